// The element types of top_k: bits, and the unsigned key of their total order.

#ifndef JAX_FUSED_TOPK_CUDA_ELEMENT_CUH_
#define JAX_FUSED_TOPK_CUDA_ELEMENT_CUH_

#include <cstdint>

#include "ffi/contract.h"

namespace jax_fused_topk {

struct Float32 {
  using Bits = uint32_t;
  static constexpr int kBits = 32;
  static constexpr int kPerWord = 1;
  static constexpr Bits kMinusInf = kNegativeInf;
  // The keys of the elements in a 32-bit word, at their places.
  __device__ static __forceinline__ uint32_t word_keys(uint32_t word) {
    return total_order_key(word);
  }
  __device__ static __forceinline__ uint32_t key(Bits bits) { return total_order_key(bits); }
  __device__ static __forceinline__ Bits bits(uint32_t key) { return total_order_bits(key); }
};

// bfloat16 and float16: the same order, another -inf.
template <uint16_t kMinusInfBits>
struct Float16 {
  using Bits = uint16_t;
  static constexpr int kBits = 16;
  static constexpr int kPerWord = 2;
  static constexpr Bits kMinusInf = kMinusInfBits;
  __device__ static __forceinline__ uint32_t word_keys(uint32_t word) {
    return word ^ ((word >> 15 & 0x00010001u) * 0x7FFFu | 0x80008000u);
  }
  __device__ static __forceinline__ uint32_t key(Bits bits) {
    return bits ^ (bits & 0x8000u ? 0xFFFFu : 0x8000u);
  }
  __device__ static __forceinline__ Bits bits(uint32_t key) {
    return static_cast<Bits>(key ^ (key & 0x8000u ? 0x8000u : 0xFFFFu));
  }
};

using BFloat16 = Float16<0xFF80>;
using Half = Float16<0xFC00>;

// Element c of a word of keys; c is a constant.
template <class Type>
__device__ __forceinline__ uint32_t key_in_word(uint32_t word, int c) {
  if constexpr (Type::kPerWord == 1) return word;
  return c == 0 ? word & 0xFFFFu : word >> 16;
}

// Calls launch(Type{}) with the type of an element of top_k.
template <class Launch>
auto with_element(Element element, Launch launch) {
  switch (element) {
    case Element::kF32:
      return launch(Float32{});
    case Element::kBF16:
      return launch(BFloat16{});
    default:
      return launch(Half{});
  }
}

// A row of results.
template <class Type>
struct TopkRow {
  using Bits = typename Type::Bits;
  Bits* values;
  int32_t* indices;

  __device__ __forceinline__ TopkRow(const TopkParams& p, int64_t row)
      : values(static_cast<Bits*>(p.values) + row * p.k), indices(p.indices + row * p.k) {}

  __device__ __forceinline__ void put(uint32_t i, uint32_t key, int32_t index) const {
    values[i] = Type::bits(key);
    indices[i] = index;
  }
  __device__ __forceinline__ uint32_t key(uint32_t i) const { return Type::key(values[i]); }
  __device__ __forceinline__ int32_t index(uint32_t i) const { return indices[i]; }

  // What a row of fewer than k keys has behind them.
  __device__ __forceinline__ void put_tail(uint32_t count, uint32_t k, int thread,
                                           int threads) const {
    for (uint32_t i = count + thread; i < k; i += threads) {
      values[i] = Type::kMinusInf;
      indices[i] = kNoIndex;
    }
  }
};

// The same where nobody wants the values: they are read where they came from.
template <class Type>
struct IndexRow {
  const typename Type::Bits* x;
  int32_t* indices;

  __device__ __forceinline__ IndexRow(const TopkParams& p, int64_t row)
      : x(static_cast<const typename Type::Bits*>(p.x) + row * p.row_stride),
        indices(p.indices + row * p.k) {}

  __device__ __forceinline__ void put(uint32_t i, uint32_t, int32_t index) const {
    indices[i] = index;
  }
  __device__ __forceinline__ uint32_t key(uint32_t i) const { return Type::key(x[indices[i]]); }
  __device__ __forceinline__ int32_t index(uint32_t i) const { return indices[i]; }
  __device__ __forceinline__ void put_tail(uint32_t count, uint32_t k, int thread,
                                           int threads) const {
    for (uint32_t i = count + thread; i < k; i += threads) indices[i] = kNoIndex;
  }
};

}  // namespace jax_fused_topk

#endif  // JAX_FUSED_TOPK_CUDA_ELEMENT_CUH_
