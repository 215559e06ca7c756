// Every limit, tile size and capacity of the CUDA kernels, and the workspace
// they need.  Plain C++ with no CUDA headers: the Python module exports these
// functions, and calls them at trace time on machines without a GPU.

#ifndef JAX_FUSED_TOPK_CUDA_LIMITS_H_
#define JAX_FUSED_TOPK_CUDA_LIMITS_H_

#include <cstdint>

#include "ffi/contract.h"

namespace jax_fused_topk {

// --- What the kernels serve.

inline constexpr int kMinComputeMajor = 8;  // mma.sync m16n8k16 and cp.async
inline constexpr int64_t kMaxHeads = 256;
inline constexpr int64_t kDimMultiple = 16;  // one 16-byte FP8 vector, one k16 MMA step
inline constexpr int64_t kMaxDim = 256;
inline constexpr int64_t kMaxIndexTopk = 4096;
inline constexpr int64_t kMaxKeys = (int64_t{1} << 31) - 1;  // an index is an int32
inline constexpr int64_t kMaxSortedTopk = 65536;             // top_k with Order::kScore

// --- The score tile (score_tile.cuh).

inline constexpr int kQueryTile = 16;  // M of mma.m16n8k16
inline constexpr int kScoreWarps = 8;
inline constexpr int kScoreThreads = 32 * kScoreWarps;
inline constexpr int kMaxTileKeys = 256;    // keys of a tile; half as many when D > 128
inline constexpr int kStageBytes = 16384;   // q of 16 queries and some heads
inline constexpr int kStages = 3;           // of the cp.async ring
inline constexpr int kScoreItemTiles = 16;  // tiles of an index_scores work item

// --- The candidate buffers of index_topk (index_topk.cu).

// CTAs with buffers of their own.  It bounds the workspace: at K = 2048 a slot
// is 512 KiB and 320 of them are 160 MiB, whatever B, Q and N are.
inline constexpr int64_t kMaxSlots = 320;
// A split of a row's keys has at least so many, or its prologue is not worth it.
inline constexpr int64_t kMinSplitKeys = 512;
inline constexpr int64_t kMinCapacity = 1024;

// --- Selection.

inline constexpr int kWarpDigitBits = 8;  // radix digit when a warp selects
inline constexpr int kCtaDigitBits = 11;  // radix digit when a CTA selects
inline constexpr int kMergeThreads = 1024;

// --- top_k for large k (top_k_radix.cu).

inline constexpr int kTopkThreads = 512;
inline constexpr int64_t kMaxSharedSort = 8192;  // larger sorts run in the workspace
inline constexpr int64_t kMaxTopkCtas = 320;     // of a sort in the workspace

// --- top_k for other k (top_k_filter.cu).

inline constexpr int64_t kMaxFilterTopk = 4096;
inline constexpr int kFilterThreads = 256;
inline constexpr uint32_t kFilterTile = 4096;  // elements between two barriers, at most
// Few long rows are cut into parts, a CTA each: so many in all, two for each SM of an
// H200, and so many keys at least in a part and in a row that is cut.
inline constexpr int64_t kMaxTopkParts = 264;
inline constexpr int64_t kMinPartKeys = kFilterTile;
inline constexpr int64_t kMinCutKeys = 49152;
// top_k_filter.cu has code of its own for rows of so many float32.
inline constexpr int64_t kMaxShortKeys = 32768;

JFT_HOST_DEVICE constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
JFT_HOST_DEVICE constexpr int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
JFT_HOST_DEVICE constexpr int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

JFT_HOST_DEVICE constexpr int64_t next_power_of_two(int64_t n) {
  int64_t p = 1;
  while (p < n) p *= 2;
  return p;
}

// Candidates a row's buffer holds: K and at least one tile more.
JFT_HOST_DEVICE constexpr int64_t index_topk_capacity(int64_t topk) {
  return max64(kMinCapacity, 2 * ceil_div(topk, kMaxTileKeys) * kMaxTileKeys);
}
static_assert(index_topk_capacity(1) >= 1 + kMaxTileKeys &&
                  index_topk_capacity(kMaxIndexTopk) >= kMaxIndexTopk + kMaxTileKeys,
              "a tile must fit behind K candidates");

// The most parts a row's key range is cut into.
JFT_HOST_DEVICE constexpr int64_t index_topk_max_splits(int64_t keys) {
  return min64(kMaxSlots, max64(1, ceil_div(keys, kMinSplitKeys)));
}

JFT_HOST_DEVICE constexpr int64_t index_topk_slot_bytes(int64_t topk) {
  constexpr int64_t kCandidateBytes = 8;  // a uint32 key and an int32 index
  constexpr int64_t kCountBytes = 4;
  return kQueryTile * (index_topk_capacity(topk) * kCandidateBytes + kCountBytes);
}

inline bool index_supported(Element element, int64_t heads, int64_t dim, int64_t keys) {
  return (element == Element::kF8E4M3FN || element == Element::kBF16) && heads >= 1 &&
         heads <= kMaxHeads && dim >= kDimMultiple && dim <= kMaxDim && dim % kDimMultiple == 0 &&
         keys >= 0 && keys <= kMaxKeys;
}

inline bool index_topk_supported(Element element, int64_t heads, int64_t dim, int64_t keys,
                                 int64_t topk) {
  return index_supported(element, heads, dim, keys) && topk >= 1 && topk <= kMaxIndexTopk;
}

// Bytes of IndexTopkParams::workspace; a function of shapes only.
inline int64_t index_topk_workspace_bytes(int64_t batch, int64_t queries, int64_t keys,
                                          int64_t topk) {
  const int64_t blocks = batch * ceil_div(queries, kQueryTile);
  const int64_t splits = index_topk_max_splits(keys);
  const int64_t slots = blocks >= kMaxSlots ? kMaxSlots : min64(kMaxSlots, blocks * splits);
  return slots * index_topk_slot_bytes(topk);
}

inline bool top_k_supported(Element element, int64_t keys, int64_t k, Order order) {
  return (element == Element::kF32 || element == Element::kBF16 || element == Element::kF16) &&
         keys <= kMaxKeys && k >= 1 && k <= keys && (order != Order::kScore || k <= kMaxSortedTopk);
}

// Candidates that top_k_filter.cu holds in shared memory: k and a tile more.
JFT_HOST_DEVICE constexpr int64_t top_k_capacity(int64_t k) {
  return ceil_div(k, 4) * 4 + kFilterTile;
}

// How top_k_filter.cu cuts rows into parts, and what it keeps in the workspace; a
// function of shapes only.
struct TopkParts {
  int64_t rows, parts, capacity;

