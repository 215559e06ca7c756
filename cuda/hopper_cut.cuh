// kAppend's candidates: what is done when a segment is full, and at the end of a piece.
//
// A full segment's row is levelled: its candidates are spread evenly over its segments.  If
// there are too many even so, it is first cut, in place, to the best of them.
//
// Why it is exact.  A key is dropped in two ways.  (1) It did not exceed the row's
// first threshold.  Then all that did are candidates, and if they are at least K, the
// dropped key is not among the K best.  (2) A cut of the piece's candidates kept the
// best `keep` <= K of them by (score, lower index), and the threshold rose to the worst
// of those, the piece's bound: the key was cut, or came later, has a higher index and
// does not exceed the bound.  If K or more candidates of all pieces are at the bound
// or better, the dropped key is not among the K best.  A cut in a block's whole room
// keeps K, so there the condition always holds.  NaN passes every test and is ranked when it
// is cut or selected; a NaN as threshold lets all pass, until a cut leaves nothing but NaN:
// then the row is complete.
//
// Sampled keys come first, whatever their index.  A block's first piece holds them from its
// start, with the bound of those that had no room (hopper_threshold.cuh).  After a cut a later
// key may have a lower index than one of them that was kept, so the bound there is no less than
// what may still come.  A repair takes all keys in their order.
//
// The CTA that finishes a block last counts, for every row, the candidates of all its
// pieces at the greatest bound or better.  Where they are fewer than K, the first
// threshold was too high or a piece too small: the CTA scores the block again, those
// rows with no threshold, and all pieces' room as one, where every cut keeps K.

#ifndef JAX_FUSED_TOPK_CUDA_HOPPER_CUT_CUH_
#define JAX_FUSED_TOPK_CUDA_HOPPER_CUT_CUH_

#include <cstdint>

#include "cuda/hopper_score.cuh"
#include "cuda/select_shared.cuh"

