// The Hopper path of index_topk: tile sizes, how a call is divided, and the
// workspace.  Plain C++ with no CUDA headers; everything is a function of shapes.

#ifndef JAX_FUSED_TOPK_CUDA_HOPPER_LAYOUT_H_
#define JAX_FUSED_TOPK_CUDA_HOPPER_LAYOUT_H_

#include <cmath>
#include <cstdint>

#include "cuda/limits.h"

namespace jax_fused_topk::hopper {

// --- The score tile (hopper_score.cuh).

inline constexpr int kDim = 128;
inline constexpr int kQueryBlock = 64;     // M of the WGMMA
inline constexpr int kTileKeys = 112;      // N of the WGMMA: keys of a math warpgroup
inline constexpr int kMathWarpgroups = 3;  // all on the same queries
inline constexpr int kMathWarps = 4 * kMathWarpgroups;
inline constexpr int kMathThreads = 32 * kMathWarps;
inline constexpr int kThreads = kMathThreads + 128;
inline constexpr int kCtaKeys = kMathWarpgroups * kTileKeys;
inline constexpr int kStageHeads = 8;  // heads of q that travel together
inline constexpr int kStages = 2;      // of q, and of keys
inline constexpr int kGroupKeys = 8;   // of the sample: one 128-byte swizzle atom
inline constexpr int kCtaGroups = kCtaKeys / kGroupKeys;
static_assert(kTileKeys % kGroupKeys == 0, "a sample tile is whole groups");
// Tile 0 of a block begins at a multiple of it: scores are stored in pairs.
inline constexpr int kFirstKeyMultiple = 8;

inline bool supported(Element element, int64_t heads, int64_t dim) {
  return element == Element::kF8E4M3FN && dim == kDim && (heads == 32 || heads == 64);
}

// --- How the work is divided.

// CTAs that a launch has at most; one runs on an SM.
inline constexpr int kMaxCtas = 132;
// Query blocks of a launch: their tile counts must fit in shared memory.
inline constexpr int64_t kMaxBlocks = 8192;

// --- Windows: how kAppend's tiles and the sample share the keys of a block, so that none is
// scored twice.  A window is a tile's keys, and in the first `holes` of every `cycle` windows a
// group of 8 more, the hole, before, between or behind the warpgroups' keys: the holes are the
// sample.
//
//     window 0            window 1            window 2          of cycle 3 with 2 holes
//   | 112 H 112 112     | H 112 112 112     | 112 112 112     | ...
//
struct Windows {
  int32_t cycle, holes;

  // Keys before window w, from the block's first.
  JFT_HOST_DEVICE int32_t start(int32_t w) const {
    return w * kCtaKeys + (w / cycle * holes + min32(w % cycle, holes)) * kGroupKeys;
  }
  // Warpgroups whose keys are before the hole; all if there is none.
  JFT_HOST_DEVICE int32_t hole(int32_t w) const {
    return w % cycle < holes ? hashed_hole(w) : kMathWarpgroups;
  }
  // Windows that so many keys take.
  JFT_HOST_DEVICE int32_t count(int32_t keys) const {
    const int32_t rest = keys % round(), without = rest - holes * kHoleWindow;
    const int32_t begun = without <= 0 ? (rest + kHoleWindow - 1) / kHoleWindow
                                       : holes + (without + kCtaKeys - 1) / kCtaKeys;
    return keys / round() * cycle + begun;
  }
  // Holes in them.
  JFT_HOST_DEVICE int32_t count_holes(int32_t keys) const {
    const int32_t begun = (keys % round() + kHoleWindow - 1) / kHoleWindow;
    return keys / round() * holes + min32(begun, holes);
  }
  // The first key of the g-th hole.
  JFT_HOST_DEVICE int32_t hole_key(int32_t g) const {
    const int32_t w = g / holes * cycle + g % holes;
    return start(w) + hashed_hole(w) * kTileKeys;
  }

