// How the CTAs of a launch divide the work.
//
// The tiles of all query blocks, laid end to end, are shared out evenly: CTA c of C
// takes numbers [total c / C, total (c + 1) / C).  What a CTA has of one block is a
// piece.  Every CTA counts the tiles by itself, from the row ranges: nothing is
// decided on the host, and causal rows cost what they have.
//
// Inside a block the tiles are numbered by steps of about 0.618 of their number, so
// that a piece, consecutive numbers, is spread evenly over the keys: good keys are
// often neighbours, and all pieces should find their share of them.  A piece takes its
// tiles in ascending order.

#ifndef JAX_FUSED_TOPK_CUDA_HOPPER_WORK_CUH_
#define JAX_FUSED_TOPK_CUDA_HOPPER_WORK_CUH_

#include <cstdint>

#include "cuda/hopper_layout.h"
#include "cuda/hopper_ptx.cuh"
#include "cuda/select.cuh"
#include "ffi/contract.h"

namespace jax_fused_topk::hopper {

// See hopper_kernel.cuh.
enum class Mode { kStore, kSample, kAppend, kTensorControl, kScoreControl };

struct ScoreArgs {
  IndexInputs in;
  Plan plan;
  uint8_t* workspace;
  float* scores;        // kStore: of the first block's first row
  int64_t row_stride;   // kStore: from a row's scores to the next row's
  bool fill;            // kStore: -inf to keys outside the rows' ranges
  bool wide;            // kStore: rows of scores begin at multiples of 16 bytes
  bool skip_short;      // rows of at most topk keys need no scores
  int64_t first_block;  // of this launch
  int32_t blocks;       // their number
  int32_t ctas;         // of this launch
};

// --- Rows.

// A block of this launch, by its number: the batch and its first query.
struct Block {
  int64_t batch, query;
};

__device__ __forceinline__ Block block_at(const ScoreArgs& args, int32_t block) {
  const int64_t each = (args.in.queries + kQueryBlock - 1) / kQueryBlock;
  const int64_t i = args.first_block + block;
  return {i / each, i % each * kQueryBlock};
}

// The same by a short division, for kernels of a CTA a row: there are fewer than 2**31 blocks, for
// q has 4 KiB or more of each.  The score kernel's loop gets other registers with it, and is
// slower.
__device__ __forceinline__ Block row_block(const ScoreArgs& args, int32_t block) {
  const uint32_t each = static_cast<uint32_t>((args.in.queries + kQueryBlock - 1) / kQueryBlock);
  const uint32_t i = static_cast<uint32_t>(args.first_block) + block;
  return {i / each, int64_t{i % each} * kQueryBlock};
}

__device__ __forceinline__ int64_t first_row(const ScoreArgs& args, const Block& block) {
  return block.batch * args.in.queries + block.query;
}

// The row's keys that need scores; none for a row outside the block.
__device__ __forceinline__ KeyRange scored_range(const ScoreArgs& args, const Block& block,
                                                 int row) {
  if (block.query + row >= args.in.queries) return {0, 0};
  const int64_t r = first_row(args, block) + row;
  const KeyRange range = clamp_range(args.in.starts[r], args.in.ends[r], args.in.keys);
  return args.skip_short && range.size() <= args.plan.topk ? KeyRange{0, 0} : range;
}

struct BlockRange {
  KeyRange any;  // keys that some row of the block needs
  KeyRange all;  // keys that every one of the 64 rows needs
  // Where tile 0 begins.
  __device__ __forceinline__ int32_t first_key() const {
    return any.start & ~(kFirstKeyMultiple - 1);
  }
};

// kLanes neighbouring lanes call it together.
template <int kLanes>
__device__ __forceinline__ BlockRange block_range(const ScoreArgs& args, const Block& block) {
  constexpr int32_t kMost = 0x7FFFFFFF;
  BlockRange range{{kMost, 0}, {0, kMost}};
#pragma unroll
  for (int i = 0; i < kQueryBlock / kLanes; ++i) {
    const KeyRange row = scored_range(args, block, lane_id() % kLanes + i * kLanes);
    if (row.size() > 0) range.any.start = min(range.any.start, row.start);
    range.any.end = max(range.any.end, row.end);
    range.all.start = max(range.all.start, row.start);
    range.all.end = min(range.all.end, row.end);  // 0 for an empty row
  }
#pragma unroll
  for (int d = kLanes / 2; d > 0; d /= 2) {
    range.any.start = min(range.any.start, __shfl_xor_sync(kFullWarp, range.any.start, d));
    range.any.end = max(range.any.end, __shfl_xor_sync(kFullWarp, range.any.end, d));
    range.all.start = max(range.all.start, __shfl_xor_sync(kFullWarp, range.all.start, d));
    range.all.end = min(range.all.end, __shfl_xor_sync(kFullWarp, range.all.end, d));
  }
  if (range.any.size() == 0) range.any = {0, 0};
  return range;
}

template <Mode kMode>
__device__ __forceinline__ int32_t tile_count(const ScoreArgs& args, const BlockRange& range) {
  if (range.any.size() == 0) return 0;
  const int32_t keys = range.any.end - range.first_key();
  if (kMode != Mode::kSample && kMode != Mode::kAppend) return (keys + kCtaKeys - 1) / kCtaKeys;
  const Windows windows = args.plan.windows;
  return kMode == Mode::kAppend ? windows.count(keys)
                                : (windows.count_holes(keys) + kCtaGroups - 1) / kCtaGroups;
}

// Tiles of the block's repair: all keys, one after the other.
__device__ __forceinline__ int32_t repair_tile_count(const ScoreArgs& args,
                                                     const BlockRange& range) {
  return tile_count<Mode::kStore>(args, range);
}

// --- Shares.

// Consecutive tile numbers of a CTA.
struct Share {
  int64_t tiles;
  int32_t block, begin;  // where they start
};

// Bounds of CTA c's share.  CTAs from `working` on have none.
__device__ __forceinline__ int64_t share_begin(int64_t total, int64_t cta, int64_t working) {
  return total * cta / working;
}

// The CTA in whose share a tile number lies.
__device__ __forceinline__ int share_owner(int64_t total, int64_t tile, int64_t working) {
  return static_cast<int>(((tile + 1) * working - 1) / total);
}

// Writes the number of tiles before each block to tiles_before[0 ... blocks].  All
// threads of the CTA call it.
template <Mode kMode>
__device__ __forceinline__ void count_tiles(const ScoreArgs& args, int64_t* tiles_before) {
  constexpr int kLanes = 8;
  for (int base = 0; base < args.blocks; base += kThreads / kLanes) {
    const int block = base + static_cast<int>(threadIdx.x) / kLanes;
    // Threads without a block go along, for the shuffles.
    const BlockRange range = block_range<kLanes>(args, block_at(args, min(block, args.blocks - 1)));
    if (threadIdx.x % kLanes == 0 && block < args.blocks) {
      tiles_before[block + 1] = tile_count<kMode>(args, range);
    }
  }
  if (threadIdx.x == 0) tiles_before[0] = 0;
  __syncthreads();
  if (threadIdx.x < 32) {
    int64_t before = 0;
    for (int base = 0; base < args.blocks; base += 32) {
      const int block = base + lane_id();
      int64_t upto = block < args.blocks ? tiles_before[block + 1] : 0;
#pragma unroll
      for (int d = 1; d < 32; d *= 2) {
        const int64_t other = __shfl_up_sync(kFullWarp, upto, d);
        if (lane_id() >= d) upto += other;
      }
      upto += before;
      if (block < args.blocks) tiles_before[block + 1] = upto;
      before = __shfl_sync(kFullWarp, upto, 31);
    }
  }
  __syncthreads();
}

// This CTA's share, from the counts of count_tiles.
__device__ __forceinline__ Share find_share(const int64_t* tiles_before, int blocks, int ctas) {
  const int64_t total = tiles_before[blocks], working = min64(ctas, total);
  if (blockIdx.x >= working) return {0, 0, 0};
  const int64_t begin = share_begin(total, blockIdx.x, working);
  const int64_t end = share_begin(total, blockIdx.x + 1, working);
  int low = 0, high = blocks;  // the last block with tiles_before <= begin
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (tiles_before[middle] <= begin ? low : high) = middle;
  }
  return {end - begin, low, static_cast<int32_t>(begin - tiles_before[low])};
}

