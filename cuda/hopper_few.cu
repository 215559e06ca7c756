// Launches the few-queries scorer of hopper_few.cuh.

#include <cuda.h>
#include <cuda_runtime.h>

#include "cuda/hopper_few.cuh"
#include "cuda/hopper_few.h"
#include "cuda/hopper_tensor_map.h"
#include "cuda/launch.h"

namespace jax_fused_topk::hopper {
namespace {

using few::Args;
using few::TensorMaps;

template <int kHeads, int kPack>
cudaError_t launch(Args args, cudaStream_t stream) {
  using L = few::Layout<kHeads, kPack>;
  const IndexInputs& in = args.in;
  EncodeTiled encode;
  TensorMaps maps;
  cudaError_t error = find_encoder(encode);
  if (error != cudaSuccess) return error;
  const cuuint64_t batch = in.batch, queries = in.queries, keys = in.keys;
  error = encode_map<5>(encode, maps.q, in.q, CU_TENSOR_MAP_DATA_TYPE_UINT8,
                        CU_TENSOR_MAP_SWIZZLE_128B, {kDim, kPack, queries, kHeads / kPack, batch},
                        {kDim, kHeads * kDim, kPack * kDim, queries * kHeads * kDim},
                        {kDim, kPack, L::kQueries, few::kChunkSlots, 1});
  if (error != cudaSuccess) return error;
  error =
      encode_map<3>(encode, maps.k, in.k, CU_TENSOR_MAP_DATA_TYPE_UINT8, CU_TENSOR_MAP_SWIZZLE_128B,
                    {kDim, keys, batch}, {kDim, keys * kDim}, {kDim, few::kTileKeys, 1});
  if (error != cudaSuccess) return error;
  Residency residency;
  error = prepare(few::few_scores_kernel<kHeads, kPack>, few::kThreads, L::kBytes, residency);
  if (error != cudaSuccess) return error;
  // No more CTAs than tiles.
  const int64_t groups = in.batch * ceil_div(in.queries, L::kQueries);
  const int64_t tiles = ceil_div(in.keys, few::kTileKeys);
  const int64_t ctas =
      groups >= residency.sms ? residency.sms : min64(residency.sms, groups * tiles);
  args.groups_per_batch = static_cast<uint32_t>(ceil_div(in.queries, L::kQueries));
  args.groups_each = static_cast<uint32_t>(groups / ctas);
  args.groups_rest = static_cast<uint32_t>(groups % ctas);
  args.part = static_cast<uint32_t>(ceil_div(int64_t{1} << 32, ctas));
  few::few_scores_kernel<kHeads, kPack>
      <<<static_cast<unsigned>(ctas), few::kThreads, L::kBytes, stream>>>(maps, args);
  return cudaGetLastError();
}

// Four queries of a group fill as many columns as eight do, with two heads each.
template <int kHeads>
cudaError_t launch(const Args& args, cudaStream_t stream) {
  const int64_t rest = args.in.queries % 8;
  return rest >= 1 && rest <= 4 ? launch<kHeads, 2>(args, stream) : launch<kHeads, 1>(args, stream);
}

}  // namespace

cudaError_t launch_few_scores(const IndexInputs& in, float* scores, int64_t row_stride,
                              cudaStream_t stream, bool fill_outside, int32_t unscored_size) {
  if (!supported(in.element, in.heads, in.dim)) return cudaErrorInvalidValue;
  if (in.batch <= 0 || in.queries <= 0 || in.keys <= 0) return cudaSuccess;
  Args args{};
  args.in = in;
  args.scores = scores;
  args.row_stride = row_stride;
  args.fill_outside = fill_outside;
  args.unscored_size = unscored_size;
  return in.heads == 64 ? launch<64>(args, stream) : launch<32>(args, stream);
}

}  // namespace jax_fused_topk::hopper
