// Sorts (order key, index) pairs by larger key, then lower index.

#ifndef JAX_FUSED_TOPK_CPU_SORT_PAIRS_H_
#define JAX_FUSED_TOPK_CPU_SORT_PAIRS_H_

#include <cstdint>

namespace jax_fused_topk::cpu {

// Elements of the scratch that sorting n pairs needs.
inline int64_t sort_scratch_size(int64_t n) { return 2 * n; }

// In place; the indices come in ascending.  scratch [sort_scratch_size(n)].
void sort_pairs(uint32_t* keys, int32_t* indices, int64_t n, uint64_t* scratch);

}  // namespace jax_fused_topk::cpu

#endif  // JAX_FUSED_TOPK_CPU_SORT_PAIRS_H_