// --- The workspace's arrays.

struct Workspace {
  const Plan& plan;
  uint8_t* memory;

  // Hidden, or the compiler keeps what follows from it in registers, over the loop over heads.
  __device__ __forceinline__ explicit Workspace(const ScoreArgs& args)
      : plan(args.plan), memory(ptx::hide(args.workspace)) {}

  template <class Type>
  __device__ __forceinline__ Type* at(int64_t offset) const {
    return reinterpret_cast<Type*>(memory + offset);
  }
  // How many candidates a row has in its first segment; the other segments' follow.
  __device__ __forceinline__ int32_t* counts(int64_t piece, int row) const {
    return at<int32_t>(plan.counts) + (piece * kQueryBlock + row) * kRowSegments;
  }
  __device__ __forceinline__ uint64_t* bound(int64_t piece, int row) const {
    return at<uint64_t>(plan.bounds) + piece * kQueryBlock + row;
  }
  __device__ __forceinline__ BlockState* state(int block) const {
    return at<BlockState>(plan.states) + block;
  }
  __device__ __forceinline__ uint32_t* samples(int block, int row) const {
    return at<uint32_t>(plan.samples) + (int64_t{block} * kQueryBlock + row) * plan.sample_keys();
  }
  __device__ __forceinline__ RowStart* row_start(int block, int row) const {
    return at<RowStart>(plan.row_starts) + int64_t{block} * kQueryBlock + row;
  }
  // The row's candidates among its sampled keys.
  __device__ __forceinline__ Candidate* sampled(int block, int row) const {
    return at<Candidate>(plan.sampled) + (int64_t{block} * kQueryBlock + row) * plan.most_sampled;
  }
};

