// Order::kScore of top_k: each row of results is sorted in place.
//
// Algorithm.  The span of the row's keys is cut into kBins equal bins.  A histogram
// gives each (key, ~index) pair (sort.cuh) its bin's place, and its rank within the
// bin is counted.  That is fast where bins are small.  If one holds more than
// kMaxBin pairs, the row is sorted by a bitonic network instead, whose time depends on
// nothing: pairs lie in registers, kPerThread neighbours a thread; partners are
// compared inside a thread at strides below kPerThread, by shuffles inside a warp,
// and through shared memory only across warps.
// All pairs differ, so the result depends neither on the way nor on how a row lay.
//
// Roles.  A CTA of 8 warps takes a row at a time.
//
// Shared memory: all pairs of the row once and the bins, 24 KiB at k = 2048.

#include <cuda_runtime.h>

#include "cuda/element.cuh"
#include "cuda/launch.h"
#include "cuda/limits.h"
#include "cuda/select.cuh"
#include "cuda/select_shared.cuh"
#include "cuda/sort.cuh"
#include "cuda/sort_rows.h"

namespace jax_fused_topk {
namespace {

constexpr int kThreads = 256;

// Padded, so that neighbours of a thread meet different banks.
template <int kPerThread>
using Exchange = uint64_t[kPerThread][kThreads + 16 / kPerThread];

__device__ __forceinline__ void swap_if(bool swap, uint64_t& a, uint64_t& b) {
  const uint64_t first = swap ? b : a;
  b = swap ? a : b;
  a = first;
}

// Partners of one thread at all strides below kPerThread and up to kFrom.
template <int kFrom, int kPerThread>
__device__ __forceinline__ void merge_in_thread(uint64_t (&pairs)[kPerThread], bool descending) {
#pragma unroll
  for (int stride = kFrom; stride > 0; stride /= 2) {
#pragma unroll
    for (int e = 0; e < kPerThread; ++e) {
      if ((e & stride) == 0) {
        swap_if((pairs[e] < pairs[e | stride]) == descending, pairs[e], pairs[e | stride]);
      }
    }
  }
}

// Sorts kThreads * kPerThread pairs in descending order.  Thread t begins with any
// pairs and ends with those from position t * kPerThread on.
template <int kPerThread>
__device__ __forceinline__ void sort_registers(uint64_t (&pairs)[kPerThread],
                                               Exchange<kPerThread>& exchange) {
  // Runs of 2, 4, ... kPerThread / 2 pairs, in turn descending and ascending.
#pragma unroll
  for (int size = 2; size < kPerThread; size *= 2) {
#pragma unroll
    for (int stride = size / 2; stride > 0; stride /= 2) {
#pragma unroll
      for (int e = 0; e < kPerThread; ++e) {
        if ((e & stride) == 0) {
          swap_if((pairs[e] < pairs[e | stride]) == ((e & size) == 0), pairs[e], pairs[e | stride]);
        }
      }
    }
  }
  // Runs of `threads` threads.
#pragma unroll 1
  for (int threads = 1; threads <= kThreads; threads *= 2) {
    const bool descending = (threadIdx.x & threads) == 0;
#pragma unroll 1
    for (int stride = threads / 2; stride >= 32; stride /= 2) {
      __syncthreads();
#pragma unroll
      for (int e = 0; e < kPerThread; ++e) exchange[e][threadIdx.x] = pairs[e];
      __syncthreads();
      const bool larger = ((threadIdx.x & stride) == 0) == descending;
#pragma unroll
      for (int e = 0; e < kPerThread; ++e) {
        const uint64_t other = exchange[e][threadIdx.x ^ stride];
        if ((other > pairs[e]) == larger) pairs[e] = other;
      }
    }
#pragma unroll 1
    for (int stride = min(threads / 2, 16); stride > 0; stride /= 2) {
      const bool larger = ((threadIdx.x & stride) == 0) == descending;
#pragma unroll
      for (int e = 0; e < kPerThread; ++e) {
        const uint64_t other = __shfl_xor_sync(kFullWarp, pairs[e], stride);
        if ((other > pairs[e]) == larger) pairs[e] = other;
      }
    }
    merge_in_thread<kPerThread / 2>(pairs, descending);
  }
}

constexpr int kBinsPerThread = 8;
constexpr uint32_t kBins = kBinsPerThread * kThreads;
constexpr uint32_t kMaxBin = 64;

template <int kPerThread>
struct Shared {
  uint32_t bins[kBins];  // pairs in a bin; then in those before it; at last up to it
  uint32_t low[kThreads / 32], high[kThreads / 32], sums[kThreads / 32];
  union {
    uint64_t pairs[kPerThread * kThreads];
    Exchange<kPerThread> exchange;
  };
};

// Replaces the pairs in each bin by those in the bins before it.  False, and nothing
// done, if a bin holds more than kMaxBin.
template <int kPerThread>
__device__ __forceinline__ bool sum_bins(Shared<kPerThread>& shared) {
  const int warp = threadIdx.x / 32;
  uint4* mine = reinterpret_cast<uint4*>(shared.bins + kBinsPerThread * threadIdx.x);
  const uint4 a = mine[0], b = mine[1];
  const uint32_t counts[kBinsPerThread] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
  uint32_t sum = 0, most = 0;
#pragma unroll
  for (int i = 0; i < kBinsPerThread; ++i) {
    sum += counts[i];
    most = max(most, counts[i]);
  }
  const uint32_t upto = sum_to_lane(sum);
  if (lane_id() == 31) shared.sums[warp] = upto;
  if (__syncthreads_or(most > kMaxBin)) return false;
  uint32_t before = upto - sum;
#pragma unroll
  for (int w = 0; w < kThreads / 32 - 1; ++w) {
    if (w < warp) before += shared.sums[w];
  }
  uint32_t starts[kBinsPerThread];
#pragma unroll
  for (int i = 0; i < kBinsPerThread; ++i) {
    starts[i] = before;
    before += counts[i];
  }
  mine[0] = make_uint4(starts[0], starts[1], starts[2], starts[3]);
  mine[1] = make_uint4(starts[4], starts[5], starts[6], starts[7]);
  return true;
}

// Sorts `count` pairs by bins: thread t begins with pairs t, t + kThreads, ... and the
// rest in kNoPair.  False, and nothing done, if a bin is too full.
template <class Type, int kPerThread>
__device__ __forceinline__ bool sort_by_bins(const uint64_t (&pairs)[kPerThread], uint32_t count,
                                             Shared<kPerThread>& shared, const TopkRow<Type>& out) {
  uint4* mine = reinterpret_cast<uint4*>(shared.bins + kBinsPerThread * threadIdx.x);
  mine[0] = mine[1] = make_uint4(0, 0, 0, 0);
  KeySpan span;
#pragma unroll
  for (int e = 0; e < kPerThread; ++e) {
    if (threadIdx.x + e * kThreads < count) span.add(pair_key(pairs[e]));
  }
  span.reduce<Group<kThreads / 32>>(shared.low, shared.high);
  // The highest key is in bin 0.
  const int shift = max(0, 32 - __clz(span.high - span.low) - __ffs(kBins) + 1);
  const auto bin = [&](uint64_t pair) { return (span.high - pair_key(pair)) >> shift; };

#pragma unroll
  for (int e = 0; e < kPerThread; ++e) {
    if (threadIdx.x + e * kThreads < count) atomicAdd(&shared.bins[bin(pairs[e])], 1u);
  }
  __syncthreads();
  if (!sum_bins(shared)) return false;
  __syncthreads();
  // In a bin the order of arrival: it does not last.
#pragma unroll
  for (int e = 0; e < kPerThread; ++e) {
    if (threadIdx.x + e * kThreads < count) {
      shared.pairs[atomicAdd(&shared.bins[bin(pairs[e])], 1u)] = pairs[e];
    }
  }
  __syncthreads();
  // From here on a thread takes places in bin order: a warp's bins are neighbours.
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < count; i += kThreads) {
    const uint64_t pair = shared.pairs[i];
    const uint32_t b = bin(pair), end = shared.bins[b];
    const uint32_t first = b == 0 ? 0 : shared.bins[b - 1];
    uint32_t rank = first;
    for (uint32_t other = first; other < end; ++other) rank += shared.pairs[other] > pair;
    out.put(rank, pair_key(pair), pair_index(pair));
  }
  return true;
}

template <class Type, int kPerThread>
__global__ __launch_bounds__(kThreads, kPerThread > 8 ? 3 : 4) void sort_rows_kernel(
    const __grid_constant__ TopkParams p) {
  extern __shared__ __align__(16) uint8_t memory[];
  Shared<kPerThread>& shared = *reinterpret_cast<Shared<kPerThread>*>(memory);
  const int64_t r = int64_t{blockIdx.y} * gridDim.x + blockIdx.x;
  if (r >= p.rows) return;
  const KeyRange range = clamp_range(p.starts[r], p.ends[r], p.keys);
  const uint32_t count = min(static_cast<uint32_t>(range.size()), static_cast<uint32_t>(p.k));
  if (count < 2) return;
  const TopkRow<Type> out(p, r);
  uint64_t pairs[kPerThread];
#pragma unroll
  for (int e = 0; e < kPerThread; ++e) {
    const uint32_t i = threadIdx.x + e * kThreads;
    pairs[e] = i < count ? make_pair(out.key(i), out.index(i)) : kNoPair;
  }
  // All have read their pairs before one is overwritten: both sorts begin with a barrier.
  if (sort_by_bins(pairs, count, shared, out)) return;
  sort_registers(pairs, shared.exchange);
  // Neighbours in one thread would be written in pieces: spread them again.
  __syncthreads();
#pragma unroll
  for (int e = 0; e < kPerThread; ++e) shared.exchange[e][threadIdx.x] = pairs[e];
  __syncthreads();
#pragma unroll
  for (int e = 0; e < kPerThread; ++e) {
    const uint32_t i = threadIdx.x + e * kThreads;
    const uint64_t pair = shared.exchange[i % kPerThread][i / kPerThread];
    if (i < count) out.put(i, pair_key(pair), pair_index(pair));
  }
}

template <class Type, int kPerThread>
cudaError_t launch(const TopkParams& p, cudaStream_t stream) {
  if constexpr (kPerThread * kThreads < kMaxFilterTopk) {
    if (p.k > kPerThread * kThreads) return launch<Type, 2 * kPerThread>(p, stream);
  }
  const auto kernel = sort_rows_kernel<Type, kPerThread>;
  constexpr size_t kBytes = sizeof(Shared<kPerThread>);
  Residency residency;
  const cudaError_t error = prepare(kernel, kThreads, kBytes, residency);
  if (error != cudaSuccess) return error;
  kernel<<<row_grid(p.rows), kThreads, kBytes, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_sort_rows(const TopkParams& params, cudaStream_t stream) {
  return with_element(params.element,
                      [&](auto type) { return launch<decltype(type), 1>(params, stream); });
}

}  // namespace jax_fused_topk