 private:
  static constexpr int32_t kHoleWindow = kCtaKeys + kGroupKeys;
  JFT_HOST_DEVICE static int32_t min32(int32_t a, int32_t b) { return a < b ? a : b; }
  // Keys of a cycle.
  JFT_HOST_DEVICE int32_t round() const { return cycle * kCtaKeys + holes * kGroupKeys; }
  JFT_HOST_DEVICE static int32_t hashed_hole(int32_t w) {
    return ((static_cast<uint32_t>(w) + 1) * 0x9E3779B1u >> 8) % (kMathWarpgroups + 1);
  }
};

// Tiles of sampled keys, at most: threshold_kernel holds a row's in shared memory.
inline constexpr int kMaxSampleTiles = 32;

// Keys of a block at most: all, and those in front of a row's first.
inline int32_t most_block_keys(int64_t keys) {
  return static_cast<int32_t>(min64(keys, kMaxKeys - kFirstKeyMultiple)) + kFirstKeyMultiple - 1;
}

// One key of 43 is sampled, or as many as fit.
inline Windows full_windows(int64_t keys) {
  constexpr int64_t kMost = int64_t{kMaxSampleTiles} * kCtaGroups;
  const int64_t cycle = ceil_div(most_block_keys(keys) - kMost * kGroupKeys, kMost * kCtaKeys);
  return {static_cast<int32_t>(max64(1, cycle)), 1};
}

// Of windows that all have holes up to a third go without, so that CTAs have equally many whole
// tiles of the sample: of 64 blocks of 65536 keys two each, not two or three.
inline Windows make_windows(int64_t keys, int64_t blocks) {
  Windows best = full_windows(keys);
  if (best.cycle > 1) return best;
  // The time that all CTAs wait for the last, in tiles.
  const auto lost = [&](const Windows& windows) {
    const int64_t groups = windows.count_holes(most_block_keys(keys));
    return ceil_div(blocks * ceil_div(groups, kCtaGroups), kMaxCtas) * kMaxCtas -
           blocks * groups / kCtaGroups;
  };
  constexpr int kCycle = 16;
  for (int holes = kCycle; holes > kCycle * 2 / 3; --holes) {
    const Windows windows{kCycle, holes};
    if (lost(windows) < lost(best)) best = windows;
  }
  return best;
}

// --- Candidates.  A row's scores lie in 4 lanes of each math warpgroup, and each
// lane appends to a segment of its own.

inline constexpr int kRowSegments = 4 * kMathWarpgroups;
inline constexpr int kBlockSegments = kQueryBlock * kRowSegments;
inline constexpr int kLaneTileKeys = kTileKeys / 4;  // of a row that a lane sees in a tile
// Beyond its share of the expected candidates a segment has room for so many.
inline constexpr int kSpare = 3 * kLaneTileKeys;
// No segment has more, so that a row's keys fit in shared memory when it is cut.
inline constexpr int kMaxCapacity = 800;
inline constexpr int kMaxRowCandidates = kRowSegments * kMaxCapacity;  // of a row in a piece

struct Candidate {
  uint32_t score;  // bits of a float32
  int32_t index;
};

// What a row knows from its sample, before any other key is scored.
struct RowStart {
  uint64_t bound;       // see hopper_cut.cuh; 0 if all sampled keys that pass are candidates
  float threshold;      // a candidate exceeds it, or either is NaN
  uint32_t candidates;  // among the sampled keys
};

// Candidates of a row that its sample has at most: 7 deviations more than the sample's share of
// 1.25 K, where hopper_threshold.cuh expects 5 at most.
inline constexpr int kMaxSampled = 256;
inline int32_t most_sampled(int64_t topk) {
  const double mean = 1.25 * topk * kGroupKeys / kCtaKeys + kGroupKeys;
  return static_cast<int32_t>(min64(static_cast<int64_t>(mean + 7 * std::sqrt(mean)), kMaxSampled));
}

// Progress of a block of queries.
struct BlockState {
  uint32_t pieces_done;
  uint32_t repaired_by;  // CTA + 1
  uint32_t missed_rows[2];
};

// Few queries have a score loop of their own (hopper_few.cuh), which costs by the query;
// a block of 64 costs what it costs.  On an H200 at N = 131072, H = 64: 98 us against 120
// for 48 queries, 128 against 132 for 64.
JFT_HOST_DEVICE constexpr bool few_queries(int64_t queries) { return queries <= 48; }

// Scores go to memory, some rows at a time, and top_k chooses, for so many keys at most:
// a large share of them would be candidates, whose scattered writes cost more.
inline constexpr int64_t kMaxDenseKeys = 32768;
// Whatever the number of keys is, all scores go to memory if they take at most so many
// bytes: of few rows, 4 launches would cost more than the rows do.
inline constexpr int64_t kMaxFewBytes = int64_t{128} << 20;
// Scores that one launch may leave for top_k: twice as many for more than kManyRows, where a
// launch's beginning and end, with SMs idle, would come often.
inline constexpr int64_t kManyRows = 4096;
inline constexpr int64_t kMaxDenseBytes = int64_t{512} << 20;
inline int64_t max_dense_bytes(int64_t rows) {
  return rows > kManyRows ? kMaxDenseBytes : kMaxDenseBytes / 2;
}
// Query blocks whose candidates are held at a time.
inline int64_t most_append_blocks(int64_t topk) { return topk <= 2048 ? 128 : 64; }

inline int64_t blocks_per_batch(int64_t queries) { return ceil_div(queries, kQueryBlock); }

// A call's way and the byte offsets in its workspace.
struct Plan {
  bool dense;
  int32_t topk;
  int64_t blocks;        // of kQueryBlock queries, in all
  int64_t chunk_blocks;  // of those, served at a time
  int64_t chunk_rows;    // at most
  // dense
  int64_t scores;       // [chunk_rows, row_stride] float
  int64_t row_stride;   // N, and what is left of 16 bytes
  int64_t top_k_space;  // of top_k
  int64_t top_k_bytes;
  int64_t values;  // [chunk_rows, topk] float: to sort by, if they are not returned
  // otherwise
  int32_t block_capacity;  // candidates of a segment, for a block's tiles together
  Windows windows;
  int32_t sample_tiles;  // of kCtaKeys sampled keys, of a block at most
  int32_t most_sampled;  // candidates of a row among them, at most
  int64_t candidates;    // Candidate, and a row more; see Piece in hopper_work.cuh
  int64_t samples;       // [chunk_blocks * 64, sample_keys] uint32; dead before candidates
  int64_t counts;        // [pieces, 64, kRowSegments] int32
  int64_t bounds;        // [pieces, 64] uint64
  int64_t row_starts;    // [chunk_blocks * 64] RowStart
  int64_t sampled;       // [chunk_blocks * 64, most_sampled] Candidate
  int64_t states;        // [chunk_blocks] BlockState
  int64_t tiles_before;  // [chunk_blocks + 1] int64
  int64_t bytes;

