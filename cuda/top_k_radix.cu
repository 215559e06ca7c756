// top_k of ready-made values for k > kMaxFilterTopk, in any order.
//
// Algorithm.  Radix select over the row in global memory (select.cuh), then a
// stable compaction: values are copied bit for bit, in ascending index, or for
// Order::kScore as pairs that are sorted.
//
// Roles.  A CTA of 16 warps takes a row at a time; a warp takes 1/16 of the row.
//
// Memory: 8 KiB histogram and 128 bytes of ranks in shared memory; for
// Order::kScore 8 next_power_of_two(k) bytes of pairs, in shared memory up to 64
// KiB (k <= 8192), beyond that in the workspace.

#include <cuda_runtime.h>

#include "cuda/element.cuh"
#include "cuda/launch.h"
#include "cuda/limits.h"
#include "cuda/select.cuh"
#include "cuda/sort.cuh"
#include "cuda/top_k_radix.h"

namespace jax_fused_topk {
namespace {

using TopkGroup = Group<kTopkThreads / 32>;

struct Shared {
  uint32_t histogram[1 << kCtaDigitBits];
  SegmentRanks<TopkGroup::kWarps> ranks;
  alignas(8) uint64_t pairs[1];  // [next_power_of_two(k)], if they fit
};

template <class Type>
struct ValueSource {
  const typename Type::Bits* values;
  __device__ __forceinline__ uint32_t key(uint32_t i) const { return Type::key(values[i]); }
  __device__ __forceinline__ int32_t index(uint32_t i) const { return static_cast<int32_t>(i); }
};

template <class Type>
__global__ __launch_bounds__(kTopkThreads,
                             2) void top_k_kernel(const __grid_constant__ TopkParams p,
                                                  const bool pairs_in_workspace) {
  using Bits = typename Type::Bits;
  extern __shared__ __align__(16) uint8_t memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const uint32_t k = static_cast<uint32_t>(p.k);
  const bool sorted = p.order == Order::kScore;
  uint64_t* pairs = shared.pairs;
  if (pairs_in_workspace) {
    pairs = static_cast<uint64_t*>(p.workspace) + blockIdx.x * next_power_of_two(p.k);
  }

  for (int64_t r = blockIdx.x; r < p.rows; r += gridDim.x) {
    const KeyRange range = clamp_range(p.starts[r], p.ends[r], p.keys);
    const uint32_t size = range.size(), count = min(size, k);
    const DividedRow<ValueSource<Type>> row{{static_cast<const Bits*>(p.x) + r * p.row_stride},
                                            static_cast<uint32_t>(range.start),
                                            static_cast<uint32_t>(range.end),
                                            TopkGroup::kWarps};
    const TopkRow<Type> out(p, r);

    const Threshold threshold =
        size <= k ? choose_all(size)
                  : radix_select<TopkGroup, Type::kBits, kCtaDigitBits>(row, k, shared.histogram);
    collect<TopkGroup>(row, threshold, shared.ranks,
                       [&](uint32_t position, uint32_t key, int32_t index) {
                         if (sorted) {
                           pairs[position] = make_pair(key, index);
                         } else {
                           out.put(position, key, index);
                         }
                       });
    if (sorted) {
      uint32_t padded = 1;
      while (padded < count) padded *= 2;
      for (uint32_t i = count + threadIdx.x; i < padded; i += kTopkThreads) pairs[i] = kNoPair;
      sort_descending(pairs, padded);
      for (uint32_t i = threadIdx.x; i < count; i += kTopkThreads) {
        out.put(i, pair_key(pairs[i]), pair_index(pairs[i]));
      }
      __syncthreads();  // before the next row's pairs
    }
    out.put_tail(count, k, threadIdx.x, kTopkThreads);
  }
}

template <class Type>
cudaError_t launch(const TopkParams& p, cudaStream_t stream) {
  const int64_t workspace_ctas = top_k_workspace_ctas(p.rows, p.k, p.order);
  size_t bytes = sizeof(Shared);
  if (p.order == Order::kScore && workspace_ctas == 0) {
    bytes += next_power_of_two(p.k) * sizeof(uint64_t);
  }
  Residency residency;
  const cudaError_t error = prepare(top_k_kernel<Type>, kTopkThreads, bytes, residency);
  if (error != cudaSuccess) return error;
  int64_t ctas = min64(p.rows, int64_t{residency.sms} * residency.ctas_per_sm);
  if (workspace_ctas > 0) ctas = min64(ctas, workspace_ctas);
  top_k_kernel<Type>
      <<<static_cast<unsigned>(ctas), kTopkThreads, bytes, stream>>>(p, workspace_ctas > 0);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_top_k_radix(const TopkParams& params, cudaStream_t stream) {
  return with_element(params.element,
                      [&](auto type) { return launch<decltype(type)>(params, stream); });
}

}  // namespace jax_fused_topk