  TopkParts(int64_t rows, int64_t keys, int64_t k)
      : rows(rows), parts(1), capacity(top_k_capacity(k)) {
    if (rows > 0 && keys >= kMinCutKeys) {
      parts = max64(1, min64(kMaxTopkParts / rows, keys / kMinPartKeys));
    }
  }
  // Candidates of each part: uint64 [rows][parts][capacity].
  JFT_HOST_DEVICE uint64_t* pairs(void* workspace) const {
    return static_cast<uint64_t*>(workspace);
  }
  // Their number, above the floor and at it: uint32 [rows][parts][2].
  JFT_HOST_DEVICE uint32_t* counts(void* workspace) const {
    return reinterpret_cast<uint32_t*>(pairs(workspace) + rows * parts * capacity);
  }
  // CTAs that are done with a row: uint32 [rows].
  JFT_HOST_DEVICE uint32_t* done(void* workspace) const {
    return counts(workspace) + 2 * rows * parts;
  }
  int64_t bytes() const {
    if (parts == 1) return 0;
    return rows * parts * capacity * int64_t{sizeof(uint64_t)} +
           rows * (2 * parts + 1) * int64_t{sizeof(uint32_t)};
  }
};

// CTAs of a top_k for large k whose sort buffers lie in the workspace, 0 if they do not.
inline int64_t top_k_workspace_ctas(int64_t rows, int64_t k, Order order) {
  return order == Order::kScore && k > kMaxSharedSort ? min64(rows, kMaxTopkCtas) : 0;
}

// Bytes of TopkParams::workspace; a function of shapes only.
inline int64_t top_k_workspace_bytes(int64_t rows, int64_t keys, int64_t k, Order order) {
  if (k <= kMaxFilterTopk) return TopkParts(rows, keys, k).bytes();
  return top_k_workspace_ctas(rows, k, order) * next_power_of_two(k) * int64_t{sizeof(uint64_t)};
}

// The same at most, whatever the number of rows is.
inline int64_t top_k_workspace_bound(int64_t keys, int64_t k, Order order) {
  if (k > kMaxFilterTopk) return top_k_workspace_bytes(kMaxTopkCtas, keys, k, order);
  if (keys < kMinCutKeys) return 0;
  // As many rows as parts, and they are never more: see TopkParts::bytes.
  return kMaxTopkParts *
         (top_k_capacity(k) * int64_t{sizeof(uint64_t)} + 3 * int64_t{sizeof(uint32_t)});
}

}  // namespace jax_fused_topk

#endif  // JAX_FUSED_TOPK_CUDA_LIMITS_H_
