// The workspace of index_topk: enough for whichever kernel the GPU at hand picks.

#ifndef JAX_FUSED_TOPK_CUDA_WORKSPACE_H_
#define JAX_FUSED_TOPK_CUDA_WORKSPACE_H_

#include "cuda/hopper_layout.h"
#include "cuda/limits.h"

namespace jax_fused_topk {

// `unscored`: scores are not returned.
inline int64_t workspace_bytes(Element element, int64_t batch, int64_t queries, int64_t heads,
                               int64_t dim, int64_t keys, int64_t topk, Order order,
                               bool unscored) {
  const int64_t any = index_topk_workspace_bytes(batch, queries, keys, topk);
  if (!hopper::supported(element, heads, dim)) return any;
  const bool keep_values = hopper::keeps_values(order, unscored);
  return max64(any, hopper::make_plan(batch, queries, keys, topk, keep_values).bytes);
}

// Enough for any number of queries and batches.
inline int64_t workspace_bound(Element element, int64_t heads, int64_t dim, int64_t keys,
                               int64_t topk, Order order, bool unscored) {
  const int64_t any = kMaxSlots * index_topk_slot_bytes(topk);
  if (!hopper::supported(element, heads, dim)) return any;
  return max64(any, hopper::most_bytes(keys, topk, hopper::keeps_values(order, unscored)));
}

}  // namespace jax_fused_topk

#endif  // JAX_FUSED_TOPK_CUDA_WORKSPACE_H_
