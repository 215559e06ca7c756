// index_topk: scoring and selection in one pass over the keys.
//
// An item is a block of rows of one batch entry and a piece of its keys: each
// panel of scores goes straight into the rows' selectors (about 2 K pairs a
// row), so no row of scores is ever stored.  Where there are too few blocks to
// go round, keys are split: each piece leaves its K best in a list and a second
// loop selects among a row's lists.

#include <algorithm>
#include <cstring>
#include <vector>

#include "cpu/aligned_array.h"
#include "cpu/block_scorer.h"
#include "cpu/float_mode.h"
#include "cpu/kernels.h"
#include "cpu/select.h"
#include "cpu/sort_pairs.h"
#include "cpu/split.h"

namespace jax_fused_topk::cpu {
namespace {

static_assert(kMaxPanelKeys <= kMaxPush, "a panel is pushed at once");

class IndexTopk {
 public:
  explicit IndexTopk(const IndexTopkParams& params)
      : params_(params),
        in_(params.in),
        max_kept_(std::min(params.topk, in_.keys)),
        row_blocks_(ceil_div(in_.queries, kRowsPerBlock)),
        splits_(num_splits(in_.batch * row_blocks_, in_.keys, 2 * max_kept_)),
        num_lists_(splits_ > 1 ? in_.batch * in_.queries * splits_ : 0),
        list_sizes_(num_lists_),
        list_keys_(num_lists_ * max_kept_),
        list_indices_(num_lists_ * max_kept_) {}

  void run(const ParallelFor& parallel_for) {
    parallel_for(in_.batch * row_blocks_ * splits_, [&](int64_t item) {
      scan_block(item / splits_ / row_blocks_, item / splits_ % row_blocks_, item % splits_);
    });
    if (splits_ > 1) {
      parallel_for(in_.batch * in_.queries, [&](int64_t row) { merge_row(row); });
    }
  }

 private:
  KeyRange range_of(int64_t row) const {
    return clamp_range(in_.starts[row], in_.ends[row], in_.keys);
  }

  // Whether the scores decide anything about a row's result.
  bool needs_scores(KeyRange range) const {
    return range.size() > params_.topk || params_.scores != nullptr ||
           params_.order == Order::kScore;
  }

  void scan_block(int64_t batch, int64_t block, int64_t split) {
    const DefaultFloatMode float_mode;
    const int64_t first_row = batch * in_.queries + block * kRowsPerBlock;
    const int64_t end_row = std::min(first_row + kRowsPerBlock, (batch + 1) * in_.queries);

    int64_t rows[kRowsPerBlock];
    int num_rows = 0;
    for (int64_t row = first_row; row < end_row; ++row) {
      if (needs_scores(range_of(row))) {
        rows[num_rows++] = row;
      } else if (splits_ == 1) {
        write_all(row);
      }
    }
    if (num_rows == 0) return;

    BlockScorer scorer(in_, batch, num_rows);
    for (int i = 0; i < num_rows; ++i) {
      scorer.add_row(rows[i] - batch * in_.queries, range_of(rows[i]));
    }
    const KeyRange keys = split_range(scorer.key_range(), split, splits_);

    const int64_t capacity = selector_capacity(max_kept_, keys.size());
    AlignedArray<uint32_t> kept_keys(num_rows * capacity);
    AlignedArray<int32_t> kept_indices(num_rows * capacity);
    AlignedArray<uint32_t> scratch(capacity);
    std::vector<Selector> selectors;
    selectors.reserve(num_rows);
    for (int i = 0; i < num_rows; ++i) {
      selectors.emplace_back(max_kept_, capacity, kept_keys.data() + i * capacity,
                             kept_indices.data() + i * capacity, scratch.data());
    }
    scorer.scan(keys, [&](int i, int32_t first, int32_t count, const uint32_t* score_bits) {
      uint32_t order_keys[kMaxPanelKeys];
      std::transform(score_bits, score_bits + count, order_keys, total_order_key);
      selectors[i].push(first, count, order_keys);
    });

    for (int i = 0; i < num_rows; ++i) {
      const int64_t kept = selectors[i].finish();
      uint32_t* row_keys = kept_keys.data() + i * capacity;
      int32_t* row_indices = kept_indices.data() + i * capacity;
      if (splits_ == 1) {
        write_row(rows[i], row_keys, row_indices, kept);
      } else {
        const int64_t list = rows[i] * splits_ + split;
        list_sizes_[list] = kept;
        std::copy_n(row_keys, kept, list_keys_.data() + list * max_kept_);
        std::copy_n(row_indices, kept, list_indices_.data() + list * max_kept_);
      }
    }
  }

