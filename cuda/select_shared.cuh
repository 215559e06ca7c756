// Exact selection of the k largest of some thousand keys in shared memory, by one
// CTA.
//
// Algorithm.  Radix select on a key's distance from the largest one: the digits
// are the top bits of the span that the keys really have, so equal keys need no
// pass and a narrow band needs few.  A histogram of the digit among the keys still
// in question, a search from its top for the bin of the k-th, the next digit.  It
// ends as soon as a bin is wanted whole, or with the k-th key itself and the number
// of keys equal to it that are wanted.
//
// Roles.  kFilterThreads threads; a thread owns four bins.
//
// Shared memory: SelectShared, 4.2 KiB.  Its histogram is all zeros between calls.

#ifndef JAX_FUSED_TOPK_CUDA_SELECT_SHARED_CUH_
#define JAX_FUSED_TOPK_CUDA_SELECT_SHARED_CUH_

#include <cstdint>

#include "cuda/limits.h"
#include "cuda/select.cuh"

namespace jax_fused_topk {

using FilterGroup = Group<kFilterThreads / 32>;

inline constexpr int kSelectDigitBits = 10;
static_assert(1 << kSelectDigitBits == 4 * kFilterThreads, "a thread owns four bins");

inline constexpr uint32_t kNoBin = 1u << kSelectDigitBits;

struct SelectShared {
  uint4 histogram[kFilterThreads + 1];
  uint32_t low[FilterGroup::kWarps], high[FilterGroup::kWarps];
  uint32_t warp_sums[FilterGroup::kWarps];
  uint32_t bin, above, size;  // the bin of the k-th key, keys in higher bins, keys in it
};

// A Threshold's ties when all keys equal to its key are chosen.
inline constexpr uint32_t kAllTies = 0xFFFFFFFFu;

// Sum over this lane and those below it.
__device__ __forceinline__ uint32_t sum_to_lane(uint32_t value) {
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const uint32_t other = __shfl_up_sync(kFullWarp, value, d);
    if (lane_id() >= d) value += other;
  }
  return value;
}

// Calls visit(key) for positions [begin, end) of a source in shared memory, all
// threads together.  The source gives key(i), and kWide neighbours at a time by
// load(i, keys), i a multiple of kWide.
template <class Source, class Visit>
__device__ __forceinline__ void visit_keys(const Source& source, uint32_t begin, uint32_t end,
                                           Visit visit) {
  constexpr uint32_t kWide = Source::kWide;
  const uint32_t first = (begin + kWide - 1) / kWide * kWide, last = end / kWide * kWide;
#pragma unroll 4
  for (uint32_t i = first + kWide * threadIdx.x; i < last; i += kWide * kFilterThreads) {
    uint32_t keys[kWide];
    source.load(i, keys);
#pragma unroll
    for (uint32_t c = 0; c < kWide; ++c) visit(keys[c]);
  }
  // The odd ones in front and behind.
  const uint32_t odd = threadIdx.x < kWide ? begin + threadIdx.x : last + threadIdx.x - kWide;
  const bool in_front = threadIdx.x < kWide && odd < min(first, end);
  const bool behind = threadIdx.x >= kWide && first <= last && odd < end;
  if (in_front || behind) visit(source.key(odd));
}

// Writes the bin of the k-th key from the top to `shared`, and clears the
// histogram.  It holds at least k keys, larger ones in lower bins.
__device__ __forceinline__ void find_shared_bin(SelectShared& shared, uint32_t k) {
  const int warp = threadIdx.x / 32;
  const uint4 bins = shared.histogram[threadIdx.x];
  shared.histogram[threadIdx.x] = make_uint4(0, 0, 0, 0);
  const uint32_t sum = bins.x + bins.y + bins.z + bins.w;
  uint32_t upto = sum_to_lane(sum);
  if (lane_id() == 31) shared.warp_sums[warp] = upto;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < FilterGroup::kWarps - 1; ++w) {
    if (w < warp) upto += shared.warp_sums[w];
  }
  uint32_t above = upto - sum;
  if (above < k && k <= upto) {
    uint32_t bin = 4 * threadIdx.x, size = bins.x;
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
  __syncthreads();
}

// The threshold of the k largest at positions [begin, end) of a source (visit_keys),
// 1 <= k <= end - begin.  It may choose up to `slack` more.  The keys are visible to
// all threads, which all call this and get the same result.
template <class Source>
__device__ __forceinline__ Threshold select_shared(const Source& source, uint32_t begin,
                                                   uint32_t end, uint32_t k, uint32_t slack,
                                                   SelectShared& shared) {
  uint32_t low = 0xFFFFFFFFu, high = 0;
  visit_keys(source, begin, end, [&](uint32_t key) {
    low = min(low, key);
    high = max(high, key);
  });
  low = __reduce_min_sync(kFullWarp, low);
  high = __reduce_max_sync(kFullWarp, high);
  if (lane_id() == 0) {
    shared.low[threadIdx.x / 32] = low;
    shared.high[threadIdx.x / 32] = high;
  }
  __syncthreads();
#pragma unroll
  for (int w = 0; w < FilterGroup::kWarps; ++w) {
    low = min(low, shared.low[w]);
    high = max(high, shared.high[w]);
  }
  uint32_t* histogram = reinterpret_cast<uint32_t*>(shared.histogram);
  uint32_t width = high - low;  // the k-th key is in [high - width, high]
#pragma unroll 1
  while (width > 0) {
    const int shift = max(0, 32 - __clz(width) - kSelectDigitBits);
    visit_keys(source, begin, end, [&](uint32_t key) {
      const uint32_t distance = high - key;
      // What is out of the question has a bin that no one reads: no branch.
      atomicAdd(&histogram[distance <= width ? distance >> shift : kNoBin], 1u);
    });
    __syncthreads();
    find_shared_bin(shared, k);
    const uint32_t skipped = shared.bin << shift;
    k -= shared.above;
    high -= skipped;
    width = min(width - skipped, (1u << shift) - 1);
    if (shared.size - k <= slack) return {high - width, kAllTies};
  }
  return {high, k};
}

}  // namespace jax_fused_topk

#endif  // JAX_FUSED_TOPK_CUDA_SELECT_SHARED_CUH_
