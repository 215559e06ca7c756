// top_k of ready-made values for k <= kMaxFilterTopk, results in ascending index.
//
// Algorithm.  A row of n values takes one of three ways:
//   n <= k       copied;
//   n small      its keys go to shared memory, and the choice is made there;
//   otherwise    a sample gives a floor that somewhat more than k values reach; one
//                pass keeps those as candidates (filter.cuh), and the choice is made
//                among them.  If fewer than k reach it, once more without a floor.
// The sample decides only how many candidates come.  All that a row's result depends
// on is the row, and the places of the sample are a fixed function of n.
//
// Few long rows are cut into parts, a CTA each.  All CTAs of a row find the same
// floor by themselves, and leave their part's candidates in the workspace; the last
// to finish, by a counter, passes over them again and chooses.  None waits for another.
//
// Roles.  A CTA of 8 warps takes a row, or a part of one.
//
// Shared memory: FilterShared, the ends of the parts' candidates (2 KiB), and
// held_candidates(k) of 8 bytes, 48 KiB at k = 2048 and 32 KiB for short rows: 4 CTAs an SM, 5
// for short rows, 3 for rows in parts, whose code needs more than 64 registers.
// Workspace, for rows in parts: TopkParts in limits.h.

#include <cuda_runtime.h>

#include "cuda/element.cuh"
#include "cuda/filter.cuh"
#include "cuda/launch.h"
#include "cuda/limits.h"
#include "cuda/select.cuh"
#include "cuda/select_shared.cuh"
#include "cuda/top_k_filter.h"

namespace jax_fused_topk {
namespace {

// Values of a sample.
constexpr uint32_t kMinSample = 1024, kMaxSample = 8192;

// Of float32 rows of up to kMaxShortKeys, whose sample and choice take as long as the pass, one
// more CTA runs on an SM: its tiles are smaller.
enum class Way { kShort, kLong, kParts };

template <class Type>
constexpr bool kHasShort = sizeof(typename Type::Bits) == 4;
template <class Type, Way kWay>
using TilesOf = RowTiles<Type, kHasShort<Type> && kWay != Way::kShort ? 3 : 2>;
// CTAs that the registers of an SM must hold.
template <Way kWay>
constexpr int kResident = kWay == Way::kShort  ? 5
                          : kWay == Way::kLong ? 4
                                               : 3;

// Candidates that a CTA holds.
template <class Type, Way kWay>
JFT_HOST_DEVICE int64_t held_candidates(const TopkParts& plan, int64_t k) {
  if (kWay != Way::kShort) return plan.capacity;
  return max64(ceil_div(k, 4) * 4 + TilesOf<Type, kWay>::kTile, kMaxSample / 2);
}

// The sample of a row of n values has about n / kSampled of them.  In parts each CTA takes it,
// but one alone has all candidates to choose from; a short row has less room for too many.
template <Way kWay>
constexpr uint32_t kSampled = kWay == Way::kLong ? 64 : 32;

static_assert(kMaxSample <= 2 * kFilterTile, "the sample must fit in shared memory");

// Rows of so many values are chosen from directly, and so are those of up to 2 k.
constexpr uint32_t kMaxDirect = 5120;
static_assert(kMaxDirect <= 2 * kFilterTile, "the keys must fit in shared memory");
static_assert(kMaxDirect >= 2 * kMinSample, "a stratum must hold a vector");

struct Shared {
  FilterShared filter;
  uint32_t part_ends[2][kMaxTopkParts];  // of both lists: what this part and those before have
  bool last;
  alignas(16) uint2 candidates[2];  // [capacity]; or keys, uint32 [2 * capacity]
};

// A part's place in the workspace: two lists, each in ascending index.  First what is
// above the floor, then what is equal to it: of that there may be any number, and as
// the first few are wanted at most, the last CTA need not read all.
struct Part {
  uint64_t* pairs;  // [capacity], index << 32 | key
  __device__ __forceinline__ void put(uint32_t i, uint32_t key, int32_t index) const {
    pairs[i] = static_cast<uint64_t>(static_cast<uint32_t>(index)) << 32 | key;
  }
  __device__ __forceinline__ uint32_t key(uint32_t i) const {
    return static_cast<uint32_t>(pairs[i]);
  }
  __device__ __forceinline__ int32_t index(uint32_t i) const {
    return static_cast<int32_t>(pairs[i] >> 32);
  }
};

// Candidates of a part that are equal to the floor.
struct Ties {
  const Candidates& candidates;
  uint32_t floor;
  __device__ __forceinline__ uint32_t key(uint32_t i) const { return candidates.key(i) == floor; }
  __device__ __forceinline__ int32_t index(uint32_t i) const { return candidates.index(i); }
};
struct TiesPart {
  Part part;
  uint32_t above, floor;
  __device__ __forceinline__ void put(uint32_t i, uint32_t, int32_t index) const {
    part.put(above + i, floor, index);
  }
};

// The first `size` candidates in one of the lists of all parts of a row.
struct PartTiles {
  static constexpr int kLoads = 2, kPerLoad = 4;
  static constexpr uint32_t kTile = kLoads * kPerLoad * kFilterThreads;
  struct Tile {
    uint64_t pairs[kLoads * kPerLoad];
  };
  using Keys = Tile;

