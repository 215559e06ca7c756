// The end of index_topk when a row's keys were scored by several CTAs.
//
// Algorithm.  The splits of a row ascend in index, and so does each split's
// buffer, so their concatenation is one candidate list for select.cuh: threshold,
// then a stable compaction, into the outputs or, for Order::kScore, into pairs that
// are sorted.
//
// Roles.  A CTA of 32 warps takes a row at a time; a warp takes splits, or parts of
// splits when there are fewer of them than warps.
//
// Shared memory: 8 KiB histogram, 4 KiB ranks and counts, 8 next_power_of_two(K)
// bytes of pairs for Order::kScore: 44 KiB at most.

#include <cuda_runtime.h>

#include "cuda/candidates.cuh"
#include "cuda/launch.h"
#include "cuda/limits.h"
#include "cuda/merge_splits.h"
#include "cuda/row_output.cuh"
#include "cuda/select.cuh"

namespace jax_fused_topk {
namespace {

using MergeGroup = Group<kMergeThreads / 32>;
static_assert(kMaxSlots >= 2 * MergeGroup::kWarps, "divided splits must fit in the ranks");

struct Shared {
  uint32_t histogram[1 << kCtaDigitBits];
  SegmentRanks<kMaxSlots> ranks;
  uint32_t counts[kMaxSlots];    // candidates of a split
  alignas(8) uint64_t pairs[1];  // [next_power_of_two(K)]
};

// The candidates of all splits of a row.
struct SplitRow {
  const IndexTopkParams& p;
  int64_t first_slot;
  uint32_t capacity;
  int row, splits, parts;  // a segment is one of `parts` parts of a split
  const uint32_t* counts;

  __device__ __forceinline__ int count() const { return splits * parts; }
  __device__ __forceinline__ Segment<CandidateSource> segment(int s) const {
    const int split = s / parts, part = s % parts;
    const Slot slot = Slot::at(p, capacity, first_slot + split);
    const uint32_t size = counts[split];
    return {{slot.keys(row), slot.indices(row)}, size * part / parts, size * (part + 1) / parts};
  }
};

__global__ __launch_bounds__(kMergeThreads) void merge_splits_kernel(
    const __grid_constant__ IndexTopkParams p, const __grid_constant__ IndexTopkPlan plan) {
  extern __shared__ __align__(16) uint8_t memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const int64_t rows = p.in.batch * p.in.queries;
  for (int64_t r = blockIdx.x; r < rows; r += gridDim.x) {
    const RowOutput out(p, r);
    const KeyRange range = row_range(p.in, r);
    if (needs_no_scores(p, range)) {
      out.put_range(range, threadIdx.x, kMergeThreads);
      continue;
    }
    const int64_t batch = r / p.in.queries, query = r % p.in.queries;
    // As run_item numbers its items.
    const int64_t block = (plan.blocks_per_batch - 1 - query / kQueryTile) * p.in.batch + batch;
    SplitRow row{p,
                 block * plan.splits,
                 plan.capacity,
                 static_cast<int>(query % kQueryTile),
                 plan.splits,
                 (MergeGroup::kWarps + plan.splits - 1) / plan.splits,
                 shared.counts};

    __syncthreads();  // the last row is done with shared memory
    for (int s = threadIdx.x; s < plan.splits; s += kMergeThreads) {
      shared.counts[s] = Slot::at(p, plan.capacity, row.first_slot + s).counts()[row.row];
    }
    __syncthreads();
    uint32_t total = 0;
    for (int s = lane_id(); s < plan.splits; s += 32) total += shared.counts[s];
    total = __reduce_add_sync(kFullWarp, total);

    const uint32_t topk = static_cast<uint32_t>(p.topk);
    const Threshold threshold =
        total <= topk ? choose_all(total)
                      : radix_select<MergeGroup, 32, kCtaDigitBits>(row, topk, shared.histogram);
    const uint32_t count = min(total, topk);
    const bool sorted = p.order == Order::kScore;
    collect<MergeGroup>(row, threshold, shared.ranks,
                        [&](uint32_t position, uint32_t key, int32_t index) {
                          if (sorted) {
                            shared.pairs[position] = make_pair(key, index);
                          } else {
                            out.put(position, key, index);
                          }
                        });
    if (sorted) {
      put_sorted(out, shared.pairs, count);
    } else {
      out.put_tail(count, threadIdx.x, kMergeThreads);
    }
  }
}

}  // namespace

cudaError_t launch_merge_splits(const IndexTopkParams& params, const IndexTopkPlan& plan,
                                cudaStream_t stream) {
  size_t bytes = sizeof(Shared);
  if (params.order == Order::kScore) bytes += next_power_of_two(params.topk) * sizeof(uint64_t);
  Residency residency;
  const cudaError_t error = prepare(merge_splits_kernel, kMergeThreads, bytes, residency);
  if (error != cudaSuccess) return error;
  const int64_t rows = params.in.batch * params.in.queries;
  const int64_t ctas = int64_t{residency.sms} * residency.ctas_per_sm;
  merge_splits_kernel<<<static_cast<unsigned>(min64(rows, ctas)), kMergeThreads, bytes, stream>>>(
      params, plan);
  return cudaGetLastError();
}

}  // namespace jax_fused_topk
