// top_k: the k largest of each row of ready-made values, in IEEE total order.
//
// A row's values stream through a selector (about 2 k pairs).  16-bit types are
// compared as the upper half of a 32-bit key, which keeps their order and their
// bits.  Where there are few rows, long ones are split: each piece leaves its k
// best in a list and a second loop selects among a row's lists.

#include <algorithm>
#include <cstring>

#include "cpu/aligned_array.h"
#include "cpu/kernels.h"
#include "cpu/select.h"
#include "cpu/sort_pairs.h"
#include "cpu/split.h"

namespace jax_fused_topk::cpu {
namespace {

// Bits is uint32_t or uint16_t: the element's pattern.
template <typename Bits>
class Topk {
 public:
  Topk(const TopkParams& params, Bits minus_inf)
      : params_(params),
        x_(static_cast<const Bits*>(params.x)),
        values_(static_cast<Bits*>(params.values)),
        minus_inf_(minus_inf),
        splits_(num_splits(params.rows, params.keys, kSplitKeysPerK * params.k)),
        num_lists_(splits_ > 1 ? params.rows * splits_ : 0),
        list_sizes_(num_lists_),
        list_keys_(num_lists_ * params.k),
        list_indices_(num_lists_ * params.k) {}

  void run(const ParallelFor& parallel_for) {
    parallel_for(params_.rows * splits_,
                 [&](int64_t item) { scan_row(item / splits_, item % splits_); });
    if (splits_ > 1) parallel_for(params_.rows, [&](int64_t row) { merge_row(row); });
  }

 private:
  // A split costs a selection among k more pairs: worth it for many more keys than that.
  static constexpr int64_t kSplitKeysPerK = 4;
  static constexpr int kPad = 32 - 8 * sizeof(Bits);

  static uint32_t key_of(Bits bits) { return total_order_key(static_cast<uint32_t>(bits) << kPad); }
  static Bits value_of(uint32_t key) { return static_cast<Bits>(total_order_bits(key) >> kPad); }

  void scan_row(int64_t row, int64_t split) {
    const KeyRange range = split_range(
        clamp_range(params_.starts[row], params_.ends[row], params_.keys), split, splits_);
    const int64_t capacity = selector_capacity(params_.k, range.size());
    AlignedArray<uint32_t> keys(capacity);
    AlignedArray<int32_t> indices(capacity);
    AlignedArray<uint32_t> scratch(capacity);
    Selector selector(params_.k, capacity, keys.data(), indices.data(), scratch.data());
    for (int64_t first = range.start; first < range.end; first += kMaxPush) {
      const int64_t count = std::min<int64_t>(kMaxPush, range.end - first);
      const Bits* x = x_ + row * params_.keys + first;
      uint32_t order_keys[kMaxPush];
      std::transform(x, x + count, order_keys, key_of);
      selector.push(static_cast<int32_t>(first), static_cast<int32_t>(count), order_keys);
    }
    const int64_t kept = selector.finish();
    if (splits_ == 1) return write_row(row, keys.data(), indices.data(), kept);
    const int64_t list = row * splits_ + split;
    list_sizes_[list] = kept;
    std::copy_n(keys.data(), kept, list_keys_.data() + list * params_.k);
    std::copy_n(indices.data(), kept, list_indices_.data() + list * params_.k);
  }

  // Selects among the lists of a row's splits, which follow each other in ascending index.
  void merge_row(int64_t row) {
    const int64_t first_list = row * splits_;
    uint32_t* keys = list_keys_.data() + first_list * params_.k;
    int32_t* indices = list_indices_.data() + first_list * params_.k;
    int64_t size = 0;
    for (int64_t split = 0; split < splits_; ++split) {
      const int64_t count = list_sizes_[first_list + split];
      std::copy_n(keys + split * params_.k, count, keys + size);
      std::copy_n(indices + split * params_.k, count, indices + size);
      size += count;
    }
    if (size > params_.k) {
      AlignedArray<uint32_t> scratch(size);
      keep_best(keys, indices, size, params_.k, scratch.data());
      size = params_.k;
    }
    write_row(row, keys, indices, size);
  }

  // A row's chosen pairs, which come in ascending index.
  void write_row(int64_t row, uint32_t* keys, int32_t* indices, int64_t count) const {
    if (params_.order == Order::kScore) {
      AlignedArray<uint64_t> scratch(sort_scratch_size(count));
      sort_pairs(keys, indices, count, scratch.data());
    }
    Bits* out_values = values_ + row * params_.k;
    int32_t* out_indices = params_.indices + row * params_.k;
    std::transform(keys, keys + count, out_values, value_of);
    std::copy_n(indices, count, out_indices);
    std::fill_n(out_values + count, params_.k - count, minus_inf_);
    std::fill_n(out_indices + count, params_.k - count, kNoIndex);
  }

  const TopkParams& params_;
  const Bits* const x_;
  Bits* const values_;
  const Bits minus_inf_;
  const int64_t splits_;
  const int64_t num_lists_;             // 0 without splits
  AlignedArray<int64_t> list_sizes_;    // [R, splits]
  AlignedArray<uint32_t> list_keys_;    // [R, splits, k]
  AlignedArray<int32_t> list_indices_;  // [R, splits, k]
};

constexpr uint16_t kMinusInfBF16 = 0xFF80;
constexpr uint16_t kMinusInfF16 = 0xFC00;

}  // namespace

void top_k(const TopkParams& params, const ParallelFor& parallel_for) {
  if (params.rows == 0) return;
  if (params.element == Element::kF32) {
    Topk<uint32_t>(params, kNegativeInf).run(parallel_for);
  } else {
    Topk<uint16_t>(params, params.element == Element::kBF16 ? kMinusInfBF16 : kMinusInfF16)
        .run(parallel_for);
  }
}

}  // namespace jax_fused_topk::cpu