  const uint64_t* pairs;  // [parts][capacity]
  uint32_t capacity;
  const uint32_t (*ends)[kMaxTopkParts];
  int list, parts;
  uint32_t size;

  __device__ __forceinline__ uint32_t count() const { return (size + kTile - 1) / kTile; }
  __device__ __forceinline__ bool whole(uint32_t t) const { return (t + 1) * kTile <= size; }
  // What a list has before a part.
  __device__ __forceinline__ uint32_t begin(int list, int part) const {
    return part == 0 ? 0 : ends[list][part - 1];
  }
  __device__ __forceinline__ uint32_t position(uint32_t t, int e) const {
    return t * kTile + threadIdx.x / 32 * (32 * kLoads * kPerLoad) +
           e / kPerLoad * (32 * kPerLoad) + lane_id() * kPerLoad + e % kPerLoad;
  }
  __device__ __forceinline__ uint32_t inside(uint32_t t) const {
    uint32_t mask = 0;
#pragma unroll
    for (int e = 0; e < kLoads * kPerLoad; ++e) {
      mask |= static_cast<uint32_t>(position(t, e) < size) << e;
    }
    return mask;
  }
  __device__ __forceinline__ void load(uint32_t t, Tile& tile) const {
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      uint32_t i = position(t, j * kPerLoad);
      // The first part that ends behind i.
      int part = 0;
      for (int above = parts - 1; part < above;) {
        const int middle = (part + above) / 2;
        if (ends[list][middle] > i) {
          above = middle;
        } else {
          part = middle + 1;
        }
      }
#pragma unroll
      for (int c = 0; c < kPerLoad; ++c, ++i) {
        if (i < size) {
          while (ends[list][part] <= i) ++part;
          const uint32_t skipped = list == 0 ? 0 : ends[0][part] - begin(0, part);
          // Other SMs wrote it: not through L1.
          tile.pairs[j * kPerLoad + c] =
              __ldcg(pairs + int64_t{part} * capacity + (skipped + i - begin(list, part)));
        }
      }
    }
  }
  __device__ __forceinline__ Keys keys(const Tile& tile) const { return tile; }
  __device__ __forceinline__ uint32_t key(const Keys& tile, int e) const {
    return static_cast<uint32_t>(tile.pairs[e]);
  }
  __device__ __forceinline__ int32_t index(const Keys& tile, uint32_t, int e) const {
    return static_cast<int32_t>(tile.pairs[e] >> 32);
  }
};

// All keys of a short row, at the row's own positions.
template <class Tiles>
__device__ __forceinline__ void load_keys(const Tiles& row, uint32_t* keys) {
#pragma unroll 1
  for (uint32_t t = 0; t < row.count(); ++t) {
    typename Tiles::Tile tile;
    row.load(t, tile);
#pragma unroll
    for (int j = 0; j < Tiles::kLoads; ++j) {
      const uint32_t first = (row.vector(t) + 32 * j) * Tiles::kPerLoad;
      if (first < row.end) put_keys<typename Tiles::Type>(tile.vectors[j], keys + first);
    }
  }
}

// Keys in shared memory whose index is their position and an offset.
struct KeySource : SharedKeys {
  int32_t index_of_first;
  __device__ __forceinline__ int32_t index(uint32_t i) const {
    return index_of_first + static_cast<int32_t>(i);
  }
};

// A row of n <= k values.
template <class Type, class Row>
__device__ __forceinline__ void copy_row(const typename Type::Bits* x, const KeyRange& range,
                                         uint32_t k, const Row& out) {
  const uint32_t size = range.size();
  for (uint32_t i = threadIdx.x; i < size; i += kFilterThreads) {
    const int32_t index = range.start + static_cast<int32_t>(i);
    out.put(i, Type::key(x[index]), index);
  }
  out.put_tail(size, k, threadIdx.x, kFilterThreads);
}

// A row whose keys fit in shared memory.
template <class Tiles, class Row>
__device__ __forceinline__ void choose_directly(const Tiles& row, uint32_t k, uint32_t* keys,
                                                FilterShared& shared, const Row& out) {
  shared.select.histogram[threadIdx.x] = make_uint4(0, 0, 0, 0);
  load_keys(row, keys);
  __syncthreads();
  const KeySource source{{keys}, row.index_of_first};
  const Threshold threshold = select_shared(source, row.begin, row.end, k, 0, shared.select);
  put_chosen(source, row.begin, row.end, threshold, shared, out);
}

// A key that at least k of the row's n keys reach, very likely, and not many more.
// The sample: a vector from each of equal strata of the row, at a hashed place.  Its
// rank is 4 deviations above the expected one.
template <Way kWay, class Tiles>
__device__ __forceinline__ uint32_t sample_floor(const Tiles& row, uint32_t k, uint32_t* keys,
                                                 FilterShared& shared) {
  constexpr uint32_t kPerVector = Tiles::kPerLoad;
  const uint32_t n = row.end - row.begin;
  uint32_t size = kMinSample;
  while (size < kMaxSample && 2 * size <= n / kSampled<kWay>) size *= 2;
  const uint32_t strata = size / kPerVector;
  const int log_strata = __popc(strata - 1);
  // Vectors wholly inside the row.
  const uint32_t first = row.begin > 0, vectors = row.end / kPerVector - first;
#pragma unroll 4
  for (uint32_t s = threadIdx.x; s < strata; s += kFilterThreads) {
    const uint32_t jitter = s * 0x9E3779B1u >> 16;
    const uint32_t place = static_cast<uint32_t>(
        static_cast<uint64_t>(s << 16 | jitter) * vectors >> (16 + log_strata));
    put_keys<typename Tiles::Type>(__ldg(row.vectors + first + place), keys + s * kPerVector);
  }
  __syncthreads();
  const float share = static_cast<float>(k) / static_cast<float>(n);
  const float expected = size * share;
  const uint32_t rank = static_cast<uint32_t>(expected + 4 * sqrtf(expected * (1 - share)) + 4);
  if (rank >= size) return 0;
  return select_shared(SharedKeys{keys}, 0, size, rank, rank / 16, shared.select).key;
}

// Chooses among the candidates.
template <class Store>
__device__ __forceinline__ void choose(const Candidates& candidates, uint32_t count, uint32_t k,
                                       FilterShared& shared, const Store& out) {
  const Threshold threshold =
      count <= k ? choose_all(count) : select_shared(candidates, 0, count, k, 0, shared.select);
  put_chosen(candidates, 0, count, threshold, shared, out);
}

// Leaves a part's candidates in the workspace.  True in the last CTA of a row.
__device__ __forceinline__ bool leave_part(const Candidates& candidates, uint32_t count,
                                           uint32_t floor, const Part& part, uint32_t* part_counts,
                                           uint32_t* done, uint32_t parts, Shared& shared) {
  const uint32_t above = put_chosen(candidates, 0, count, {floor, 0}, shared.filter, part);
  const uint32_t ties = put_chosen(Ties{candidates, floor}, 0, count, {0, 0}, shared.filter,
                                   TiesPart{part, above, floor});
  if (threadIdx.x == 0) {
    part_counts[0] = above;
    part_counts[1] = ties;
  }
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) shared.last = atomicAdd(done, 1) == parts - 1;
  __syncthreads();
  __threadfence();
  return shared.last;
}