namespace jax_fused_topk::hopper {

// A candidate's place in the choice: a better one has a greater rank, and no two have
// the same.
__device__ __forceinline__ uint64_t rank_of(uint32_t score_key, int32_t index) {
  return static_cast<uint64_t>(score_key) << 32 | static_cast<uint32_t>(~index);
}
__device__ __forceinline__ uint64_t rank_of(const Candidate& candidate) {
  return rank_of(total_order_key(canonical_score_bits(candidate.score)), candidate.index);
}

__device__ __forceinline__ Candidate load_candidate(const Candidate* from) {
  const uint2 bits = __ldcg(reinterpret_cast<const uint2*>(from));
  return {bits.x, static_cast<int32_t>(bits.y)};
}

// The math warps as a group of select.cuh.  It reads the thread's number anew each time: what is
// made of it must not be kept over the loop over heads, which needs the registers.
struct MathGroup {
  static constexpr int kWarps = kMathWarps, kThreads = kMathThreads;
  __device__ static __forceinline__ int lane() { return ptx::tid_x() % 32; }
  __device__ static __forceinline__ int warp() { return ptx::tid_x() / 32; }
  __device__ static __forceinline__ int thread() { return ptx::tid_x(); }
  __device__ static __forceinline__ void sync() { ptx::bar_sync(kMathBarrier, kMathThreads); }
};

// Candidates that a piece's row holds at most without being cut: spread evenly, they leave
// every segment room for another tile, and some more, or it would soon be full again.
__device__ __forceinline__ uint32_t level_size(const Piece& piece) {
  return kRowSegments * (piece.capacity - kLaneTileKeys - kLaneTileKeys / 4);
}

// Candidates that a cut leaves: there is room for a third as many before the next one.
__device__ __forceinline__ uint32_t cut_size(const Plan& plan, const Piece& piece) {
  return min(static_cast<uint32_t>(plan.topk), level_size(piece) / 4 * 3);
}

// A row's segments lie in these threads' counts: see lane_row in hopper_kernel.cuh.
__device__ __forceinline__ uint16_t& count_of(Shared& shared, int row, int segment) {
  const int warp = segment / 4 * 4 + row / 16, lane = row % 8 * 4 + segment % 4;
  return reinterpret_cast<uint16_t*>(&shared.counts[warp * 32 + lane])[row % 16 / 8];
}

// Lane s gets the size of the row's segment s, the lanes above 0.
__device__ __forceinline__ uint32_t lane_size(Shared& shared, int row) {
  return MathGroup::lane() < kRowSegments ? count_of(shared, row, MathGroup::lane()) : 0;
}

// --- The cut of a row, by all math warps: warp s has segment s.

static_assert(kMathWarps == kRowSegments);
static_assert(kRowSegments * (kMaxCapacity - 2 * kLaneTileKeys) / 4 * 3 >= kMaxIndexTopk,
              "a cut in a block's whole room keeps K");

// Lies where a tile's keys were.
struct CutMemory {
  SelectSharedBy<MathGroup> select;
  uint64_t bound;                                          // the least rank that is kept
  alignas(16) uint32_t keys[kRowSegments * kMaxCapacity];  // of the row, segment by segment
};
static_assert(sizeof(CutMemory) <= Shared::kKeyBytes);

// Keeps a segment's candidates of rank `least` or greater, in place, and returns their number.
// The least rank of those lowers `bound`.  A warp calls it.
__device__ __forceinline__ uint32_t keep_best(Candidate* segment, uint32_t size, uint64_t least,
                                              uint64_t& bound) {
  uint32_t kept = 0;
  for (uint32_t base = 0; base < size; base += 32) {
    Candidate candidate{};
    uint64_t rank = 0;
    if (base + MathGroup::lane() < size) {
      candidate = load_candidate(segment + base + MathGroup::lane());
      rank = rank_of(candidate);
    }
    const bool take = rank != 0 && rank >= least;
    const uint32_t taken = __ballot_sync(kFullWarp, take);
    __syncwarp();  // what is written lies among those that all have read by now, or before
    if (take) {
      segment[kept + __popc(taken & ((1u << MathGroup::lane()) - 1))] = candidate;
      bound = rank < bound ? rank : bound;
    }
    kept += __popc(taken);
  }
  return kept;
}

// Cuts a row of the piece down to its best, and raises threshold and bound.  `to_come`: the
// first key that may still come.
__device__ __forceinline__ void cut_row(const Workspace& workspace, const Piece& piece, int row,
                                        int32_t to_come, CutMemory& memory, Shared& shared) {
  const uint32_t keep = cut_size(workspace.plan, piece);
  const int s = MathGroup::warp();
  Candidate* segment = piece.segment(row, s);
  const uint32_t sizes = lane_size(shared, row), size = __shfl_sync(kFullWarp, sizes, s);
  const uint32_t total = __reduce_add_sync(kFullWarp, sizes);
  uint32_t* keys = memory.keys + __reduce_add_sync(kFullWarp, MathGroup::lane() < s ? sizes : 0);
#pragma unroll 4
  for (uint32_t i = MathGroup::lane(); i < size; i += 32) {
    keys[i] = rank_of(load_candidate(segment + i)) >> 32;
  }
  if (MathGroup::thread() == 0) memory.bound = ~uint64_t{0};
  MathGroup::sync();
  const Threshold found = select_shared(SharedKeys{memory.keys}, 0, total, keep, 0, memory.select);
  uint64_t least = static_cast<uint64_t>(found.key) << 32;
  if (found.ties != kAllTies) {
    // Of those equal to it the first are kept.
#pragma unroll 4
    for (uint32_t i = MathGroup::lane(); i < size; i += 32) {
      keys[i] = keys[i] == found.key ? ~load_candidate(segment + i).index : 0;
    }
    MathGroup::sync();
    least |= select_shared(SharedKeys{memory.keys}, 0, total, found.ties, 0, memory.select).key;
  }
  uint64_t bound = ~uint64_t{0};
  const uint32_t kept = keep_best(segment, size, least, bound);
  if (MathGroup::lane() == 0) count_of(shared, row, s) = static_cast<uint16_t>(kept);
#pragma unroll
  for (int d = 16; d > 0; d /= 2) {
    const uint64_t other = __shfl_xor_sync(kFullWarp, bound, d);
    bound = other < bound ? other : bound;
  }
  if (MathGroup::lane() == 0) {
    atomicMin(reinterpret_cast<unsigned long long*>(&memory.bound),
              static_cast<unsigned long long>(bound));
  }
  MathGroup::sync();
  if (MathGroup::thread() == 0) {
    const uint32_t key = static_cast<uint32_t>(memory.bound >> 32);
    const uint32_t threshold = total_order_bits(key);
    // A sampled key may have been kept that lies behind those to come.
    const uint64_t bound = max(memory.bound, rank_of(key, to_come - 1));
    shared.bounds[row] = max(shared.bounds[row], bound);
    shared.thresholds[row] = __uint_as_float(threshold);
    if (threshold == kPositiveNaN) shared.complete[row / 32] |= 1u << row % 32;
  }
}

// --- Levelling, by a warp.

// Moves the ends of a row's long segments to short ones, until all are as long as each other.
__device__ __forceinline__ void level_row(const Piece& piece, int row, Shared& shared) {
  Candidate* first = piece.segment(row, 0);
  const uint32_t size = lane_size(shared, row);
  const uint32_t total = __reduce_add_sync(kFullWarp, size);
  const bool segment = MathGroup::lane() < kRowSegments;
  const uint32_t share =
      segment ? (total + kRowSegments - 1 - MathGroup::lane()) / kRowSegments : 0;
  // The i-th candidate above its segment's share goes to the i-th place below one.
  const uint32_t over = size > share ? size - share : 0, under = share > size ? share - size : 0;
  const uint32_t over_below = sum_to_lane<MathGroup>(over) - over;
  const uint32_t under_below = sum_to_lane<MathGroup>(under) - under;
  const uint32_t moved = __reduce_add_sync(kFullWarp, over);
  for (uint32_t base = 0; base < moved; base += 32) {
    const uint32_t i = base + MathGroup::lane();
    uint32_t from = 0, to = 0;
#pragma unroll 4
    for (int s = 0; s < kRowSegments; ++s) {
      const uint32_t over_before = __shfl_sync(kFullWarp, over_below, s);
      const uint32_t over_here = __shfl_sync(kFullWarp, over, s);
      const uint32_t kept = __shfl_sync(kFullWarp, share, s);
      if (i - over_before < over_here) from = s * piece.capacity + kept + (i - over_before);
      const uint32_t free_before = __shfl_sync(kFullWarp, under_below, s);
      const uint32_t free_here = __shfl_sync(kFullWarp, under, s);
      const uint32_t used = __shfl_sync(kFullWarp, size, s);
      if (i - free_before < free_here) to = s * piece.capacity + used + (i - free_before);
    }
    if (i < moved) first[to] = load_candidate(first + from);
  }
  if (segment) count_of(shared, row, MathGroup::lane()) = static_cast<uint16_t>(share);
}

// Makes room for another tile in every segment of the piece.  All math warps call it, with
// barriers around it; `memory` is free meanwhile.
__device__ __forceinline__ void make_room(const Workspace& workspace, const Piece& piece,
                                          int32_t to_come, CutMemory& memory, Shared& shared) {
  const uint32_t most = piece.capacity - kLaneTileKeys;
  for (int i = MathGroup::thread(); i < kBinOwners; i += kMathThreads) {
    memory.select.histogram[i] = make_uint4(0, 0, 0, 0);
  }
  for (int row = 0; row < kQueryBlock; ++row) {
    const uint32_t size = lane_size(shared, row);
    if (!__any_sync(kFullWarp, size > most)) continue;
    if (__reduce_add_sync(kFullWarp, size) <= level_size(piece)) continue;
    cut_row(workspace, piece, row, to_come, memory, shared);
  }
  // What one warp has written another moves.
  __threadfence_block();
  MathGroup::sync();
  for (int row = MathGroup::warp(); row < kQueryBlock; row += kMathWarps) {
    if (__any_sync(kFullWarp, lane_size(shared, row) > most)) {
      level_row(piece, row, shared);
    }
    __syncwarp();
  }
}

// --- The end of a block.

// Whether a candidate is at a bound or better, for select.cuh.
struct AtBound {
  const Candidate* first;
  uint64_t bound;
  __device__ __forceinline__ uint32_t key(uint32_t i) const {
    return rank_of(load_candidate(first + i)) >= bound;
  }
};

// Finds the rows that are to be scored again.  All math warps
// of the CTA that finished it last call it.
__device__ __forceinline__ void find_missed_rows(const ScoreArgs& args, int block,
                                                 const Pieces& pieces) {
  const Workspace workspace(args);
  for (int row = MathGroup::warp(); row < kQueryBlock; row += kMathWarps) {
    const int wanted = min(scored_range(args, block_at(args, block), row).size(), args.plan.topk);
    int32_t held = 0;
    uint64_t bound = 0;
    for (int i = MathGroup::lane(); i < pieces.count() * kRowSegments; i += 32) {
      const int64_t piece = int64_t{block} + pieces.first_cta + i / kRowSegments;
      held += __ldcg(workspace.counts(piece, row) + i % kRowSegments);
      if (i % kRowSegments == 0) {
        const uint64_t other = __ldcg(workspace.bound(piece, row));
        bound = other > bound ? other : bound;
      }
    }
    for (int d = 16; d > 0; d /= 2) {
      const uint64_t other = __shfl_xor_sync(kFullWarp, bound, d);
      bound = other > bound ? other : bound;
    }
    if (bound != 0) {
      held = 0;
      for (int i = 0; i < pieces.count(); ++i) {
        const Piece piece = pieces.piece(workspace, block, i);
        for (int s = 0; s < kRowSegments; ++s) {
          const uint32_t size = __ldcg(workspace.counts(piece.number, row) + s);
          visit_segment(Segment<AtBound>{{piece.segment(row, s), bound}, 0, size},
                        [&](bool inside, uint32_t better, uint32_t) { held += inside && better; });
        }
      }
    }
    held = __reduce_add_sync(kFullWarp, held);
    if (held < wanted && MathGroup::lane() == 0) {
      BlockState* state = workspace.state(block);
      atomicOr(&state->missed_rows[row / 32], 1u << row % 32);
      atomicExch(&state->repaired_by, blockIdx.x + 1);
    }
  }
}

}  // namespace jax_fused_topk::hopper

#endif  // JAX_FUSED_TOPK_CUDA_HOPPER_CUT_CUH_
