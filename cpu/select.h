// The k best of a stream of (order key, index) pairs with ascending indices.
//
// A selector holds up to `capacity` pairs, about 2 k.  When they run out, the k
// best stay and their smallest key becomes the bar: a later pair has a
// larger index, so it must be strictly larger to enter.  Pairs keep
// their order throughout, so the result is in ascending index.

#ifndef JAX_FUSED_TOPK_CPU_SELECT_H_
#define JAX_FUSED_TOPK_CPU_SELECT_H_

#include <algorithm>
#include <cstdint>

#include "cpu/isa_kernels.h"

namespace jax_fused_topk::cpu {

// Most pairs in one push.
inline constexpr int64_t kMaxPush = 512;

// Pairs beyond 2 k, so that small k does not compact all the time.
inline constexpr int64_t kSelectorSlack = 1024;
static_assert(kSelectorSlack >= kMaxPush, "a push must fit after compaction");

// Capacity of a selector of k pairs that is pushed at most `pushed` pairs.
inline int64_t selector_capacity(int64_t k, int64_t pushed) {
  return std::min(2 * k, pushed) + kSelectorSlack;
}

// The pairs kept, in ascending index, in the caller's arrays.
class Selector {
 public:
  // keys, indices and scratch have `capacity` elements; scratch may be shared
  // by selectors of one thread.
  Selector(int64_t k, int64_t capacity, uint32_t* keys, int32_t* indices, uint32_t* scratch)
      : k_(k), capacity_(capacity), keys_(keys), indices_(indices), scratch_(scratch) {}

  // Pushes (keys[i], first + i), i < count <= kMaxPush.
  void push(int32_t first, int32_t count, const uint32_t* keys) {
    if (size_ + count > capacity_) compact();
    if (closed_) return;
    size_ +=
        kernels_.numbered_pairs_from(keys, first, count, bar_, keys_ + size_, indices_ + size_);
  }

  // Leaves the best min(k, pushed) pairs and returns their number.
  int64_t finish() {
    compact();
    return size_;
  }

 private:
  // Leaves at most k pairs and raises the bar above the worst of them.
  void compact();

  const IsaKernels& kernels_ = isa_kernels();
  const int64_t k_;
  const int64_t capacity_;
  uint32_t* const keys_;
  int32_t* const indices_;
  uint32_t* const scratch_;
  int64_t size_ = 0;
  uint32_t bar_ = 0;     // smallest key that may enter
  bool closed_ = false;  // nothing can enter: the worst pair kept has the largest key
};

// Leaves the k best of n pairs with ascending indices, in place and in order:
// larger keys are better, then lower indices.  Returns the smallest key kept.
// 1 <= k <= n; scratch [n].
uint32_t keep_best(uint32_t* keys, int32_t* indices, int64_t n, int64_t k, uint32_t* scratch);

}  // namespace jax_fused_topk::cpu

#endif  // JAX_FUSED_TOPK_CPU_SELECT_H_
