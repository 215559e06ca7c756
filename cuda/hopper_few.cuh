// The Hopper score loop for few queries, FP8: dense scores, keys on M.
//
// Algorithm.  D = K (64 keys of a warpgroup) x Q (128 columns of heads and queries).
// Eight columns are a slot: one head of 8 queries, or (kPack = 2) two heads of 4
// queries, the heads of a query side by side.  Lane 4 g + t of a warp holds, of every
// slot, columns 2t and 2t + 1 for its keys g and g + 8: a query's heads never leave
// the lane, and
//     sum[key, query] += weights[query, head] * relu(acc)
// for head 0, 1, ... is the whole sum over heads, in registers.
//
// The bits are those of the heads-in-time loop (hopper_score.cuh): the same four k32
// steps, the same order of heads, and the same products half_weight * 2 relu(x).  Odd slots
// take 2 relu(x) = x + |x|, which is on the FMA pipe, and half the weight, even ones
// max.NaN, which is on the ALU, and twice that half.
//
// Work: hopper_few_work.cuh.
//
// Roles.  Four warpgroups, all the same: each takes every fourth tile of the CTA's share
// and copies its own tiles (TMA, kStages ahead).  One accumulator set a warpgroup: while
// one adds up, the tensor cores work for the others.  Keys are A from registers, loaded
// once a tile: shared memory is what limits, with q (B) and the weights read for every
// tile.  One CTA an SM.
//
// Shared memory (bytes, H = 64, kPack = 1): q 4 chunks x 16,384, loaded once a group;
// keys 4 x 4 stages x 8,192; weights 2,048; rows 128; the item 64; barriers 160.  In all
// 199,008 of 232,448.

#ifndef JAX_FUSED_TOPK_CUDA_HOPPER_FEW_CUH_
#define JAX_FUSED_TOPK_CUDA_HOPPER_FEW_CUH_

#include <cstdint>

#include "cuda/hopper_few_work.cuh"
#include "cuda/hopper_finish.cuh"
#include "cuda/hopper_layout.h"
#include "cuda/hopper_ptx.cuh"
#include "cuda/limits.h"
#include "cuda/select.cuh"
#include "ffi/contract.h"

namespace jax_fused_topk::hopper::few {

inline constexpr int kChunkColumns = 128;  // N of the WGMMA
inline constexpr int kChunkSlots = kChunkColumns / 8;
inline constexpr int kMmaSteps = kDim / 32;
inline constexpr int kWarpgroups = 4;
inline constexpr int kThreads = 128 * kWarpgroups;
inline constexpr int kStages = 4;  // tiles of keys, of each warpgroup
inline constexpr int kAccumulators = kChunkColumns / 2;

__device__ __forceinline__ int warp_of_group() { return threadIdx.x / 32 % 4; }

// Named barrier of a warpgroup; 0 is __syncthreads.
__device__ __forceinline__ int keys_barrier(int warpgroup) { return 1 + warpgroup; }

// How heads and queries lie in the columns, and where everything lies in shared memory.
template <int kHeads, int kPack>
struct Layout {
  static constexpr int kQueries = 8 / kPack;  // of a group
  static constexpr int kSlots = kHeads / kPack;
  static constexpr int kColumns = 8 * kSlots;
  static constexpr int kChunks = kColumns / kChunkColumns;
  static_assert(kColumns % kChunkColumns == 0 && kColumns <= kThreads, "a weight a thread");

  static constexpr uint32_t kKeyBytes = kTileKeys * kDim;
  static constexpr uint32_t kChunkBytes = kChunkColumns * kDim;
  // Slots 2i and 2i + 1 share 64 bytes: float [t][slot % 2][column % 2].
  static constexpr uint32_t kWeightPairBytes = 64;

