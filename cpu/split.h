// How work is cut into items: a pure function of shapes, so that the same call
// is cut the same way on every machine.

#ifndef JAX_FUSED_TOPK_CPU_SPLIT_H_
#define JAX_FUSED_TOPK_CPU_SPLIT_H_

#include <algorithm>
#include <cstdint>

#include "ffi/contract.h"

namespace jax_fused_topk::cpu {

// Enough items to keep a large host busy; fewer row blocks than this split their keys.
inline constexpr int64_t kTargetItems = 32;

// A split shorter than this spends more on its own selection than it wins.
inline constexpr int64_t kMinSplitKeys = 4096;

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Pieces to cut the keys of each of `blocks` pieces of work into, each of at least min_keys.
inline int64_t num_splits(int64_t blocks, int64_t keys, int64_t min_keys) {
  if (blocks <= 0) return 1;
  return std::max<int64_t>(
      1, std::min(ceil_div(kTargetItems, blocks), keys / std::max(min_keys, kMinSplitKeys)));
}

// Piece `split` of `splits` of a range.
inline KeyRange split_range(KeyRange range, int64_t split, int64_t splits) {
  const int64_t size = range.size();
  return {static_cast<int32_t>(range.start + size * split / splits),
          static_cast<int32_t>(range.start + size * (split + 1) / splits)};
}

inline KeyRange intersect(KeyRange a, KeyRange b) {
  return {std::max(a.start, b.start), std::min(a.end, b.end)};
}

}  // namespace jax_fused_topk::cpu

#endif  // JAX_FUSED_TOPK_CPU_SPLIT_H_
