// What both extension modules tell Python: their handlers and how they were built.

#ifndef JAX_FUSED_TOPK_FFI_MODULE_H_
#define JAX_FUSED_TOPK_FFI_MODULE_H_

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <tuple>

#include "ffi/contract.h"
#include "xla/ffi/api/ffi.h"

namespace jax_fused_topk {

namespace nb = ::nanobind;

inline nb::capsule handler_capsule(XLA_FFI_Handler* handler) {
  return nb::capsule(reinterpret_cast<void*>(handler));
}

// Target name -> handler.  The version in the name keeps a cached or exported
// program from meeting a handler with other operands.
inline nb::dict handler_table(XLA_FFI_Handler* index_topk, XLA_FFI_Handler* index_scores,
                              XLA_FFI_Handler* top_k) {
  nb::dict table;
  table["jax_fused_topk_index_topk_" JFT_TARGET_VERSION] = handler_capsule(index_topk);
  table["jax_fused_topk_index_scores_" JFT_TARGET_VERSION] = handler_capsule(index_scores);
  table["jax_fused_topk_top_k_" JFT_TARGET_VERSION] = handler_capsule(top_k);
  return table;
}

inline void define_common(nb::module_& m) {
  m.attr("TARGET_VERSION") = JFT_TARGET_VERSION;
  m.attr("FFI_HEADER_VERSION") = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  nb::dict orders;
  orders["any"] = static_cast<int>(Order::kAny);
  orders["index"] = static_cast<int>(Order::kIndex);
  orders["score"] = static_cast<int>(Order::kScore);
  m.attr("ORDERS") = orders;
}

}  // namespace jax_fused_topk

#endif  // JAX_FUSED_TOPK_FFI_MODULE_H_
