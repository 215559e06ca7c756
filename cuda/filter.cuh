// One pass over a row that keeps the candidates for its k largest, in order.
//
// Algorithm.  A row comes in tiles.  A warp sees a contiguous piece of a tile, so a
// candidate's place follows from the counts before it: one packed scan over the
// lanes, the totals of the warps through shared memory, one barrier a tile, no
// atomic.  Candidates (key >= floor) go to shared memory in ascending index.  When a
// tile does not fit behind them, the best k are kept and the floor rises to just
// above the k-th: what comes later has a higher index and loses a tie.  So whatever
// the floor is at first, a pass that ends with at least k candidates holds the row's
// k largest.
//
// Roles.  A CTA of kFilterThreads threads, each with 8 to 16 elements of a tile; the
// next tile's are in flight while one is worked on.
//
// Shared memory: FilterShared, 4.4 KiB; 8 bytes a candidate for
// top_k_capacity(k) >= k + kFilterTile of them.

#ifndef JAX_FUSED_TOPK_CUDA_FILTER_CUH_
#define JAX_FUSED_TOPK_CUDA_FILTER_CUH_

#include <cstdint>

#include "cuda/element.cuh"
#include "cuda/limits.h"
#include "cuda/select.cuh"
#include "cuda/select_shared.cuh"

namespace jax_fused_topk {

struct FilterShared {
  SelectShared select;
  uint32_t held[FilterGroup::kWarps];
  uint32_t warp_counts[2][FilterGroup::kWarps];
};

// Candidates [0, count) in shared memory, in ascending index.
struct Candidates {
  static constexpr int kWide = 2;
  uint2* pairs;  // key, index
  uint32_t capacity;
  __device__ __forceinline__ uint32_t key(uint32_t i) const { return pairs[i].x; }
  __device__ __forceinline__ int32_t index(uint32_t i) const {
    return static_cast<int32_t>(pairs[i].y);
  }
  __device__ __forceinline__ void load(uint32_t i, uint32_t (&keys)[kWide]) const {
    const uint4 two = *reinterpret_cast<const uint4*>(pairs + i);
    keys[0] = two.x;
    keys[1] = two.z;
  }
};

// Puts the chosen ones of source [begin, end) into `store`, in order, and returns their
// number.  A warp takes an eighth; it counts what it has above the threshold and at it,
// then puts.
template <class Source, class Store>
__device__ __forceinline__ uint32_t put_chosen(const Source& source, uint32_t begin, uint32_t end,
                                               Threshold threshold, FilterShared& shared,
                                               const Store& store) {
  constexpr uint32_t kTie = 1u << 16;  // counts: ties in the high half
  const int warp = threadIdx.x / 32;
  const uint32_t share = (end - begin + kFilterThreads - 1) / kFilterThreads * 32;
  const uint32_t first = begin + warp * share, last = min(first + share, end);
  uint32_t held = 0;
#pragma unroll 4
  for (uint32_t i = first + lane_id(); i < last; i += 32) {
    const uint32_t key = source.key(i);
    held += key > threshold.key ? 1 : key == threshold.key ? kTie : 0;
  }
  held = __reduce_add_sync(kFullWarp, held);
  if (lane_id() == 0) shared.held[warp] = held;
  __syncthreads();
  held = lane_id() < FilterGroup::kWarps ? shared.held[lane_id()] : 0;
  const uint32_t total = __reduce_add_sync(kFullWarp, held);
  const uint32_t before = __reduce_add_sync(kFullWarp, lane_id() < warp ? held : 0);
  uint32_t ties = before / kTie;
  uint32_t out = before % kTie + min(ties, threshold.ties);
#pragma unroll 2
  for (uint32_t base = first; base < last; base += 32) {
    const uint32_t i = base + lane_id();
    const uint32_t key = i < last ? source.key(i) : 0;
    const bool tie = i < last && key == threshold.key;
    const uint32_t tied = __ballot_sync(kFullWarp, tie);
    const bool take = (i < last && key > threshold.key) ||
                      (tie && ties + __popc(tied & lanes_below()) < threshold.ties);
    const uint32_t taken = __ballot_sync(kFullWarp, take);
    if (take) store.put(out + __popc(taken & lanes_below()), key, source.index(i));
    ties += __popc(tied);
    out += __popc(taken);
  }
  __syncthreads();  // what is in `store` is visible
  return total % kTie + min(total / kTie, threshold.ties);
}

// --- Rows in global memory.

// Elements [begin, end) of an array of 16-byte vectors, begin within the first one.
template <class ElementType, int kTileLoads>
struct RowTiles {
  using Type = ElementType;
  using Bits = typename Type::Bits;
  static constexpr uint32_t kPerLoad = 16 / sizeof(Bits);
  static constexpr int kLoads = kTileLoads;            // of a thread, 3 at most: 64 registers
  static constexpr int kElements = kLoads * kPerLoad;  // of a thread
  static constexpr uint32_t kTile = kElements * kFilterThreads;
  static_assert(kTile <= kFilterTile);
  struct Tile {
    uint4 vectors[kLoads];
  };
  struct Keys {
    uint32_t words[4 * kLoads];
  };

