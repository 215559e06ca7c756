// The first threshold of a row, from its sampled scores.  A CTA a row.
//
// It is about the r-th best of the m sampled scores in the row's range, with
//     r = m p + d sqrt(m p (1 - p)),  p = 1.25 K / n,  d = 3.5:
// some more than K of the row's n keys exceed it, almost never fewer.  The samples come in
// groups of neighbours: where few groups lie in the row's range, d is twice that.  A wrong
// guess costs time, never the answer (hopper_cut.cuh).
//
// Shared memory: SelectShared and the sample, 47 KiB at most.

#ifndef JAX_FUSED_TOPK_CUDA_HOPPER_THRESHOLD_CUH_
#define JAX_FUSED_TOPK_CUDA_HOPPER_THRESHOLD_CUH_

#include <cstdint>

#include "cuda/hopper_kernel.cuh"
#include "cuda/select_shared.cuh"

namespace jax_fused_topk::hopper {

inline constexpr uint32_t kFewSamples = 1000;

struct ThresholdMemory {
  SelectShared select;
  uint32_t counts[FilterGroup::kWarps];
  alignas(16) uint32_t keys[1];  // of the sample

  static size_t bytes(const Plan& plan) {
    return sizeof(ThresholdMemory) + plan.sample_keys() * sizeof(uint32_t);
  }
};

__global__ __launch_bounds__(kFilterThreads) void threshold_kernel(
    const __grid_constant__ ScoreArgs args) {
  extern __shared__ __align__(16) uint8_t threshold_memory[];
  ThresholdMemory& memory = *reinterpret_cast<ThresholdMemory*>(threshold_memory);
  const Workspace workspace(args);
  const int block = blockIdx.x / kQueryBlock, row = blockIdx.x % kQueryBlock;
  if (row == 0 && threadIdx.x == 0) *workspace.state(block) = BlockState{};
  const int size = scored_range(args, block_at(args, block), row).size();
  if (size <= args.plan.topk) {
    // All may be needed: NaN lets everything pass.
    if (threadIdx.x == 0) *workspace.threshold(block, row) = __uint_as_float(kPositiveNaN);
    return;
  }
  memory.select.histogram[threadIdx.x] = make_uint4(0, 0, 0, 0);
  const uint32_t sampled = args.plan.sample_keys();
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
  const float deviations = in_range < kFewSamples ? 7.0f : 3.5f;
  const uint32_t rank =
      static_cast<uint32_t>(ceilf(m * p + deviations * sqrtf(m * p * (1.0f - p)))) + 1;
  uint32_t threshold = kPositiveNaN;
  if (rank <= in_range) {
    const Threshold found =
        select_shared(SharedKeys{memory.keys}, 0, sampled, rank, rank / 32, memory.select);
    // The test is strict, so one step below; of +0 that is not -0, which equals it.  Below
    // -inf comes a NaN.
    const uint32_t zero = total_order_key(0);
    threshold = total_order_bits(found.key - (found.key == zero ? 2 : 1));
  }
  if (threadIdx.x == 0) *workspace.threshold(block, row) = __uint_as_float(threshold);
}

}  // namespace jax_fused_topk::hopper

#endif  // JAX_FUSED_TOPK_CUDA_HOPPER_THRESHOLD_CUH_
