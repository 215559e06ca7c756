// Stable radix sort on the key's three digits, lowest first; see sort_pairs.h.
//
// A pair travels as ~key << 32 | index, so that ascending is the order wanted.
// The stable passes leave equal keys in ascending index, as they came.

#include "cpu/sort_pairs.h"

#include <algorithm>

namespace jax_fused_topk::cpu {
namespace {

constexpr int kDigitBits = 11;
constexpr int kNumDigits = 3;
constexpr int kKeyShift = 32;
constexpr uint64_t kDigitMask = (1 << kDigitBits) - 1;
static_assert(kNumDigits * kDigitBits >= 32, "the digits must cover the key");

// Below this, clearing and summing the histograms costs more than comparisons.
constexpr int64_t kMinRadixSize = 512;

// The last digit is the highest, cut off by the word's end.
uint64_t digit_of(uint64_t pair, int digit) {
  return (pair >> (kKeyShift + digit * kDigitBits)) & kDigitMask;
}

// Sorts `from` with `to` as the other buffer; returns the one that holds the result.
uint64_t* radix_sort(uint64_t* from, uint64_t* to, int64_t n) {
  uint32_t offsets[kNumDigits][1 << kDigitBits] = {};
  for (int64_t i = 0; i < n; ++i) {
    for (int digit = 0; digit < kNumDigits; ++digit) ++offsets[digit][digit_of(from[i], digit)];
  }
  for (int digit = 0; digit < kNumDigits; ++digit) {
    uint32_t* offset = offsets[digit];
    if (offset[digit_of(from[0], digit)] == n) continue;  // all alike
    uint32_t sum = 0;
    for (int64_t bin = 0; bin <= static_cast<int64_t>(kDigitMask); ++bin) {
      const uint32_t count = offset[bin];
      offset[bin] = sum;
      sum += count;
    }
    for (int64_t i = 0; i < n; ++i) to[offset[digit_of(from[i], digit)]++] = from[i];
    std::swap(from, to);
  }
  return from;
}

}  // namespace

void sort_pairs(uint32_t* keys, int32_t* indices, int64_t n, uint64_t* scratch) {
  if (n < 2) return;
  for (int64_t i = 0; i < n; ++i) {
    scratch[i] = static_cast<uint64_t>(~keys[i]) << kKeyShift | static_cast<uint32_t>(indices[i]);
  }
  uint64_t* sorted = scratch;
  if (n < kMinRadixSize) {
    std::sort(scratch, scratch + n);
  } else {
    sorted = radix_sort(scratch, scratch + n, n);
  }
  for (int64_t i = 0; i < n; ++i) {
    keys[i] = ~static_cast<uint32_t>(sorted[i] >> kKeyShift);
    indices[i] = static_cast<int32_t>(static_cast<uint32_t>(sorted[i]));
  }
}

}  // namespace jax_fused_topk::cpu
