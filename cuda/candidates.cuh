// index_topk's candidate buffers in the workspace and its work items.  Shared by the main
// kernel and the merge of splits.
//
// A slot: keys[16][capacity], indices[16][capacity], counts[16] for one block of
// 16 queries.  A row's candidates are always in ascending index.

#ifndef JAX_FUSED_TOPK_CUDA_CANDIDATES_CUH_
#define JAX_FUSED_TOPK_CUDA_CANDIDATES_CUH_

#include <cstdint>

#include "cuda/limits.h"
#include "ffi/contract.h"

namespace jax_fused_topk {

// How a launch divides its work; a function of shapes and of the SM count.
struct IndexTopkPlan {
  int64_t blocks_per_batch;  // of 16 queries
  int64_t items;             // batch * blocks_per_batch * splits
  int splits;                // parts of a block's key range
  int columns, levels;       // of the grid: levels CTAs on each of columns SMs
  uint32_t capacity;         // of a row's buffer
};

struct CandidateSource {
  const uint32_t* keys;
  const int32_t* indices;
  __device__ __forceinline__ uint32_t key(uint32_t i) const { return keys[i]; }
  __device__ __forceinline__ int32_t index(uint32_t i) const { return indices[i]; }
};

class Slot {
 public:
  __device__ __forceinline__ Slot(uint8_t* base, uint32_t capacity)
      : base_(base), capacity_(capacity) {}

  __device__ static __forceinline__ Slot at(const IndexTopkParams& p, uint32_t capacity,
                                            int64_t slot) {
    return {static_cast<uint8_t*>(p.workspace) + slot * index_topk_slot_bytes(p.topk), capacity};
  }

  __device__ __forceinline__ uint8_t* base() const { return base_; }
  __device__ __forceinline__ uint32_t* keys(int row) const {
    return reinterpret_cast<uint32_t*>(base_) + static_cast<int64_t>(row) * capacity_;
  }
  __device__ __forceinline__ int32_t* indices(int row) const {
    return reinterpret_cast<int32_t*>(base_) + static_cast<int64_t>(kQueryTile + row) * capacity_;
  }
  __device__ __forceinline__ uint32_t* counts() const {
    return reinterpret_cast<uint32_t*>(base_) + static_cast<int64_t>(2 * kQueryTile) * capacity_;
  }

 private:
  uint8_t* base_;
  uint32_t capacity_;
};

}  // namespace jax_fused_topk

#endif  // JAX_FUSED_TOPK_CUDA_CANDIDATES_CUH_
