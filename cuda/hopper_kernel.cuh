// The kernel of hopper_score.cuh: roles, and what becomes of a finished tile.
//
//   kStore    writes the scores (index_scores, and index_topk of short rows);
//   kSample   writes those of sampled keys, for the threshold and the first candidates;
//   kAppend   appends what exceeds the row's threshold, of the other keys, to the lane's own
//             segments.
//
// Two more are built for benchmarks alone: kTensorControl has no work on the
// accumulators, kScoreControl has all of it and drops the scores.

#ifndef JAX_FUSED_TOPK_CUDA_HOPPER_KERNEL_CUH_
#define JAX_FUSED_TOPK_CUDA_HOPPER_KERNEL_CUH_

#include <cstdint>

#include "cuda/hopper_cut.cuh"
#include "cuda/hopper_score.cuh"

namespace jax_fused_topk::hopper {

// What marks a sampled key outside the row's range: a NaN that is no score.
inline constexpr uint32_t kNoSample = 0xFFFFFFFFu;

// The lane's first row of the block (the second is 8 further on), its segment of each,
// and its first column of a tile.  Read anew wherever they are used: the loop over
// heads needs the registers.
__device__ __forceinline__ int lane_row() {
  return ptx::tid_x() / 32 % 4 * 16 + ptx::tid_x() % 32 / 4;
}
__device__ __forceinline__ int lane_segment() { return ptx::tid_x() / 128 * 4 + ptx::tid_x() % 4; }
__device__ __forceinline__ int lane_column() {
  return ptx::tid_x() / 128 * kTileKeys + ptx::tid_x() % 4 * 2;
}

// Calls visit(r, j, even, odd) for the lane's neighbouring keys 8 j and 8 j + 1 from its
// first, of row lane_row + 8 r: the sums over heads and the scales to `finish` them with.
template <class Finish, class Visit>
__device__ __forceinline__ void visit_sums(const float (&sum)[kAccumulators], const float* scales,
                                           Finish finish, Visit visit) {
  const uint32_t address = ptx::smem_address(scales + lane_column());
#pragma unroll
  for (int j = 0; j < kAccumulators / 4; ++j) {
    const float2 scale = ptx::ld_shared_f32x2(address + 32 * j);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      visit(r, j, finish(sum[4 * j + 2 * r], scale.x), finish(sum[4 * j + 2 * r + 1], scale.y));
    }
  }
}

template <class Visit>
__device__ __forceinline__ void visit_scores(const float (&sum)[kAccumulators], const float* scales,
                                             Visit visit) {
  visit_sums(sum, scales, [](float sum, float scale) { return finish_score(sum, scale); }, visit);
}

// --- kStore.

__device__ __forceinline__ void store_scores(const ScoreArgs& args, const Tile& tile,
                                             const float* scales,
                                             const float (&sum)[kAccumulators]) {
  const int64_t keys = args.in.keys;
  const int32_t first = tile.first_key + lane_column() / kTileKeys * kTileKeys;
  const int32_t lane_key = tile.first_key + lane_column();
  const int64_t stride = args.row_stride;
  float* out = args.scores + (int64_t{tile.first_row} + lane_row()) * stride + lane_key;
  // Without a fill nobody reads what lies outside a row's range.
  const KeyRange free =
      args.fill ? tile.all
                : KeyRange{0, tile.query + kQueryBlock <= args.in.queries ? int32_t(keys) : 0};
  if (args.wide && first >= free.start && first + kTileKeys <= free.end) {
    // Neighbouring lanes swap, so that each has four keys in a row and the four lanes of a row
    // write 64 bytes: an even lane takes the keys of j, an odd one those of j + 1.
    const bool odd_lane = ptx::tid_x() % 2 != 0;
    out += odd_lane ? 6 : 0;
    float* const out8 = out + 8 * stride;
    float2 before[2];
    visit_scores(sum, scales, [&](int r, int j, float even, float odd) {
      const float2 now = make_float2(even, odd);
      if (j % 2 == 0) {
        before[r] = now;
        return;
      }
      const float2 kept = odd_lane ? now : before[r], given = odd_lane ? before[r] : now;
      const float2 got = make_float2(__shfl_xor_sync(kFullWarp, given.x, 1),
                                     __shfl_xor_sync(kFullWarp, given.y, 1));
      *reinterpret_cast<float4*>((r == 0 ? out : out8) + 8 * (j - 1)) =
          odd_lane ? make_float4(got.x, got.y, kept.x, kept.y)
                   : make_float4(kept.x, kept.y, got.x, got.y);
    });
    return;
  }
  const Block block = block_at(args, tile.block);
  KeyRange range[2];
  bool inside[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    range[r] = scored_range(args, block, lane_row() + 8 * r);
    inside[r] = tile.query + lane_row() + 8 * r < args.in.queries;
  }
  visit_scores(sum, scales, [&](int r, int j, float even, float odd) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int64_t key = int64_t{lane_key} + 8 * j + c;
      if (!inside[r] || key >= keys) continue;
      const bool valid = key >= range[r].start && key < range[r].end;
      out[8 * r * stride + 8 * j + c] = !valid ? __uint_as_float(kNegativeInf) : c ? odd : even;
    }
  });
}

