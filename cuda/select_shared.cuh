// Exact selection of the k largest of some thousand keys in shared memory, by a group of
// warps.
//
// Algorithm.  Radix select on a key's distance from the largest one: the digits
// are the top bits of the span that the keys really have, so equal keys need no
// pass and a narrow band needs few.  A histogram of the digit among the keys still
// in question, a search from its top for the bin of the k-th, the next digit.  It
// ends as soon as a bin is wanted whole, or with the k-th key itself and the number
// of keys equal to it that are wanted.
//
// Roles.  A Group of 256 threads or more; each of the first 256 owns four bins.
//
// Shared memory: SelectSharedBy, 4.2 KiB.  Its histogram is all zeros between calls.

#ifndef JAX_FUSED_TOPK_CUDA_SELECT_SHARED_CUH_
#define JAX_FUSED_TOPK_CUDA_SELECT_SHARED_CUH_

#include <cstdint>

#include "cuda/limits.h"
#include "cuda/select.cuh"

namespace jax_fused_topk {

using FilterGroup = Group<kFilterThreads / 32>;

inline constexpr int kSelectDigitBits = 10;
inline constexpr uint32_t kNoBin = 1u << kSelectDigitBits;
inline constexpr int kBinOwners = kNoBin / 4;

template <class Group>
struct SelectSharedBy {
  static_assert(Group::kThreads >= kBinOwners);
  uint4 histogram[kBinOwners + 1];
  uint32_t low[Group::kWarps], high[Group::kWarps];
  uint32_t warp_sums[Group::kWarps];
  uint32_t bin, above, size;  // the bin of the k-th key, keys in higher bins, keys in it
};
using SelectShared = SelectSharedBy<FilterGroup>;

// Keys in shared memory, aligned to 16 bytes.
struct SharedKeys {
  static constexpr int kWide = 4;
  const uint32_t* keys;
  __device__ __forceinline__ uint32_t key(uint32_t i) const { return keys[i]; }
  __device__ __forceinline__ void load(uint32_t i, uint32_t (&four)[kWide]) const {
    const uint4 vector = *reinterpret_cast<const uint4*>(keys + i);
    four[0] = vector.x, four[1] = vector.y, four[2] = vector.z, four[3] = vector.w;
  }
};

// A Threshold's ties when all keys equal to its key are chosen.
inline constexpr uint32_t kAllTies = 0xFFFFFFFFu;

// Sum over this lane and those below it.
template <class Group = FilterGroup>
__device__ __forceinline__ uint32_t sum_to_lane(uint32_t value) {
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const uint32_t other = __shfl_up_sync(kFullWarp, value, d);
    if (Group::lane() >= d) value += other;
  }
  return value;
}

// Exclusive sum over the threads of the CTA; `total` gets the sum of all.
__device__ __forceinline__ uint32_t sum_before(uint32_t value, uint32_t* sums, uint32_t& total) {
  const int warp = FilterGroup::warp();
  const uint32_t upto = sum_to_lane(value);
  __syncthreads();
  if (FilterGroup::lane() == 31) sums[warp] = upto;
  __syncthreads();
  uint32_t before = upto - value;
  total = 0;
#pragma unroll
  for (int w = 0; w < FilterGroup::kWarps; ++w) {
    if (w < warp) before += sums[w];
    total += sums[w];
  }
  return before;
}

// The lowest and the highest of the keys of all threads of a group.
struct KeySpan {
  uint32_t low = 0xFFFFFFFFu, high = 0;

  __device__ __forceinline__ void add(uint32_t key) {
    low = min(low, key);
    high = max(high, key);
  }
  // All threads call it; `lows` and `highs` are shared memory, a place a warp.
  template <class Group>
  __device__ __forceinline__ void reduce(uint32_t (&lows)[Group::kWarps],
                                         uint32_t (&highs)[Group::kWarps]) {
    low = __reduce_min_sync(kFullWarp, low);
    high = __reduce_max_sync(kFullWarp, high);
    if (Group::lane() == 0) {
      lows[Group::warp()] = low;
      highs[Group::warp()] = high;
    }
    Group::sync();
#pragma unroll
    for (int w = 0; w < Group::kWarps; ++w) {
      low = min(low, lows[w]);
      high = max(high, highs[w]);
    }
  }
};