  static constexpr uint32_t kQ = 0;
  static constexpr uint32_t kKeys = kQ + kChunks * kChunkBytes;
  static constexpr uint32_t kWeights = kKeys + kWarpgroups * kStages * kKeyBytes;
  static constexpr uint32_t kRows = kWeights + kSlots / 2 * kWeightPairBytes;
  static constexpr uint32_t kItem = kRows + 8 * sizeof(Row);
  static constexpr uint32_t kQueryFull = kItem + 64;
  static constexpr uint32_t kKeyFull = kQueryFull + 8 * kChunks;
  static constexpr uint32_t kBytes = kKeyFull + 8 * kWarpgroups * kStages;
  static constexpr uint32_t kBarriers = (kBytes - kQueryFull) / 8;
  static_assert(sizeof(Item) <= kQueryFull - kItem);
  static_assert(kKeyBytes % 1024 == 0 && kChunkBytes % 1024 == 0, "swizzle atoms are 1 KiB");
  static_assert(kBytes <= 232448, "shared memory of one SM");
};

// q as [B, H / kPack, Q, kPack, 128] in boxes of 16 slots, k [B, N, 128] in boxes of 64 keys.
struct TensorMaps {
  CUtensorMap q, k;
};

// Keeps the compiler from moving accumulators across asynchronous WGMMA.
__device__ __forceinline__ void pin(float (&acc)[kAccumulators]) {
#pragma unroll
  for (int i = 0; i < kAccumulators; ++i) asm volatile("" : "+f"(acc[i])::"memory");
}

template <class L>
__device__ __forceinline__ void copy_query(const TensorMaps& maps, uint32_t base,
                                           const Item& item) {
#pragma unroll 1
  for (int chunk = 0; chunk < L::kChunks; ++chunk) {
    const uint32_t full = base + L::kQueryFull + 8 * chunk;
    ptx::mbarrier_arrive_expect_tx(full, L::kChunkBytes);
    ptx::cp_async_bulk_tensor_5d(base + L::kQ + chunk * L::kChunkBytes, &maps.q, full, 0, 0,
                                 item.query, chunk * kChunkSlots, item.batch);
  }
}

// `buffer` counts the stages of all warpgroups.
template <class L>
__device__ __forceinline__ void copy_keys(const TensorMaps& maps, uint32_t base, uint32_t buffer,
                                          const Item& item, uint32_t tile) {
  const uint32_t full = base + L::kKeyFull + 8 * buffer;
  ptx::mbarrier_arrive_expect_tx(full, L::kKeyBytes);
  ptx::cp_async_bulk_tensor_3d(base + L::kKeys + buffer * L::kKeyBytes, &maps.k, full, 0,
                               tile * kTileKeys, item.batch);
}

// The weight of this thread's column; 0 past the last query.  Heads are consecutive in
// consecutive threads, as in memory.
template <int kHeads, int kPack>
__device__ __forceinline__ float load_weight(const Args& args, const Item& item) {
  using L = Layout<kHeads, kPack>;
  const int64_t query = item.query + threadIdx.x / kHeads;
  if (threadIdx.x >= L::kColumns || threadIdx.x / kHeads >= item.rows) return 0.0f;
  return __ldg(args.in.weights + (int64_t{item.batch} * args.in.queries + query) * kHeads +
               threadIdx.x % kHeads);
}

template <int kHeads, int kPack>
__device__ __forceinline__ void store_weight(uint8_t* memory, float weight) {
  using L = Layout<kHeads, kPack>;
  if (threadIdx.x >= L::kColumns) return;
  const int query = threadIdx.x / kHeads, head = threadIdx.x % kHeads;
  const int slot = head / kPack, column = query * kPack + head % kPack;
  auto* at = reinterpret_cast<float*>(memory + L::kWeights + slot / 2 * L::kWeightPairBytes) +
             column / 2 * 4 + slot % 2 * 2 + column % 2;
  const float half = 0.5f * weight;
  *at = slot % 2 == 0 ? 2.0f * half : half;
}

// Adds a chunk's heads to sum[2 r + c]: key g + 8 r, query 2 t + c; with kPack = 2, to
// sum[2 r]: query t.  weights: the lane's, of slots 2 i and 2 i + 1.
template <int kPack>
__device__ __forceinline__ void add_chunk(const float (&acc)[kAccumulators],
                                          const float4 (&weights)[kChunkSlots / 2],
                                          float (&sum)[4]) {
#pragma unroll
  for (int i = 0; i < kAccumulators; ++i) {
    const int slot = i / 4, r = i / 2 % 2, c = i % 2;
    const float4 w = weights[slot / 2];
    const float weight = slot % 2 == 0 ? (c == 0 ? w.x : w.y) : (c == 0 ? w.z : w.w);
    const float x = acc[i];
    float& s = sum[2 * r + (kPack == 1 ? c : 0)];
    s = fmaf(slot % 2 == 0 ? ptx::max_nan(x, 0.0f) : x + fabsf(x), weight, s);
  }
}

// Writes the lane's scores of a tile, keys `key` and `key` + 8.
template <class L>
__device__ __forceinline__ void store_scores(const Args& args, const Item& item, const Row* rows,
                                             uint32_t tile, uint32_t key, const float (&sum)[4],
                                             const float (&scale)[2]) {
  constexpr int kLaneQueries = L::kQueries / 4;
  const int query = lane_id() % 4 * kLaneQueries;
  if (tile - item.inside < item.inside_tiles) {
#pragma unroll
    for (int c = 0; c < kLaneQueries; ++c) {
      if (query + c >= item.rows) break;
      float* out = rows[query + c].scores + key;
#pragma unroll
      for (int r = 0; r < 2; ++r) out[8 * r] = finish_score(sum[2 * r + c], scale[r]);
    }
    return;
  }
#pragma unroll 1
  for (int c = 0; c < kLaneQueries && query + c < item.rows; ++c) {
    const Row row = rows[query + c];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (key + 8 * r - row.start < row.size) {
        row.scores[key + 8 * r] = finish_score(c == 0 ? sum[2 * r] : sum[2 * r + 1], scale[r]);
      } else if (args.fill_outside && key + 8 * r < args.in.keys) {
        row.scores[key + 8 * r] = __uint_as_float(kNegativeInf);
      }
    }
  }
}

