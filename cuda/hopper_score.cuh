// The Hopper score loop, FP8, "heads in time": shared memory, copies and math.
//
// Algorithm.  D = Q[head] (64 queries) x K (112 keys of a warpgroup) for head 0, 1,
// ... in turn: an accumulator of a lane always belongs to the same (query, key), so
//     sum[i] += weights[query, head] * relu(acc[i])
// is the whole sum over heads, in registers and in one order.  What becomes of the
// finished scores: hopper_kernel.cuh.
//
// Roles.  Warpgroups 0-2 do the math, each on 112 keys of its own and all on the same
// 64 queries.  Warp 12 copies: keys and q and weights by TMA, the keys' scales by
// cp.async, for their rows have any alignment.  It alone walks over the CTA's share
// and tells the math, by a header beside each tile's keys, what the tile is.  Warps
// 13-15 fill what lies outside the rows' ranges where that is asked for, or do nothing:
// registers are handed out to whole warpgroups.
//
// Shared memory: Shared, below.  One CTA an SM.

#ifndef JAX_FUSED_TOPK_CUDA_HOPPER_SCORE_CUH_
#define JAX_FUSED_TOPK_CUDA_HOPPER_SCORE_CUH_

#include <cstdint>

#include "cuda/hopper_finish.cuh"
#include "cuda/hopper_layout.h"
#include "cuda/hopper_ptx.cuh"
#include "cuda/hopper_work.cuh"
#include "cuda/select.cuh"
#include "ffi/contract.h"

namespace jax_fused_topk::hopper {

// Tensor maps: q [B, H, Q, 128] in boxes of 8 heads x 64 queries, weights
// [B, H / 8, Q, 8] likewise, k [B, N, 128] in boxes of 112 keys or of a group of 8.
struct TensorMaps {
  CUtensorMap q, weights, k;
};

// What the math has to know of a tile, or the copying warp of a piece's next one.
struct Tile {
  Piece piece;
  int32_t block;      // of this launch; -1: no more tiles in this pass
  int32_t first_row;  // of the block, in the launch
  int32_t batch, query;
  KeyRange any, all;  // of the block
  int32_t number;     // in the block
  int32_t first_key;  // of the CTA's keys
  int32_t hole;       // kAppend: 8 keys are left out before this warpgroup's
  bool first, last;   // of the piece; last of a pass's end: no more passes
  bool opens;         // the piece is the block's first: it takes the sample's candidates
  bool repair;

  __device__ __forceinline__ int32_t warpgroup_key(int g) const {
    return first_key + g * kTileKeys + (g >= hole ? kGroupKeys : 0);
  }
};

struct Shared {
  static constexpr uint32_t kKeyBytes = kCtaKeys * kDim;
  static constexpr uint32_t kQueryBytes = kStageHeads * kQueryBlock * kDim;
  static constexpr uint32_t kWeightBytes = kStageHeads * kQueryBlock * sizeof(float);

  alignas(1024) uint8_t keys[kStages][kKeyBytes];  // the next tile's arrive meanwhile
  alignas(1024) uint8_t queries[kStages][kQueryBytes];
  alignas(128) float weights[kStages][kQueryBlock][kStageHeads];
  alignas(16) float scales[kStages][kCtaKeys];
  int32_t groups[kStages][kCtaGroups];  // kSample: their first keys
  Tile tiles[kStages], next_tile;
  Share share;
  uint64_t key_full[kStages], key_empty[kStages];
  uint64_t query_full[kStages], query_empty[kStages];
  // kAppend.
  uint64_t bounds[kQueryBlock];         // see hopper_cut.cuh
  float thresholds[kQueryBlock];        // a candidate exceeds it
  uint32_t complete[kQueryBlock / 32];  // rows that no later key can enter
  uint32_t counts[kMathThreads];        // candidates of a lane's two segments, 16 bits each
  uint32_t last_piece;
};
static_assert(sizeof(Shared) <= 232448, "shared memory of one SM");
static_assert(kMaxBlocks * sizeof(int64_t) < sizeof(Shared::queries),
              "the counts of all blocks lie where q comes later");

// Named barriers; 0 is __syncthreads.
inline constexpr int kMathBarrier = 1;
inline constexpr int kPassBarrier = 2;  // all math warps are done with the first pass
inline constexpr int kPassThreads = kMathThreads + 32;

// A place in a double buffer, and the parity of its barriers' phase.
struct Ring {
  uint32_t step = 0;
  __device__ __forceinline__ uint32_t at() const { return step & 1; }
  __device__ __forceinline__ uint32_t parity() const { return step >> 1 & 1; }
};
static_assert(kStages == 2, "Ring counts two buffers");

// q's ring is in the same state at the start of every tile: it goes round twice in four
// groups of heads, and a tile has a multiple of four.
template <int kHeads>
__device__ __forceinline__ Ring query_ring(int group) {
  static_assert(kHeads / kStageHeads % (2 * kStages) == 0);
  return {static_cast<uint32_t>(group)};
}

// --- The copying warp.

// Walks over the tiles of a CTA's share, in the second pass over blocks to repair.
// The present tile is shared.next_tile: the copying warp has few registers.
template <Mode kMode>
struct ShareWalk {
  const ScoreArgs& args;
  Shared& shared;
  int64_t left;  // tile numbers of the share behind the present piece
  int32_t next_block, next_begin;
  bool repair;
  using Walk = TileWalk<kMode == Mode::kAppend>;
  Walk walk;
  int32_t to_come = 0;  // tiles of the piece

