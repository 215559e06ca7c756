#ifndef JAX_FUSED_TOPK_CUDA_HOPPER_H_
#define JAX_FUSED_TOPK_CUDA_HOPPER_H_

#include <cuda_runtime_api.h>

#include "ffi/contract.h"

namespace jax_fused_topk::hopper {

// Whether the current device runs sm_90a code and hopper_layout.h supports the shape.
bool serves(const IndexInputs& in);

// As launch_index_topk and launch_index_scores, for what `serves`.
cudaError_t launch_index_topk(const IndexTopkParams& params, cudaStream_t stream);
cudaError_t launch_index_scores(const IndexScoresParams& params, cudaStream_t stream);

}  // namespace jax_fused_topk::hopper

#endif  // JAX_FUSED_TOPK_CUDA_HOPPER_H_
