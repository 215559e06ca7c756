// The contract every implementation shares: element types, orders, the bits
// that decide a choice, and the parameter blocks of the three operations.
//
// Plain C++ with no FFI, JAX or CUDA headers, so that handlers and kernels can
// both include it.  Every array is dense and row-major, and every offset is
// 64-bit: Q * N or Q * topk may pass 2**31.

#ifndef JAX_FUSED_TOPK_FFI_CONTRACT_H_
#define JAX_FUSED_TOPK_FFI_CONTRACT_H_

#include <cstdint>

#if defined(__CUDACC__)
#define JFT_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define JFT_HOST_DEVICE inline
#endif

namespace jax_fused_topk {

// Part of every custom-call target's name.  Raise it when operands, attributes
// or results change, so that a cached or exported program never meets a handler
// that reads it in another way.
#define JFT_TARGET_VERSION "v1"

enum class Element : int32_t { kF8E4M3FN, kBF16, kF16, kF32 };

// The order of a row's results; the numbers travel as an FFI attribute.
enum class Order : int32_t { kAny = 0, kIndex = 1, kScore = 2 };

// What an output holds where a row has fewer than topk valid keys.
inline constexpr int32_t kNoIndex = -1;

inline constexpr uint32_t kPositiveNaN = 0x7FC00000u;
inline constexpr uint32_t kNegativeInf = 0xFF800000u;
inline constexpr uint32_t kPositiveInf = 0x7F800000u;

// Bits of a float32 -> an unsigned key in IEEE total order: a larger key is a
// larger value, +NaN above +inf, -NaN below -inf, -0 below +0.
JFT_HOST_DEVICE uint32_t total_order_key(uint32_t bits) {
  return bits ^ (static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000u);
}

// The inverse of total_order_key.
JFT_HOST_DEVICE uint32_t total_order_bits(uint32_t key) {
  return key ^ ((key & 0x80000000u) ? 0x80000000u : 0xFFFFFFFFu);
}

// A score as the contract stores it, given as bits: every NaN becomes one
// positive NaN and -0 becomes +0, so that total order is lax.top_k's choice.
JFT_HOST_DEVICE uint32_t canonical_score_bits(uint32_t bits) {
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return kPositiveNaN;
  return bits == 0x80000000u ? 0u : bits;
}

// A row's valid keys [start, end), clamped to [0, keys]; start >= end is empty.
struct KeyRange {
  int32_t start, end;
  JFT_HOST_DEVICE int32_t size() const { return end > start ? end - start : 0; }
};

JFT_HOST_DEVICE KeyRange clamp_range(int32_t start, int32_t end, int64_t keys) {
  const int32_t n = static_cast<int32_t>(keys);
  KeyRange range{start < 0 ? 0 : start, end > n ? n : end};
  if (range.start >= range.end) range = {0, 0};
  return range;
}

// score[b, t, s] = k_scale[b, s] * sum_h weights[b, t, h] * max(0, q[b, t, h] . k[b, s])
struct IndexInputs {
  int64_t batch, queries, heads, dim, keys;  // B, Q, H, D, N
  Element element;                           // of q and k: kF8E4M3FN or kBF16
  const void* q;                             // [B, Q, H, D]
  const void* k;                             // [B, N, D]
  const float* weights;                      // [B, Q, H]
  const float* k_scale;                      // [B, N]
  const int32_t* starts;                     // [B, Q]
  const int32_t* ends;                       // [B, Q]
};

struct IndexScoresParams {
  IndexInputs in;
  float* scores;  // [B, Q, N], -inf outside the row's range
};

struct IndexTopkParams {
  IndexInputs in;
  int64_t topk;  // K >= 1; may exceed N
  Order order;
  int32_t* indices;  // [B, Q, K]
  float* scores;     // [B, Q, K], or null when scores are not returned
  void* workspace;   // device scratch, unused on the CPU
  int64_t workspace_bytes;
};

// Top-k over ready-made values, in IEEE total order.
struct TopkParams {
  int64_t rows, keys;  // R, N
  int64_t k;           // 1 <= k <= N; inside the CUDA kernels it may exceed N
  Element element;     // kF32, kBF16 or kF16
  Order order;
  const void* x;          // [R, N]
  int64_t row_stride;     // elements from a row of x to the next
  const int32_t* starts;  // [R]
  const int32_t* ends;    // [R]
  void* values;           // [R, k], the element type; -inf past a short row's end.  Inside
                          // the CUDA kernels null if nobody wants them and order is not kScore
  int32_t* indices;       // [R, k]
  void* workspace;        // device scratch, unused on the CPU
  int64_t workspace_bytes;
};

}  // namespace jax_fused_topk

#endif  // JAX_FUSED_TOPK_FFI_CONTRACT_H_
