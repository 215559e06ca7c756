// The choice among a row's candidates.  A CTA a row.
//
// Algorithm.  Candidates come from the segments of the block's pieces to shared
// memory; a radix select (select_shared.cuh) finds the K-th, and among those equal to
// it, if not all are wanted, the last by index.  In any order the chosen ones are written as
// they lie.  In ascending index they set bits in a bitmap of the row's keys: a prefix sum over
// its words and a population count give each its place.  A row too wide for the bitmap, and
// Order::kScore, sort.
//
// Roles.  kFilterThreads threads, all alike.
//
// Shared memory: SelectMemory, then held_candidates candidates of 8 bytes, 43 KiB at K = 2048;
// then the bitmap and its sums, 24 KiB at N = 131072, or the pairs to sort.  A row
// with more candidates than are held comes in batches, cut to K in between.

#ifndef JAX_FUSED_TOPK_CUDA_HOPPER_SELECT_CUH_
#define JAX_FUSED_TOPK_CUDA_HOPPER_SELECT_CUH_

#include <cstdint>

#include "cuda/hopper_threshold.cuh"
#include "cuda/row_output.cuh"
#include "cuda/select_shared.cuh"

namespace jax_fused_topk::hopper {

// 1.8 K come on the average (hopper_threshold.cuh).
JFT_HOST_DEVICE int64_t held_candidates(int64_t topk) {
  return max64(1024, ceil_div(topk * 9, 16) * 4);
}
// Keys whose bitmap fits in shared memory: 6 bytes for 32 keys.
inline constexpr int64_t kMaxBitmapKeys = int64_t{1} << 19;

// Pieces of which candidates are gathered at a time: a lane of a warp finds each.
inline constexpr int kGathered = 32;

struct Gathering {
  const Candidate* candidates[kGathered];               // the row's first, in each piece
  int32_t capacities[kGathered];                        // of the pieces' segments
  alignas(16) uint32_t ends[kGathered * kRowSegments];  // candidates up to each segment's end
  int32_t pieces;                                       // in all, however many are gathered now
  uint32_t total;                                       // candidates of those gathered now
};

struct SelectMemory {
  SelectShared select;
  uint32_t sums[FilterGroup::kWarps];
  Gathering gathering;
  alignas(16) uint2 candidates[1];  // key, index

  // Behind the candidates: the bitmap's words and their sums, or pairs to sort.
  template <class Type>
  __device__ __forceinline__ Type* rest(int64_t topk) {
    return reinterpret_cast<Type*>(candidates + held_candidates(topk));
  }

