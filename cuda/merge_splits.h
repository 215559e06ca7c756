#ifndef JAX_FUSED_TOPK_CUDA_MERGE_SPLITS_H_
#define JAX_FUSED_TOPK_CUDA_MERGE_SPLITS_H_

#include <cuda_runtime_api.h>

#include "ffi/contract.h"

namespace jax_fused_topk {

struct IndexTopkPlan;

// Ends an index_topk whose plan has several splits: selects every row from its
// splits' candidates and writes the outputs.
cudaError_t launch_merge_splits(const IndexTopkParams& params, const IndexTopkPlan& plan,
                                cudaStream_t stream);

}  // namespace jax_fused_topk

#endif  // JAX_FUSED_TOPK_CUDA_MERGE_SPLITS_H_
