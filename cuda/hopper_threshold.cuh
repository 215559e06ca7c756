// What a row knows from its sampled scores: a first threshold, and those that exceed it, which
// are candidates and not scored again.  A CTA a row.
//
// The threshold is about the r-th best of the m sampled scores in the row's range, with
//     r = m p + d sqrt(m p (1 - p)),  p = 1.25 K / n,  d = 3.5:
// some more than K of the row's n keys exceed it, almost never fewer.  The samples come in
// groups of neighbours: where few groups lie in the row's range, d is 5.  A wrong
// guess costs time, never the answer (hopper_cut.cuh).
//
// Where more sampled keys exceed it than there is room for, as where many are equal, the best of
// them stay, as if the others had been cut (hopper_cut.cuh): the row starts with a bound.
//
// Shared memory: FilterShared and the sample, 47 KiB at most.

#ifndef JAX_FUSED_TOPK_CUDA_HOPPER_THRESHOLD_CUH_
#define JAX_FUSED_TOPK_CUDA_HOPPER_THRESHOLD_CUH_

#include <cstdint>

#include "cuda/filter.cuh"
#include "cuda/hopper_kernel.cuh"
#include "cuda/select_shared.cuh"

namespace jax_fused_topk::hopper {

inline constexpr uint32_t kFewSamples = 500;
// CTAs that an SM holds, with its 2048 threads: the registers must do for them.
inline constexpr int kThresholdResident = 2048 / kFilterThreads;

struct ThresholdMemory {
  FilterShared filter;
  uint32_t counts[FilterGroup::kWarps];
  int32_t first_key;             // of the block
  int32_t last_tie;              // the last candidate that has the least score
  uint16_t places[kMaxSampled];  // of candidates in the sample
  alignas(16) uint32_t keys[1];  // of the sampled scores, 0 outside the row's range

