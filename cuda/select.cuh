// Exact selection of the k largest keys, ties to the first, kept in order.
//
// Algorithm.  Radix select, highest digit first: a histogram of the digit among
// the keys that match the prefix so far, a search from its top for the bin of the
// k-th key, the next digit.  It ends with the k-th key itself and the number of
// keys equal to it that are still wanted.  Then a stable compaction by ballots:
// candidates come in ascending index, so the first equal ones are the right ones.
//
// Roles.  A Group of one warp (in-place compaction of index_topk's buffers, a row
// a warp) or of a CTA's warps (merge of splits, top_k).  A row is a list of
// segments; a warp works on a segment at a time.
//
// Shared memory: a histogram of 2**kDigitBits uint32 a group; SegmentRanks for
// groups of more than one warp.

#ifndef JAX_FUSED_TOPK_CUDA_SELECT_CUH_
#define JAX_FUSED_TOPK_CUDA_SELECT_CUH_

#include <cstdint>

namespace jax_fused_topk {

inline constexpr uint32_t kFullWarp = 0xFFFFFFFFu;

__device__ __forceinline__ int lane_id() { return threadIdx.x % 32; }

__device__ __forceinline__ uint32_t lanes_below() { return (1u << lane_id()) - 1; }

// Threads that select one row together.
template <int kWarpCount>
struct Group {
  static constexpr int kWarps = kWarpCount;
  static constexpr int kThreads = 32 * kWarpCount;

  __device__ static __forceinline__ int lane() { return lane_id(); }
  __device__ static __forceinline__ int warp() { return kWarps == 1 ? 0 : threadIdx.x / 32; }
  __device__ static __forceinline__ int thread() { return kWarps == 1 ? lane() : threadIdx.x; }
  __device__ static __forceinline__ void sync() {
    if constexpr (kWarps == 1) {
      __syncwarp();
    } else {
      __syncthreads();
    }
  }
};

// The choice: keys above `key`, and the first `ties` of those equal to it.
struct Threshold {
  uint32_t key, ties;
};

// For a row of n keys that are all chosen.
__device__ __forceinline__ Threshold choose_all(uint32_t n) { return {0, n}; }

// Positions [begin, end) of a source.  A source gives key(i), the unsigned key to
// compare, and index(i), what the results call it.
template <class Source>
struct Segment {
  Source source;
  uint32_t begin, end;
};

// A row in one piece.
template <class Source>
struct WholeRow {
  Source source;
  uint32_t begin, end;
  __device__ __forceinline__ int count() const { return 1; }
  __device__ __forceinline__ Segment<Source> segment(int) const { return {source, begin, end}; }
};

// A row in `parts` pieces of nearly the same length.
template <class Source>
struct DividedRow {
  Source source;
  uint32_t begin, end;
  int parts;
  __device__ __forceinline__ int count() const { return parts; }
  __device__ __forceinline__ Segment<Source> segment(int s) const {
    const uint64_t size = end - begin;
    return {source, static_cast<uint32_t>(begin + size * s / parts),
            static_cast<uint32_t>(begin + size * (s + 1) / parts)};
  }
};

// Calls visit(inside, key, i) by whole warps, positions ascending with the lane.
// All keys of a step are loaded before its first visit.
template <class Source, class Visit>
__device__ __forceinline__ void visit_segment(const Segment<Source>& segment, Visit visit) {
  constexpr int kUnroll = 8;
  for (uint32_t base = segment.begin; base < segment.end; base += 32 * kUnroll) {
    uint32_t keys[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const uint32_t i = base + 32 * u + lane_id();
      keys[u] = i < segment.end ? segment.source.key(i) : 0;
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const uint32_t i = base + 32 * u + lane_id();
      if (base + 32 * u < segment.end) visit(i < segment.end, keys[u], i);
    }
  }
}

// Sum over this lane and those above it.
__device__ __forceinline__ uint32_t sum_from_lane(uint32_t value) {
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const uint32_t other = __shfl_down_sync(kFullWarp, value, d);
    if (lane_id() + d < 32) value += other;
  }
  return value;
}

struct Bin {
  uint32_t digit;
  uint32_t above;  // keys in higher bins
};

// The bin of the k-th key from the top.  A whole warp calls it; the histogram
// holds at least k keys.
template <int kDigitBits>
__device__ __forceinline__ Bin find_bin(const uint32_t* histogram, uint32_t k) {
  constexpr int kPerLane = (1 << kDigitBits) / 32;
  uint32_t sum = 0;
  // Rotated, so that the lanes meet different banks.
  for (int i = 0; i < kPerLane; ++i) {
    sum += histogram[lane_id() * kPerLane + (i + lane_id()) % kPerLane];
  }
  uint32_t from = sum_from_lane(sum);
  uint32_t hits = __ballot_sync(kFullWarp, from >= k && from - sum < k);
  const int lane = __ffs(hits) - 1;
  uint32_t above = __shfl_sync(kFullWarp, from - sum, lane);
  const uint32_t first = lane * kPerLane;
  // The same among that lane's bins, 32 at a time from the top.
  for (int base = (kPerLane - 1) / 32 * 32; base >= 0; base -= 32) {
    const uint32_t count = base + lane_id() < kPerLane ? histogram[first + base + lane_id()] : 0;
    from = above + sum_from_lane(count);
    hits = __ballot_sync(kFullWarp, from >= k && from - count < k);
    if (hits != 0) {
      const int winner = __ffs(hits) - 1;
      return {first + base + winner, __shfl_sync(kFullWarp, from - count, winner)};
    }
    above = __shfl_sync(kFullWarp, from, 0);
  }
  return {first, above};  // not reached
}

