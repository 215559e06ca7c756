// Scores of a block of query rows of one batch entry, a panel of keys at a time.
//
// Buffers: the rows' queries as packed float32 (rows x H x D, converted once),
// one key panel (D x panel keys, converted once for all rows) and its scales.

#ifndef JAX_FUSED_TOPK_CPU_BLOCK_SCORER_H_
#define JAX_FUSED_TOPK_CPU_BLOCK_SCORER_H_

#include <algorithm>
#include <cstdint>

#include "cpu/aligned_array.h"
#include "cpu/isa_kernels.h"
#include "cpu/split.h"
#include "ffi/contract.h"

namespace jax_fused_topk::cpu {

// Rows that share a converted panel: conversion is then some 2 % of scoring
// at H = 64, and the block's packed queries (256 KB) stay in L2.
inline constexpr int kRowsPerBlock = 8;

class BlockScorer {
 public:
  BlockScorer(const IndexInputs& in, int64_t batch, int64_t max_rows);

  // Makes `query` the next row, with its valid keys.
  void add_row(int64_t query, KeyRange range);

  int rows() const { return rows_; }

  // Smallest range that holds every row's.
  KeyRange key_range() const;

  // Calls sink(row, first_key, count, score_bits) for the keys of each row's
  // range that lie in `keys`: ascending keys for a row, each key once.
  template <typename Sink>
  void scan(KeyRange keys, Sink sink) {
    alignas(64) uint32_t score_bits[kMaxPanelKeys];
    for (int64_t first = keys.start; first < keys.end; first += kernels_.panel_keys) {
      const int64_t end = std::min<int64_t>(first + kernels_.panel_keys, keys.end);
      const KeyRange panel_range{static_cast<int32_t>(first), static_cast<int32_t>(end)};
      bool loaded = false;
      for (int row = 0; row < rows_; ++row) {
        const KeyRange wanted = intersect(ranges_[row], panel_range);
        if (wanted.size() == 0) continue;
        if (!loaded) load_panel(panel_range);
        loaded = true;
        score_row(row, score_bits);
        sink(row, wanted.start, wanted.size(), score_bits + (wanted.start - first));
      }
    }
  }

 private:
  void load_panel(KeyRange range);
  void score_row(int row, uint32_t* score_bits) const;

  const IndexInputs& in_;
  const int64_t batch_;
  const IsaKernels& kernels_;
  int rows_ = 0;
  int64_t queries_[kRowsPerBlock];
  KeyRange ranges_[kRowsPerBlock];
  AlignedArray<float> row_floats_;  // [H, D] of the row being added
  AlignedArray<float> packed_;      // [rows, H * D]
  AlignedArray<float> panel_;       // [D, panel keys]
  alignas(64) float k_scale_[kMaxPanelKeys];
};

}  // namespace jax_fused_topk::cpu

#endif  // JAX_FUSED_TOPK_CPU_BLOCK_SCORER_H_
