// The host kernels: plain launchers over the parameter blocks of ffi/contract.h.
//
// Each runs to completion before it returns and gives the same bits whatever
// the loop it is lent does.  Memory comes from the heap: std::bad_alloc may leave a body of
// the loop.

#ifndef JAX_FUSED_TOPK_CPU_KERNELS_H_
#define JAX_FUSED_TOPK_CPU_KERNELS_H_

#include "cpu/parallel.h"
#include "ffi/contract.h"

namespace jax_fused_topk::cpu {

void index_topk(const IndexTopkParams& params, const ParallelFor& parallel_for);
void index_scores(const IndexScoresParams& params, const ParallelFor& parallel_for);
void top_k(const TopkParams& params, const ParallelFor& parallel_for);

// The instruction set that scoring uses here: "avx512", "avx2" or "baseline".
// The environment variable JAX_FUSED_TOPK_CPU_ISA picks another supported one;
// it is read once.
const char* dispatched_isa();

}  // namespace jax_fused_topk::cpu

#endif  // JAX_FUSED_TOPK_CPU_KERNELS_H_
