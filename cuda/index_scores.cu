// index_scores: the unfused scorer, index_topk's arithmetic bit for bit.
//
// Algorithm.  A work item is 16 queries x 16 tiles of 256 keys (score_tile.cuh).
// Scores go straight from registers to the output, a quad writing 32 bytes of a
// row; a tile that no row of the block uses is filled with -inf unscored.
//
// Roles.  8 warps, all the same; a warp writes the keys it scored.
//
// Shared memory: 48 KiB ring, 128 bytes of ranges, 64 H bytes of weights: 52 KiB
// at H = 64, 64 KiB at most.

#include <cuda_runtime.h>

#include "cuda/hopper.h"
#include "cuda/index_scores.h"
#include "cuda/launch.h"
#include "cuda/limits.h"
#include "cuda/score_tile.cuh"

namespace jax_fused_topk {
namespace {

struct Shared {
  ScoreShared score;
  int64_t next_item;
  float* scores;  // the block's first row
  uint32_t end;   // of the item's keys
  KeyRange ranges[kQueryTile];
  alignas(8) float2 weights[1];  // [H][8]

  static size_t bytes(int64_t heads) { return sizeof(Shared) + heads * 8 * sizeof(float2); }
};

struct Plan {
  int64_t blocks_per_batch, chunks, items;
};

// The warp's part of a tile; masked where a row's range ends.
template <class Tile>
__device__ __forceinline__ void put_scores(const Shared& shared, uint32_t first,
                                           const float (&scores)[Tile::kNTiles][4]) {
  const int g = ptx::tid_x() % 32 / 4, t = ptx::tid_x() % 4;  // anew: few registers
  const uint32_t keys = shared.score.block.keys;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = g + 8 * r;
    if (row >= shared.score.block.queries) continue;
    const uint32_t start = shared.ranges[row].start, end = shared.ranges[row].end;
    float* out = shared.scores + static_cast<int64_t>(row) * keys;
#pragma unroll
    for (int n = 0; n < Tile::kNTiles * 2; ++n) {
      const uint32_t key = first + n / 2 * 8 + 2 * t + n % 2;
      if (key >= keys) continue;
      const uint32_t bits = canonical_score_bits(__float_as_uint(scores[n / 2][2 * r + n % 2]));
      out[key] = __uint_as_float(key >= start && key < end ? bits : kNegativeInf);
    }
  }
}

// A tile outside every row's range.
template <class Tile>
__device__ __forceinline__ void put_nothing(const Shared& shared, uint32_t tile) {
  const uint32_t keys = shared.score.block.keys;
  const uint32_t end = min(tile + Tile::kTileKeys, keys);
  for (int row = threadIdx.x / 32; row < shared.score.block.queries; row += kScoreWarps) {
    float* out = shared.scores + static_cast<int64_t>(row) * keys;
    for (uint32_t key = tile + threadIdx.x % 32; key < end; key += 32) {
      out[key] = __uint_as_float(kNegativeInf);
    }
  }
}

template <class Tile>
__device__ __forceinline__ void run_item(const IndexScoresParams& p, const Plan& plan,
                                         Shared& shared, int64_t item) {
  {
    const IndexInputs& in = p.in;
    const int64_t block = item / plan.chunks;
    const int64_t batch = block / plan.blocks_per_batch;
    // The last block first: with causal rows it is the longest.
    const int64_t query = (plan.blocks_per_batch - 1 - block % plan.blocks_per_batch) * kQueryTile;
    const int64_t first_row = batch * in.queries + query;
    const int valid = static_cast<int>(min64(kQueryTile, in.queries - query));
    const int heads = static_cast<int>(in.heads);
    const int row = threadIdx.x;
    if (row == 0) {
      set_block(shared.score.block, in, batch, first_row, valid);
      const int64_t first_key = item % plan.chunks * (kScoreItemTiles * Tile::kTileKeys);
      shared.end =
          static_cast<uint32_t>(min64(in.keys, first_key + kScoreItemTiles * Tile::kTileKeys));
      shared.scores = p.scores + first_row * in.keys;
    }
    if (row < kQueryTile) {
      shared.ranges[row] =
          row < valid ? clamp_range(in.starts[first_row + row], in.ends[first_row + row], in.keys)
                      : KeyRange{0, 0};
    }
    load_weights(shared.weights, in.weights + first_row * heads, valid, heads);
  }
  __syncthreads();

  QueryStream<Tile> stream;
  stream.start(shared.score);
  uint32_t tile = static_cast<uint32_t>(item % plan.chunks) * (kScoreItemTiles * Tile::kTileKeys);
#pragma unroll 1
  for (; tile < shared.end; tile += Tile::kTileKeys) {
    KeyRange range{0, 0};
    if (threadIdx.x % 32 < kQueryTile) range = shared.ranges[threadIdx.x % 32];
    const uint32_t range_start = range.start, range_end = range.end;
    const bool used = range_end > tile && range_start < tile + Tile::kTileKeys;
    if (!__any_sync(0xFFFFFFFFu, used)) {
      put_nothing<Tile>(shared, tile);
      continue;
    }
    float scores[Tile::kNTiles][4];
    score_tile(shared.score, stream, shared.weights, tile, scores);
    put_scores<Tile>(shared, warp_key<Tile>(tile, ptx::tid_x()), scores);
  }
  stream.drain();
}

template <class Tile>
__global__ __launch_bounds__(kScoreThreads, 2) void index_scores_kernel(
    const __grid_constant__ IndexScoresParams p, const __grid_constant__ Plan plan) {
  extern __shared__ __align__(128) uint8_t memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
#pragma unroll 1
  for (int64_t item = blockIdx.x; item < plan.items;) {
    __syncthreads();  // the last item is done with shared memory
    if (threadIdx.x == 0) shared.next_item = item + gridDim.x;
    run_item<Tile>(p, plan, shared, item);
    item = shared.next_item;
  }
}

template <Element kElement, int kDimPad>
cudaError_t launch(const IndexScoresParams& p, cudaStream_t stream) {
  using Tile = ScoreTile<kElement, kDimPad>;
  const size_t bytes = Shared::bytes(p.in.heads);
  Residency residency;
  const cudaError_t error = prepare(index_scores_kernel<Tile>, kScoreThreads, bytes, residency);
  if (error != cudaSuccess) return error;
  Plan plan;
  plan.blocks_per_batch = ceil_div(p.in.queries, kQueryTile);
  plan.chunks = ceil_div(p.in.keys, Tile::kTileKeys * kScoreItemTiles);
  plan.items = p.in.batch * plan.blocks_per_batch * plan.chunks;
  // Items differ in cost: let the hardware hand them out, and loop past its limit.
  constexpr int64_t kMaxGrid = int64_t{1} << 30;
  index_scores_kernel<Tile>
      <<<static_cast<unsigned>(min64(plan.items, kMaxGrid)), kScoreThreads, bytes, stream>>>(p,
                                                                                             plan);
  return cudaGetLastError();
}

template <Element kElement>
cudaError_t launch_element(const IndexScoresParams& p, cudaStream_t stream) {
  if (p.in.dim <= 64) return launch<kElement, 64>(p, stream);
  if (p.in.dim <= 128) return launch<kElement, 128>(p, stream);
  return launch<kElement, 256>(p, stream);
}

}  // namespace

cudaError_t launch_index_scores(const IndexScoresParams& params, cudaStream_t stream) {
  if (hopper::serves(params.in)) return hopper::launch_index_scores(params, stream);
  const IndexInputs& in = params.in;
  if (!index_supported(in.element, in.heads, in.dim, in.keys)) return cudaErrorInvalidValue;
  if (in.batch <= 0 || in.queries <= 0 || in.keys == 0) return cudaSuccess;
  return in.element == Element::kBF16 ? launch_element<Element::kBF16>(params, stream)
                                      : launch_element<Element::kF8E4M3FN>(params, stream);
}

}  // namespace jax_fused_topk
