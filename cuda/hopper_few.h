#ifndef JAX_FUSED_TOPK_CUDA_HOPPER_FEW_H_
#define JAX_FUSED_TOPK_CUDA_HOPPER_FEW_H_

#include <cuda_runtime_api.h>

#include "ffi/contract.h"

namespace jax_fused_topk::hopper {

// scores: [B, Q, N] float32, `row_stride` from row to row, the bits of launch_index_scores, -inf
// outside the rows' ranges.  Without fill_outside nothing need be written there, and rows of at
// most unscored_size keys are left out.  For what is `supported`, faster for `few_queries`.
cudaError_t launch_few_scores(const IndexInputs& in, float* scores, int64_t row_stride,
                              cudaStream_t stream, bool fill_outside, int32_t unscored_size);

}  // namespace jax_fused_topk::hopper

#endif  // JAX_FUSED_TOPK_CUDA_HOPPER_FEW_H_
