// index_topk: scores and exact selection in one pass, no score matrix.
//
// Algorithm.  A work item is 16 queries x a part of their keys: the union of the
// rows' ranges, or one of its splits.  A CTA walks the part in tiles of 256 keys,
// ascending (score_tile.cuh).  After a tile every score becomes a total-order key;
// a candidate is in the row's range and not below the row's floor.  Candidates are
// appended to the row's buffer in ascending index: masks by quad shuffles, counts
// of the 8 warps through shared memory, no atomics.  When a buffer has no room for
// another tile it is cut to its K best in place, exactly, and the floor rises to
// one above the K-th key: later keys have higher indices, so an equal one can
// never enter.  With one split the CTA writes the row; with several the buffers
// stay in the workspace and merge_splits.cu ends the job.
//
// A row depends on its own query, range and keys only: the other rows decide when
// buffers are cut, not what survives.
//
// Roles.  8 warps score; in a cut and at the end a warp takes rows w and w + 8.
//
// Grid.  Persistent: `levels` CTAs on each of `columns` SMs.  Items are numbered
// from the last block of queries, the longest with causal rows; levels go to and
// fro over the columns, so that a long item shares its SM with a short one.
//
// Shared memory: 48 KiB ring (the sort's pairs at the end), 8 KiB histograms,
// 1 KiB row state, 64 H bytes of weights: 61 KiB at H = 64, 73 KiB at most.

#include <cuda_runtime.h>

#include "cuda/candidates.cuh"
#include "cuda/hopper.h"
#include "cuda/index_topk.h"
#include "cuda/launch.h"
#include "cuda/limits.h"
#include "cuda/merge_splits.h"
#include "cuda/row_output.cuh"
#include "cuda/score_tile.cuh"
#include "cuda/select.cuh"

namespace jax_fused_topk {
namespace {

struct Shared {
  ScoreShared score;  // the ring and what the item scores
  uint32_t histograms[kScoreWarps][1 << kWarpDigitBits];
  alignas(16) uint32_t warp_counts[kQueryTile][kScoreWarps];  // candidates of a tile
  uint32_t counts[2][kQueryTile];  // candidates of a row, before and after a tile by turns
  uint32_t floors[kQueryTile];     // the least key that may still enter
  int64_t item, next_level;
  uint8_t* slot;                 // the item's candidate buffers
  uint32_t end;                  // of its keys
  KeyRange ranges[kQueryTile];   // empty for rows that need no scores
  alignas(8) float2 weights[1];  // [H][8]

