#ifndef JAX_FUSED_TOPK_CUDA_INDEX_TOPK_H_
#define JAX_FUSED_TOPK_CUDA_INDEX_TOPK_H_

#include <cuda_runtime_api.h>

#include "ffi/contract.h"

namespace jax_fused_topk {

// Scores every valid key of every row and writes the K best (contract.h).  The
// workspace must have index_topk_workspace_bytes (limits.h), 16-byte aligned.
// Enqueues on the stream of the current device and returns: no synchronisation,
// no allocation, safe to capture in a graph.  cudaErrorInvalidValue if limits.h
// does not list the case.
cudaError_t launch_index_topk(const IndexTopkParams& params, cudaStream_t stream);

}  // namespace jax_fused_topk

#endif  // JAX_FUSED_TOPK_CUDA_INDEX_TOPK_H_
