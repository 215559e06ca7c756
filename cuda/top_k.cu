// top_k of ready-made values: which kernels serve a call.

#include "cuda/limits.h"
#include "cuda/sort_rows.h"
#include "cuda/top_k.h"
#include "cuda/top_k_filter.h"
#include "cuda/top_k_radix.h"

namespace jax_fused_topk {

cudaError_t launch_top_k(const TopkParams& params, cudaStream_t stream) {
  if (!top_k_supported(params.element, params.keys, params.k, params.order)) {
    return cudaErrorInvalidValue;
  }
  if (params.rows <= 0) return cudaSuccess;
  if (params.workspace_bytes <
      top_k_workspace_bytes(params.rows, params.keys, params.k, params.order)) {
    return cudaErrorInvalidValue;
  }
  if (params.k > kMaxFilterTopk) return launch_top_k_radix(params, stream);
  const cudaError_t error = launch_top_k_filter(params, stream);
  if (error != cudaSuccess || params.order != Order::kScore) return error;
  return launch_sort_rows(params, stream);
}

}  // namespace jax_fused_topk