// --- Pieces.

// Where a piece's candidates are: for each of kQueryBlock rows, kRowSegments segments of
// `capacity`.  A row's segments follow each other and cross no multiple of 4 GiB, so that 32
// bits of an address are enough to walk in one: from the row that would cross it on, all lie
// further on by what a row has at most.
struct Piece {
  int64_t number;  // among all pieces
  Candidate* candidates;
  int32_t capacity;
  int32_t crossing;  // the first row that lies further on

  // `offset`: of its room, in candidates of a segment.
  __device__ __forceinline__ Piece(const Workspace& workspace, int64_t number, int64_t offset,
                                   int64_t room)
      : number(number), capacity(static_cast<int32_t>(min64(room, kMaxCapacity))) {
    auto* base = workspace.at<Candidate>(workspace.plan.candidates);
    candidates = base + offset * kBlockSegments;
    const uint64_t multiple = (reinterpret_cast<uint64_t>(base) | 0xFFFFFFFFu) + 1;
    // Candidates before the multiple; negative behind it.
    const int64_t before =
        static_cast<int64_t>(multiple - reinterpret_cast<uint64_t>(candidates)) >> 3;
    static_assert(sizeof(Candidate) == 1 << 3);
    const uint32_t row = kRowSegments * capacity;
    crossing =
        before < 0 ? 0 : static_cast<uint32_t>(min64(before, int64_t{kQueryBlock} * row)) / row;
  }
  __device__ __forceinline__ Candidate* segment(int row, int s) const {
    return candidates + (row * kRowSegments + s) * capacity +
           (row >= crossing ? kMaxRowCandidates : 0);
  }
};

