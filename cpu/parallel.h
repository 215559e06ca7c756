// How a kernel asks for threads: the caller lends a parallel loop.

#ifndef JAX_FUSED_TOPK_CPU_PARALLEL_H_
#define JAX_FUSED_TOPK_CPU_PARALLEL_H_

#include <cstdint>
#include <functional>

namespace jax_fused_topk::cpu {

// Runs body(0 .. count - 1), in any order on any threads, and returns when all are done.
using ParallelFor = std::function<void(int64_t count, const std::function<void(int64_t)>& body)>;

}  // namespace jax_fused_topk::cpu

#endif  // JAX_FUSED_TOPK_CPU_PARALLEL_H_
