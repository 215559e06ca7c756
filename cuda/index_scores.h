#ifndef JAX_FUSED_TOPK_CUDA_INDEX_SCORES_H_
#define JAX_FUSED_TOPK_CUDA_INDEX_SCORES_H_

#include <cuda_runtime_api.h>

#include "ffi/contract.h"

namespace jax_fused_topk {

// Writes every score, -inf outside the row's range: index_topk's arithmetic bit
// for bit.  Needs no workspace.
// Enqueues on the stream of the current device and returns: no synchronisation,
// no allocation, safe to capture in a graph.  cudaErrorInvalidValue if limits.h
// does not list the case.
cudaError_t launch_index_scores(const IndexScoresParams& params, cudaStream_t stream);

}  // namespace jax_fused_topk

#endif  // JAX_FUSED_TOPK_CUDA_INDEX_SCORES_H_