  JFT_HOST_DEVICE int sample_keys() const { return sample_tiles * kCtaKeys; }
  // Pieces that CTAs cut the blocks of a chunk into.
  JFT_HOST_DEVICE int64_t pieces() const { return chunk_blocks + kMaxCtas - 1; }
};

// Whether the scores are needed for their order alone.
inline bool keeps_values(Order order, bool unscored) { return unscored && order == Order::kScore; }

// The next bytes of a plan's workspace.
inline int64_t take(Plan& plan, int64_t bytes) {
  constexpr int64_t kAlign = 256;
  const int64_t here = plan.bytes;
  plan.bytes += ceil_div(bytes, kAlign) * kAlign;
  return here;
}

inline void lay_out_dense(Plan& plan, int64_t value_bytes, int64_t keys) {
  plan.scores = take(plan, plan.chunk_rows * plan.row_stride * int64_t{sizeof(float)});
  plan.values = take(plan, plan.chunk_rows * value_bytes);
  // The last chunk may have fewer rows, and so more parts of each.
  plan.top_k_bytes = plan.chunk_blocks < plan.blocks
                         ? top_k_workspace_bound(keys, plan.topk, Order::kIndex)
                         : TopkParts(plan.chunk_rows, keys, plan.topk).bytes();
  plan.top_k_space = take(plan, plan.top_k_bytes);
}

inline void lay_out_append(Plan& plan, int64_t keys, const Windows& windows) {
  const int64_t topk = plan.topk;
  plan.windows = windows;
  plan.sample_tiles =
      static_cast<int32_t>(ceil_div(windows.count_holes(most_block_keys(keys)), kCtaGroups));
  plan.most_sampled = most_sampled(topk);
  // 2.2 K candidates a row: somewhat more than the threshold lets pass.
  plan.block_capacity = static_cast<int32_t>(ceil_div(topk * 22, 10 * kRowSegments));
  const int64_t block_rows = plan.chunk_blocks * kQueryBlock;
  const int64_t segment_room = plan.chunk_blocks * plan.block_capacity + plan.pieces() * kSpare;
  plan.samples = plan.bytes;
  constexpr int64_t kBytes = sizeof(Candidate);
  plan.candidates = take(plan, max64((segment_room * kBlockSegments + kMaxRowCandidates) * kBytes,
                                     block_rows * plan.sample_keys() * int64_t{sizeof(uint32_t)}));
  plan.counts = take(plan, plan.pieces() * kBlockSegments * int64_t{sizeof(int32_t)});
  plan.bounds = take(plan, plan.pieces() * kQueryBlock * int64_t{sizeof(uint64_t)});
  plan.row_starts = take(plan, block_rows * int64_t{sizeof(RowStart)});
  plan.sampled = take(plan, block_rows * plan.most_sampled * kBytes);
  plan.states = take(plan, plan.chunk_blocks * int64_t{sizeof(BlockState)});
  plan.tiles_before = take(plan, (plan.chunk_blocks + 1) * int64_t{sizeof(int64_t)});
}

inline Plan make_plan(int64_t batch, int64_t queries, int64_t keys, int64_t topk,
                      bool keep_values) {
  Plan plan{};
  plan.topk = static_cast<int32_t>(topk);
  plan.blocks = max64(1, batch * blocks_per_batch(queries));
  const int64_t block_rows = max64(1, min64(queries, kQueryBlock));
  plan.row_stride = ceil_div(max64(1, keys), 4) * 4;
  const int64_t row_bytes = plan.row_stride * int64_t{sizeof(float)};
  const int64_t rows = max64(1, batch * queries);
  // Without dense scores the selection sorts by itself.
  const int64_t value_bytes = keep_values ? topk * int64_t{sizeof(float)} : 0;
  plan.dense = keys <= kMaxDenseKeys || rows <= kMaxFewBytes / row_bytes ||
               (few_queries(queries) && block_rows * row_bytes <= max_dense_bytes(rows));
  const int64_t dense_bytes =
      max_dense_bytes(rows) - top_k_workspace_bound(keys, topk, Order::kIndex);
  const int64_t most = plan.dense ? dense_bytes / ((row_bytes + value_bytes) * block_rows)
                                  : most_append_blocks(topk);
  const int64_t chunks = ceil_div(plan.blocks, max64(1, min64(most, kMaxBlocks)));
  plan.chunk_blocks = ceil_div(plan.blocks, chunks);
  plan.chunk_rows = min64(plan.chunk_blocks * block_rows, rows);
  if (plan.dense) {
    lay_out_dense(plan, value_bytes, keys);
  } else {
    lay_out_append(plan, keys, make_windows(keys, plan.chunk_blocks));
  }
  return plan;
}

// Bytes that make_plan asks for at most, whatever the numbers of queries and batches are.
inline int64_t most_bytes(int64_t keys, int64_t topk, bool keep_values) {
  // Dense: chunks of kMaxDenseBytes, or of one block of few rows.
  const int64_t block_values = keep_values ? kQueryBlock * topk * int64_t{sizeof(float)} : 0;
  const int64_t dense = kMaxDenseBytes + block_values +
                        top_k_workspace_bound(kMinCutKeys, topk, Order::kIndex) + (1 << 12);
  Plan append{};
  append.topk = static_cast<int32_t>(topk);
  append.chunk_blocks = most_append_blocks(topk);
  lay_out_append(append, keys, full_windows(keys));
  return max64(dense, append.bytes);
}

}  // namespace jax_fused_topk::hopper

#endif  // JAX_FUSED_TOPK_CUDA_HOPPER_LAYOUT_H_
