// What the launchers share: host code only.

#ifndef JAX_FUSED_TOPK_CUDA_LAUNCH_H_
#define JAX_FUSED_TOPK_CUDA_LAUNCH_H_

#include <cuda_runtime.h>

#include <cstdint>

namespace jax_fused_topk {

// A grid of at least `rows` CTAs: row blockIdx.y * gridDim.x + blockIdx.x.
inline dim3 row_grid(int64_t rows) {
  constexpr int64_t kMaxGridX = (int64_t{1} << 31) - 1;
  const int64_t y = (rows + kMaxGridX - 1) / kMaxGridX;
  return dim3(static_cast<unsigned>((rows + y - 1) / y), static_cast<unsigned>(y));
}

// CTAs of a kernel that the current device runs at a time.
struct Residency {
  int sms = 0, ctas_per_sm = 0;
};

// Asks how many CTAs of the kernel fit with `shared_bytes` of dynamic shared memory each.
// The kernel may use all that the device has, the same in every call: another thread's
// launch of it must not find less.  Host-side only, legal during graph capture.
template <class... Args>
cudaError_t prepare(void (*kernel)(Args...), int threads, size_t shared_bytes,
                    Residency& residency) {
  int device = 0, most = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&residency.sms, cudaDevAttrMultiProcessorCount, device);
  }
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  }
  if (error == cudaSuccess) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most);
  }
  if (error == cudaSuccess) {
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&residency.ctas_per_sm, kernel, threads,
                                                          shared_bytes);
  }
  if (error != cudaSuccess) {
    cudaGetLastError();  // returned here, so it must not show up in a later call
    return error;
  }
  return residency.ctas_per_sm > 0 ? cudaSuccess : cudaErrorInvalidConfiguration;
}

}  // namespace jax_fused_topk

#endif  // JAX_FUSED_TOPK_CUDA_LAUNCH_H_
