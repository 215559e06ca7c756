// An uninitialised heap array, aligned for the widest vector and a cache line.

#ifndef JAX_FUSED_TOPK_CPU_ALIGNED_ARRAY_H_
#define JAX_FUSED_TOPK_CPU_ALIGNED_ARRAY_H_

#include <cstddef>
#include <cstdint>
#include <new>
#include <type_traits>

namespace jax_fused_topk::cpu {

template <typename T>
class AlignedArray {
  static_assert(std::is_trivial_v<T>, "the elements are neither constructed nor destroyed");

 public:
  explicit AlignedArray(int64_t count)
      : data_(static_cast<T*>(::operator new(static_cast<size_t>(count) * sizeof(T), kAlignment))) {
  }
  ~AlignedArray() { ::operator delete(data_, kAlignment); }
  AlignedArray(const AlignedArray&) = delete;
  AlignedArray& operator=(const AlignedArray&) = delete;

  T* data() { return data_; }
  const T* data() const { return data_; }
  T& operator[](int64_t i) { return data_[i]; }
  const T& operator[](int64_t i) const { return data_[i]; }

 private:
  static constexpr std::align_val_t kAlignment{64};
  T* const data_;
};

}  // namespace jax_fused_topk::cpu

#endif  // JAX_FUSED_TOPK_CPU_ALIGNED_ARRAY_H_