// -inf to what the tiles of a block do not cover.  Spare warps of all CTAs share it.
__device__ __forceinline__ void fill_outside(const ScoreArgs& args, int warp, int warps) {
  constexpr int kChunk = 4096;
  const int64_t keys = args.in.keys, chunks = (keys + kChunk - 1) / kChunk;
  const int64_t origin = first_row(args, block_at(args, 0));
  for (int64_t unit = blockIdx.x; unit < args.blocks * chunks; unit += gridDim.x) {
    const int block = static_cast<int>(unit / chunks);
    const Block place = block_at(args, block);
    const BlockRange range = block_range<32>(args, place);
    const int64_t begin = range.first_key();
    const int64_t end = begin + int64_t{tile_count<Mode::kStore>(args, range)} * kCtaKeys;
    const int64_t low = unit % chunks * kChunk, high = min64(low + kChunk, keys);
    for (int row = warp; row < kQueryBlock && place.query + row < args.in.queries; row += warps) {
      float* out = args.scores + (first_row(args, place) - origin + row) * args.row_stride;
      for (int64_t key = low + lane_id(); key < high; key += 32) {
        if (key < begin || key >= end) out[key] = __uint_as_float(kNegativeInf);
      }
    }
  }
}

// --- kSample.

__device__ __forceinline__ void store_sample(const ScoreArgs& args, const Tile& tile,
                                             const int32_t* groups, const float* scales,
                                             const float (&sum)[kAccumulators]) {
  const Block block = block_at(args, tile.block);
  KeyRange range[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) range[r] = scored_range(args, block, lane_row() + 8 * r);
  const int column0 = lane_column();
  uint32_t* out =
      Workspace(args).samples(tile.block, lane_row()) + tile.number * kCtaKeys + column0;
  const int64_t row_stride = args.plan.sample_keys();
  visit_scores(sum, scales, [&](int r, int j, float even, float odd) {
    const int column = column0 + 8 * j;
    const int32_t key = groups[column / kGroupKeys] + column % kGroupKeys;
    const auto bits = [&](int32_t key, float score) {
      return key >= range[r].start && key < range[r].end ? __float_as_uint(score) : kNoSample;
    };
    *reinterpret_cast<uint2*>(out + 8 * r * row_stride + 8 * j) =
        make_uint2(bits(key, even), bits(key + 1, odd));
  });
}

// --- kAppend.

// A lane's place in a segment.  The upper word of the address does not change on the way:
// see Piece.
struct Tail {
  uint32_t low, high;
  __device__ __forceinline__ explicit Tail(const Candidate* at)
      : low(static_cast<uint32_t>(reinterpret_cast<uintptr_t>(at))),
        high(static_cast<uint32_t>(reinterpret_cast<uintptr_t>(at) >> 32)) {}
};

