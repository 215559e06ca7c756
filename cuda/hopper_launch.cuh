// Tensor maps and the launch of score_kernel: host code.

#ifndef JAX_FUSED_TOPK_CUDA_HOPPER_LAUNCH_CUH_
#define JAX_FUSED_TOPK_CUDA_HOPPER_LAUNCH_CUH_

#include <cuda.h>
#include <cuda_runtime.h>

#include "cuda/hopper_kernel.cuh"
#include "cuda/hopper_layout.h"
#include "cuda/hopper_tensor_map.h"
#include "cuda/launch.h"

namespace jax_fused_topk::hopper {

inline cudaError_t make_maps(const IndexInputs& in, int key_rows, TensorMaps& maps) {
  EncodeTiled encode;
  cudaError_t error = find_encoder(encode);
  if (error != cudaSuccess) return error;
  const cuuint64_t batch = in.batch, queries = in.queries, heads = in.heads, keys = in.keys;
  error =
      encode_map<4>(encode, maps.q, in.q, CU_TENSOR_MAP_DATA_TYPE_UINT8, CU_TENSOR_MAP_SWIZZLE_128B,
                    {kDim, queries, heads, batch}, {heads * kDim, kDim, queries * heads * kDim},
                    {kDim, kQueryBlock, kStageHeads, 1});
  if (error != cudaSuccess) return error;
  error = encode_map<4>(
      encode, maps.weights, in.weights, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, CU_TENSOR_MAP_SWIZZLE_NONE,
      {kStageHeads, queries, heads / kStageHeads, batch},
      {heads * sizeof(float), kStageHeads * sizeof(float), queries * heads * sizeof(float)},
      {kStageHeads, kQueryBlock, 1, 1});
  if (error != cudaSuccess) return error;
  return encode_map<3>(encode, maps.k, in.k, CU_TENSOR_MAP_DATA_TYPE_UINT8,
                       CU_TENSOR_MAP_SWIZZLE_128B, {kDim, keys, batch}, {kDim, keys * kDim},
                       {kDim, static_cast<cuuint32_t>(key_rows), 1});
}

template <Mode kMode, int kHeads>
cudaError_t launch_score(ScoreArgs& args, const TensorMaps& maps, int64_t most_tiles,
                         cudaStream_t stream) {
  Residency residency;
  const cudaError_t error =
      prepare(score_kernel<kMode, kHeads>, kThreads, sizeof(Shared), residency);
  if (error != cudaSuccess) return error;
  args.wide = args.row_stride % 4 == 0 && reinterpret_cast<uintptr_t>(args.scores) % 16 == 0;
  args.ctas = static_cast<int32_t>(min64(most_tiles, min64(residency.sms, kMaxCtas)));
  score_kernel<kMode, kHeads><<<args.ctas, kThreads, sizeof(Shared), stream>>>(maps, args);
  return cudaGetLastError();
}

template <Mode kMode>
cudaError_t launch_score(ScoreArgs& args, const TensorMaps& maps, cudaStream_t stream) {
  const int64_t each = kMode == Mode::kSample
                           ? args.plan.sample_tiles
                           : ceil_div(args.in.keys + kFirstKeyMultiple - 1, kCtaKeys);
  return args.in.heads == 64 ? launch_score<kMode, 64>(args, maps, args.blocks * each, stream)
                             : launch_score<kMode, 32>(args, maps, args.blocks * each, stream);
}

}  // namespace jax_fused_topk::hopper

#endif  // JAX_FUSED_TOPK_CUDA_HOPPER_LAUNCH_CUH_
