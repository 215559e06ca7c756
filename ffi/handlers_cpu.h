// The CPU handlers, as module_cpu.cc registers them.

#ifndef JAX_FUSED_TOPK_FFI_HANDLERS_CPU_H_
#define JAX_FUSED_TOPK_FFI_HANDLERS_CPU_H_

#include "xla/ffi/api/ffi.h"

XLA_FFI_DECLARE_HANDLER_SYMBOL(JftIndexTopkCpu);
XLA_FFI_DECLARE_HANDLER_SYMBOL(JftIndexScoresCpu);
XLA_FFI_DECLARE_HANDLER_SYMBOL(JftTopkCpu);

#endif  // JAX_FUSED_TOPK_FFI_HANDLERS_CPU_H_
