// Tensor maps for the copy engine (TMA): host code only.

#ifndef JAX_FUSED_TOPK_CUDA_HOPPER_TENSOR_MAP_H_
#define JAX_FUSED_TOPK_CUDA_HOPPER_TENSOR_MAP_H_

#include <cuda.h>
#include <cuda_runtime.h>

namespace jax_fused_topk::hopper {

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

// The driver's encoder of tensor maps, without linking to the driver.
inline cudaError_t find_encoder(EncodeTiled& encode) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                             12000, cudaEnableDefault, &found);
  if (error != cudaSuccess) return error;
  if (found != cudaDriverEntryPointSuccess) return cudaErrorNotSupported;
  encode = reinterpret_cast<EncodeTiled>(function);
  return cudaSuccess;
}

// Sizes and box run from the innermost dimension, strides are those of the others, in
// bytes; what lies outside the array reads as zeros.
template <int kRank>
cudaError_t encode_map(EncodeTiled encode, CUtensorMap& map, const void* base,
                       CUtensorMapDataType type, CUtensorMapSwizzle swizzle,
                       const cuuint64_t (&sizes)[kRank], const cuuint64_t (&strides)[kRank - 1],
                       const cuuint32_t (&box)[kRank]) {
  cuuint32_t steps[kRank];
  for (cuuint32_t& step : steps) step = 1;
  const CUresult result =
      encode(&map, type, kRank, const_cast<void*>(base), sizes, strides, box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace jax_fused_topk::hopper

#endif  // JAX_FUSED_TOPK_CUDA_HOPPER_TENSOR_MAP_H_
