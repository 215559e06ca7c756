#ifndef JAX_FUSED_TOPK_CUDA_TOP_K_H_
#define JAX_FUSED_TOPK_CUDA_TOP_K_H_

#include <cuda_runtime_api.h>

#include "ffi/contract.h"

namespace jax_fused_topk {

// Top-k of ready-made values in IEEE total order (contract.h).  The workspace
// must have top_k_workspace_bytes (limits.h), mostly none.
// Enqueues on the stream of the current device and returns: no synchronisation,
// no allocation, safe to capture in a graph.  cudaErrorInvalidValue if limits.h
// does not list the case.
cudaError_t launch_top_k(const TopkParams& params, cudaStream_t stream);

}  // namespace jax_fused_topk

#endif  // JAX_FUSED_TOPK_CUDA_TOP_K_H_
