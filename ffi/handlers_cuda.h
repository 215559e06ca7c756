// The CUDA handlers, as module_cuda.cc registers them.

#ifndef JAX_FUSED_TOPK_FFI_HANDLERS_CUDA_H_
#define JAX_FUSED_TOPK_FFI_HANDLERS_CUDA_H_

#include "xla/ffi/api/ffi.h"

XLA_FFI_DECLARE_HANDLER_SYMBOL(JftIndexTopkCuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(JftIndexScoresCuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(JftTopkCuda);

#endif  // JAX_FUSED_TOPK_FFI_HANDLERS_CUDA_H_
