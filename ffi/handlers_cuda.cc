// XLA FFI handlers of the CUDA implementation: check, launch on XLA's stream.
//
// No synchronisation, no allocation and no state of their own, so every handler
// can be captured into a CUDA graph: scratch memory is a result that XLA owns.

#include "ffi/handlers_cuda.h"

#include <cuda_runtime_api.h>

#include "cuda/index_scores.h"
#include "cuda/index_topk.h"
#include "cuda/limits.h"
#include "cuda/top_k.h"
#include "cuda/workspace.h"
#include "ffi/checks.h"

namespace jax_fused_topk {
namespace {

using Workspace = ffi::Result<U8x1>;

ffi::Error cuda_error(const char* what, cudaError_t status) {
  return ffi::Error::Internal(std::string("jax_fused_topk: ") + what + ": " +
                              cudaGetErrorName(status) + ": " + cudaGetErrorString(status));
}

// Makes the call's device current while it lives: a thread of XLA may have been left
// on another one.  (The stream cannot be asked: that is illegal while it captures.)
class CurrentDevice {
 public:
  explicit CurrentDevice(int32_t device) {
    status_ = cudaGetDevice(&previous_);
    if (status_ == cudaSuccess && device != previous_) {
      status_ = cudaSetDevice(device);
      changed_ = status_ == cudaSuccess;
    }
    if (status_ == cudaSuccess) {
      status_ = cudaDeviceGetAttribute(&major_, cudaDevAttrComputeCapabilityMajor, device);
    }
  }
  ~CurrentDevice() {
    if (changed_) cudaSetDevice(previous_);
  }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

  ffi::Error check() const {
    if (status_ != cudaSuccess) return cuda_error("cannot select the device", status_);
    if (major_ >= kMinComputeMajor) return ffi::Error::Success();
    return invalid("the kernels need a GPU of compute capability " +
                   std::to_string(kMinComputeMajor) + ".0 or newer, this one has " +
                   std::to_string(major_) + ".x; use implementation=\"reference\"");
  }

 private:
  cudaError_t status_;
  int previous_ = 0, major_ = 0;
  bool changed_ = false;
};

template <typename Launch, typename Params>
ffi::Error launch_on(int32_t device, cudaStream_t stream, Launch launch, const Params& params) {
  CurrentDevice current(device);
  JFT_RETURN_IF_ERROR(current.check());
  const cudaError_t status = launch(params, stream);
  return status == cudaSuccess ? ffi::Error::Success() : cuda_error("launch failed", status);
}

template <typename Params>
ffi::Error use_workspace(Workspace workspace, int64_t needed, Params* params) {
  params->workspace = workspace->typed_data();
  params->workspace_bytes = static_cast<int64_t>(workspace->element_count());
  JFT_RETURN_IF_ERROR(expect_aligned("workspace", params->workspace));
  if (params->workspace_bytes >= needed) return ffi::Error::Success();
  return invalid("workspace must have " + std::to_string(needed) + " bytes, got " +
                 std::to_string(params->workspace_bytes));
}

ffi::Error expect_served(const IndexInputs& in, int64_t topk) {
  if (index_topk_supported(in.element, in.heads, in.dim, in.keys, topk))
    return ffi::Error::Success();
  return invalid("no CUDA kernel serves H = " + std::to_string(in.heads) +
                 ", D = " + std::to_string(in.dim) + ", topk = " + std::to_string(topk));
}

ffi::Error index_topk(int32_t device, cudaStream_t stream, ffi::AnyBuffer q, ffi::AnyBuffer k,
                      F32x3 weights, F32x2 k_scale, S32x2 starts, S32x2 ends, int32_t order,
                      ffi::Result<F32x3> scores, ffi::Result<S32x3> indices, Workspace workspace) {
  IndexTopkParams params;
  JFT_RETURN_IF_ERROR(
      read_index_topk({q, k, weights, k_scale, starts, ends}, order, scores, indices, &params));
  const IndexInputs& in = params.in;
  JFT_RETURN_IF_ERROR(expect_served(in, params.topk));
  JFT_RETURN_IF_ERROR(
      use_workspace(workspace,
                    workspace_bytes(in.element, in.batch, in.queries, in.heads, in.dim, in.keys,
                                    params.topk, params.order, params.scores == nullptr),
                    &params));
  return launch_on(device, stream, launch_index_topk, params);
}

ffi::Error index_scores(int32_t device, cudaStream_t stream, ffi::AnyBuffer q, ffi::AnyBuffer k,
                        F32x3 weights, F32x2 k_scale, S32x2 starts, S32x2 ends,
                        ffi::Result<F32x3> scores) {
  IndexScoresParams params;
  JFT_RETURN_IF_ERROR(read_index_scores({q, k, weights, k_scale, starts, ends}, scores, &params));
  JFT_RETURN_IF_ERROR(expect_served(params.in, 1));
  return launch_on(device, stream, launch_index_scores, params);
}

ffi::Error top_k(int32_t device, cudaStream_t stream, ffi::AnyBuffer x, S32x1 starts, S32x1 ends,
                 int32_t order, ffi::Result<ffi::AnyBuffer> values, ffi::Result<S32x2> indices,
                 Workspace workspace) {
  TopkParams params;
  JFT_RETURN_IF_ERROR(read_top_k(x, starts, ends, order, values, indices, &params));
  JFT_RETURN_IF_ERROR(use_workspace(
      workspace, top_k_workspace_bytes(params.rows, params.keys, params.k, params.order), &params));
  return launch_on(device, stream, launch_top_k, params);
}

}  // namespace
}  // namespace jax_fused_topk

using jax_fused_topk::F32x2, jax_fused_topk::F32x3, jax_fused_topk::S32x1, jax_fused_topk::S32x2,
    jax_fused_topk::S32x3, jax_fused_topk::U8x1;
namespace ffi = ::xla::ffi;

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    JftIndexTopkCuda, jax_fused_topk::index_topk,
    jax_fused_topk::bind_index_inputs(
        ffi::Ffi::Bind().Ctx<ffi::DeviceOrdinal>().Ctx<ffi::PlatformStream<cudaStream_t>>())
        .Attr<int32_t>("order")
        .Ret<F32x3>()  // scores [B, Q, K or 0]
        .Ret<S32x3>()  // indices [B, Q, K]
        .Ret<U8x1>(),  // workspace
    {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    JftIndexScoresCuda, jax_fused_topk::index_scores,
    jax_fused_topk::bind_index_inputs(
        ffi::Ffi::Bind().Ctx<ffi::DeviceOrdinal>().Ctx<ffi::PlatformStream<cudaStream_t>>())
        .Ret<F32x3>(),  // scores [B, Q, N]
    {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(JftTopkCuda, jax_fused_topk::top_k,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()  // x [R, N]
                                  .Arg<S32x1>()           // starts [R]
                                  .Arg<S32x1>()           // ends [R]
                                  .Attr<int32_t>("order")
                                  .Ret<ffi::AnyBuffer>()  // values [R, k]
                                  .Ret<S32x2>()           // indices [R, k]
                                  .Ret<U8x1>(),           // workspace
                              {ffi::Traits::kCmdBufferCompatible});