// Calls visit(key) for positions [begin, end) of a source in shared memory, all
// threads together.  The source gives key(i), and kWide neighbours at a time by
// load(i, keys), i a multiple of kWide.
template <class Group, class Source, class Visit>
__device__ __forceinline__ void visit_keys(const Source& source, uint32_t begin, uint32_t end,
                                           Visit visit) {
  constexpr uint32_t kWide = Source::kWide;
  const uint32_t thread = Group::thread();
  const uint32_t first = (begin + kWide - 1) / kWide * kWide, last = end / kWide * kWide;
#pragma unroll 4
  for (uint32_t i = first + kWide * thread; i < last; i += kWide * Group::kThreads) {
    uint32_t keys[kWide];
    source.load(i, keys);
#pragma unroll
    for (uint32_t c = 0; c < kWide; ++c) visit(keys[c]);
  }
  // The odd ones in front and behind.
  const uint32_t odd = thread < kWide ? begin + thread : last + thread - kWide;
  const bool in_front = thread < kWide && odd < min(first, end);
  const bool behind = thread >= kWide && first <= last && odd < end;
  if (in_front || behind) visit(source.key(odd));
}

// Writes the bin of the k-th key from the top to `shared`, and clears the
// histogram.  It holds at least k keys, larger ones in lower bins.
template <class Group>
__device__ __forceinline__ void find_shared_bin(SelectSharedBy<Group>& shared, uint32_t k) {
  const int warp = Group::warp(), thread = Group::thread();
  uint4 bins = make_uint4(0, 0, 0, 0);
  if (Group::kThreads == kBinOwners || thread < kBinOwners) {
    bins = shared.histogram[thread];
    shared.histogram[thread] = make_uint4(0, 0, 0, 0);
  }
  const uint32_t sum = bins.x + bins.y + bins.z + bins.w;
  uint32_t upto = sum_to_lane<Group>(sum);
  if (Group::lane() == 31) shared.warp_sums[warp] = upto;
  Group::sync();
#pragma unroll
  for (int w = 0; w < Group::kWarps - 1; ++w) {
    if (w < warp) upto += shared.warp_sums[w];
  }
  uint32_t above = upto - sum;
  if (above < k && k <= upto) {
    uint32_t bin = 4 * thread, size = bins.x;
    if (above + size < k) {
      above += size, size = bins.y, ++bin;
      if (above + size < k) {
        above += size, size = bins.z, ++bin;
        if (above + size < k) above += size, size = bins.w, ++bin;
      }
    }
    shared.bin = bin;
    shared.above = above;
    shared.size = size;
  }
  Group::sync();
}

// The threshold of the k largest at positions [begin, end) of a source (visit_keys),
// k >= 1.  It may choose up to `slack` more.  `span`: of this thread's keys; what is outside all
// threads' spans is left out, and at least k keys are inside.  The keys are visible to all
// threads, which all call this and get the same result.
template <class Group, class Source>
__device__ __forceinline__ Threshold select_shared(const Source& source, uint32_t begin,
                                                   uint32_t end, uint32_t k, uint32_t slack,
                                                   KeySpan span, SelectSharedBy<Group>& shared) {
  span.reduce<Group>(shared.low, shared.high);
  uint32_t high = span.high;
  uint32_t* histogram = reinterpret_cast<uint32_t*>(shared.histogram);
  uint32_t width = high - span.low;  // the k-th key is in [high - width, high]
#pragma unroll 1
  while (width > 0) {
    const int shift = max(0, 32 - __clz(width) - kSelectDigitBits);
    visit_keys<Group>(source, begin, end, [&](uint32_t key) {
      const uint32_t distance = high - key;
      // What is out of the question has a bin that no one reads: no branch.
      atomicAdd(&histogram[distance <= width ? distance >> shift : kNoBin], 1u);
    });
    Group::sync();
    find_shared_bin(shared, k);
    const uint32_t skipped = shared.bin << shift;
    k -= shared.above;
    high -= skipped;
    width = min(width - skipped, (1u << shift) - 1);
    if (shared.size - k <= slack) return {high - width, kAllTies};
  }
  return {high, k};
}

// The same where no thread knows the span of its keys.
template <class Group, class Source>
__device__ __forceinline__ Threshold select_shared(const Source& source, uint32_t begin,
                                                   uint32_t end, uint32_t k, uint32_t slack,
                                                   SelectSharedBy<Group>& shared) {
  KeySpan span;
  visit_keys<Group>(source, begin, end, [&](uint32_t key) { span.add(key); });
  return select_shared<Group>(source, begin, end, k, slack, span, shared);
}

}  // namespace jax_fused_topk

#endif  // JAX_FUSED_TOPK_CUDA_SELECT_SHARED_CUH_
