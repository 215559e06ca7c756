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
// Shared memory: SelectShared and the sample, 47 KiB at most.

#ifndef JAX_FUSED_TOPK_CUDA_HOPPER_THRESHOLD_CUH_
#define JAX_FUSED_TOPK_CUDA_HOPPER_THRESHOLD_CUH_

#include <cstdint>

#include "cuda/hopper_kernel.cuh"
#include "cuda/select_shared.cuh"

namespace jax_fused_topk::hopper {

inline constexpr uint32_t kFewSamples = 500;

struct ThresholdMemory {
  SelectShared select;
  uint32_t counts[FilterGroup::kWarps];
  uint32_t candidates;
  int32_t first_key;             // of the block
  uint16_t places[kMaxSampled];  // of candidates in the sample
  alignas(16) uint32_t keys[1];  // of the sampled scores, 0 outside the row's range

  static size_t bytes(const Plan& plan) {
    return sizeof(ThresholdMemory) + plan.sample_keys() * sizeof(uint32_t);
  }
};

// A sampled key, by its place in the block's sample.
struct SampledKeys {
  Windows windows;
  int32_t first_key;  // of the block
  __device__ __forceinline__ int32_t operator()(uint32_t i) const {
    return first_key + windows.hole_key(i / kGroupKeys) + i % kGroupKeys;
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

// Keeps the best `most` of the candidates, of which there are more, by (score, lower index), and
// returns the least rank among them.  All threads call it.
__device__ __forceinline__ uint64_t keep_sampled(ThresholdMemory& memory, uint32_t sampled,
                                                 uint32_t most, const SampledKeys& key_of,
                                                 Candidate* out) {
  const Threshold found =
      select_shared(SharedKeys{memory.keys}, 0, sampled, most, 0, memory.select);
  uint32_t* const at = &memory.candidates;
  if (threadIdx.x == 0) *at = 0;
  __syncthreads();
  const bool all_ties = found.ties == kAllTies;
  for (uint32_t i = threadIdx.x; i < sampled; i += kFilterThreads) {
    const uint32_t key = memory.keys[i];
    if (key > found.key || (all_ties && key == found.key)) {
      out[atomicAdd(at, 1u)] = {total_order_bits(key), key_of(i)};
    }
    // Of those equal to it the first are kept: the sample ascends.
    memory.keys[i] = key == found.key ? ~i : 0;
  }
  __syncthreads();
  // No index is less than 0: all that have the least score are at this rank or better.
  if (all_ties) return rank_of(found.key, 0x7FFFFFFF);
  const uint32_t last =
      ~select_shared(SharedKeys{memory.keys}, 0, sampled, found.ties, 0, memory.select).key;
  for (uint32_t i = threadIdx.x; i <= last; i += kFilterThreads) {
    if (memory.keys[i] != 0) out[atomicAdd(at, 1u)] = {total_order_bits(found.key), key_of(i)};
  }
  return rank_of(found.key, key_of(last));
}

__global__ __launch_bounds__(kFilterThreads) void threshold_kernel(
    const __grid_constant__ ScoreArgs args) {
  extern __shared__ __align__(16) uint8_t threshold_memory[];
  ThresholdMemory& memory = *reinterpret_cast<ThresholdMemory*>(threshold_memory);
  const Workspace workspace(args);
  const int block = blockIdx.x / kQueryBlock, row = blockIdx.x % kQueryBlock;
  if (row == 0 && threadIdx.x == 0) *workspace.state(block) = BlockState{};
  const Block place = block_at(args, block);
  const int size = scored_range(args, place, row).size();
  RowStart* const start = workspace.row_start(block, row);
  if (size == 0) {
    if (threadIdx.x == 0) *start = {0, __uint_as_float(kPositiveNaN), 0};
    return;
  }
  memory.select.histogram[threadIdx.x] = make_uint4(0, 0, 0, 0);
  if (threadIdx.x == 0) memory.candidates = 0;
  if (threadIdx.x < 32) {
    const int32_t first_key = block_first_key(args, place);
    if (threadIdx.x == 0) memory.first_key = first_key;
  }
  const auto* tiles_before = workspace.at<const int64_t>(args.plan.tiles_before);
  const uint32_t sampled =
      static_cast<uint32_t>(tiles_before[block + 1] - tiles_before[block]) * kCtaKeys;
  const auto* samples = reinterpret_cast<const uint4*>(workspace.samples(block, row));
  uint32_t in_range = 0;
  const auto key = [&](uint32_t bits) {
    if (bits == kNoSample) return 0u;
    ++in_range;
    return total_order_key(bits);
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
        select_shared(SharedKeys{memory.keys}, 0, sampled, rank, rank / 32, memory.select);
    // The test is strict, so one step below; of +0 that is not -0, which equals it.  Below -inf
    // comes a NaN, and all pass.  Below NaN it must be +inf, so that no others do.
    const uint32_t zero = total_order_key(0), infinity = total_order_key(kPositiveInf);
    threshold = found.key > infinity ? kPositiveInf
                                     : total_order_bits(found.key - (found.key == zero ? 2 : 1));
    least = found.key;
  }
  const uint32_t most = args.plan.most_sampled;
#pragma unroll 2
  for (uint32_t i = threadIdx.x; i < sampled / 4; i += kFilterThreads) {
    uint32_t keys[4];
    SharedKeys{memory.keys}.load(4 * i, keys);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      if (keys[c] < least) continue;
      const uint32_t at = atomicAdd(&memory.candidates, 1u);
      if (at < most) memory.places[at] = static_cast<uint16_t>(4 * i + c);
    }
  }
  __syncthreads();
  const uint32_t candidates = memory.candidates;
  const SampledKeys key_of{args.plan.windows, memory.first_key};
  Candidate* const out = workspace.sampled(block, row);
  uint64_t bound = 0;
  if (candidates > most) {
    bound = keep_sampled(memory, sampled, most, key_of, out);
  } else {
    for (uint32_t c = threadIdx.x; c < candidates; c += kFilterThreads) {
      const uint32_t place = memory.places[c];
      out[c] = {total_order_bits(memory.keys[place]), key_of(place)};
    }
  }
  if (threadIdx.x == 0) {
    *start = {bound, __uint_as_float(threshold), min(candidates, most)};
  }
}

}  // namespace jax_fused_topk::hopper

#endif  // JAX_FUSED_TOPK_CUDA_HOPPER_THRESHOLD_CUH_