// Appends (score, key) if the score exceeds the threshold or either is NaN.  The score
// need not be finished: the select kernel does that, and the test has the same outcome.
// One block of assembly, or the compiler moves the stores and spills.
__device__ __forceinline__ void append(Tail& tail, float score, int32_t key, float threshold,
                                       bool inside = true) {
  asm volatile(
      "{\n"
      ".reg .pred p, q;\n"
      ".reg .b64 at;\n"
      "setp.ne.u32 q, %5, 0;\n"
      "setp.gtu.and.f32 p, %2, %4, q;\n"
      "mov.b64 at, {%0, %1};\n"
      "@p st.global.v2.b32 [at], {%2, %3};\n"
      "@p add.u32 %0, %0, 8;\n"
      "}\n"
      : "+r"(tail.low)
      : "r"(tail.high), "f"(score), "r"(key), "f"(threshold), "r"(static_cast<uint32_t>(inside))
      : "memory");
}

// Hands the block's candidates among its sampled keys to the segments of its first piece.
__device__ __forceinline__ void take_sampled(const Workspace& workspace, const Tile& tile,
                                             Shared& shared) {
  constexpr int kLanes = kMathThreads / kQueryBlock;
  const int row = MathGroup::thread() % kQueryBlock, lane = MathGroup::thread() / kQueryBlock;
  const uint32_t count = __ldcg(&workspace.row_start(tile.block, row)->candidates);
  const Candidate* from = workspace.sampled(tile.block, row);
#pragma unroll 8
  for (uint32_t i = lane; i < count; i += kLanes) {
    tile.piece.segment(row, i % kRowSegments)[i / kRowSegments] = load_candidate(from + i);
  }
  for (uint32_t s = lane; s < kRowSegments; s += kLanes) {
    count_of(shared, row, s) = static_cast<uint16_t>((count + kRowSegments - 1 - s) / kRowSegments);
  }
}

// Called by the math warps at a piece's first tile.
__device__ __forceinline__ void begin_piece(const ScoreArgs& args, const Tile& tile,
                                            Shared& shared) {
  const Workspace workspace(args);
  ptx::bar_sync(kMathBarrier, kMathThreads);  // the piece before is done with
  shared.counts[MathGroup::thread()] = 0;
  const int row = MathGroup::thread();
  if (row < kQueryBlock) {
    const bool again =
        tile.repair &&
        (__ldcg(&workspace.state(tile.block)->missed_rows[row / 32]) >> row % 32 & 1);
    const RowStart* start = workspace.row_start(tile.block, row);
    shared.thresholds[row] = again ? __uint_as_float(kPositiveNaN) : __ldcg(&start->threshold);
    shared.bounds[row] = tile.opens ? __ldcg(&start->bound) : 0;
    if (row < kQueryBlock / 32) shared.complete[row] = 0;
  }
  if (tile.opens) {
    ptx::bar_sync(kMathBarrier, kMathThreads);
    take_sampled(workspace, tile, shared);
  }
  ptx::bar_sync(kMathBarrier, kMathThreads);
}

// Whether a segment has no room for another tile: the same for all math threads.
__device__ __forceinline__ bool append_scores(const ScoreArgs& args, const Tile& tile,
                                              Shared& shared, const float* scales,
                                              const float (&sum)[kAccumulators]) {
  const uint32_t counts = shared.counts[MathGroup::thread()];
  const Tail begin[2] = {Tail(tile.piece.segment(lane_row(), lane_segment())),
                         Tail(tile.piece.segment(lane_row() + 8, lane_segment()))};
  Tail tail[2] = {begin[0], begin[1]};
  tail[0].low += (counts & 0xFFFF) * uint32_t{sizeof(Candidate)};
  tail[1].low += (counts >> 16) * uint32_t{sizeof(Candidate)};
  const float threshold[2] = {shared.thresholds[lane_row()], shared.thresholds[lane_row() + 8]};
  const int32_t first = tile.warpgroup_key(lane_column() / kTileKeys);
  const int32_t lane_key = first + lane_column() % kTileKeys;
  const bool whole = (shared.complete[0] | shared.complete[1]) == 0 && first >= tile.all.start &&
                     first + kTileKeys <= tile.all.end;
  const auto unfinished = [](float sum, float scale) { return sum * scale; };
  if (whole) {
    visit_sums(sum, scales, unfinished, [&](int r, int j, float even, float odd) {
      append(tail[r], even, lane_key + 8 * j, threshold[r]);
      append(tail[r], odd, lane_key + 8 * j + 1, threshold[r]);
    });
  } else {
    const Block block = block_at(args, tile.block);
    KeyRange range[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = lane_row() + 8 * r;
      range[r] = scored_range(args, block, row);
      if (shared.complete[row / 32] >> row % 32 & 1) range[r] = {0, 0};
    }
    visit_sums(sum, scales, unfinished, [&](int r, int j, float even, float odd) {
      const int32_t key = lane_key + 8 * j;
      append(tail[r], even, key, threshold[r], key >= range[r].start && key < range[r].end);
      append(tail[r], odd, key + 1, threshold[r],
             key + 1 >= range[r].start && key + 1 < range[r].end);
    });
  }
  uint32_t count[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    count[r] = (tail[r].low - begin[r].low) / uint32_t{sizeof(Candidate)};
  }
  shared.counts[MathGroup::thread()] = count[0] | count[1] << 16;
  const bool full = static_cast<int>(max(count[0], count[1])) > tile.piece.capacity - kLaneTileKeys;
  return ptx::bar_red_or(kMathBarrier, kMathThreads, full) && !tile.last;
}