  const uint4* vectors;
  uint32_t begin, end;
  int32_t index_of_first;  // the index of the array's element 0, which may be outside the row

  __device__ __forceinline__ RowTiles(const Bits* row, KeyRange range) {
    const uintptr_t address = reinterpret_cast<uintptr_t>(row + range.start);
    const uint32_t lead = address % 16 / sizeof(Bits);
    vectors = reinterpret_cast<const uint4*>(address - address % 16);
    begin = lead;
    end = lead + range.size();
    index_of_first = range.start - static_cast<int32_t>(lead);
  }

  __device__ __forceinline__ uint32_t count() const { return (end + kTile - 1) / kTile; }
  __device__ __forceinline__ bool whole(uint32_t t) const {
    return t * kTile >= begin && (t + 1) * kTile <= end;
  }
  // The thread's vector of load 0 of tile t; the next loads' are 32 further on each.
  __device__ __forceinline__ uint32_t vector(uint32_t t) const {
    return t * (kTile / kPerLoad) + threadIdx.x / 32 * (32 * kLoads) + lane_id();
  }
  __device__ __forceinline__ int32_t index(const Keys&, uint32_t t, int e) const {
    return index_of_first + vector(t) * kPerLoad + e / kPerLoad * (32 * kPerLoad) + e % kPerLoad;
  }

  __device__ __forceinline__ void load(uint32_t t, Tile& tile) const {
    const uint32_t first = vector(t);
    if (whole(t)) {
#pragma unroll
      for (int j = 0; j < kLoads; ++j) tile.vectors[j] = __ldg(vectors + first + 32 * j);
    } else {
#pragma unroll
      for (int j = 0; j < kLoads; ++j) tile.vectors[j] = load_inside(first + 32 * j);
    }
  }

  // A vector of which only what lies inside the row may be read.
  __device__ __forceinline__ uint4 load_inside(uint32_t vector) const {
    const uint32_t first = vector * kPerLoad;
    if (first >= begin && first + kPerLoad <= end) return __ldg(vectors + vector);
    const Bits* elements = reinterpret_cast<const Bits*>(vectors);
    // The first or the last vector of a row: not worth the registers of fast code.
    uint64_t low = 0, high = 0;
#pragma unroll 1
    for (int c = kPerLoad - 1; c >= 0; --c) {
      const uint32_t i = first + c;
      high = high << Type::kBits | low >> (64 - Type::kBits);
      low <<= Type::kBits;
      if (i >= begin && i < end) low |= __ldg(elements + i);
    }
    return make_uint4(static_cast<uint32_t>(low), static_cast<uint32_t>(low >> 32),
                      static_cast<uint32_t>(high), static_cast<uint32_t>(high >> 32));
  }

  // Bits of the thread's elements of tile t that are in the row.
  __device__ __forceinline__ uint32_t inside(uint32_t t) const {
    uint32_t mask = 0;
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      const uint32_t first = (vector(t) + 32 * j) * kPerLoad;
      const auto below = [&](uint32_t bound) {  // bits of the elements before `bound`
        const uint32_t count = bound > first ? min(bound - first, kPerLoad) : 0;
        return (1u << count) - 1;
      };
      mask |= (below(end) & ~below(begin)) << j * kPerLoad;
    }
    return mask;
  }

  __device__ __forceinline__ Keys keys(const Tile& tile) const {
    Keys result;
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      const uint4& v = tile.vectors[j];
      const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int w = 0; w < 4; ++w) result.words[4 * j + w] = Type::word_keys(words[w]);
    }
    return result;
  }
  __device__ __forceinline__ uint32_t key(const Keys& keys, int e) const {
    return key_in_word<Type>(keys.words[e / Type::kPerWord], e % Type::kPerWord);
  }
};

