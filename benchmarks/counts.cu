// What the Hopper path leaves in its workspace: how often a sampled threshold misled, and
// how many candidates came.  See counts.py and hopper_library.py, which builds this file with
// the kernels' sources.

#include <cuda_runtime.h>

#include "cuda/hopper.h"
#include "cuda/hopper_work.cuh"
#include "cuda/launch.h"
#include "cuda/workspace.h"
#include "ffi/checks.h"

namespace jax_fused_topk {
namespace {

// Rows that candidates were held for, those scored again, those cut in some piece, and
// their candidates.
enum Count { kRows, kRepaired, kCut, kCandidates, kCounts };

// A thread a row.
__global__ void count_kernel(const __grid_constant__ hopper::ScoreArgs args, uint32_t* counts) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const int block = static_cast<int>(i / hopper::kQueryBlock);
  const int row = static_cast<int>(i % hopper::kQueryBlock);
  if (block >= args.blocks) return;
  if (hopper::scored_range(args, hopper::block_at(args, block), row).size() == 0) return;
  const hopper::Workspace workspace(args);
  const hopper::Pieces pieces(args, block);
  const hopper::BlockState* state = workspace.state(block);
  const bool repaired = state->missed_rows[row / 32] >> row % 32 & 1;
  bool cut = false;
  uint32_t candidates = 0;
  for (int p = 0; p < (state->repaired_by != 0 ? 1 : pieces.count()); ++p) {
    const int64_t piece = int64_t{block} + pieces.first_cta + p;
    cut |= *workspace.bound(piece, row) != 0;
    for (int s = 0; s < hopper::kRowSegments; ++s) candidates += workspace.counts(piece, row)[s];
  }
  atomicAdd(&counts[kRows], 1u);
  atomicAdd(&counts[kRepaired], static_cast<uint32_t>(repaired));
  atomicAdd(&counts[kCut], static_cast<uint32_t>(cut));
  atomicAdd(&counts[kCandidates], candidates);
}

cudaError_t run(const IndexTopkParams& params, uint32_t* counts, cudaStream_t stream) {
  cudaError_t error = hopper::launch_index_topk(params, stream);
  if (error != cudaSuccess) return error;
  hopper::ScoreArgs args{};
  args.in = params.in;
  args.plan = hopper::make_plan(params.in.batch, params.in.queries, params.in.keys, params.topk,
                                /*keep_values=*/false);
  args.workspace = static_cast<uint8_t*>(params.workspace);
  args.skip_short = true;
  args.blocks = static_cast<int32_t>(args.plan.blocks);
  Residency residency;
  error = prepare(count_kernel, 128, 0, residency);
  if (error != cudaSuccess) return error;
  args.ctas = static_cast<int32_t>(min64(residency.sms, hopper::kMaxCtas));
  error = cudaMemsetAsync(counts, 0, kCounts * sizeof(uint32_t), stream);
  if (error != cudaSuccess) return error;
  count_kernel<<<(args.blocks * hopper::kQueryBlock + 127) / 128, 128, 0, stream>>>(args, counts);
  return cudaGetLastError();
}

ffi::Error count(cudaStream_t stream, ffi::AnyBuffer q, ffi::AnyBuffer k, F32x3 weights,
                 F32x2 k_scale, S32x2 starts, S32x2 ends, ffi::Result<F32x3> scores,
                 ffi::Result<S32x3> indices, ffi::Result<U8x1> workspace,
                 ffi::Result<ffi::BufferR1<ffi::U32>> counts) {
  IndexTopkParams params;
  JFT_RETURN_IF_ERROR(
      read_index_topk({q, k, weights, k_scale, starts, ends}, 0, scores, indices, &params));
  params.workspace = workspace->typed_data();
  params.workspace_bytes = static_cast<int64_t>(workspace->element_count());
  const hopper::Plan plan = hopper::make_plan(params.in.batch, params.in.queries, params.in.keys,
                                              params.topk, /*keep_values=*/false);
  if (!hopper::serves(params.in) || plan.dense || plan.chunk_blocks < plan.blocks) {
    return invalid("no candidates are held for this shape, or not for all rows at a time");
  }
  const cudaError_t error = run(params, counts->typed_data(), stream);
  return error == cudaSuccess ? ffi::Error::Success()
                              : ffi::Error::Internal(cudaGetErrorString(error));
}

}  // namespace
}  // namespace jax_fused_topk

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    JftCount, jax_fused_topk::count,
    jax_fused_topk::bind_index_inputs(
        ::xla::ffi::Ffi::Bind().Ctx<::xla::ffi::PlatformStream<cudaStream_t>>())
        .Ret<jax_fused_topk::F32x3>()                    // scores [B, Q, 0]
        .Ret<jax_fused_topk::S32x3>()                    // indices [B, Q, K]
        .Ret<jax_fused_topk::U8x1>()                     // workspace
        .Ret<::xla::ffi::BufferR1<::xla::ffi::U32>>());  // counts [4]