// Called by the math warps after a piece's last tile.
__device__ __forceinline__ void end_piece(const ScoreArgs& args, const Tile& tile, Shared& shared) {
  const Workspace workspace(args);
  const uint32_t counts = shared.counts[MathGroup::thread()];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    workspace.counts(tile.piece.number, lane_row() + 8 * r)[lane_segment()] =
        static_cast<int32_t>(counts >> 16 * r & 0xFFFF);
  }
  if (MathGroup::thread() < kQueryBlock) {
    *workspace.bound(tile.piece.number, MathGroup::thread()) = shared.bounds[MathGroup::thread()];
  }
  if (tile.repair) return;
  const Pieces pieces(args, tile.block);
  __threadfence();
  ptx::bar_sync(kMathBarrier, kMathThreads);
  if (MathGroup::thread() == 0) {
    shared.last_piece = atomicAdd(&workspace.state(tile.block)->pieces_done, 1u) + 1 ==
                        static_cast<uint32_t>(pieces.count());
  }
  ptx::bar_sync(kMathBarrier, kMathThreads);
  if (shared.last_piece) {
    __threadfence();
    find_missed_rows(args, tile.block, pieces);
  }
}

// --- Controls.

// Makes the compiler believe that the values are wanted.
__device__ __forceinline__ void pretend_use(const ScoreArgs& args,
                                            const float (&values)[kAccumulators]) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kAccumulators; ++i) sum += values[i];
  if (__float_as_uint(sum) == kNoSample) args.scores[0] = sum;  // never: not the GPU's NaN
}

// --- Roles.

