// Radix selection of the k-th largest key, and the stable cut behind a Selector.

#include "cpu/select.h"

namespace jax_fused_topk::cpu {
namespace {

// A 32-bit key is read as three digits, from the top.
constexpr int kDigitBits = 11;
constexpr int kDigitShifts[] = {21, 10, 0};
constexpr uint32_t kDigitMasks[] = {0x7FF, 0x7FF, 0x3FF};
constexpr int kNumDigits = 3;
static_assert(kDigitShifts[0] + kDigitBits == 32, "the digits must cover the key");

struct Cut {
  uint32_t key;      // the k-th largest key
  int64_t ties;      // pairs with that key among the k best
  int64_t all_ties;  // pairs with that key
};

Cut find_cut(const uint32_t* keys, int64_t n, int64_t k, uint32_t* scratch) {
  const IsaKernels& kernels = isa_kernels();
  Cut cut{0, k, 0};
  for (int digit = 0; digit < kNumDigits; ++digit) {
    const int shift = kDigitShifts[digit];
    const uint32_t mask = kDigitMasks[digit];
    uint32_t histogram[1 << kDigitBits] = {};
    for (int64_t i = 0; i < n; ++i) ++histogram[(keys[i] >> shift) & mask];
    uint32_t bin = mask;
    while (histogram[bin] < cut.ties) cut.ties -= histogram[bin--];
    cut.key |= bin << shift;
    cut.all_ties = histogram[bin];
    if (digit + 1 == kNumDigits) break;
    n = kernels.keys_within(keys, n, cut.key, (1u << shift) - 1, scratch);
    keys = scratch;
  }
  return cut;
}

}  // namespace

uint32_t keep_best(uint32_t* keys, int32_t* indices, int64_t n, int64_t k, uint32_t* scratch) {
  const IsaKernels& kernels = isa_kernels();
  const Cut cut = find_cut(keys, n, k, scratch);
  // Up to `tied` every tie is kept, from there on none.
  int64_t tied = n;
  if (cut.ties < cut.all_ties) {
    int64_t seen = 0;
    for (tied = 0; seen < cut.ties; ++tied) seen += keys[tied] == cut.key;
  }
  const int64_t kept = kernels.pairs_from(keys, indices, tied, cut.key, keys, indices);
  if (tied < n && cut.key < UINT32_MAX) {
    kernels.pairs_from(keys + tied, indices + tied, n - tied, cut.key + 1, keys + kept,
                       indices + kept);
  }
  return cut.key;
}

void Selector::compact() {
  if (size_ <= k_) return;
  const uint32_t worst = keep_best(keys_, indices_, size_, k_, scratch_);
  size_ = k_;
  closed_ = worst == UINT32_MAX;
  bar_ = worst + 1;
}

}  // namespace jax_fused_topk::cpu
