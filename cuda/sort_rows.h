#ifndef JAX_FUSED_TOPK_CUDA_SORT_ROWS_H_
#define JAX_FUSED_TOPK_CUDA_SORT_ROWS_H_

#include <cuda_runtime_api.h>

#include "ffi/contract.h"

namespace jax_fused_topk {

// Sorts each row of top_k's results in place: larger first, then lower index.
// k <= kMaxFilterTopk.  Enqueues and returns, as launch_top_k does.
cudaError_t launch_sort_rows(const TopkParams& params, cudaStream_t stream);

}  // namespace jax_fused_topk

#endif  // JAX_FUSED_TOPK_CUDA_SORT_ROWS_H_
