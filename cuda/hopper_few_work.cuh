// The work of the few-queries scorer: groups of queries, tiles of keys, and each CTA's share.
//
// A group is a few queries of a batch element.  The tiles of 64 keys in the hull of its
// rows' ranges are cut into gridDim.x equal parts, and so are the keys outside it, which
// need only be filled.  A CTA takes as many consecutive parts as there are groups: pieces
// of at most two groups, and whole ones between them.  All of it follows from the shapes
// and the group's own ranges.

#ifndef JAX_FUSED_TOPK_CUDA_HOPPER_FEW_WORK_CUH_
#define JAX_FUSED_TOPK_CUDA_HOPPER_FEW_WORK_CUH_

#include <cstdint>

#include "cuda/select.cuh"
#include "ffi/contract.h"

namespace jax_fused_topk::hopper::few {

inline constexpr uint32_t kTileKeys = 64;  // M of the WGMMA

struct Args {
  IndexInputs in;
  float* scores;          // [B, Q, N]
  int64_t row_stride;     // from a row's scores to the next row's
  bool fill_outside;      // write -inf outside the rows' ranges
  int32_t unscored_size;  // rows of at most so many keys are left out
  uint32_t groups_per_batch;
  uint32_t groups_each, groups_rest;  // all groups / and % gridDim.x
  uint32_t part;                      // 2**32 / gridDim.x, rounded up
};

// A CTA's part of one group.
struct Item {
  int32_t batch, query;   // the group's first query
  int32_t rows;           // queries of the group that exist
  uint32_t first, last;   // tiles of the hull of its rows' ranges
  uint32_t part[2];       // the CTA's parts of it
  uint32_t begin, end;    // and tiles
  uint32_t inside;        // the first tile that every row needs whole
  uint32_t inside_tiles;  // how many of these there are
  const float* k_scale;   // of the batch element
};

// A query of the group, as the stores see it.
struct alignas(16) Row {
  float* scores;
  uint32_t start, size;  // the row's range
};

// About count * part / gridDim.x for part <= gridDim.x: where a part of `count` things
// begins, and the one before it ends.
__device__ __forceinline__ uint32_t share(const Args& args, uint32_t count, uint32_t part) {
  return part == gridDim.x ? count : __umulhi(count, part * args.part);
}

// Sets the tiles from the ranges of the group's rows, one a lane.  Unsigned: a range may
// end at 2**31 - 1.
__device__ __forceinline__ void set_tiles(const Args& args, Item& item, KeyRange range) {
  constexpr uint32_t kMost = 0x7FFFFFFF;
  const uint32_t start = range.start, end = range.end;
  const bool row = lane_id() < item.rows;
  const uint32_t first = __reduce_min_sync(kFullWarp, start < end ? start : kMost);
  const uint32_t last = __reduce_max_sync(kFullWarp, end);
  item.first = last > 0 ? first / kTileKeys : 0;
  item.last = (last + kTileKeys - 1) / kTileKeys;
  item.begin = item.first + share(args, item.last - item.first, item.part[0]);
  item.end = item.first + share(args, item.last - item.first, item.part[1]);
  item.inside = (__reduce_max_sync(kFullWarp, start) + kTileKeys - 1) / kTileKeys;
  const uint32_t outside = __reduce_min_sync(kFullWarp, row ? end : kMost) / kTileKeys;
  item.inside_tiles = outside > item.inside ? outside - item.inside : 0;
}

}  // namespace jax_fused_topk::hopper::few

#endif  // JAX_FUSED_TOPK_CUDA_HOPPER_FEW_WORK_CUH_