  static size_t bytes(int64_t heads) { return sizeof(Shared) + heads * 8 * sizeof(float2); }
};
static_assert(kMaxIndexTopk * sizeof(uint64_t) <= sizeof(ScoreShared::ring),
              "the sort of a row must fit in the ring");
static_assert((kMaxIndexTopk & (kMaxIndexTopk - 1)) == 0, "the sort pads to a power of two");
static_assert(kQueryTile == 2 * kScoreWarps, "a warp takes two rows");

// Cuts a row of `count` > topk candidates to its topk best.  Returns the K-th key.
// A call, not inlined: it is rare, and its registers are not the main loop's.
__device__ __noinline__ uint32_t cut_row(uint32_t* keys, int32_t* indices, uint32_t count,
                                         uint32_t topk, uint32_t* histogram) {
  const CandidateSource source{keys, indices};
  const Threshold threshold = radix_select<Group<1>, 32, kWarpDigitBits>(
      WholeRow<CandidateSource>{source, 0, count}, topk, histogram);
  collect_segment(Segment<CandidateSource>{source, 0, count}, threshold, 0, 0,
                  [&](uint32_t position, uint32_t key, int32_t index) {
                    keys[position] = key;
                    indices[position] = index;
                  });
  __syncwarp();
  return threshold.key;
}

// Cuts all rows that hold more than topk.  A barrier must lie before and after.
__device__ __forceinline__ void cut_rows(Shared& shared, uint32_t capacity, uint32_t* counts,
                                         uint32_t topk) {
  const Slot slot(shared.slot, capacity);
  const int warp = threadIdx.x / 32;
#pragma unroll 1
  for (int row = warp; row < kQueryTile; row += kScoreWarps) {
    if (counts[row] <= topk) continue;
    const uint32_t kth =
        cut_row(slot.keys(row), slot.indices(row), counts[row], topk, shared.histograms[warp]);
    if (lane_id() == 0) {
      counts[row] = topk;
      shared.floors[row] = kth + 1;  // canonical keys end below 2**32 - 1
    }
    __syncwarp();
  }
}

// Appends a tile's candidates.  Returns whether a row has no room for another
// tile, the same in all threads.
template <class Tile>
__device__ __forceinline__ bool append(Shared& shared, uint32_t capacity, int parity,
                                       uint32_t first, const float (&scores)[Tile::kNTiles][4]) {
  const int warp = threadIdx.x / 32;
  const int g = lane_id() / 4, t = lane_id() % 4;

  uint32_t keys[2][Tile::kNTiles * 2];
  uint32_t masks[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = g + 8 * r;
    const uint32_t start = shared.ranges[row].start, end = shared.ranges[row].end;
    const uint32_t floor = shared.floors[row];
    uint32_t mask = 0;
#pragma unroll
    for (int n = 0; n < Tile::kNTiles * 2; ++n) {
      const int bit = n / 2 * 8 + 2 * t + n % 2;
      const uint32_t index = first + bit;
      const uint32_t bits = __float_as_uint(scores[n / 2][2 * r + n % 2]);
      keys[r][n] = total_order_key(canonical_score_bits(bits));
      if (keys[r][n] >= floor && index >= start && index < end) mask |= 1u << bit;
    }
    mask |= __shfl_xor_sync(kFullWarp, mask, 1);
    mask |= __shfl_xor_sync(kFullWarp, mask, 2);
    if (t == 0) shared.warp_counts[row][warp] = __popc(mask);
    masks[r] = mask;
  }
  __syncthreads();

  const Slot slot(shared.slot, capacity);
  bool full = false;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = g + 8 * r;
    uint32_t count = shared.counts[parity][row];
    uint32_t out = 0;
#pragma unroll
    for (int w = 0; w < kScoreWarps; ++w) {
      if (w == warp) out = count;
      count += shared.warp_counts[row][w];
    }
    if (warp == 0 && t == 0) shared.counts[parity ^ 1][row] = count;
    full |= count + Tile::kTileKeys > capacity;
    if (masks[r] != 0) {
      uint32_t* row_keys = slot.keys(row);
      int32_t* row_indices = slot.indices(row);
#pragma unroll
      for (int n = 0; n < Tile::kNTiles * 2; ++n) {
        const int bit = n / 2 * 8 + 2 * t + n % 2;
        if ((masks[r] >> bit & 1) == 0) continue;
        const uint32_t position = out + __popc(masks[r] & ((1u << bit) - 1));
        row_keys[position] = keys[r][n];
        row_indices[position] = static_cast<int32_t>(first + bit);
      }
    }
  }
  return __any_sync(kFullWarp, full);  // a warp sees all 16 rows
}

// Writes the rows of a block whose candidates are all in its slot, cut to topk.
__device__ __forceinline__ void put_rows(const IndexTopkParams& p, Shared& shared, const Slot& slot,
                                         const uint32_t* counts, int64_t first_row, int valid) {
  if (p.order == Order::kScore) {
    uint64_t* pairs = reinterpret_cast<uint64_t*>(shared.score.ring);
    for (int row = 0; row < valid; ++row) {
      const uint32_t count = counts[row];
      for (uint32_t i = threadIdx.x; i < count; i += kScoreThreads) {
        pairs[i] = make_pair(slot.keys(row)[i], slot.indices(row)[i]);
      }
      put_sorted(RowOutput(p, first_row + row), pairs, count);
    }
    return;
  }
#pragma unroll 1
  for (int row = threadIdx.x / 32; row < valid; row += kScoreWarps) {
    const RowOutput out(p, first_row + row);
    const KeyRange range = row_range(p.in, first_row + row);
    if (needs_no_scores(p, range)) {
      out.put_range(range, lane_id(), 32);
      continue;
    }
    const uint32_t count = counts[row];
    const uint32_t* keys = slot.keys(row);
    const int32_t* indices = slot.indices(row);
#pragma unroll 4
    for (uint32_t i = lane_id(); i < count; i += 32) out.put(i, keys[i], indices[i]);
    out.put_tail(count, lane_id(), 32);
  }
}

// The part of the keys that the item scores.
struct Tiles {
  uint32_t begin, end;  // keys
};

// The item's share of the union of its rows' ranges, in whole tiles.
template <class Tile>
__device__ __forceinline__ Tiles item_tiles(const Shared& shared, int split, int splits) {
  KeyRange range{0, 0};
  if (lane_id() < kQueryTile) range = shared.ranges[lane_id()];
  const bool empty = range.size() == 0;
  const uint32_t low =
      __reduce_min_sync(kFullWarp, empty ? 0xFFFFFFFFu : static_cast<uint32_t>(range.start));
  const uint32_t high = __reduce_max_sync(kFullWarp, static_cast<uint32_t>(range.end));
  const uint64_t tiles = low < high ? (high - low + Tile::kTileKeys - 1) / Tile::kTileKeys : 0;
  return {low + static_cast<uint32_t>(tiles * split / splits) * Tile::kTileKeys,
          low + static_cast<uint32_t>(tiles * (split + 1) / splits) * Tile::kTileKeys};
}

// Whether a row's range meets the tile: ranges may leave gaps in their union.
template <class Tile>
__device__ __forceinline__ bool is_used(const Shared& shared, uint32_t tile) {
  KeyRange range{0, 0};
  if (lane_id() < kQueryTile) range = shared.ranges[lane_id()];
  return __any_sync(kFullWarp, static_cast<uint32_t>(range.start) < tile + Tile::kTileKeys &&
                                   static_cast<uint32_t>(range.end) > tile);
}

struct Item {
  int64_t batch, first_row;
  int split, valid;