// Puts the keys of a vector at keys[0...] in shared memory, aligned to 16 bytes.
template <class Type>
__device__ __forceinline__ void put_keys(const uint4& vector, uint32_t* keys) {
  const uint32_t words[4] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
  for (int e = 0; e < 4 * Type::kPerWord; e += 4) {
    const auto key = [&](int c) {
      return key_in_word<Type>(Type::word_keys(words[(e + c) / Type::kPerWord]),
                               (e + c) % Type::kPerWord);
    };
    *reinterpret_cast<uint4*>(keys + e) = make_uint4(key(0), key(1), key(2), key(3));
  }
}

// --- The pass.

// Keeps the best k of `count` candidates, by way of `store`.
template <class Store>
__device__ __forceinline__ Threshold keep_best(const Candidates& candidates, uint32_t count,
                                               uint32_t k, FilterShared& shared,
                                               const Store& store) {
  const Threshold threshold = select_shared(candidates, 0, count, k, 0, shared.select);
  put_chosen(candidates, 0, count, threshold, shared, store);
  for (uint32_t i = threadIdx.x; i < k; i += kFilterThreads) {
    candidates.pairs[i] = make_uint2(store.key(i), static_cast<uint32_t>(store.index(i)));
  }
  return threshold;
}

// Filters all tiles and returns the number of candidates, `count` of which were there
// before.  If they are fewer than k, the floor was too high.  `store()` is room for k
// candidates in global memory.
template <class Tiles, class MakeStore>
__device__ __forceinline__ uint32_t filter(const Tiles& tiles, uint32_t floor, uint32_t k,
                                           const Candidates& candidates, uint32_t count,
                                           FilterShared& shared, const MakeStore& store) {
  constexpr int kLoads = Tiles::kLoads, kPerLoad = Tiles::kPerLoad;
  // A count for each load, packed: a warp's fits its field.
  constexpr int kFieldBits = 32 / kLoads;
  constexpr uint32_t kField = (1u << kFieldBits) - 1;
  static_assert(32 * kPerLoad <= kField);
  const int warp = threadIdx.x / 32;
  const uint32_t tile_count = tiles.count();
  typename Tiles::Tile next;
  if (tile_count > 0) tiles.load(0, next);
#pragma unroll 1
  for (uint32_t t = 0; t < tile_count;) {
    const typename Tiles::Keys tile = tiles.keys(next);
    uint32_t passed = 0;
#pragma unroll
    for (int e = 0; e < kLoads * kPerLoad; ++e) {
      if (tiles.key(tile, e) >= floor) passed |= 1u << e;
    }
    if (!tiles.whole(t)) passed &= tiles.inside(t);
    if (t + 1 < tile_count) tiles.load(t + 1, next);

    uint32_t packed = 0;
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      packed |= __popc(passed >> j * kPerLoad & ((1u << kPerLoad) - 1)) << j * kFieldBits;
    }
    const uint32_t upto = sum_to_lane(packed);
    const uint32_t warp_packed = __shfl_sync(kFullWarp, upto, 31);
    uint32_t warp_count = 0;
#pragma unroll
    for (int j = 0; j < kLoads; ++j) warp_count += warp_packed >> j * kFieldBits & kField;
    if (lane_id() == 0) shared.warp_counts[t % 2][warp] = warp_count;
    __syncthreads();
    const uint32_t held =
        lane_id() < FilterGroup::kWarps ? shared.warp_counts[t % 2][lane_id()] : 0;
    const uint32_t total = __reduce_add_sync(kFullWarp, held);
    uint32_t place = count + __reduce_add_sync(kFullWarp, lane_id() < warp ? held : 0);

    if (count + total > candidates.capacity) {
      const Threshold threshold = keep_best(candidates, count, k, shared, store());
      count = k;
      floor = threshold.key;
      if (threshold.ties != kAllTies) {
        if (floor == 0xFFFFFFFFu) break;  // nothing can be better
        ++floor;
      }
      tiles.load(t, next);  // again
      continue;
    }

    if (passed != 0) {
      const uint32_t before = upto - packed;
#pragma unroll
      for (int j = 0; j < kLoads; ++j) {
        uint2* to = candidates.pairs + place + (before >> j * kFieldBits & kField);
#pragma unroll
        for (int c = 0; c < kPerLoad; ++c) {
          const int e = j * kPerLoad + c;
          if (passed >> e & 1) {
            *to++ = make_uint2(tiles.key(tile, e), static_cast<uint32_t>(tiles.index(tile, t, e)));
          }
        }
        place += warp_packed >> j * kFieldBits & kField;
      }
    }
    count += total;
    ++t;
  }
  __syncthreads();  // the candidates are visible
  return count;
}

}  // namespace jax_fused_topk

#endif  // JAX_FUSED_TOPK_CUDA_FILTER_CUH_
