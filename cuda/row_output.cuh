// A row of index_topk's results.  Shared by all its kernels.

#ifndef JAX_FUSED_TOPK_CUDA_ROW_OUTPUT_CUH_
#define JAX_FUSED_TOPK_CUDA_ROW_OUTPUT_CUH_

#include <cstdint>

#include "cuda/sort.cuh"
#include "ffi/contract.h"

namespace jax_fused_topk {

__device__ __forceinline__ float score_from_key(uint32_t key) {
  return __uint_as_float(total_order_bits(key));
}

__device__ __forceinline__ KeyRange row_range(const IndexInputs& in, int64_t row) {
  return clamp_range(in.starts[row], in.ends[row], in.keys);
}

// All valid keys are chosen and nobody asks for their scores.
__device__ __forceinline__ bool needs_no_scores(const IndexTopkParams& p, KeyRange range) {
  return p.scores == nullptr && p.order != Order::kScore && range.size() <= p.topk;
}

// A row of the outputs, written by `threads` threads together.
struct RowOutput {
  int32_t* indices;
  float* scores;  // or null
  uint32_t topk;

  __device__ __forceinline__ RowOutput(const IndexTopkParams& p, int64_t row)
      : indices(p.indices + row * p.topk),
        scores(p.scores == nullptr ? nullptr : p.scores + row * p.topk),
        topk(static_cast<uint32_t>(p.topk)) {}

  __device__ __forceinline__ void put(uint32_t position, uint32_t key, int32_t index) const {
    indices[position] = index;
    if (scores != nullptr) scores[position] = score_from_key(key);
  }
  __device__ __forceinline__ void put_tail(uint32_t count, uint32_t thread,
                                           uint32_t threads) const {
    for (uint32_t i = count + thread; i < topk; i += threads) {
      indices[i] = kNoIndex;
      if (scores != nullptr) scores[i] = __uint_as_float(kNegativeInf);
    }
  }
  // A row for which needs_no_scores.
  __device__ __forceinline__ void put_range(KeyRange range, uint32_t thread,
                                            uint32_t threads) const {
    const uint32_t count = range.size();
    for (uint32_t i = thread; i < count; i += threads) indices[i] = range.start + i;
    put_tail(count, thread, threads);
  }
};

// Sorts the first `count` <= topk pairs by score and writes the row.  The buffer
// holds next_power_of_two(topk) pairs.  All threads of the CTA call it.
__device__ __forceinline__ void put_sorted(const RowOutput& out, uint64_t* pairs, uint32_t count) {
  uint32_t size = 1;
  while (size < count) size *= 2;
  for (uint32_t i = count + threadIdx.x; i < size; i += blockDim.x) pairs[i] = kNoPair;
  __syncthreads();
  sort_descending(pairs, size);
  for (uint32_t i = threadIdx.x; i < count; i += blockDim.x) {
    out.put(i, pair_key(pairs[i]), pair_index(pairs[i]));
  }
  out.put_tail(count, threadIdx.x, blockDim.x);
  __syncthreads();  // before the buffer is used again
}

}  // namespace jax_fused_topk

#endif  // JAX_FUSED_TOPK_CUDA_ROW_OUTPUT_CUH_
