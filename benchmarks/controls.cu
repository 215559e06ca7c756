// The indexer with parts of its work left out, for attribution: see controls.py and
// hopper_library.py, which builds this file.

#include <cuda_runtime_api.h>

#include "cuda/hopper_launch.cuh"
#include "ffi/checks.h"

namespace jax_fused_topk {
namespace {

template <hopper::Mode kMode>
cudaError_t launch(const IndexInputs& in, float* out, cudaStream_t stream) {
  hopper::TensorMaps maps;
  const cudaError_t error = hopper::make_maps(in, hopper::kTileKeys, maps);
  if (error != cudaSuccess) return error;
  hopper::ScoreArgs args{};
  args.in = in;
  args.scores = out;
  args.blocks = static_cast<int32_t>(in.batch * hopper::blocks_per_batch(in.queries));
  return hopper::launch_score<kMode>(args, maps, stream);
}

ffi::Error control(cudaStream_t stream, ffi::AnyBuffer q, ffi::AnyBuffer k, F32x3 weights,
                   F32x2 k_scale, S32x2 starts, S32x2 ends, int32_t epilogue,
                   ffi::Result<ffi::BufferR1<ffi::F32>> out) {
  IndexInputs in;
  JFT_RETURN_IF_ERROR(read_index_inputs({q, k, weights, k_scale, starts, ends}, &in));
  if (!hopper::supported(in.element, in.heads, in.dim) ||
      in.batch * hopper::blocks_per_batch(in.queries) > hopper::kMaxBlocks) {
    return invalid("the controls do not serve this shape");
  }
  const cudaError_t error =
      epilogue ? launch<hopper::Mode::kScoreControl>(in, out->typed_data(), stream)
               : launch<hopper::Mode::kTensorControl>(in, out->typed_data(), stream);
  return error == cudaSuccess ? ffi::Error::Success()
                              : ffi::Error::Internal(cudaGetErrorString(error));
}

}  // namespace
}  // namespace jax_fused_topk

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    JftControl, jax_fused_topk::control,
    jax_fused_topk::bind_index_inputs(
        ::xla::ffi::Ffi::Bind().Ctx<::xla::ffi::PlatformStream<cudaStream_t>>())
        .Attr<int32_t>("epilogue")
        .Ret<::xla::ffi::BufferR1<::xla::ffi::F32>>());
