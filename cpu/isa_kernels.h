// The inner loops, compiled once per instruction set, as a table of functions.
//
// A panel is `panel_keys` keys as float32, transposed to [dim, panel_keys], so
// that one vector holds one coordinate of neighbouring keys.  A packed query
// holds a row's [heads, dim] float32 in the order the inner loop broadcasts it.
// Both must be 64-byte aligned.

#ifndef JAX_FUSED_TOPK_CPU_ISA_KERNELS_H_
#define JAX_FUSED_TOPK_CPU_ISA_KERNELS_H_

#include <cstdint>

#include "ffi/contract.h"

namespace jax_fused_topk::cpu {

// No panel is larger, so callers can keep a panel's scores on the stack.
inline constexpr int kMaxPanelKeys = 64;

struct IsaKernels {
  const char* isa;
  int panel_keys;

  // q float32 [heads, dim] -> packed, as many floats.
  void (*pack_query)(const float* q, int64_t heads, int64_t dim, float* packed);

  // k [count, dim] of the element type -> panel; keys from count on become zero.
  void (*pack_keys)(Element element, const void* k, int64_t count, int64_t dim, float* panel);

  // Canonical score bits of one query against a panel, [panel_keys].
  // weights [heads], k_scale [panel_keys].
  void (*score_panel)(const float* packed, const float* weights, int64_t heads, int64_t dim,
                      const float* panel, const float* k_scale, uint32_t* score_bits);

  // Cuts of key lists, in order; each returns how many elements pass.  The
  // output has room for all n and may be the input.
  //
  // Keys in [low, low + width].
  int64_t (*keys_within)(const uint32_t* keys, int64_t n, uint32_t low, uint32_t width,
                         uint32_t* out_keys);
  // Pairs whose key is at least `low`.
  int64_t (*pairs_from)(const uint32_t* keys, const int32_t* indices, int64_t n, uint32_t low,
                        uint32_t* out_keys, int32_t* out_indices);
  // The same, where the pairs' indices are first_index + 0 .. n - 1.
  int64_t (*numbered_pairs_from)(const uint32_t* keys, int32_t first_index, int64_t n, uint32_t low,
                                 uint32_t* out_keys, int32_t* out_indices);
};

extern const IsaKernels kIsaKernelsBaseline;
#if defined(__x86_64__)
extern const IsaKernels kIsaKernelsAvx2;
extern const IsaKernels kIsaKernelsAvx512;
#endif

// The table for this machine; chosen once.
const IsaKernels& isa_kernels();

}  // namespace jax_fused_topk::cpu

#endif  // JAX_FUSED_TOPK_CPU_ISA_KERNELS_H_
