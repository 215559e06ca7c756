// The end of a sum over heads, the same in both score loops.

#ifndef JAX_FUSED_TOPK_CUDA_HOPPER_FINISH_CUH_
#define JAX_FUSED_TOPK_CUDA_HOPPER_FINISH_CUH_

#include "ffi/contract.h"

namespace jax_fused_topk::hopper {

// The contract's bits.  Adding +0 makes +0 of -0, not as an FMA, where -0 may be a tiny
// number rounded.  The GPU's own NaN is 0x7FFFFFFF, and among positive ones the smaller
// integer is the contract's.
__device__ __forceinline__ float finish_score(float sum, float scale) {
  const float score = __fadd_rn(__fmul_rn(sum, scale), 0.0f);
  return __int_as_float(min(__float_as_int(score), static_cast<int>(kPositiveNaN)));
}

}  // namespace jax_fused_topk::hopper

#endif  // JAX_FUSED_TOPK_CUDA_HOPPER_FINISH_CUH_
