#ifndef JAX_FUSED_TOPK_CUDA_TOP_K_RADIX_H_
#define JAX_FUSED_TOPK_CUDA_TOP_K_RADIX_H_

#include <cuda_runtime_api.h>

#include "ffi/contract.h"

namespace jax_fused_topk {

// top_k for any k, straight from global memory: for k > kMaxFilterTopk.
// Enqueues and returns, as launch_top_k does.
cudaError_t launch_top_k_radix(const TopkParams& params, cudaStream_t stream);

}  // namespace jax_fused_topk

#endif  // JAX_FUSED_TOPK_CUDA_TOP_K_RADIX_H_