template <Mode kMode, int kHeads>
__device__ __forceinline__ void math_loop(const ScoreArgs& args, Shared& shared, int warp) {
  const int warpgroup = warp / 4;
  // Hidden from the compiler, so that it stays in its register.
  const uint32_t weight_row =
      __shfl_sync(kFullWarp, ptx::smem_address(shared.weights[0][lane_row()]), lane_id());
  // Upper words of the descriptors, all the same: from a register that the compiler
  // cannot see to be constant, it updates the lower words in place.
  uint32_t high[2 * kMmaSteps];
  {
    uint32_t zero;
    asm volatile("mov.u32 %0, %%ctaid.y;" : "=r"(zero));
    high[0] = ptx::kDescriptorHigh + zero;
#pragma unroll
    for (int i = 1; i < 2 * kMmaSteps; ++i) high[i] = high[i - 1] + zero;
  }
  Ring ring;
  float acc[kAccumulators], sum[kAccumulators];
  if constexpr (kMode == Mode::kTensorControl) {
#pragma unroll
    for (int i = 0; i < kAccumulators; ++i) acc[i] = 0.0f;
  }
#pragma unroll 1
  while (true) {
    const uint32_t at = ring.at();
    ptx::mbarrier_wait(ptx::smem_address(&shared.key_full[at]), ring.parity());
    if (shared.tiles[at].block < 0) {
      if (shared.tiles[at].last) break;
      __threadfence();  // the copying warp reads what find_missed_rows wrote
      ptx::bar_arrive(kPassBarrier, kPassThreads);
    } else {
      if (kMode == Mode::kAppend && shared.tiles[at].first) {
        begin_piece(args, shared.tiles[at], shared);
      }
      score_tile<kMode, kHeads>(
          shared,
          ptx::smem_address(shared.keys) + at * Shared::kKeyBytes + warpgroup * kTileKeys * kDim,
          high, weight_row, acc, sum);
      const uint32_t now = ptx::hide(ring.at());
      const Tile& tile = shared.tiles[now];
      const float* scales = shared.scales[now];
      if constexpr (kMode == Mode::kStore) {
        store_scores(args, tile, scales, sum);
      } else if constexpr (kMode == Mode::kSample) {
        store_sample(args, tile, shared.groups[now], scales, sum);
      } else if constexpr (kMode == Mode::kScoreControl) {
        float scores[kAccumulators];
        visit_scores(sum, scales, [&](int r, int j, float even, float odd) {
          scores[4 * j + 2 * r] = even;
          scores[4 * j + 2 * r + 1] = odd;
        });
        pretend_use(args, scores);
      } else if constexpr (kMode == Mode::kAppend) {
        if (append_scores(args, tile, shared, scales, sum)) {
          __threadfence_block();
          ptx::bar_sync(kMathBarrier, kMathThreads);
          // The tile's keys are done with.
          make_room(Workspace(args), tile.piece, tile.first_key + kCtaKeys,
                    *reinterpret_cast<CutMemory*>(shared.keys[at]), shared);
          ptx::fence_proxy_async();  // before the copy engine writes there again
          ptx::bar_sync(kMathBarrier, kMathThreads);
        }
        if (tile.last) end_piece(args, tile, shared);
      }
    }
    __syncwarp();
    // Every lane for itself, as each has read the header and the scales.
    ptx::mbarrier_arrive(ptx::smem_address(&shared.key_empty[at]));
    ++ring.step;
  }
  if constexpr (kMode == Mode::kTensorControl) pretend_use(args, acc);
}

template <Mode kMode, int kHeads>
__global__ __launch_bounds__(kThreads,
                             1) void score_kernel(const __grid_constant__ TensorMaps maps,
                                                  const __grid_constant__ ScoreArgs args) {
  constexpr int kMathRegisters = 152, kCopyRegisters = 56;
  extern __shared__ __align__(1024) uint8_t memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const int warp = __shfl_sync(kFullWarp, threadIdx.x / 32, 0);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      ptx::mbarrier_init(ptx::smem_address(&shared.query_full[i]), 1);
      ptx::mbarrier_init(ptx::smem_address(&shared.query_empty[i]), kMathWarps);
      // The header and the keys, and 32 lanes' copies of the scales.
      ptx::mbarrier_init(ptx::smem_address(&shared.key_full[i]), 1 + 32);
      ptx::mbarrier_init(ptx::smem_address(&shared.key_empty[i]), kMathThreads);
    }
    ptx::fence_mbarrier_init();
  }
  auto* tiles_before = reinterpret_cast<int64_t*>(shared.queries);
  count_tiles<kMode>(args, tiles_before);
  if (threadIdx.x == 0) shared.share = find_share(tiles_before, args.blocks, args.ctas);
  if (kMode == Mode::kSample || kMode == Mode::kAppend) {
    // The same from every CTA, so that each may read it.
    auto* out = Workspace(args).at<int64_t>(args.plan.tiles_before);
    for (int i = threadIdx.x; i <= args.blocks; i += kThreads) out[i] = tiles_before[i];
  }
  ptx::fence_proxy_async();  // before the copy engine writes over it
  __syncthreads();
  if (warp >= kMathWarps) {
    ptx::setmaxnreg_dec<kCopyRegisters>();
    if (warp == kMathWarps) {
      copy_loop<kMode, kHeads>(args, maps, shared);
    } else if (kMode == Mode::kStore && args.fill) {
      fill_outside(args, warp - kMathWarps - 1, kThreads / 32 - kMathWarps - 1);
    }
  } else {
    ptx::setmaxnreg_inc<kMathRegisters>();
    math_loop<kMode, kHeads>(args, shared, warp);
  }
}

}  // namespace jax_fused_topk::hopper

#endif  // JAX_FUSED_TOPK_CUDA_HOPPER_KERNEL_CUH_
