// Turns FFI buffers into the parameter blocks of contract.h, checking shapes,
// element types and alignment.  Shared by the CPU and the CUDA handlers.
//
// Python checks the same at trace time with better words; these checks keep a
// handler that is called in another way from reading outside a buffer.

#ifndef JAX_FUSED_TOPK_FFI_CHECKS_H_
#define JAX_FUSED_TOPK_FFI_CHECKS_H_

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <sstream>
#include <string>
#include <utility>

#include "ffi/contract.h"
#include "xla/ffi/api/ffi.h"

namespace jax_fused_topk {

namespace ffi = ::xla::ffi;

// Named by element type and rank.
using F32x2 = ffi::Buffer<ffi::F32, 2>;
using F32x3 = ffi::Buffer<ffi::F32, 3>;
using S32x1 = ffi::Buffer<ffi::S32, 1>;
using S32x2 = ffi::Buffer<ffi::S32, 2>;
using S32x3 = ffi::Buffer<ffi::S32, 3>;
using U8x1 = ffi::Buffer<ffi::U8, 1>;

// Adds the operands of the indexer to a handler's binding.
template <typename Binding>
auto bind_index_inputs(Binding&& binding) {
  return std::move(binding)
      .template Arg<ffi::AnyBuffer>()  // q [B, Q, H, D]
      .template Arg<ffi::AnyBuffer>()  // k [B, N, D]
      .template Arg<F32x3>()           // weights [B, Q, H]
      .template Arg<F32x2>()           // k_scale [B, N]
      .template Arg<S32x2>()           // starts [B, Q]
      .template Arg<S32x2>();          // ends [B, Q]
}

// Kernels read q, k and x in 16-byte pieces.
inline constexpr uintptr_t kAlignment = 16;

inline ffi::Error invalid(const std::string& message) {
  return ffi::Error(ffi::ErrorCode::kInvalidArgument, "jax_fused_topk: " + message);
}

inline std::string shape_string(ffi::AnyBuffer::Dimensions dims) {
  std::ostringstream out;
  out << '[';
  for (size_t i = 0; i < dims.size(); ++i) out << (i ? ", " : "") << dims[i];
  out << ']';
  return out.str();
}

// Success when `buffer`, of any element type, has exactly the shape `want`.
template <typename Buffer>
ffi::Error expect_shape(const char* name, const Buffer& buffer,
                        std::initializer_list<int64_t> want) {
  const auto dims = buffer.dimensions();
  if (dims.size() == want.size() && std::equal(want.begin(), want.end(), dims.begin())) {
    return ffi::Error::Success();
  }
  return invalid(std::string(name) + " must have shape " +
                 shape_string(ffi::AnyBuffer::Dimensions(want.begin(), want.size())) + ", got " +
                 shape_string(dims));
}

inline ffi::Error expect_aligned(const char* name, const void* data) {
  if (reinterpret_cast<uintptr_t>(data) % kAlignment == 0) return ffi::Error::Success();
  return invalid(std::string(name) + " must start at a multiple of " + std::to_string(kAlignment) +
                 " bytes");
}

inline ffi::Error expect_keys(int64_t keys) {
  if (keys <= std::numeric_limits<int32_t>::max()) return ffi::Error::Success();
  return invalid("at most 2**31 - 1 keys fit int32 indices, got " + std::to_string(keys));
}

inline ffi::Error expect_order(int32_t order) {
  if (order >= 0 && order <= static_cast<int32_t>(Order::kScore)) return ffi::Error::Success();
  return invalid("order must be 0, 1 or 2, got " + std::to_string(order));
}

#define JFT_RETURN_IF_ERROR(expression)                       \
  do {                                                        \
    if (ffi::Error error_ = (expression); error_.failure()) { \
      return error_;                                          \
    }                                                         \
  } while (0)

// The six operands that both scored operations take.
struct IndexOperands {
  ffi::AnyBuffer q, k;
  F32x3 weights;
  F32x2 k_scale;
  S32x2 starts, ends;
};

inline ffi::Error read_index_inputs(const IndexOperands& op, IndexInputs* in) {
  const auto q = op.q.dimensions(), k = op.k.dimensions();
  if (q.size() != 4) return invalid("q must have 4 dimensions, got " + shape_string(q));
  if (k.size() != 3) return invalid("k must have 3 dimensions, got " + shape_string(k));
  if (op.q.element_type() != op.k.element_type()) {
    return invalid("q and k must have the same element type");
  }
  switch (op.q.element_type()) {
    case ffi::DataType::F8E4M3FN:
      in->element = Element::kF8E4M3FN;
      break;
    case ffi::DataType::BF16:
      in->element = Element::kBF16;
      break;
    default:
      return invalid("q and k must be float8_e4m3fn or bfloat16");
  }
  in->batch = q[0], in->queries = q[1], in->heads = q[2], in->dim = q[3], in->keys = k[1];
  JFT_RETURN_IF_ERROR(expect_keys(in->keys));
  JFT_RETURN_IF_ERROR(expect_shape("k", op.k, {in->batch, in->keys, in->dim}));
  JFT_RETURN_IF_ERROR(expect_shape("weights", op.weights, {in->batch, in->queries, in->heads}));
  JFT_RETURN_IF_ERROR(expect_shape("k_scale", op.k_scale, {in->batch, in->keys}));
  JFT_RETURN_IF_ERROR(expect_shape("starts", op.starts, {in->batch, in->queries}));
  JFT_RETURN_IF_ERROR(expect_shape("ends", op.ends, {in->batch, in->queries}));
  in->q = op.q.untyped_data();
  in->k = op.k.untyped_data();
  JFT_RETURN_IF_ERROR(expect_aligned("q", in->q));
  JFT_RETURN_IF_ERROR(expect_aligned("k", in->k));
  in->weights = op.weights.typed_data();
  JFT_RETURN_IF_ERROR(expect_aligned("weights", in->weights));
  in->k_scale = op.k_scale.typed_data();
  in->starts = op.starts.typed_data();
  in->ends = op.ends.typed_data();
  return ffi::Error::Success();
}

inline ffi::Error read_index_scores(const IndexOperands& op, ffi::Result<F32x3> scores,
                                    IndexScoresParams* params) {
  JFT_RETURN_IF_ERROR(read_index_inputs(op, &params->in));
  const IndexInputs& in = params->in;
  JFT_RETURN_IF_ERROR(expect_shape("scores", *scores, {in.batch, in.queries, in.keys}));
  params->scores = scores->typed_data();
  return ffi::Error::Success();
}

// `scores` has a last dimension of 0 where scores are not returned.
inline ffi::Error read_index_topk(const IndexOperands& op, int32_t order, ffi::Result<F32x3> scores,
                                  ffi::Result<S32x3> indices, IndexTopkParams* params) {
  JFT_RETURN_IF_ERROR(read_index_inputs(op, &params->in));
  JFT_RETURN_IF_ERROR(expect_order(order));
  const IndexInputs& in = params->in;
  const int64_t topk = indices->dimensions()[2];
  if (topk < 1) return invalid("topk must be at least 1, got " + std::to_string(topk));
  JFT_RETURN_IF_ERROR(expect_shape("indices", *indices, {in.batch, in.queries, topk}));
  const bool with_scores = scores->dimensions()[2] != 0;
  JFT_RETURN_IF_ERROR(
      expect_shape("scores", *scores, {in.batch, in.queries, with_scores ? topk : 0}));
  params->topk = topk;
  params->order = static_cast<Order>(order);
  params->indices = indices->typed_data();
  params->scores = with_scores ? scores->typed_data() : nullptr;
  params->workspace = nullptr;
  params->workspace_bytes = 0;
  return ffi::Error::Success();
}

inline ffi::Error read_top_k(ffi::AnyBuffer x, S32x1 starts, S32x1 ends, int32_t order,
                             ffi::Result<ffi::AnyBuffer> values, ffi::Result<S32x2> indices,
                             TopkParams* params) {
  const auto dims = x.dimensions();
  if (dims.size() != 2) return invalid("x must have 2 dimensions, got " + shape_string(dims));
  switch (x.element_type()) {
    case ffi::DataType::F32:
      params->element = Element::kF32;
      break;
    case ffi::DataType::BF16:
      params->element = Element::kBF16;
      break;
    case ffi::DataType::F16:
      params->element = Element::kF16;
      break;
    default:
      return invalid("x must be float32, bfloat16 or float16");
  }
  params->rows = dims[0], params->keys = dims[1], params->k = indices->dimensions()[1];
  params->row_stride = params->keys;
  JFT_RETURN_IF_ERROR(expect_keys(params->keys));
  JFT_RETURN_IF_ERROR(expect_order(order));
  if (params->k < 1 || params->k > params->keys) {
    return invalid("k must be 1 to " + std::to_string(params->keys) + ", got " +
                   std::to_string(params->k));
  }
  JFT_RETURN_IF_ERROR(expect_shape("starts", starts, {params->rows}));
  JFT_RETURN_IF_ERROR(expect_shape("ends", ends, {params->rows}));
  JFT_RETURN_IF_ERROR(expect_shape("indices", *indices, {params->rows, params->k}));
  JFT_RETURN_IF_ERROR(expect_shape("values", *values, {params->rows, params->k}));
  if (values->element_type() != x.element_type()) {
    return invalid("values must have x's element type");
  }
  params->order = static_cast<Order>(order);
  params->x = x.untyped_data();
  JFT_RETURN_IF_ERROR(expect_aligned("x", params->x));
  params->starts = starts.typed_data();
  params->ends = ends.typed_data();
  params->values = values->untyped_data();
  params->indices = indices->typed_data();
  params->workspace = nullptr;
  params->workspace_bytes = 0;
  return ffi::Error::Success();
}

}  // namespace jax_fused_topk

#endif  // JAX_FUSED_TOPK_FFI_CHECKS_H_