// This warpgroup's tiles of the item.  Its first kStages are on their way; `step` counts
// its tiles.
template <int kHeads, int kPack>
__device__ __forceinline__ void score_tiles(const Args& args, const TensorMaps& maps,
                                            const uint8_t* memory, uint32_t base, const Item& item,
                                            uint32_t query_parity, int warpgroup, uint32_t& step) {
  using L = Layout<kHeads, kPack>;
  const uint32_t lane_weights = base + L::kWeights + lane_id() % 4 * 16;
  const auto* rows = reinterpret_cast<const Row*>(memory + L::kRows);
  for (int i = 0; i < L::kChunks; ++i) {
    ptx::mbarrier_wait(base + L::kQueryFull + 8 * i, query_parity);
  }
  // What the lane addresses for ldmatrix: a row of its warp's 16 keys, and bytes 0-15 or
  // 16-31 of it; with the swizzle, 16-byte piece p of row r lies at p ^ r % 8.
  const uint32_t row = warp_of_group() * 16 + lane_id() % 16;
  const uint32_t lane_a = base + L::kKeys + row * kDim + (lane_id() / 16 ^ row % 8) * 16;
  float acc[kAccumulators];
#pragma unroll 1
  for (uint32_t tile = item.begin + warpgroup; tile < item.end; tile += kWarpgroups, ++step) {
    const uint32_t buffer = warpgroup * kStages + step % kStages;
    const uint32_t key = tile * kTileKeys + warp_of_group() * 16 + lane_id() / 4;
    float scale[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      // Scores past the last key are not stored.
      scale[r] = __ldg(item.k_scale + min(key + 8 * r, static_cast<uint32_t>(args.in.keys) - 1));
    }
    float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    // The first WGMMA of a chunk overwrites it, so nothing is kept between chunks.
#pragma unroll
    for (int i = 0; i < kAccumulators; ++i) asm volatile("" : "=f"(acc[i]));
    uint32_t b = ptx::descriptor_low(base + L::kQ);
    ptx::mbarrier_wait(base + L::kKeyFull + 8 * buffer, step / kStages & 1);
    uint32_t a[kMmaSteps][4];
#pragma unroll
    for (int k = 0; k < kMmaSteps; ++k) {
      ptx::ldmatrix_x4(a[k], (lane_a ^ k * 32) + buffer * L::kKeyBytes);
    }
#pragma unroll
    for (int chunk = 0; chunk < L::kChunks; ++chunk) {
      pin(acc);
      ptx::wgmma_fence();
      ptx::wgmma_m64n128k32_f32_e4m3<false>(acc, a[0], ptx::pack_b64(b, ptx::kDescriptorHigh));
#pragma unroll
      for (int k = 1; k < kMmaSteps; ++k) {
        ptx::wgmma_m64n128k32_f32_e4m3<true>(acc, a[k],
                                             ptx::pack_b64(b + 2 * k, ptx::kDescriptorHigh));
      }
      ptx::wgmma_commit_group();
      pin(acc);
      b += L::kChunkBytes >> 4;
      float4 weights[kChunkSlots / 2];
#pragma unroll
      for (int i = 0; i < kChunkSlots / 4; ++i) {  // more would spill
        weights[i] = ptx::ld_shared_f32x4(lane_weights +
                                          (chunk * kChunkSlots / 2 + i) * L::kWeightPairBytes);
      }
      ptx::wgmma_wait_group<0>();
      pin(acc);
#pragma unroll
      for (int i = kChunkSlots / 4; i < kChunkSlots / 2; ++i) {
        weights[i] = ptx::ld_shared_f32x4(lane_weights +
                                          (chunk * kChunkSlots / 2 + i) * L::kWeightPairBytes);
      }
      add_chunk<kPack>(acc, weights, sum);
    }
    ptx::bar_sync(keys_barrier(warpgroup), 128);  // all four warps are done with the keys
    if (threadIdx.x % 128 == 0 && tile + kWarpgroups * kStages < item.end) {
      copy_keys<L>(maps, base, buffer, item, tile + kWarpgroups * kStages);
    }
    store_scores<L>(args, item, rows, tile, key, sum, scale);
  }
}