  __device__ __forceinline__ ShareWalk(const ScoreArgs& args, Shared& shared, bool repair)
      : args(args),
        shared(shared),
        left(shared.share.tiles),
        next_block(shared.share.block),
        next_begin(shared.share.begin),
        repair(repair) {}

  // The whole warp moves together.  False at the end.
  __device__ __forceinline__ bool next() {
    while (!walk.next()) {
      if (!next_piece()) return false;
    }
    Tile& tile = shared.next_tile;
    if (lane_id() == 0) {
      tile.first = to_come == walk.end - walk.begin;
      tile.last = to_come == 1;
      tile.number = walk.tile;
      const Windows windows = args.plan.windows;
      const bool window = kMode == Mode::kAppend && !repair;
      tile.first_key = BlockRange{tile.any, tile.all}.first_key() +
                       (window ? windows.start(walk.tile) : walk.tile * kCtaKeys);
      tile.hole = window ? windows.hole(walk.tile) : kMathWarpgroups;
    }
    --to_come;
    __syncwarp();
    return true;
  }

 private:
  __device__ __forceinline__ bool next_piece() {
    while (left > 0) {
      const int32_t block = next_block++, begin = next_begin;
      next_begin = 0;
      const Block place = block_at(args, block);
      const BlockRange range = block_range<32>(args, place);
      const int32_t tiles = tile_count<kMode>(args, range);
      if (tiles == 0) continue;
      const int32_t end = static_cast<int32_t>(min64(tiles, begin + left));
      left -= end - begin;
      if (repair && __ldcg(&Workspace(args).state(block)->repaired_by) != blockIdx.x + 1) continue;
      if (lane_id() == 0) {
        Tile& tile = shared.next_tile;
        tile.block = block;
        tile.first_row =
            static_cast<int32_t>(first_row(args, place) - first_row(args, block_at(args, 0)));
        tile.batch = static_cast<int32_t>(place.batch);
        tile.query = static_cast<int32_t>(place.query);
        tile.any = range.any;
        tile.all = range.all;
        tile.repair = repair;
        tile.opens = begin == 0 && !repair;
        if (repair) {
          tile.piece = Pieces(args, block).whole(Workspace(args), block);
        } else if (kMode == Mode::kAppend) {
          tile.piece = piece_at(Workspace(args), block, blockIdx.x, begin, end, tiles);
        }
      }
      if (repair) {
        const int32_t all = repair_tile_count(args, range);
        walk = Walk(all, 0, all);
      } else {
        walk = Walk(tiles, begin, end);
      }
      to_come = walk.end - walk.begin;
      return true;
    }
    return false;
  }
};

// Waits for the buffer, writes the header and starts the copies of keys and scales.
template <Mode kMode>
__device__ __forceinline__ void copy_keys(const ScoreArgs& args, const TensorMaps& maps,
                                          Shared& shared, Ring& ring) {
  const uint32_t at = ring.at(), full = ptx::smem_address(&shared.key_full[at]);
  const Tile& tile = shared.next_tile;
  ptx::mbarrier_wait(ptx::smem_address(&shared.key_empty[at]), ring.parity() ^ 1);
  static_assert(sizeof(Tile) % 4 == 0 && sizeof(Tile) <= 4 * 32);
  if (lane_id() < sizeof(Tile) / 4) {
    reinterpret_cast<uint32_t*>(&shared.tiles[at])[lane_id()] =
        reinterpret_cast<const uint32_t*>(&tile)[lane_id()];
  }
  if constexpr (kMode == Mode::kSample) {
    const Windows windows = args.plan.windows;
    const int32_t first = BlockRange{tile.any, tile.all}.first_key();
    const int32_t holes = windows.count_holes(tile.any.end - first);
    for (int j = lane_id(); j < kCtaGroups; j += 32) {
      const int g = tile.number * kCtaGroups + j;
      // Behind the last: keys that do not exist.
      shared.groups[at][j] =
          static_cast<int32_t>(g < holes ? first + windows.hole_key(g) : args.in.keys);
    }
  }
  __syncwarp();
  if (lane_id() == 0) ptx::mbarrier_arrive_expect_tx(full, Shared::kKeyBytes);
  __syncwarp();
  const uint32_t keys = ptx::smem_address(shared.keys[at]);
  if constexpr (kMode == Mode::kSample) {
    for (int j = lane_id(); j < kCtaGroups; j += 32) {
      ptx::cp_async_bulk_tensor_3d(keys + j * kGroupKeys * kDim, &maps.k, full, 0,
                                   shared.groups[at][j], tile.batch);
    }
  } else if (lane_id() < kMathWarpgroups) {
    const int g = lane_id();
    ptx::cp_async_bulk_tensor_3d(keys + g * kTileKeys * kDim, &maps.k, full, 0,
                                 tile.warpgroup_key(g), tile.batch);
  }
  const float* scales = args.in.k_scale + int64_t{tile.batch} * args.in.keys;
#pragma unroll 1
  for (int c = lane_id(); c < kCtaKeys; c += 32) {
    int64_t key = int64_t{tile.first_key} + c;
    if constexpr (kMode == Mode::kAppend) key += c >= tile.hole * kTileKeys ? kGroupKeys : 0;
    if constexpr (kMode == Mode::kSample) {
      key = int64_t{shared.groups[at][c / kGroupKeys]} + c % kGroupKeys;
    }
    const bool inside = key < args.in.keys;
    ptx::cp_async_4(ptx::smem_address(&shared.scales[at][c]), scales + (inside ? key : 0),
                    inside ? 4 : 0);
  }
  ptx::cp_async_mbarrier_arrive_noinc(full);
  ++ring.step;
}

// Tells the math that the pass is over.
__device__ __forceinline__ void post_end(Shared& shared, Ring& ring, bool last_pass) {
  const uint32_t at = ring.at(), full = ptx::smem_address(&shared.key_full[at]);
  ptx::mbarrier_wait(ptx::smem_address(&shared.key_empty[at]), ring.parity() ^ 1);
  if (lane_id() == 0) {
    shared.tiles[at].block = -1;
    shared.tiles[at].last = last_pass;
    ptx::mbarrier_arrive(full);
  }
  ptx::cp_async_mbarrier_arrive_noinc(full);
  ++ring.step;
}

template <Mode kMode, int kHeads>
__device__ __forceinline__ void copy_loop(const ScoreArgs& args, const TensorMaps& maps,
                                          Shared& shared) {
  Ring key_ring;
  constexpr int kPasses = kMode == Mode::kAppend ? 2 : 1;
#pragma unroll 1
  for (int pass = 0; pass < kPasses; ++pass) {
    ShareWalk<kMode> walk(args, shared, pass == 1);
    bool more = walk.next();
    if (more) copy_keys<kMode>(args, maps, shared, key_ring);
#pragma unroll 1
    while (more) {
      const int32_t batch = shared.next_tile.batch, query = shared.next_tile.query;
#pragma unroll 1
      for (int i = 0; i < kHeads / kStageHeads; ++i) {
        // By now the math is at this tile, so that the other key buffer is soon free.
        if (i == kStages) {
          more = walk.next();
          if (more) copy_keys<kMode>(args, maps, shared, key_ring);
        }
        const Ring ring = query_ring<kHeads>(i);
        const uint32_t full = ptx::smem_address(&shared.query_full[ring.at()]);
        ptx::mbarrier_wait(ptx::smem_address(&shared.query_empty[ring.at()]), ring.parity() ^ 1);
        __syncwarp();  // all lanes have seen this phase before lane 0 lets the next one begin
        if (lane_id() == 0) {
          ptx::mbarrier_arrive_expect_tx(full, Shared::kQueryBytes + Shared::kWeightBytes);
          ptx::cp_async_bulk_tensor_4d(ptx::smem_address(shared.queries[ring.at()]), &maps.q, full,
                                       0, query, i * kStageHeads, batch);
          ptx::cp_async_bulk_tensor_4d(ptx::smem_address(shared.weights[ring.at()]), &maps.weights,
                                       full, 0, query, i, batch);
        }
        __syncwarp();
      }
    }
    post_end(shared, key_ring, pass == kPasses - 1);
    // Only then it is known which blocks are to be repaired.
    if (pass < kPasses - 1) ptx::bar_sync(kPassBarrier, kPassThreads);
  }
  ptx::cp_async_wait_all();
}

// --- The math warps.

inline constexpr int kMmaSteps = kDim / 32;

inline constexpr int kAccumulators = kTileKeys / 2;  // of a lane: 2 rows x 28 keys

// Adds one head's share: sum += half_weight * 2 relu(acc).  2 relu(x) = x + |x| is on the FMA
// pipe, which is faster here than max.NaN on the ALU or a mixture.  Halving is exact but for
// weights below 2**-125: hopper_few.cuh has the same bits there too.
__device__ __forceinline__ void add_head(float (&sum)[kAccumulators],
                                         const float (&acc)[kAccumulators], float half_weight0,
                                         float half_weight1) {
#pragma unroll
  for (int i = 0; i < kAccumulators; ++i) {
    sum[i] = fmaf(acc[i] + fabsf(acc[i]), i / 2 % 2 == 0 ? half_weight0 : half_weight1, sum[i]);
  }
}

// Keeps the compiler from moving accumulators across asynchronous WGMMA.
__device__ __forceinline__ void pin(float (&acc)[kAccumulators]) {
#pragma unroll
  for (int i = 0; i < kAccumulators; ++i) asm volatile("" : "+f"(acc[i])::"memory");
}

// Scores 64 queries x this warpgroup's 112 keys, all heads; k_scale not yet applied.
// `weight_row`: the address of the lane's first row of weights in stage 0.
template <Mode kMode, int kHeads>
__device__ __forceinline__ void score_tile(Shared& shared, uint32_t keys,
                                           const uint32_t (&high)[2 * kMmaSteps],
                                           uint32_t weight_row, float (&acc)[kAccumulators],
                                           float (&sum)[kAccumulators]) {
  uint32_t b[kMmaSteps];
#pragma unroll
  for (int k = 0; k < kMmaSteps; ++k) b[k] = ptx::descriptor_low(keys) + 2 * k;
  // A control keeps the products, or the compiler would leave them out.
  constexpr bool kTensorOnly = kMode == Mode::kTensorControl;
#pragma unroll
  for (int i = 0; i < kAccumulators; ++i) {
    sum[i] = 0.0f;
    // The first WGMMA overwrites it, so nothing is kept between tiles.
    if constexpr (!kTensorOnly) asm volatile("" : "=f"(acc[i]));
  }
#pragma unroll 1
  for (int group = 0; group < kHeads / kStageHeads; ++group) {
    const Ring ring = query_ring<kHeads>(group);
    ptx::mbarrier_wait(ptx::smem_address(&shared.query_full[ring.at()]), ring.parity());
    uint32_t a[kMmaSteps];
#pragma unroll
    for (int k = 0; k < kMmaSteps; ++k) {
      a[k] = ptx::descriptor_low(ptx::smem_address(shared.queries)) +
             ring.at() * (Shared::kQueryBytes >> 4) + 2 * k;
    }
    float4 half[2];
#pragma unroll
    for (int h = 0; h < kStageHeads; ++h) {
      pin(acc);
      ptx::wgmma_fence();
      ptx::wgmma_m64n112k32_f32_e4m3<kTensorOnly>(acc, ptx::pack_b64(a[0], high[0]),
                                                  ptx::pack_b64(b[0], high[kMmaSteps]));
#pragma unroll
      for (int k = 1; k < kMmaSteps; ++k) {
        ptx::wgmma_m64n112k32_f32_e4m3<true>(acc, ptx::pack_b64(a[k], high[k]),
                                             ptx::pack_b64(b[k], high[kMmaSteps + k]));
      }
#pragma unroll
      for (int k = 0; k < kMmaSteps; ++k) a[k] += kQueryBlock * kDim >> 4;
      ptx::wgmma_commit_group();
      pin(acc);
      if (h % 4 == 0) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float4 v = ptx::ld_shared_f32x4(weight_row + ring.at() * Shared::kWeightBytes +
                                                (r * 8 * kStageHeads + h) * sizeof(float));
          half[r] = {0.5f * v.x, 0.5f * v.y, 0.5f * v.z, 0.5f * v.w};
        }
      }
      ptx::wgmma_wait_group<0>();
      pin(acc);
      if (h == kStageHeads - 1) {
        __syncwarp();
        if (lane_id() == 0) {
          ptx::mbarrier_arrive(ptx::smem_address(&shared.query_empty[ring.at()]));
        }
      }
      const auto weight = [&](int r) {
        return h % 4 == 0 ? half[r].x : h % 4 == 1 ? half[r].y : h % 4 == 2 ? half[r].z : half[r].w;
      };
      if constexpr (!kTensorOnly) add_head(sum, acc, weight(0), weight(1));
    }
  }
}

}  // namespace jax_fused_topk::hopper

#endif  // JAX_FUSED_TOPK_CUDA_HOPPER_SCORE_CUH_