  static size_t bytes(const Plan& plan) {
    return sizeof(ThresholdMemory) + plan.sample_keys() * sizeof(uint32_t);
  }
};

// The sample, for put_chosen.
struct SampledKeys : SharedKeys {
  Windows windows;
  int32_t first_key;  // of the block
  __device__ __forceinline__ int32_t index(uint32_t i) const {
    return first_key + windows.hole_key(i / kGroupKeys) + i % kGroupKeys;
  }
};

// A row's candidates; notes the last that has `tie` for a key.
struct SampledStore {
  Candidate* candidates;
  uint32_t tie;
  int32_t* last_tie;
  __device__ __forceinline__ void put(uint32_t position, uint32_t key, int32_t index) const {
    candidates[position] = {total_order_bits(key), index};
    if (key == tie) atomicMax(last_tie, index);
  }
};

// BlockRange::first_key of a block that some row needs keys of.  A warp calls it.
__device__ __forceinline__ int32_t block_first_key(const ScoreArgs& args, const Block& block) {
  int32_t start = 0x7FFFFFFF;
#pragma unroll
  for (int row = lane_id(); row < kQueryBlock; row += 32) {
    const KeyRange range = scored_range(args, block, row);
    if (range.size() > 0) start = min(start, range.start);
  }
  return BlockRange{{__reduce_min_sync(kFullWarp, start), 0}, {0, 0}}.first_key();
}

__global__ __launch_bounds__(kFilterThreads, kThresholdResident) void threshold_kernel(
    const __grid_constant__ ScoreArgs args) {
  extern __shared__ __align__(16) uint8_t threshold_memory[];
  ThresholdMemory& memory = *reinterpret_cast<ThresholdMemory*>(threshold_memory);
  const Workspace workspace(args);
  const int block = blockIdx.x / kQueryBlock, row = blockIdx.x % kQueryBlock;
  if (row == 0 && threadIdx.x == 0) *workspace.state(block) = BlockState{};
  const Block place = row_block(args, block);
  const int size = scored_range(args, place, row).size();
  RowStart* const start = workspace.row_start(block, row);
  if (size == 0) {
    if (threadIdx.x == 0) *start = {0, __uint_as_float(kPositiveNaN), 0};
    return;
  }
  SelectShared& select = memory.filter.select;
  select.histogram[threadIdx.x] = make_uint4(0, 0, 0, 0);
  if (threadIdx.x < 32) {
    const int32_t first_key = block_first_key(args, place);
    if (threadIdx.x == 0) memory.first_key = first_key;
  }
  const auto* tiles_before = workspace.at<const int64_t>(args.plan.tiles_before);
  const uint32_t sampled =
      static_cast<uint32_t>(tiles_before[block + 1] - tiles_before[block]) * kCtaKeys;
  const auto* samples = reinterpret_cast<const uint4*>(workspace.samples(block, row));
  uint32_t in_range = 0;
  KeySpan span;
  const auto key = [&](uint32_t bits) {
    if (bits == kNoSample) return 0u;
    ++in_range;
    const uint32_t key = total_order_key(bits);
    span.add(key);
    return key;
  };
#pragma unroll 4
  for (uint32_t i = threadIdx.x; i < sampled / 4; i += kFilterThreads) {
    const uint4 v = samples[i];
    reinterpret_cast<uint4*>(memory.keys)[i] = make_uint4(key(v.x), key(v.y), key(v.z), key(v.w));
  }
  in_range = __reduce_add_sync(kFullWarp, in_range);
  if (lane_id() == 0) memory.counts[threadIdx.x / 32] = in_range;
  __syncthreads();
  in_range = 0;
#pragma unroll
  for (int w = 0; w < FilterGroup::kWarps; ++w) in_range += memory.counts[w];
  const float m = in_range, p = fminf(1.25f * args.plan.topk / size, 1.0f);
  const float deviations = in_range < kFewSamples ? 5.0f : 3.5f;
  const uint32_t rank =
      static_cast<uint32_t>(ceilf(m * p + deviations * sqrtf(m * p * (1.0f - p)))) + 1;
  uint32_t threshold = kPositiveNaN, least = 1;  // all pass
  if (size > args.plan.topk && rank <= in_range) {
    const Threshold found =
        select_shared(SharedKeys{memory.keys}, 0, sampled, rank, rank / 32, span, select);
    // The test is strict, so one step below; of +0 that is not -0, which equals it.  Below -inf
    // comes a NaN, and all pass.  Below NaN it must be +inf, so that no others do.
    const uint32_t zero = total_order_key(0), infinity = total_order_key(kPositiveInf);
    threshold = found.key > infinity ? kPositiveInf
                                     : total_order_bits(found.key - (found.key == zero ? 2 : 1));
    least = found.key;
  }
  // Which of the thread's keys pass, four bits a step.
  static_assert(kMaxSampleTiles * kCtaKeys <= 64 * kFilterThreads);
  static_assert(kMaxSampleTiles * kCtaKeys < 1 << 16, "a place in the sample has 16 bits");
  uint64_t passes = 0;
#pragma unroll 2
  for (uint32_t i = threadIdx.x, bit = 0; i < sampled / 4; i += kFilterThreads, bit += 4) {
    uint32_t four[4], mask = 0;
    SharedKeys{memory.keys}.load(4 * i, four);
#pragma unroll
    for (int c = 0; c < 4; ++c) mask |= static_cast<uint32_t>(four[c] >= least) << c;
    passes |= uint64_t{mask} << bit;
  }
  uint32_t passed;
  uint32_t at = sum_before(__popcll(passes), memory.filter.held, passed);
  const uint32_t most = args.plan.most_sampled;
  const SampledKeys keys{{memory.keys}, args.plan.windows, memory.first_key};
  Candidate* const out = workspace.sampled(block, row);
  uint64_t bound = 0;
  if (passed <= most) {
    for (; passes != 0; passes &= passes - 1) {
      const uint32_t bit = __ffsll(static_cast<long long>(passes)) - 1;
      memory.places[at++] =
          static_cast<uint16_t>(4 * threadIdx.x + bit / 4 * (4 * kFilterThreads) + bit % 4);
    }
    __syncthreads();
    // A loop of its own: to find the index takes long.
    for (uint32_t c = threadIdx.x; c < passed; c += kFilterThreads) {
      const uint32_t i = memory.places[c];
      out[c] = {total_order_bits(memory.keys[i]), keys.index(i)};
    }
  } else {
    if (threadIdx.x == 0) memory.last_tie = 0;
    const Threshold best = select_shared(keys, 0, sampled, most, 0, select);
    const SampledStore store{out, best.key, &memory.last_tie};
    put_chosen(keys, 0, sampled, best, memory.filter, store);
    // Where no tie was left out, all that have the least score are at the bound or better.
    bound = rank_of(best.key, best.ties == kAllTies ? 0x7FFFFFFF : memory.last_tie);
  }
  if (threadIdx.x == 0) *start = {bound, __uint_as_float(threshold), min(passed, most)};
}

}  // namespace jax_fused_topk::hopper

#endif  // JAX_FUSED_TOPK_CUDA_HOPPER_THRESHOLD_CUH_
