// index_scores: every score, straight into the output.
//
// An item is a block of rows of one batch entry and a piece of the keys; it
// writes all of its part of the output, -inf outside the rows' ranges.

#include <algorithm>
#include <cstring>

#include "cpu/block_scorer.h"
#include "cpu/float_mode.h"
#include "cpu/kernels.h"
#include "cpu/split.h"

namespace jax_fused_topk::cpu {
namespace {

void fill_minus_inf(float* scores, int64_t count) {
  float minus_inf;
  std::memcpy(&minus_inf, &kNegativeInf, sizeof(minus_inf));
  std::fill_n(scores, count, minus_inf);
}

}  // namespace

void index_scores(const IndexScoresParams& params, const ParallelFor& parallel_for) {
  const IndexInputs& in = params.in;
  if (in.batch == 0 || in.queries == 0 || in.keys == 0) return;
  const int64_t row_blocks = ceil_div(in.queries, kRowsPerBlock);
  const int64_t splits = num_splits(in.batch * row_blocks, in.keys, kMinSplitKeys);

  parallel_for(in.batch * row_blocks * splits, [&](int64_t item) {
    const DefaultFloatMode float_mode;
    const int64_t batch = item / splits / row_blocks;
    const int64_t first_query = item / splits % row_blocks * kRowsPerBlock;
    const int64_t end_query = std::min<int64_t>(first_query + kRowsPerBlock, in.queries);
    const KeyRange keys = split_range({0, static_cast<int32_t>(in.keys)}, item % splits, splits);

    BlockScorer scorer(in, batch, end_query - first_query);
    float* output[kRowsPerBlock];
    for (int64_t query = first_query; query < end_query; ++query) {
      const int64_t row = batch * in.queries + query;
      const KeyRange range = intersect(clamp_range(in.starts[row], in.ends[row], in.keys), keys);
      float* scores = params.scores + row * in.keys;
      if (range.size() == 0) {
        fill_minus_inf(scores + keys.start, keys.size());
        continue;
      }
      fill_minus_inf(scores + keys.start, range.start - keys.start);
      fill_minus_inf(scores + range.end, keys.end - range.end);
      output[scorer.rows()] = scores;
      scorer.add_row(query, range);
    }
    scorer.scan(keys, [&](int row, int32_t first, int32_t count, const uint32_t* score_bits) {
      std::memcpy(output[row] + first, score_bits, count * sizeof(float));
    });
  });
}

}  // namespace jax_fused_topk::cpu