  // Selects among the lists of a row's splits, which follow each other in ascending index.
  void merge_row(int64_t row) {
    if (!needs_scores(range_of(row))) return write_all(row);
    const int64_t first_list = row * splits_;
    uint32_t* keys = list_keys_.data() + first_list * max_kept_;
    int32_t* indices = list_indices_.data() + first_list * max_kept_;
    int64_t size = 0;
    for (int64_t split = 0; split < splits_; ++split) {
      const int64_t count = list_sizes_[first_list + split];
      std::copy_n(keys + split * max_kept_, count, keys + size);
      std::copy_n(indices + split * max_kept_, count, indices + size);
      size += count;
    }
    if (size > max_kept_) {
      AlignedArray<uint32_t> scratch(size);
      keep_best(keys, indices, size, max_kept_, scratch.data());
      size = max_kept_;
    }
    write_row(row, keys, indices, size);
  }

  // A row whose valid keys are all chosen and need no scores.
  void write_all(int64_t row) const {
    const KeyRange range = range_of(row);
    int32_t* indices = params_.indices + row * params_.topk;
    for (int32_t i = 0; i < range.size(); ++i) indices[i] = range.start + i;
    write_tail(row, range.size());
  }

  // A row's chosen pairs, which come in ascending index.
  void write_row(int64_t row, uint32_t* keys, int32_t* indices, int64_t count) const {
    if (params_.order == Order::kScore) {
      AlignedArray<uint64_t> scratch(sort_scratch_size(count));
      sort_pairs(keys, indices, count, scratch.data());
    }
    std::copy_n(indices, count, params_.indices + row * params_.topk);
    if (params_.scores != nullptr) {
      float* scores = params_.scores + row * params_.topk;
      for (int64_t i = 0; i < count; ++i) {
        const uint32_t bits = total_order_bits(keys[i]);
        std::memcpy(scores + i, &bits, sizeof(bits));
      }
    }
    write_tail(row, count);
  }

  void write_tail(int64_t row, int64_t count) const {
    std::fill_n(params_.indices + row * params_.topk + count, params_.topk - count, kNoIndex);
    if (params_.scores != nullptr) {
      float minus_inf;
      std::memcpy(&minus_inf, &kNegativeInf, sizeof(minus_inf));
      std::fill_n(params_.scores + row * params_.topk + count, params_.topk - count, minus_inf);
    }
  }

  const IndexTopkParams& params_;
  const IndexInputs& in_;
  const int64_t max_kept_;  // pairs a row can keep
  const int64_t row_blocks_, splits_;
  const int64_t num_lists_;             // 0 without splits
  AlignedArray<int64_t> list_sizes_;    // [B * Q, splits]
  AlignedArray<uint32_t> list_keys_;    // [B * Q, splits, max_kept]
  AlignedArray<int32_t> list_indices_;  // [B * Q, splits, max_kept]
};

}  // namespace

void index_topk(const IndexTopkParams& params, const ParallelFor& parallel_for) {
  if (params.in.batch == 0 || params.in.queries == 0) return;
  IndexTopk(params).run(parallel_for);
}

}  // namespace jax_fused_topk::cpu