// Adds one to the bins of the lanes that take part.  What falls into lane 0's bin, the
// most where many keys are alike, costs one atomic instead of 32 in a row.
__device__ __forceinline__ void histogram_add(uint32_t* histogram, bool take, uint32_t digit) {
  constexpr uint32_t kNone = 0xFFFFFFFFu;
  const uint32_t bin = take ? digit : kNone;
  const uint32_t first = __shfl_sync(kFullWarp, bin, 0);
  const uint32_t alike = __ballot_sync(kFullWarp, bin == first);
  if (bin == kNone) return;
  if (bin != first) {
    atomicAdd(&histogram[bin], 1u);
  } else if (lane_id() == 0) {
    atomicAdd(&histogram[bin], static_cast<uint32_t>(__popc(alike)));
  }
}

// The threshold of the k largest, 1 <= k <= the row's size.  Keys have kKeyBits
// bits.  All threads of the group call it and get the same result.
template <class Group, int kKeyBits, int kDigitBits, class Row>
__device__ __forceinline__ Threshold radix_select(const Row& row, uint32_t k, uint32_t* histogram) {
  constexpr int kBins = 1 << kDigitBits;
  uint32_t prefix = 0;
#pragma unroll 1
  for (int high = kKeyBits; high > 0; high -= kDigitBits) {
    // Bits [low, high); the last digit may be a narrow one.
    const int low = high > kDigitBits ? high - kDigitBits : 0;
    const uint32_t mask = (1u << (high - low)) - 1;
    for (int i = Group::thread(); i < kBins; i += Group::kThreads) histogram[i] = 0;
    Group::sync();
    for (int s = Group::warp(); s < row.count(); s += Group::kWarps) {
      visit_segment(row.segment(s), [&](bool inside, uint32_t key, uint32_t) {
        // The prefix is all bits from `high` on, and there are none at first.
        const bool matches = high == kKeyBits || key >> high == prefix;
        histogram_add(histogram, inside && matches, (key >> low) & mask);
      });
    }
    Group::sync();
    const Bin bin = find_bin<kDigitBits>(histogram, k);
    k -= bin.above;
    prefix = (prefix << (high - low)) | bin.digit;
    Group::sync();  // before the histogram is cleared
  }
  return {prefix, k};
}

// Compacts a segment: calls emit(position, key, index) for what is chosen, from
// position `out` on.  `ties_before`: keys equal to the threshold's in front of the
// segment.  A warp calls it; emit may write over what lies at or before the
// positions just read, so a row may be compacted in place.
template <class Source, class Emit>
__device__ __forceinline__ uint32_t collect_segment(const Segment<Source>& segment,
                                                    Threshold threshold, uint32_t out,
                                                    uint32_t ties_before, Emit emit) {
  visit_segment(segment, [&](bool inside, uint32_t key, uint32_t i) {
    const bool tie = inside && key == threshold.key;
    const uint32_t ties = __ballot_sync(kFullWarp, tie);
    const bool take = (inside && key > threshold.key) ||
                      (tie && ties_before + __popc(ties & lanes_below()) < threshold.ties);
    const uint32_t taken = __ballot_sync(kFullWarp, take);
    const int32_t index = take ? segment.source.index(i) : 0;
    __syncwarp();  // every lane has read before one overwrites
    if (take) emit(out + __popc(taken & lanes_below()), key, index);
    ties_before += __popc(ties);
    out += __popc(taken);
  });
  return out;
}

// Scratch of collect: of each segment first what it holds, then what lies before.
template <int kMaxSegments>
struct SegmentRanks {
  static constexpr int kSegments = kMaxSegments;
  uint32_t above[kMaxSegments];
  uint32_t ties[kMaxSegments];
};

// collect_segment for a whole row, by all warps of a CTA.
template <class Group, class Row, class Ranks, class Emit>
__device__ __forceinline__ void collect(const Row& row, Threshold threshold, Ranks& ranks,
                                        Emit emit) {
  static_assert(Group::kWarps > 1);
  for (int s = Group::warp(); s < row.count(); s += Group::kWarps) {
    uint32_t above = 0, ties = 0;
    visit_segment(row.segment(s), [&](bool inside, uint32_t key, uint32_t) {
      above += inside && key > threshold.key;
      ties += inside && key == threshold.key;
    });
    above = __reduce_add_sync(kFullWarp, above);
    ties = __reduce_add_sync(kFullWarp, ties);
    if (lane_id() == 0) {
      ranks.above[s] = above;
      ranks.ties[s] = ties;
    }
  }
  Group::sync();
  if (Group::warp() == 0) {
    uint32_t above_before = 0, ties_before = 0;
    for (int base = 0; base < row.count(); base += 32) {
      // Lanes in reverse, so that sum_from_lane counts what comes before.
      const int s = base + 31 - lane_id();
      const bool inside = s < row.count();
      const uint32_t above = inside ? ranks.above[s] : 0, ties = inside ? ranks.ties[s] : 0;
      const uint32_t above_to = sum_from_lane(above), ties_to = sum_from_lane(ties);
      if (inside) {
        ranks.above[s] = above_before + above_to - above;
        ranks.ties[s] = ties_before + ties_to - ties;
      }
      above_before += __shfl_sync(kFullWarp, above_to, 0);
      ties_before += __shfl_sync(kFullWarp, ties_to, 0);
    }
  }
  Group::sync();
  for (int s = Group::warp(); s < row.count(); s += Group::kWarps) {
    const uint32_t ties = ranks.ties[s];
    const uint32_t out = ranks.above[s] + min(ties, threshold.ties);
    collect_segment(row.segment(s), threshold, out, ties, emit);
  }
  Group::sync();  // before the ranks are used again; emit's writes are visible
}

}  // namespace jax_fused_topk

#endif  // JAX_FUSED_TOPK_CUDA_SELECT_CUH_
