// Launches the Hopper path.  index_scores is one kernel, index_topk, for the rows of
// Plan::chunk_blocks blocks at a time,
//
//   of dense scores           otherwise
//   score_kernel<kStore>      score_kernel<kSample>   scores some keys of every row
//     or few_scores_kernel
//   top_k's kernel            threshold_kernel        a threshold from them, first candidates
//   and its sort, by order    score_kernel<kAppend>   all others: keeps what exceeds it
//                             select_kernel           the K best of what was kept
//
// Scores are the same bits in all: one loop over the heads, in one order.

#include <cuda_runtime.h>

#include "cuda/hopper.h"
#include "cuda/hopper_few.h"
#include "cuda/hopper_launch.cuh"
#include "cuda/hopper_layout.h"
#include "cuda/hopper_select.cuh"
#include "cuda/launch.h"
#include "cuda/sort_rows.h"
#include "cuda/top_k_filter.h"

namespace jax_fused_topk::hopper {
namespace {

// The first row of a block, or the end of all rows.
int64_t block_row(const IndexInputs& in, int64_t block) {
  const int64_t each = blocks_per_batch(in.queries);
  return block / each * in.queries + block % each * kQueryBlock;
}

// Calls launch(first block, blocks) for all blocks, `most` at a time.
template <class Launch>
cudaError_t for_chunks(int64_t blocks, int64_t most, Launch launch) {
  for (int64_t first = 0; first < blocks; first += most) {
    const cudaError_t error = launch(first, static_cast<int32_t>(min64(most, blocks - first)));
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

// The inputs of `count` batch entries from `first` on.
IndexInputs batch_slice(const IndexInputs& in, int64_t first, int64_t count) {
  IndexInputs slice = in;
  slice.batch = count;
  slice.q = static_cast<const uint8_t*>(in.q) + first * in.queries * in.heads * in.dim;
  slice.k = static_cast<const uint8_t*>(in.k) + first * in.keys * in.dim;
  slice.weights += first * in.queries * in.heads;
  slice.k_scale += first * in.keys;
  slice.starts += first * in.queries;
  slice.ends += first * in.queries;
  return slice;
}

// Writes the scores of args' rows, by the faster loop.
cudaError_t launch_dense_scores(ScoreArgs& args, const TensorMaps& maps, cudaStream_t stream) {
  if (!few_queries(args.in.queries)) return launch_score<Mode::kStore>(args, maps, stream);
  // A block is a batch entry.
  static_assert(!few_queries(kQueryBlock + 1));
  return launch_few_scores(batch_slice(args.in, args.first_block, args.blocks), args.scores,
                           args.row_stride, stream, args.fill,
                           args.skip_short ? args.plan.topk : 0);
}

// The top_k of the scores of args' rows.
cudaError_t launch_dense_top_k(const ScoreArgs& args, const IndexTopkParams& params,
                               cudaStream_t stream) {
  const IndexInputs& in = params.in;
  const int64_t row = block_row(in, args.first_block);
  TopkParams top_k{};
  top_k.rows = min64(block_row(in, args.first_block + args.blocks), in.batch * in.queries) - row;
  top_k.keys = in.keys;
  top_k.k = params.topk;
  top_k.element = Element::kF32;
  top_k.order = params.order;
  top_k.x = args.scores;
  top_k.row_stride = args.row_stride;
  top_k.starts = in.starts + row;
  top_k.ends = in.ends + row;
  if (params.scores != nullptr) {
    top_k.values = params.scores + row * params.topk;
  } else if (params.order == Order::kScore) {
    top_k.values = args.workspace + args.plan.values;
  }
  top_k.indices = params.indices + row * params.topk;
  top_k.workspace = args.workspace + args.plan.top_k_space;
  top_k.workspace_bytes = args.plan.top_k_bytes;
  const cudaError_t error = launch_top_k_filter(top_k, stream);
  if (error != cudaSuccess || params.order != Order::kScore) return error;
  return launch_sort_rows(top_k, stream);
}

cudaError_t launch_threshold(const ScoreArgs& args, cudaStream_t stream) {
  const size_t bytes = ThresholdMemory::bytes(args.plan);
  Residency residency;
  const cudaError_t error = prepare(threshold_kernel, kFilterThreads, bytes, residency);
  if (error != cudaSuccess) return error;
  threshold_kernel<<<args.blocks * kQueryBlock, kFilterThreads, bytes, stream>>>(args);
  return cudaGetLastError();
}

template <Order kOrder>
cudaError_t launch_select(const ScoreArgs& args, const IndexTopkParams& params,
                          cudaStream_t stream) {
  const size_t bytes = SelectMemory::bytes(kOrder, args.in.keys, params.topk);
  Residency residency;
  const cudaError_t error = prepare(select_kernel<kOrder>, kFilterThreads, bytes, residency);
  if (error != cudaSuccess) return error;
  select_kernel<kOrder><<<args.blocks * kQueryBlock, kFilterThreads, bytes, stream>>>(args, params);
  return cudaGetLastError();
}

cudaError_t launch_select(const ScoreArgs& args, const IndexTopkParams& params,
                          cudaStream_t stream) {
  switch (params.order) {
    case Order::kIndex:
      return launch_select<Order::kIndex>(args, params, stream);
    case Order::kScore:
      return launch_select<Order::kScore>(args, params, stream);
    case Order::kAny:
      return launch_select<Order::kAny>(args, params, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace

bool serves(const IndexInputs& in) {
  int device = 0, major = 0;
  // A window past the last key must not pass 2**31 either.
  return supported(in.element, in.heads, in.dim) && in.keys <= kMaxKeys - kCtaKeys - kGroupKeys &&
         cudaGetDevice(&device) == cudaSuccess &&
         cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
         major == 9;
}

cudaError_t launch_index_scores(const IndexScoresParams& params, cudaStream_t stream) {
  const IndexInputs& in = params.in;
  if (in.batch <= 0 || in.queries <= 0 || in.keys <= 0) return cudaSuccess;
  TensorMaps maps;
  if (!few_queries(in.queries)) {
    const cudaError_t error = make_maps(in, kTileKeys, maps);
    if (error != cudaSuccess) return error;
  }
  ScoreArgs args{};
  args.in = in;
  args.fill = true;
  args.row_stride = in.keys;
  return for_chunks(in.batch * blocks_per_batch(in.queries), kMaxBlocks,
                    [&](int64_t first, int32_t blocks) {
                      args.first_block = first;
                      args.blocks = blocks;
                      args.scores = params.scores + block_row(in, first) * in.keys;
                      return launch_dense_scores(args, maps, stream);
                    });
}

cudaError_t launch_index_topk(const IndexTopkParams& params, cudaStream_t stream) {
  const IndexInputs& in = params.in;
  if (in.batch <= 0 || in.queries <= 0) return cudaSuccess;
  const bool unscored_result = params.scores == nullptr;
  ScoreArgs args{};
  args.in = in;
  args.plan = make_plan(in.batch, in.queries, in.keys, params.topk,
                        keeps_values(params.order, unscored_result));
  args.workspace = static_cast<uint8_t*>(params.workspace);
  args.scores = reinterpret_cast<float*>(args.workspace + args.plan.scores);
  args.row_stride = args.plan.row_stride;
  args.skip_short = unscored_result && params.order != Order::kScore;
  if (params.workspace_bytes < args.plan.bytes) return cudaErrorInvalidValue;
  const bool nothing_to_score = in.keys <= 0 || (args.skip_short && in.keys <= params.topk);
  TensorMaps maps, sample_maps;
  if (!nothing_to_score && !(args.plan.dense && few_queries(in.queries))) {
    cudaError_t error = make_maps(in, kTileKeys, maps);
    if (error == cudaSuccess && !args.plan.dense) error = make_maps(in, kGroupKeys, sample_maps);
    if (error != cudaSuccess) return error;
  }
  return for_chunks(args.plan.blocks, args.plan.chunk_blocks, [&](int64_t first, int32_t blocks) {
    args.first_block = first;
    args.blocks = blocks;
    cudaError_t error = cudaSuccess;
    if (args.plan.dense) {
      if (!nothing_to_score) error = launch_dense_scores(args, maps, stream);
      return error != cudaSuccess ? error : launch_dense_top_k(args, params, stream);
    }
    error = launch_score<Mode::kSample>(args, sample_maps, stream);
    if (error != cudaSuccess) return error;
    error = launch_threshold(args, stream);
    if (error != cudaSuccess) return error;
    error = launch_score<Mode::kAppend>(args, maps, stream);
    return error != cudaSuccess ? error : launch_select(args, params, stream);
  });
}

}  // namespace jax_fused_topk::hopper
