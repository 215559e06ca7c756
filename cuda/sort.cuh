// Order::kScore: a bitonic sort of (key, index) pairs by one CTA, in shared or
// global memory.  A pair is one uint64, key above ~index: descending order is the
// larger key first and the lower index first among equals.  All pairs differ, so
// the result does not depend on the network.

#ifndef JAX_FUSED_TOPK_CUDA_SORT_CUH_
#define JAX_FUSED_TOPK_CUDA_SORT_CUH_

#include <cstdint>

namespace jax_fused_topk {

// Sorts after every pair: the index of a pair is >= 0, so its low word is not 0.
inline constexpr uint64_t kNoPair = 0;

__device__ __forceinline__ uint64_t make_pair(uint32_t key, int32_t index) {
  return (static_cast<uint64_t>(key) << 32) | static_cast<uint32_t>(~index);
}

__device__ __forceinline__ uint32_t pair_key(uint64_t pair) {
  return static_cast<uint32_t>(pair >> 32);
}

__device__ __forceinline__ int32_t pair_index(uint64_t pair) {
  return ~static_cast<int32_t>(static_cast<uint32_t>(pair));
}

// n must be a power of two.  All threads of the CTA call it; it begins and ends
// with a barrier.
__device__ __forceinline__ void sort_descending(uint64_t* pairs, uint32_t n) {
  for (uint32_t size = 2; size <= n; size *= 2) {
    for (uint32_t stride = size / 2; stride > 0; stride /= 2) {
      __syncthreads();
      for (uint32_t i = threadIdx.x; i < n / 2; i += blockDim.x) {
        const uint32_t low = 2 * i - (i & (stride - 1)), high = low + stride;
        const bool descending = (low & size) == 0;
        const uint64_t a = pairs[low], b = pairs[high];
        if ((a < b) == descending) {
          pairs[low] = b;
          pairs[high] = a;
        }
      }
    }
  }
  __syncthreads();
}

}  // namespace jax_fused_topk

#endif  // JAX_FUSED_TOPK_CUDA_SORT_CUH_