// Writes -inf to this CTA's share of the keys outside the hull, for every row of the group.
__device__ __forceinline__ void fill_outside(const Args& args, const Item& item, const Row* rows) {
  const uint32_t keys = static_cast<uint32_t>(args.in.keys);
  const uint32_t below = item.first * kTileKeys;
  const uint32_t above = min(item.last * kTileKeys, keys);
  const uint32_t outside = below + keys - above;
  if (outside == 0) return;
  const uint32_t begin = share(args, outside, item.part[0]);
  const uint32_t end = share(args, outside, item.part[1]);
  for (int row = 0; row < item.rows; ++row) {
    for (uint32_t i = begin + threadIdx.x; i < end; i += kThreads) {
      rows[row].scores[i < below ? i : i - below + above] = __uint_as_float(kNegativeInf);
    }
  }
}

template <int kHeads, int kPack>
__global__ __launch_bounds__(kThreads,
                             1) void few_scores_kernel(const __grid_constant__ TensorMaps maps,
                                                       const __grid_constant__ Args args) {
  using L = Layout<kHeads, kPack>;
  extern __shared__ __align__(1024) uint8_t memory[];
  const uint32_t base = ptx::smem_address(memory);
  const int warpgroup = __shfl_sync(kFullWarp, threadIdx.x / 128, 0);
  if (threadIdx.x < L::kBarriers) {
    ptx::mbarrier_init(base + L::kQueryFull + 8 * threadIdx.x, 1);
    ptx::fence_mbarrier_init();
  }
  if (threadIdx.x == 32) ptx::prefetch_tensormap(&maps.q);
  if (threadIdx.x == 64) ptx::prefetch_tensormap(&maps.k);
  // Read anew wherever it is used: the loop over tiles needs the registers.
  auto& item = *reinterpret_cast<Item*>(memory + L::kItem);
  auto* rows = reinterpret_cast<Row*>(memory + L::kRows);
  // In parts, the CTA begins at groups * blockIdx.x, and takes as many as there are groups.
  const uint32_t rest = args.groups_rest * blockIdx.x;
  uint32_t group = args.groups_each * blockIdx.x + rest / gridDim.x;
  uint32_t first_part = rest % gridDim.x;
  uint64_t parts = uint64_t{args.groups_each} * gridDim.x + args.groups_rest;
  uint32_t step = 0;
#pragma unroll 1
  for (uint32_t query_parity = 0; parts > 0; ++group, first_part = 0, query_parity ^= 1) {
    Item next{};
    next.batch = group / args.groups_per_batch;
    next.query = group % args.groups_per_batch * L::kQueries;
    next.rows = static_cast<int32_t>(min64(L::kQueries, args.in.queries - next.query));
    next.part[0] = first_part;
    next.part[1] = static_cast<uint32_t>(min64(first_part + parts, gridDim.x));
    next.k_scale = args.in.k_scale + int64_t{next.batch} * args.in.keys;
    parts -= next.part[1] - first_part;
    KeyRange range{0, 0};
    const int64_t row = int64_t{next.batch} * args.in.queries + next.query + lane_id();
    if (lane_id() < next.rows) {
      range = clamp_range(__ldg(args.in.starts + row), __ldg(args.in.ends + row), args.in.keys);
      if (range.size() <= args.unscored_size) range = {0, 0};
    }
    const float weight = load_weight<kHeads, kPack>(args, next);
    // Past the barrier, nobody reads the last group's q, weights and ranges.
    __syncthreads();
    if (threadIdx.x == 32) copy_query<L>(maps, base, next);
    set_tiles(args, next, range);
    if (threadIdx.x % 128 == 0) {
      for (int i = 0; i < kStages; ++i) {
        const uint32_t tile = next.begin + warpgroup + i * kWarpgroups;
        if (tile >= next.end) break;
        copy_keys<L>(maps, base, warpgroup * kStages + (step + i) % kStages, next, tile);
      }
    }
    if (threadIdx.x == 64) item = next;
    if (threadIdx.x < L::kQueries) {
      rows[threadIdx.x] = {args.scores + row * args.row_stride, static_cast<uint32_t>(range.start),
                           static_cast<uint32_t>(range.size())};
    }
    store_weight<kHeads, kPack>(memory, weight);
    __syncthreads();
    score_tiles<kHeads, kPack>(args, maps, memory, base, item, query_parity, warpgroup, step);
    if (args.fill_outside) fill_outside(args, item, rows);
    // A group without tiles has not waited for its q yet.
    for (int i = 0; i < L::kChunks; ++i) {
      ptx::mbarrier_wait(base + L::kQueryFull + 8 * i, query_parity);
    }
  }
}

}  // namespace jax_fused_topk::hopper::few

#endif  // JAX_FUSED_TOPK_CUDA_HOPPER_FEW_CUH_
