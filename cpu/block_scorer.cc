// Conversion of queries and the calls into the ISA kernels; see block_scorer.h.

#include "cpu/block_scorer.h"

#include <cstring>

namespace jax_fused_topk::cpu {
namespace {

float float_from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// The 256 values of e4m3fn: sign, 4 exponent bits of bias 7, 3 mantissa bits;
// no infinity, NaN at 0x7F and 0xFF.
struct F8Table {
  float values[256];

  F8Table() {
    for (uint32_t byte = 0; byte < 256; ++byte) {
      const int exponent = (byte >> 3) & 15;
      const int mantissa = byte & 7;
      float value = exponent == 0 ? mantissa / 512.0f : (8 + mantissa) / 1024.0f;
      for (int i = 0; i < exponent; ++i) value *= 2.0f;
      if ((byte & 0x7F) == 0x7F) value = float_from_bits(kPositiveNaN);
      values[byte] = byte & 0x80 ? -value : value;
    }
  }
};

size_t element_bytes(Element element) { return element == Element::kF8E4M3FN ? 1 : 2; }

const char* element_at(Element element, const void* base, int64_t offset) {
  return static_cast<const char*>(base) + offset * static_cast<int64_t>(element_bytes(element));
}

void to_float(Element element, const char* source, int64_t count, float* result) {
  if (element == Element::kF8E4M3FN) {
    static const F8Table table;
    for (int64_t i = 0; i < count; ++i) {
      result[i] = table.values[static_cast<unsigned char>(source[i])];
    }
  } else {
    for (int64_t i = 0; i < count; ++i) {
      uint16_t bits;
      std::memcpy(&bits, source + 2 * i, sizeof(bits));
      result[i] = float_from_bits(static_cast<uint32_t>(bits) << 16);
    }
  }
}

}  // namespace

BlockScorer::BlockScorer(const IndexInputs& in, int64_t batch, int64_t max_rows)
    : in_(in),
      batch_(batch),
      kernels_(isa_kernels()),
      row_floats_(in.heads * in.dim),
      packed_(max_rows * in.heads * in.dim),
      panel_(in.dim * kernels_.panel_keys) {}

void BlockScorer::add_row(int64_t query, KeyRange range) {
  const int64_t row_size = in_.heads * in_.dim;
  const int64_t offset = (batch_ * in_.queries + query) * row_size;
  to_float(in_.element, element_at(in_.element, in_.q, offset), row_size, row_floats_.data());
  kernels_.pack_query(row_floats_.data(), in_.heads, in_.dim, packed_.data() + rows_ * row_size);
  queries_[rows_] = query;
  ranges_[rows_] = range;
  ++rows_;
}

KeyRange BlockScorer::key_range() const {
  if (rows_ == 0) return {0, 0};
  KeyRange hull = ranges_[0];
  for (int row = 1; row < rows_; ++row) {
    hull.start = std::min(hull.start, ranges_[row].start);
    hull.end = std::max(hull.end, ranges_[row].end);
  }
  return hull;
}

void BlockScorer::load_panel(KeyRange range) {
  const int64_t first = batch_ * in_.keys + range.start;
  const int64_t count = range.size();
  kernels_.pack_keys(in_.element, element_at(in_.element, in_.k, first * in_.dim), count, in_.dim,
                     panel_.data());
  std::copy_n(in_.k_scale + first, count, k_scale_);
  std::fill(k_scale_ + count, k_scale_ + kernels_.panel_keys, 0.0f);
}

void BlockScorer::score_row(int row, uint32_t* score_bits) const {
  kernels_.score_panel(packed_.data() + row * in_.heads * in_.dim,
                       in_.weights + (batch_ * in_.queries + queries_[row]) * in_.heads, in_.heads,
                       in_.dim, panel_.data(), k_scale_, score_bits);
}

}  // namespace jax_fused_topk::cpu
