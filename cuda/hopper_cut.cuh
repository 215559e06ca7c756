// kAppend's candidates: segments, the in-place cut when one is full, and the end
// of a piece.
//
// Why it is exact.  A key is dropped in two ways.  (1) It did not exceed the row's
// first threshold.  Then all that did are candidates, and if they are at least K, the
// dropped key is not among the K best.  (2) A cut of the piece's candidates kept the
// best `keep` <= K of them by (score, lower index), and the threshold rose to the worst
// of those, the piece's bound: the key was cut, or came later, has a higher index and
// does not exceed the bound.  If K or more candidates of all pieces are at the bound
// or better, the dropped key is not among the K best.  A cut in a block's whole room
// keeps K, so that there it is so.  NaN passes every test and is ranked when it is cut or selected;
// a NaN as threshold lets all pass, until a cut leaves nothing but NaN: then the row is complete.
//
// The CTA that finishes a block last counts, for every row, the candidates of all its
// pieces at the greatest bound or better.  Where they are fewer than K, the first
// threshold was too high or a piece too small: the CTA scores the block again, those
// rows with no threshold, and all pieces' room as one, where every cut keeps K.

#ifndef JAX_FUSED_TOPK_CUDA_HOPPER_CUT_CUH_
#define JAX_FUSED_TOPK_CUDA_HOPPER_CUT_CUH_

#include <cstdint>

#include "cuda/hopper_score.cuh"

namespace jax_fused_topk::hopper {

// A candidate's place in the choice: a better one has a greater rank, and no two have
// the same.
__device__ __forceinline__ uint64_t rank_of(const Candidate& candidate) {
  return static_cast<uint64_t>(total_order_key(canonical_score_bits(candidate.score))) << 32 |
         static_cast<uint32_t>(~candidate.index);
}

__device__ __forceinline__ Candidate load_candidate(const Candidate* from) {
  const uint2 bits = __ldcg(reinterpret_cast<const uint2*>(from));
  return {bits.x, static_cast<int32_t>(bits.y)};
}

// A row's segments in one piece, for select.cuh: the upper or the lower half of ranks.
template <bool kUpper>
struct PieceRow {
  const Candidate* first;  // of segment 0
  const int32_t* counts;
  uint32_t capacity;
  uint32_t upper;  // kUpper false: those with this upper half, the others get 0