// Blocks and CTAs both ascend from piece to piece, and one of them by one.
__device__ __forceinline__ Piece piece_at(const Workspace& workspace, int block, int cta,
                                          int32_t begin, int32_t end, int32_t tiles) {
  const int64_t room = workspace.plan.block_capacity;
  const int64_t from = room * begin / tiles, to = room * end / tiles;
  const int64_t number = int64_t{block} + cta;
  return {workspace, number, room * block + from + kSpare * number, to - from + kSpare};
}

// The room of all pieces of a block as one, for its repair.
__device__ __forceinline__ Piece whole_piece(const Workspace& workspace, int block, int first_cta,
                                             int last_cta) {
  const int64_t number = int64_t{block} + first_cta, room = workspace.plan.block_capacity;
  return {workspace, number, room * block + kSpare * number,
          room + kSpare * (last_cta - first_cta + 1)};
}

// The pieces of a block.
struct Pieces {
  int64_t total, working, before;
  int32_t tiles, first_cta, last_cta;

  __device__ __forceinline__ Pieces(const ScoreArgs& args, int block) {
    const auto* tiles_before = Workspace(args).at<const int64_t>(args.plan.tiles_before);
    total = __ldcg(&tiles_before[args.blocks]);
    working = min64(args.ctas, total);
    before = __ldcg(&tiles_before[block]);
    tiles = static_cast<int32_t>(__ldcg(&tiles_before[block + 1]) - before);
    first_cta = last_cta = 0;
    if (tiles > 0) {
      first_cta = share_owner(total, before, working);
      last_cta = share_owner(total, before + tiles - 1, working);
    }
  }
  __device__ __forceinline__ int count() const { return tiles > 0 ? last_cta - first_cta + 1 : 0; }
  __device__ __forceinline__ Piece piece(const Workspace& workspace, int block, int i) const {
    const int cta = first_cta + i;
    const int64_t begin = max64(share_begin(total, cta, working) - before, 0);
    const int64_t end = min64(share_begin(total, cta + 1, working) - before, tiles);
    return piece_at(workspace, block, cta, static_cast<int32_t>(begin), static_cast<int32_t>(end),
                    tiles);
  }
  __device__ __forceinline__ Piece whole(const Workspace& workspace, int block) const {
    return whole_piece(workspace, block, first_cta, last_cta);
  }
};

// --- The order of a piece's tiles.

// A step of about 0.618 `tiles` that meets every number.
__device__ __forceinline__ int32_t spread_step(int32_t tiles) {
  int32_t step = max(1, static_cast<int32_t>(0.618034f * static_cast<float>(tiles)));
  while (true) {
    int32_t a = tiles, b = step;
    while (b != 0) {
      const int32_t rest = a % b;
      a = b;
      b = rest;
    }
    if (a == 1) return step;
    step = step > 1 ? step - 1 : 1;
  }
}

// Tiles of a block whose numbers are in [begin, end), ascending.  kSpread false: a
// tile's number is its place.
template <bool kSpread>
struct TileWalk {
  int32_t tiles, begin, end, step;
  int32_t tile, number;

  __device__ __forceinline__ TileWalk() : TileWalk(1, 0, 0) {}
  __device__ __forceinline__ TileWalk(int32_t tiles, int32_t begin, int32_t end)
      : tiles(tiles),
        begin(begin),
        end(end),
        step(kSpread ? spread_step(tiles) : 1),
        tile(kSpread ? -1 : begin - 1),
        number(tiles - step) {}

  __device__ __forceinline__ bool next() {
    if constexpr (kSpread) {
      while (++tile < tiles) {
        number += step;
        if (number >= tiles) number -= tiles;
        if (number >= begin && number < end) return true;
      }
      return false;
    } else {
      return ++tile < end;
    }
  }
};

}  // namespace jax_fused_topk::hopper

#endif  // JAX_FUSED_TOPK_CUDA_HOPPER_WORK_CUH_
