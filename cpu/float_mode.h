// Default floating-point behaviour for a scope: XLA's threads flush denormals,
// the contract keeps them.

#ifndef JAX_FUSED_TOPK_CPU_FLOAT_MODE_H_
#define JAX_FUSED_TOPK_CPU_FLOAT_MODE_H_

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace jax_fused_topk::cpu {

#if defined(__x86_64__)
// Round to nearest, denormals kept, no exception traps; restored on exit.
class DefaultFloatMode {
 public:
  DefaultFloatMode() : saved_(_mm_getcsr()) { _mm_setcsr(kDefaultMxcsr); }
  ~DefaultFloatMode() { _mm_setcsr(saved_); }
  DefaultFloatMode(const DefaultFloatMode&) = delete;
  DefaultFloatMode& operator=(const DefaultFloatMode&) = delete;

 private:
  static constexpr unsigned kDefaultMxcsr = 0x1F80;
  const unsigned saved_;
};
#else
class DefaultFloatMode {
 public:
  DefaultFloatMode() {}
  ~DefaultFloatMode() {}
  DefaultFloatMode(const DefaultFloatMode&) = delete;
  DefaultFloatMode& operator=(const DefaultFloatMode&) = delete;
};
#endif

}  // namespace jax_fused_topk::cpu

#endif  // JAX_FUSED_TOPK_CPU_FLOAT_MODE_H_
