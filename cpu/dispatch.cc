// Picks the ISA kernels for the machine at run time.

#include <cstdlib>
#include <cstring>

#include "cpu/isa_kernels.h"
#include "cpu/kernels.h"

namespace jax_fused_topk::cpu {
namespace {

constexpr char kIsaVariable[] = "JAX_FUSED_TOPK_CPU_ISA";

struct Choice {
  const IsaKernels* kernels;
  bool supported;
};

const IsaKernels& choose() {
#if defined(__x86_64__)
  __builtin_cpu_init();
#endif
  // Best first; the last one always runs.
  const Choice choices[] = {
#if defined(__x86_64__)
      {&kIsaKernelsAvx512, __builtin_cpu_supports("avx512f") &&
                               __builtin_cpu_supports("avx512bw") &&
                               __builtin_cpu_supports("avx512dq") &&
                               __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("fma")},
      {&kIsaKernelsAvx2, __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")},
#endif
      {&kIsaKernelsBaseline, true},
  };
  const char* wanted = std::getenv(kIsaVariable);
  if (wanted != nullptr) {
    for (const Choice& choice : choices) {
      if (choice.supported && std::strcmp(choice.kernels->isa, wanted) == 0) return *choice.kernels;
    }
  }
  for (const Choice& choice : choices) {
    if (choice.supported) return *choice.kernels;
  }
  return kIsaKernelsBaseline;
}

}  // namespace

const IsaKernels& isa_kernels() {
  static const IsaKernels& kernels = choose();
  return kernels;
}

const char* dispatched_isa() { return isa_kernels().isa; }

}  // namespace jax_fused_topk::cpu
