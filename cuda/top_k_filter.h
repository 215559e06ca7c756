#ifndef JAX_FUSED_TOPK_CUDA_TOP_K_FILTER_H_
#define JAX_FUSED_TOPK_CUDA_TOP_K_FILTER_H_

#include <cuda_runtime_api.h>

#include "ffi/contract.h"

namespace jax_fused_topk {

// top_k for k <= kMaxFilterTopk, in ascending index whatever the order asked for.
// Enqueues and returns, as launch_top_k does.
cudaError_t launch_top_k_filter(const TopkParams& params, cudaStream_t stream);

}  // namespace jax_fused_topk

#endif  // JAX_FUSED_TOPK_CUDA_TOP_K_FILTER_H_