  __device__ __forceinline__ uint32_t key(uint32_t i) const {
    const uint64_t rank = rank_of(load_candidate(first + i));
    if constexpr (kUpper) return static_cast<uint32_t>(rank >> 32);
    return rank >> 32 == upper ? static_cast<uint32_t>(rank) : 0;
  }
  __device__ __forceinline__ int count() const { return kRowSegments; }
  __device__ __forceinline__ Segment<PieceRow> segment(int s) const {
    return {*this, s * capacity, s * capacity + static_cast<uint32_t>(counts[s])};
  }
};

// The rank of the keep-th best.  A warp calls it.
__device__ __forceinline__ uint64_t find_rank(const Candidate* first, const int32_t* counts,
                                              uint32_t capacity, uint32_t keep,
                                              uint32_t* histogram) {
  const Threshold upper = radix_select<Group<1>, 32, kWarpDigitBits>(
      PieceRow<true>{first, counts, capacity, 0}, keep, histogram);
  const Threshold lower = radix_select<Group<1>, 32, kWarpDigitBits>(
      PieceRow<false>{first, counts, capacity, upper.key}, upper.ties, histogram);
  return static_cast<uint64_t>(upper.key) << 32 | lower.key;
}

// Candidates that a cut leaves in a row of a piece at most: with them spread evenly,
// every segment has room for another tile, and some more, or there would soon be
// another cut.
__device__ __forceinline__ uint32_t cut_size(const Plan& plan, const Piece& piece) {
  return min(plan.topk, kRowSegments * (piece.capacity - kLaneTileKeys - kLaneTileKeys / 4));
}

// Cuts one row of the piece down to its best, spread evenly over the segments, and
// raises threshold and bound.  A warp calls it; `counts` are the row's, in shared memory.
__device__ __forceinline__ void cut_row(const Workspace& workspace, const Piece& piece, int row,
                                        int32_t* counts, uint32_t* histogram, Candidate* scratch,
                                        Shared& shared) {
  const uint32_t keep = cut_size(workspace.plan, piece), capacity = piece.capacity;
  Candidate* first = workspace.segment(piece, row, 0);
  const uint32_t total =
      __reduce_add_sync(kFullWarp, lane_id() < kRowSegments ? counts[lane_id()] : 0);
  uint64_t bound = 0;
  if (total > keep) {
    bound = find_rank(first, counts, capacity, keep, histogram);
    const uint32_t threshold = total_order_bits(static_cast<uint32_t>(bound >> 32));
    if (lane_id() == 0) {
      shared.bounds[row] = bound;
      shared.thresholds[row] = __uint_as_float(threshold);
      if (threshold == kPositiveNaN) atomicOr(&shared.complete[row / 32], 1u << row % 32);
    }
  }
  // Through scratch, for a segment is written while others are still to be read.
  uint32_t kept = 0;
  for (int s = 0; s < kRowSegments; ++s) {
    const uint32_t n = counts[s];
    for (uint32_t base = 0; base < n; base += 32) {
      Candidate candidate{};
      bool take = false;
      if (base + lane_id() < n) {
        candidate = load_candidate(first + s * capacity + base + lane_id());
        take = rank_of(candidate) >= bound;
      }
      const uint32_t taken = __ballot_sync(kFullWarp, take);
      if (take) scratch[kept + __popc(taken & lanes_below())] = candidate;
      kept += __popc(taken);
    }
  }
  __syncwarp();
  for (uint32_t j = lane_id(); j < kept; j += 32) {
    first[j % kRowSegments * capacity + j / kRowSegments] = scratch[j];
  }
  if (lane_id() < kRowSegments) {
    counts[lane_id()] = (kept + kRowSegments - 1 - lane_id()) / kRowSegments;
  }
  __syncwarp();
}

// A row's segments lie in these threads' counts: see lane_row in hopper_kernel.cuh.
__device__ __forceinline__ uint32_t& count_word(Shared& shared, int row, int segment) {
  const int warp = segment / 4 * 4 + row / 16, lane = row % 8 * 4 + segment % 4;
  return shared.counts[warp * 32 + lane];
}
__device__ __forceinline__ int count_shift(int row) { return row % 16 / 8 * 16; }

// Cuts the rows that have a segment without room for another tile.  All math warps
// call it, with barriers around it; `room` is shared memory that is free meanwhile.
__device__ __forceinline__ void cut_rows(const Workspace& workspace, const Piece& piece,
                                         uint8_t* room, Shared& shared) {
  const int warp = threadIdx.x / 32;
  static_assert(8 % kCutWarps == 0, "two rows that share words of counts are one warp's");
  if (warp >= kCutWarps) return;
  auto* histogram = reinterpret_cast<uint32_t*>(room) + (warp << kWarpDigitBits);
  auto* counts = reinterpret_cast<int32_t*>(room) + (kCutWarps << kWarpDigitBits) + warp * 32;
  auto* scratch = workspace.at<Candidate>(workspace.plan.scratch) +
                  (int64_t{blockIdx.x} * kCutWarps + warp) * workspace.plan.topk;
  for (int row = warp; row < kQueryBlock; row += kCutWarps) {
    int32_t count = 0;
    if (lane_id() < kRowSegments) {
      count = count_word(shared, row, lane_id()) >> count_shift(row) & 0xFFFF;
      counts[lane_id()] = count;
    }
    __syncwarp();
    if (!__any_sync(kFullWarp, count > piece.capacity - kLaneTileKeys)) continue;
    cut_row(workspace, piece, row, counts, histogram, scratch, shared);
    if (lane_id() < kRowSegments) {
      // The other half is another row's.
      auto* half = reinterpret_cast<uint16_t*>(&count_word(shared, row, lane_id()));
      half[count_shift(row) / 16] = static_cast<uint16_t>(counts[lane_id()]);
    }
    __syncwarp();
  }
}

// At the end of a block: finds the rows that are to be scored again.  All math warps
// of the CTA that finished it last call it.
__device__ __forceinline__ void find_short_rows(const ScoreArgs& args, int block,
                                                const Pieces& pieces) {
  const Workspace workspace(args);
  for (int row = threadIdx.x / 32; row < kQueryBlock; row += kMathWarps) {
    const int wanted = min(scored_range(args, block_at(args, block), row).size(), args.plan.topk);
    int32_t held = 0;
    uint64_t bound = 0;
    for (int i = lane_id(); i < pieces.count() * kRowSegments; i += 32) {
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
        const Piece piece = pieces.piece(args.plan, block, i);
        for (int s = 0; s < kRowSegments; ++s) {
          const int32_t n = __ldcg(workspace.counts(piece.number, row) + s);
          const Candidate* segment = workspace.segment(piece, row, s);
          for (int c = lane_id(); c < n; c += 32) {
            held += rank_of(load_candidate(segment + c)) >= bound;
          }
        }
      }
    }
    held = __reduce_add_sync(kFullWarp, held);
    if (held < wanted && lane_id() == 0) {
      BlockState* state = workspace.state(block);
      atomicOr(&state->short_rows[row / 32], 1u << row % 32);
      state->repaired_by = blockIdx.x + 1;
    }
  }
}

}  // namespace jax_fused_topk::hopper

#endif  // JAX_FUSED_TOPK_CUDA_HOPPER_CUT_CUH_