  __device__ __forceinline__ Item(const IndexInputs& in, const IndexTopkPlan& plan, int64_t item) {
    split = static_cast<int>(item % plan.splits);
    const int64_t block = item / plan.splits;
    batch = block % in.batch;
    const int64_t query = (plan.blocks_per_batch - 1 - block / in.batch) * kQueryTile;
    first_row = batch * in.queries + query;
    valid = static_cast<int>(min64(kQueryTile, in.queries - query));
  }
};

// Scores the item's keys and collects every row's candidates.  Returns which of
// shared.counts holds.  Little lives in registers here: the head loop needs them.
template <class Tile>
__device__ __forceinline__ int scan(const IndexTopkParams& p, uint32_t capacity, Shared& shared,
                                    Tiles tiles) {
  int parity = 0;
  if (tiles.begin >= tiles.end) return parity;
  if (threadIdx.x == 0) shared.end = tiles.end;
  QueryStream<Tile> stream;
  stream.start(shared.score);
  __syncthreads();
#pragma unroll 1
  for (uint32_t tile = tiles.begin; tile < shared.end; tile += Tile::kTileKeys) {
    if (!is_used<Tile>(shared, tile)) continue;
    float scores[Tile::kNTiles][4];
    score_tile(shared.score, stream, shared.weights, tile, scores);
    if (append<Tile>(shared, capacity, parity, warp_key<Tile>(tile, ptx::tid_x()), scores)) {
      __syncthreads();
      cut_rows(shared, capacity, shared.counts[parity ^ 1], static_cast<uint32_t>(p.topk));
      __syncthreads();
    }
    parity ^= 1;
  }
  stream.drain();
  return parity;
}

template <class Tile>
__device__ __forceinline__ void run_item(const IndexTopkParams& p, const IndexTopkPlan& plan,
                                         Shared& shared, int64_t number) {
  {
    const Item item(p.in, plan, number);
    const int row = threadIdx.x;
    if (row == 0) {
      set_block(shared.score.block, p.in, item.batch, item.first_row, item.valid);
      // In one round every item has its own slot, which the merge looks up by item.
      const int64_t slot = plan.items <= gridDim.x ? number : blockIdx.x;
      shared.item = number;
      shared.slot = Slot::at(p, plan.capacity, slot).base();
    }
    if (row < kQueryTile) {
      KeyRange range{0, 0};
      if (row < item.valid) range = row_range(p.in, item.first_row + row);
      if (needs_no_scores(p, range)) range = {0, 0};
      shared.ranges[row] = range;
      shared.counts[0][row] = 0;
      shared.floors[row] = 0;
    }
    const int heads = static_cast<int>(p.in.heads);
    load_weights(shared.weights, p.in.weights + item.first_row * heads, item.valid, heads);
  }
  __syncthreads();

  const int parity =
      scan<Tile>(p, plan.capacity, shared,
                 item_tiles<Tile>(shared, static_cast<int>(number % plan.splits), plan.splits));

  uint32_t* counts = shared.counts[parity];
  cut_rows(shared, plan.capacity, counts, static_cast<uint32_t>(p.topk));
  __syncthreads();
  const Slot slot(shared.slot, plan.capacity);
  if (plan.splits == 1) {
    const Item item(p.in, plan, shared.item);
    put_rows(p, shared, slot, counts, item.first_row, item.valid);
  } else if (threadIdx.x < kQueryTile) {
    slot.counts()[threadIdx.x] = counts[threadIdx.x];
  }
}

template <class Tile>
__global__ __launch_bounds__(kScoreThreads,
                             2) void index_topk_kernel(const __grid_constant__ IndexTopkParams p,
                                                       const __grid_constant__ IndexTopkPlan plan) {
  extern __shared__ __align__(128) uint8_t memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
#pragma unroll 1
  for (int64_t level = blockIdx.x / plan.columns; level * plan.columns < plan.items;) {
    const int column = ptx::ctaid_x() % plan.columns;
    const int64_t item = level * plan.columns + (level % 2 ? plan.columns - 1 - column : column);
    __syncthreads();  // the last item is done with shared memory
    if (threadIdx.x == 0) shared.next_level = level + plan.levels;
    if (item < plan.items) run_item<Tile>(p, plan, shared, item);
    __syncthreads();
    level = shared.next_level;
  }
}

// Splits the key ranges when there are too few blocks to fill the device.
IndexTopkPlan make_plan(const IndexTopkParams& p, const Residency& residency) {
  IndexTopkPlan plan;
  plan.blocks_per_batch = ceil_div(p.in.queries, kQueryTile);
  const int64_t blocks = p.in.batch * plan.blocks_per_batch;
  plan.columns = static_cast<int>(min64(residency.sms, kMaxSlots));
  plan.levels = static_cast<int>(min64(residency.ctas_per_sm, kMaxSlots / plan.columns));
  const int64_t ctas = int64_t{plan.columns} * plan.levels;
  plan.splits = static_cast<int>(max64(1, min64(ctas / blocks, index_topk_max_splits(p.in.keys))));
  plan.items = blocks * plan.splits;
  if (plan.items <= plan.columns) {
    plan.columns = static_cast<int>(plan.items);
    plan.levels = 1;
  }
  plan.capacity = static_cast<uint32_t>(index_topk_capacity(p.topk));
  return plan;
}

template <Element kElement, int kDimPad>
cudaError_t launch(const IndexTopkParams& p, cudaStream_t stream) {
  using Tile = ScoreTile<kElement, kDimPad>;
  const size_t bytes = Shared::bytes(p.in.heads);
  Residency residency;
  cudaError_t error = prepare(index_topk_kernel<Tile>, kScoreThreads, bytes, residency);
  if (error != cudaSuccess) return error;
  const IndexTopkPlan plan = make_plan(p, residency);
  index_topk_kernel<Tile><<<plan.columns * plan.levels, kScoreThreads, bytes, stream>>>(p, plan);
  error = cudaGetLastError();
  if (error != cudaSuccess || plan.splits == 1) return error;
  return launch_merge_splits(p, plan, stream);
}

template <Element kElement>
cudaError_t launch_element(const IndexTopkParams& p, cudaStream_t stream) {
  if (p.in.dim <= 64) return launch<kElement, 64>(p, stream);
  if (p.in.dim <= 128) return launch<kElement, 128>(p, stream);
  return launch<kElement, 256>(p, stream);
}

}  // namespace

cudaError_t launch_index_topk(const IndexTopkParams& params, cudaStream_t stream) {
  if (hopper::serves(params.in)) return hopper::launch_index_topk(params, stream);
  const IndexInputs& in = params.in;
  if (!index_topk_supported(in.element, in.heads, in.dim, in.keys, params.topk)) {
    return cudaErrorInvalidValue;
  }
  if (in.batch <= 0 || in.queries <= 0) return cudaSuccess;
  if (params.workspace_bytes <
      index_topk_workspace_bytes(in.batch, in.queries, in.keys, params.topk)) {
    return cudaErrorInvalidValue;
  }
  return in.element == Element::kBF16 ? launch_element<Element::kBF16>(params, stream)
                                      : launch_element<Element::kF8E4M3FN>(params, stream);
}

}  // namespace jax_fused_topk