// The running sums of the parts' counts, by a warp for each list.
__device__ __forceinline__ void sum_parts(const uint32_t* counts, int parts, Shared& shared) {
  const int list = threadIdx.x / 32;
  if (list < 2) {
    uint32_t before = 0;
    for (int base = 0; base < parts; base += 32) {
      const int s = base + lane_id();
      const uint32_t upto = before + sum_to_lane(s < parts ? __ldcg(counts + 2 * s + list) : 0);
      if (s < parts) shared.part_ends[list][s] = upto;
      before = __shfl_sync(kFullWarp, upto, 31);
    }
  }
  __syncthreads();
}

// Puts candidates [0, above) and [above, count), each in ascending index, as one list.
template <class Store>
__device__ __forceinline__ void interleave(const Candidates& candidates, uint32_t above,
                                           uint32_t count, const Store& out) {
  for (uint32_t i = threadIdx.x; i < count; i += kFilterThreads) {
    const int32_t index = candidates.index(i);
    // How many of the other list come before it.
    const uint32_t first = i < above ? above : 0;
    uint32_t low = first, high = i < above ? count : above;
    while (low < high) {
      const uint32_t middle = (low + high) / 2;
      if (candidates.index(middle) < index) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    const uint32_t before = i < above ? i : i - above;
    out.put(before + low - first, candidates.key(i), index);
  }
}

// In the last CTA of a row: chooses among all parts' candidates.  False if they are
// fewer than k.
template <class MakeStore>
__device__ __forceinline__ bool choose_of_parts(const uint64_t* pairs, const uint32_t* counts,
                                                int parts, uint32_t k, const Candidates& candidates,
                                                Shared& shared, const MakeStore& out) {
  sum_parts(counts, parts, shared);
  const uint32_t above = shared.part_ends[0][parts - 1], ties = shared.part_ends[1][parts - 1];
  if (above + ties < k) return false;
  uint32_t count = 0;
#pragma unroll 1
  for (int list = 0; list < 2 && count < k; ++list) {
    const PartTiles tiles{pairs, candidates.capacity,          shared.part_ends, list,
                          parts, list == 0 ? above : k - above};
    count = filter(tiles, 0, k, candidates, count, shared.filter, out);
  }
  if (above < k) {
    interleave(candidates, above, k, out());
  } else {
    choose(candidates, count, k, shared.filter, out());
  }
  return true;
}

// The CTA's row and its part of it.  Read anew wherever it is needed: registers are
// what the pass over a row is short of.
template <Way kWay>
__device__ __forceinline__ int64_t cta_row() {
  return kWay == Way::kParts ? int64_t{blockIdx.y} : int64_t{blockIdx.y} * gridDim.x + blockIdx.x;
}
template <Way kWay>
__device__ __forceinline__ uint32_t cta_part() {
  return kWay == Way::kParts ? blockIdx.x : 0;
}

template <Way kWay>
__device__ __forceinline__ KeyRange cta_range(const TopkParams& p) {
  const int64_t r = cta_row<kWay>();
  return clamp_range(p.starts[r], p.ends[r], p.keys);
}

// Row: TopkRow or IndexRow.
template <class Type, class Row, Way kWay>
__global__ __launch_bounds__(kFilterThreads, kResident<kWay>) void top_k_filter_kernel(
    const __grid_constant__ TopkParams p, const __grid_constant__ TopkParts plan) {
  using Bits = typename Type::Bits;
  extern __shared__ __align__(16) uint8_t memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const Candidates candidates{shared.candidates,
                              static_cast<uint32_t>(held_candidates<Type, kWay>(plan, p.k))};
  uint32_t* const keys = reinterpret_cast<uint32_t*>(shared.candidates);
  const uint32_t k = static_cast<uint32_t>(p.k);
  if (cta_row<kWay>() >= p.rows) return;
  const auto values = [&] {
    return static_cast<const Bits*>(p.x) + cta_row<kWay>() * p.row_stride;
  };
  const auto out = [&] { return Row(p, cta_row<kWay>()); };
  const KeyRange range = cta_range<kWay>(p);
  const uint32_t size = range.size();
  const TilesOf<Type, kWay> row(values(), range);
  if (size <= k || row.end <= max(kMaxDirect, 2 * k)) {
    if (cta_part<kWay>() == 0) {
      if (size <= k) {
        copy_row<Type>(values(), range, k, out());
      } else {
        choose_directly(row, k, keys, shared.filter, out());
      }
    }
    return;
  }

  shared.filter.select.histogram[threadIdx.x] = make_uint4(0, 0, 0, 0);
  uint32_t floor = sample_floor<kWay>(row, k, keys, shared.filter);
  if constexpr (kWay == Way::kParts) {
    const uint32_t parts = static_cast<uint32_t>(plan.parts);
    const auto part = [&](uint32_t s) {
      return Part{plan.pairs(p.workspace) + (cta_row<kWay>() * plan.parts + s) * plan.capacity};
    };
    const auto counts = [&] { return plan.counts(p.workspace) + 2 * cta_row<kWay>() * plan.parts; };
    const auto bound = [&](uint32_t s) {
      return range.start + static_cast<int32_t>(uint64_t{size} * s / parts);
    };
    const TilesOf<Type, kWay> piece(values(), {bound(blockIdx.x), bound(blockIdx.x + 1)});
    const uint32_t count =
        filter(piece, floor, k, candidates, 0, shared.filter, [&] { return part(blockIdx.x); });
    if (!leave_part(candidates, count, floor, part(blockIdx.x), counts() + 2 * blockIdx.x,
                    plan.done(p.workspace) + cta_row<kWay>(), parts, shared)) {
      return;
    }
    if (choose_of_parts(part(0).pairs, counts(), parts, k, candidates, shared, out)) return;
    floor = 0;
  }
  uint32_t count;
  while (true) {
    const TilesOf<Type, kWay> row(values(), cta_range<kWay>(p));
    count = filter(row, floor, k, candidates, 0, shared.filter, out);
    if (count >= k) break;
    floor = 0;  // it was too high
  }
  choose(candidates, count, k, shared.filter, out());
}

template <class Type, class Row, Way kWay>
cudaError_t launch(const TopkParams& p, const TopkParts& plan, cudaStream_t stream) {
  const size_t bytes = sizeof(Shared) + held_candidates<Type, kWay>(plan, p.k) * sizeof(uint2);
  const auto kernel = top_k_filter_kernel<Type, Row, kWay>;
  Residency residency;
  cudaError_t error = prepare(kernel, kFilterThreads, bytes, residency);
  if (error != cudaSuccess) return error;
  dim3 grid = row_grid(p.rows);
  if (kWay == Way::kParts) {
    error = cudaMemsetAsync(plan.done(p.workspace), 0, p.rows * sizeof(uint32_t), stream);
    if (error != cudaSuccess) return error;
    grid = dim3(static_cast<unsigned>(plan.parts), static_cast<unsigned>(p.rows));
  }
  kernel<<<grid, kFilterThreads, bytes, stream>>>(p, plan);
  return cudaGetLastError();
}

template <class Type, class Row>
cudaError_t launch(const TopkParams& p, cudaStream_t stream) {
  const TopkParts plan(p.rows, p.keys, p.k);
  if (p.workspace_bytes < plan.bytes()) return cudaErrorInvalidValue;
  if (plan.parts > 1) return launch<Type, Row, Way::kParts>(p, plan, stream);
  if constexpr (kHasShort<Type>) {
    if (p.keys <= kMaxShortKeys) return launch<Type, Row, Way::kShort>(p, plan, stream);
  }
  return launch<Type, Row, Way::kLong>(p, plan, stream);
}

}  // namespace

cudaError_t launch_top_k_filter(const TopkParams& params, cudaStream_t stream) {
  if (params.values == nullptr) {
    // Only index_topk leaves them out.
    if (params.element != Element::kF32) return cudaErrorInvalidValue;
    return launch<Float32, IndexRow<Float32>>(params, stream);
  }
  return with_element(params.element, [&](auto type) {
    using Type = decltype(type);
    return launch<Type, TopkRow<Type>>(params, stream);
  });
}

}  // namespace jax_fused_topk