  // Words of a bitmap of so many keys, the first of which is anywhere in a word.
  JFT_HOST_DEVICE static int64_t words(int64_t keys) { return ceil_div(keys + 31, 128) * 4; }
  static size_t bytes(Order order, int64_t keys, int64_t topk) {
    int64_t rest = 0;
    if (order == Order::kIndex && keys <= kMaxBitmapKeys) {
      rest = words(keys) * int64_t{sizeof(uint32_t) + sizeof(uint16_t)};
    } else if (order != Order::kAny) {
      rest = next_power_of_two(topk) * int64_t{sizeof(uint64_t)};
    }
    return sizeof(SelectMemory) + held_candidates(topk) * int64_t{sizeof(uint2)} + rest;
  }
};

// Candidates in shared memory, for select_shared.
struct HeldSource {
  static constexpr int kWide = 2;
  const uint2* pairs;
  __device__ __forceinline__ uint32_t key(uint32_t i) const { return pairs[i].x; }
  __device__ __forceinline__ void load(uint32_t i, uint32_t (&keys)[kWide]) const {
    const uint4 two = *reinterpret_cast<const uint4*>(pairs + i);
    keys[0] = two.x;
    keys[1] = two.z;
  }
};

// The same, for the lowest indices among the keys equal to `tie`.
struct TieSource {
  static constexpr int kWide = 2;
  const uint2* pairs;
  uint32_t tie;
  __device__ __forceinline__ uint32_t key(uint32_t i) const {
    return pairs[i].x == tie ? ~pairs[i].y : 0;
  }
  __device__ __forceinline__ void load(uint32_t i, uint32_t (&keys)[kWide]) const {
    const uint4 two = *reinterpret_cast<const uint4*>(pairs + i);
    keys[0] = two.x == tie ? ~two.y : 0;
    keys[1] = two.z == tie ? ~two.w : 0;
  }
};

// What is chosen: candidates of this rank (hopper_cut.cuh) or a greater one.
struct Choice {
  uint64_t least;
  __device__ __forceinline__ bool takes(uint2 candidate) const {
    return rank_of(candidate.x, static_cast<int32_t>(candidate.y)) >= least;
  }
};

// Chooses the best min(topk, count).  `span`: of the keys that this thread has seen.
__device__ __forceinline__ Choice choose(const uint2* candidates, uint32_t count, uint32_t topk,
                                         const KeySpan& span, SelectShared& shared) {
  if (count <= topk) return {0};
  const Threshold found = select_shared(HeldSource{candidates}, 0, count, topk, 0, span, shared);
  const uint64_t least = static_cast<uint64_t>(found.key) << 32;
  if (found.ties == kAllTies) return {least};
  __syncthreads();
  const TieSource ties{candidates, found.key};
  return {least | select_shared(ties, 0, count, found.ties, 0, shared).key};
}

// Writes the chosen ones as they lie.  A warp takes an eighth.
__device__ __forceinline__ void put_as_they_lie(const uint2* candidates, uint32_t count,
                                                const Choice& choice, uint32_t* sums,
                                                const RowOutput& out) {
  const int warp = threadIdx.x / 32;
  const uint32_t share = (count + kFilterThreads - 1) / kFilterThreads * 32;
  const uint32_t first = warp * share, last = min(first + share, count);
  uint32_t chosen = 0;
#pragma unroll 4
  for (uint32_t i = first + lane_id(); i < last; i += 32) chosen += choice.takes(candidates[i]);
  chosen = __reduce_add_sync(kFullWarp, chosen);
  if (lane_id() == 0) sums[warp] = chosen;
  __syncthreads();
  uint32_t at = 0;
#pragma unroll
  for (int w = 0; w < FilterGroup::kWarps; ++w) {
    if (w < warp) at += sums[w];
  }
#pragma unroll 2
  for (uint32_t base = first; base < last; base += 32) {
    const uint32_t i = base + lane_id();
    const uint2 candidate = candidates[min(i, last - 1)];
    const bool take = i < last && choice.takes(candidate);
    const uint32_t taken = __ballot_sync(kFullWarp, take);
    if (take) {
      out.put(at + __popc(taken & lanes_below()), candidate.x, static_cast<int32_t>(candidate.y));
    }
    at += __popc(taken);
  }
}

// Writes the chosen ones, whose indices are in `range`, in ascending index.
__device__ __forceinline__ void put_ascending(const uint2* candidates, uint32_t count,
                                              const Choice& choice, KeyRange range,
                                              uint32_t* bitmap, uint32_t* sums,
                                              const RowOutput& out) {
  const int32_t base = range.start & ~31;
  const int words = static_cast<int>(ceil_div(int64_t{range.end} - base, 128)) * 4;
  auto* before = reinterpret_cast<uint16_t*>(bitmap + words);
  for (int w = 4 * threadIdx.x; w < words; w += 4 * kFilterThreads) {
    *reinterpret_cast<uint4*>(bitmap + w) = make_uint4(0, 0, 0, 0);
  }
  __syncthreads();
#pragma unroll 4
  for (uint32_t i = threadIdx.x; i < count; i += kFilterThreads) {
    const uint2 candidate = candidates[i];
    const uint32_t bit = candidate.y - base;
    if (choice.takes(candidate)) atomicOr(&bitmap[bit / 32], 1u << bit % 32);
  }
  __syncthreads();
  // How many are before each word: among its warp's words, then among all.
  const int warp = threadIdx.x / 32;
  const int warp_words = static_cast<int>(ceil_div(words, 128 * FilterGroup::kWarps)) * 128;
  const int first_word = warp * warp_words, last_word = min(words, first_word + warp_words);
  uint32_t done = 0;
  for (int base = first_word; base < last_word; base += 128) {
    const int w = base + 4 * lane_id();
    uint4 four = make_uint4(0, 0, 0, 0);
    if (w < last_word) four = *reinterpret_cast<const uint4*>(bitmap + w);
    const uint32_t a = __popc(four.x), b = a + __popc(four.y), c = b + __popc(four.z);
    const uint32_t sum = c + __popc(four.w), upto = sum_to_lane(sum), at = done + upto - sum;
    done += __shfl_sync(kFullWarp, upto, 31);
    if (w < last_word) {
      *reinterpret_cast<uint2*>(before + w) =
          make_uint2(at | (at + a) << 16, (at + b) | (at + c) << 16);
    }
  }
  if (lane_id() == 0) sums[warp] = done;
  __syncthreads();
  uint32_t warps_before = 0;
#pragma unroll
  for (int w = 0; w < FilterGroup::kWarps; ++w) {
    if (w < warp) warps_before += sums[w];
  }
  for (int w = first_word + 4 * lane_id(); w < last_word; w += 128) {
    uint2& four = *reinterpret_cast<uint2*>(before + w);
    four.x += warps_before * 0x10001u;
    four.y += warps_before * 0x10001u;
  }
  __syncthreads();
#pragma unroll 4
  for (uint32_t i = threadIdx.x; i < count; i += kFilterThreads) {
    const uint2 candidate = candidates[i];
    if (!choice.takes(candidate)) continue;
    const uint32_t bit = candidate.y - base;
    const uint32_t below = bitmap[bit / 32] & ((1u << bit % 32) - 1);
    out.put(before[bit / 32] + __popc(below), candidate.x, static_cast<int32_t>(candidate.y));
  }
}

// Finds kGathered pieces of a row from the `first` on, and counts their candidates.  Two warps call
// it, one for either: both wait for memory.
__device__ __forceinline__ void find_pieces(const ScoreArgs& args, int block, int row, int first,
                                            Gathering& gathering) {
  const Workspace workspace(args);
  const Pieces pieces(args, block);
  const bool repaired = pieces.tiles > 0 && workspace.state(block)->repaired_by != 0;
  const int count = repaired ? 1 : pieces.count(), i = first + lane_id();
  if (threadIdx.x >= 32) {
    if (i < count) {
      const Piece piece =
          repaired ? pieces.whole(workspace, block) : pieces.piece(workspace, block, i);
      gathering.candidates[lane_id()] = piece.segment(row, 0);
      gathering.capacities[lane_id()] = piece.capacity;
    }
    return;
  }
  static_assert(kRowSegments % 4 == 0);
  int4 sizes[kRowSegments / 4] = {};
  if (i < count) {
    const int64_t number = int64_t{block} + pieces.first_cta + i;
    const auto* counts = reinterpret_cast<const int4*>(workspace.counts(number, row));
#pragma unroll
    for (int j = 0; j < kRowSegments / 4; ++j) sizes[j] = counts[j];
  }
  uint32_t size = 0;
#pragma unroll
  for (const int4& four : sizes) size += four.x + four.y + four.z + four.w;
  const uint32_t upto = sum_to_lane(size);
  uint32_t end = upto - size;
#pragma unroll
  for (int j = 0; j < kRowSegments / 4; ++j) {
    uint4 ends;
    ends.x = end += sizes[j].x;
    ends.y = end += sizes[j].y;
    ends.z = end += sizes[j].z;
    ends.w = end += sizes[j].w;
    reinterpret_cast<uint4*>(gathering.ends + lane_id() * kRowSegments)[j] = ends;
  }
  if (lane_id() == 31) {
    gathering.pieces = count;
    gathering.total = upto;
  }
}

// Brings the row's candidates [begin, end), in the order of the segments, to `to`, and makes
// keys of their scores.  All are on their way at once: segments are short, and memory is far.
__device__ __forceinline__ void gather(const Gathering& gathering, int segments, uint32_t begin,
                                       uint32_t end, uint2* to, KeySpan& span) {
  const uint32_t address = ptx::smem_address(to);
  for (int s = threadIdx.x / 32; s < segments; s += FilterGroup::kWarps) {
    const uint32_t start = s == 0 ? 0 : gathering.ends[s - 1];
    const uint32_t first = max(start, begin), last = min(gathering.ends[s], end);
    const int piece = s / kRowSegments;
    const Candidate* from =
        gathering.candidates[piece] + s % kRowSegments * gathering.capacities[piece];
#pragma unroll 4
    for (uint32_t i = first + lane_id(); i < last; i += 32) {
      ptx::cp_async_8(address + (i - begin) * sizeof(uint2), from + (i - start));
    }
  }
  ptx::cp_async_wait_all();
  __syncthreads();
#pragma unroll 4
  for (uint32_t i = threadIdx.x; i < end - begin; i += kFilterThreads) {
    const uint32_t key = total_order_key(canonical_score_bits(to[i].x));
    span.add(key);
    to[i].x = key;
  }
  __syncthreads();
}

// Calls put(position, candidate) for the chosen ones, in the order they lie; put may
// write over candidates up to the one it gets.  Returns their number.
template <class Put>
__device__ __forceinline__ uint32_t visit_chosen(const uint2* candidates, uint32_t count,
                                                 const Choice& choice, uint32_t* sums, Put put) {
  uint32_t chosen = 0;
  for (uint32_t base = 0; base < count; base += kFilterThreads) {
    const uint32_t i = base + threadIdx.x;
    const uint2 candidate = i < count ? candidates[i] : make_uint2(0, 0);
    const bool take = i < count && choice.takes(candidate);
    uint32_t total;
    const uint32_t at = chosen + sum_before(take, sums, total);
    if (take) put(at, candidate);
    chosen += total;
  }
  __syncthreads();
  return chosen;
}

// Writes the chosen ones sorted by index or by score.
template <Order kOrder>
__device__ __forceinline__ void put_by_sort(const uint2* candidates, uint32_t count,
                                            const Choice& choice, uint64_t* pairs, uint32_t* sums,
                                            const RowOutput& out) {
  const uint32_t chosen =
      visit_chosen(candidates, count, choice, sums, [&](uint32_t at, uint2 candidate) {
        pairs[at] = kOrder == Order::kScore
                        ? make_pair(candidate.x, static_cast<int32_t>(candidate.y))
                        : static_cast<uint64_t>(~candidate.y) << 32 | candidate.x;
      });
  if constexpr (kOrder == Order::kScore) {
    put_sorted(out, pairs, chosen);
  } else {
    uint32_t size = 1;
    while (size < chosen) size *= 2;
    for (uint32_t i = chosen + threadIdx.x; i < size; i += kFilterThreads) pairs[i] = kNoPair;
    sort_descending(pairs, size);
    for (uint32_t i = threadIdx.x; i < chosen; i += kFilterThreads) {
      const uint64_t pair = pairs[i];
      out.put(i, static_cast<uint32_t>(pair), ~static_cast<int32_t>(pair >> 32));
    }
  }
}

// CTAs that the registers of an SM must hold: no fewer than its shared memory does at K = 2048.
template <Order kOrder>
constexpr int kSelectResident = kOrder == Order::kAny ? 5 : 4;

template <Order kOrder>
__global__ __launch_bounds__(kFilterThreads, kSelectResident<kOrder>) void select_kernel(
    const __grid_constant__ ScoreArgs args, const __grid_constant__ IndexTopkParams params) {
  extern __shared__ __align__(16) uint8_t select_memory[];
  SelectMemory& memory = *reinterpret_cast<SelectMemory*>(select_memory);
  const uint32_t topk = args.plan.topk;
  const int block = blockIdx.x / kQueryBlock, row = blockIdx.x % kQueryBlock;
  const Block place = row_block(args, block);
  if (place.query + row >= args.in.queries) return;
  const int64_t output_row = first_row(args, place) + row;
  const RowOutput out(params, output_row);
  const KeyRange range = row_range(args.in, output_row);
  if (args.skip_short && range.size() <= topk) {
    out.put_range(range, threadIdx.x, kFilterThreads);
    return;
  }
  SelectShared& select = memory.select;
  uint32_t* const sums = memory.sums;
  select.histogram[threadIdx.x] = make_uint4(0, 0, 0, 0);
  uint2* candidates = memory.candidates;
  const uint32_t most = static_cast<uint32_t>(held_candidates(topk));
  uint32_t held = 0;
  KeySpan span;
  Gathering& gathering = memory.gathering;
  for (int first = 0, pieces = 1; first < pieces; first += kGathered) {
    if (first > 0) __syncthreads();  // all have read the last ones' total
    if (threadIdx.x < 64) find_pieces(args, block, row, first, gathering);
    __syncthreads();
    pieces = gathering.pieces;
    const uint32_t total = gathering.total;
    for (uint32_t begin = 0; begin < total;) {
      if (held == most) {
        const Choice choice = choose(candidates, held, topk, span, select);
        held = visit_chosen(candidates, held, choice, sums,
                            [&](uint32_t at, uint2 candidate) { candidates[at] = candidate; });
      }
      const uint32_t end = min(total, begin + most - held);
      gather(gathering, min(pieces - first, kGathered) * kRowSegments, begin, end,
             candidates + held, span);
      held += end - begin;
      begin = end;
    }
  }
  const Choice choice = choose(candidates, held, topk, span, select);
  if constexpr (kOrder == Order::kAny) {
    put_as_they_lie(candidates, held, choice, sums, out);
  } else if (kOrder == Order::kIndex && args.in.keys <= kMaxBitmapKeys) {
    put_ascending(candidates, held, choice, range, memory.rest<uint32_t>(topk), sums, out);
  } else {
    put_by_sort<kOrder>(candidates, held, choice, memory.rest<uint64_t>(topk), sums, out);
    if (kOrder == Order::kScore) return;  // with its tail
  }
  out.put_tail(min(held, topk), threadIdx.x, kFilterThreads);
}

}  // namespace jax_fused_topk::hopper

#endif  // JAX_FUSED_TOPK_CUDA_HOPPER_SELECT_CUH_
