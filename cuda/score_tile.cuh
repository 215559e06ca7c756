// The scores of 16 queries x 256 keys on mma.sync, "heads in time": shared by
// index_scores and index_topk, so that their scores agree bit for bit.
//
// Algorithm.  For head h = 0, 1, ... the CTA forms D = Q[h] (16 queries, M) x
// keys (N) over the whole of D, and then sums[i] += w[query, h] * relu(D[i]).  An
// accumulator of a lane is always the same (query, key), so the sum over heads is
// one FMA each, without shuffles, and its order is h = 0 .. H-1.  A score depends
// on its query, its key and nothing else: not on the tile, nor on the neighbours.
//
// Roles.  8 warps; a warp owns 32 keys (16 when D > 128) and keeps their B
// fragments in registers for all heads.  All warps read the same A fragments: q
// streams through shared memory as raw bytes, in a ring of 3 stages filled by
// cp.async, one __syncthreads a stage.
//
// Order of k.  An MMA sums over k, so any order that A and B share is right.  A
// row is cut into chunks of 64 bytes and lane t of a quad takes bytes 16t..16t+15
// of each: one 16-byte load, from global memory for a key, from shared memory for
// a query.  Its words are the fragments of consecutive k16 steps:
//   FP8:  word j, bytes 0-1 -> k slots 2t, 2t+1; bytes 2-3 -> 2t+8, 2t+9 of step j
//   BF16: words 2j and 2j+1 -> the same slots of step j
//
// Shared memory of a stage (16 KiB): [head][query 0..15][row bytes], 16-byte units
// swizzled by XOR of unit bit 2 with the query's lowest bit: the 8 lanes of an
// LDS.128 phase (2 queries x 64 bytes) then meet all 32 banks.
//
// Registers (D <= 128): 64 B fragments, 16 accumulators, 16 sums, 8-24 A
// fragments; 128 at most, for two CTAs on an SM.

#ifndef JAX_FUSED_TOPK_CUDA_SCORE_TILE_CUH_
#define JAX_FUSED_TOPK_CUDA_SCORE_TILE_CUH_

#include <cstdint>

#include "cuda/limits.h"
#include "cuda/ptx.cuh"
#include "ffi/contract.h"

namespace jax_fused_topk {

// Queries and keys of kElement, rows padded with zeros to kDimPad.
template <Element kElement, int kDimPad>
struct ScoreTile {
  static constexpr bool kFp8 = kElement == Element::kF8E4M3FN;
  static constexpr int kRowBytes = kDimPad * (kFp8 ? 1 : 2);
  static constexpr int kRowUnits = kRowBytes / 16;
  static constexpr int kChunks = kRowBytes / 64;
  static constexpr int kChunkSteps = kFp8 ? 4 : 2;
  static constexpr int kSteps = kChunks * kChunkSteps;
  static constexpr int kNTiles = kDimPad > 128 ? 2 : 4;  // of 8 keys, a warp
  static constexpr int kWarpKeys = 8 * kNTiles;
  static constexpr int kTileKeys = kWarpKeys * kScoreWarps;
  static constexpr int kStageHeads = kStageBytes / (kQueryTile * kRowBytes);
  static constexpr int kStageUnits = kStageBytes / 16;

  static_assert(kElement == Element::kF8E4M3FN || kElement == Element::kBF16);
  static_assert(kDimPad == 64 || kDimPad == 128 || kDimPad == 256);
  static_assert(kSteps * 16 == kDimPad, "the chunks must cover the row in k16 steps");
  static_assert(kTileKeys <= kMaxTileKeys);
  static_assert(kStageHeads >= 1 && kStageHeads * kQueryTile * kRowBytes == kStageBytes);
  static_assert(kStageUnits % kScoreThreads == 0);
};

// Four e4m3 bytes -> two f16x2, exactly; NaN stays NaN.
__device__ __forceinline__ void f16_from_e4m3(uint32_t bytes, uint32_t& low, uint32_t& high) {
#if __CUDA_ARCH__ >= 890
  low = ptx::cvt_f16x2_e4m3x2(static_cast<uint16_t>(bytes));
  high = ptx::cvt_f16x2_e4m3x2(static_cast<uint16_t>(bytes >> 16));
#else
  // sEEEEmmm moved to s0EEEEmmm0000000 is the value times 2**-8, denormals too.
  // Only the NaN 0x7F carries into bit 14 when one unit is added; that bit makes
  // it an f16 NaN.
  const auto convert = [](uint32_t pair) {
    const uint32_t magnitude = (pair >> 1) & 0x3F803F80u;
    const uint32_t nan = (magnitude + 0x00800080u) & 0x40004000u;
    constexpr uint32_t k256x2 = 0x5C005C00u;
    return ptx::mul_f16x2((pair & 0x80008000u) | magnitude | nan, k256x2);
  };
  low = convert(ptx::prmt(bytes, 0, 0x1404));
  high = convert(ptx::prmt(bytes, 0, 0x3424));
#endif
}

// What a work item scores.  It lies in shared memory and is read where it is used:
// the head loop leaves no registers for it.
struct ScoreBlock {
  const uint8_t* q;      // the first query's [H, D]
  const uint8_t* k;      // the batch entry's [N, D]
  const float* k_scale;  // [N]
  int queries;           // of the block; those beyond read as zeros
  int heads, row_bytes;  // of D elements
  uint32_t keys;         // N; keys beyond read as zeros
};

struct ScoreShared {
  alignas(128) uint8_t ring[kStages * kStageBytes];
  ScoreBlock block;
};

// One thread fills in the block that starts at row `first_row` of [B * Q].
__device__ __forceinline__ void set_block(ScoreBlock& block, const IndexInputs& in, int64_t batch,
                                          int64_t first_row, int queries) {
  const int element_bytes = in.element == Element::kF8E4M3FN ? 1 : 2;
  const int64_t row_bytes = in.dim * element_bytes;
  block.q = static_cast<const uint8_t*>(in.q) + first_row * in.heads * row_bytes;
  block.k = static_cast<const uint8_t*>(in.k) + batch * in.keys * row_bytes;
  block.k_scale = in.k_scale + batch * in.keys;
  block.queries = queries;
  block.heads = static_cast<int>(in.heads);
  block.row_bytes = static_cast<int>(row_bytes);
  block.keys = static_cast<uint32_t>(in.keys);
}

// The ring that brings q of a block to shared memory, heads in order and over
// again for every tile.  All threads of the CTA call every method together.
template <class Tile>
class QueryStream {
 public:
  __device__ __forceinline__ void start(ScoreShared& shared) {
    slot_ = 0;
    next_head_ = 0;
#pragma unroll
    for (int s = 0; s < kStages - 1; ++s) fill(shared, s);
  }

  // Waits for the next stage and returns its address.  It stays valid until the
  // next call: that one's barrier is what frees it.
  __device__ __forceinline__ uint32_t next(ScoreShared& shared) {
    ptx::cp_async_wait_group<kStages - 2>();
    __syncthreads();
    fill(shared, slot_ == 0 ? kStages - 1 : slot_ - 1);  // read by all before the barrier
    const uint32_t stage = ptx::smem_address(shared.ring) + slot_ * kStageBytes;
    slot_ = slot_ == kStages - 1 ? 0 : slot_ + 1;
    return stage;
  }

  // Waits for what is in flight; afterwards the ring's memory is free.
  __device__ __forceinline__ void drain() {
    ptx::cp_async_wait_group<0>();
    __syncthreads();
  }

 private:
  __device__ __forceinline__ void fill(ScoreShared& shared, int slot) {
    const ScoreBlock& block = shared.block;
    const uint32_t stage = ptx::smem_address(shared.ring) + slot * kStageBytes;
    // Read anew each time, or the compiler keeps all of the addresses below in
    // registers.
    const int thread = static_cast<int>(ptx::tid_x());
#pragma unroll
    for (int i = 0; i < Tile::kStageUnits / kScoreThreads; ++i) {
      const int unit = i * kScoreThreads + thread;
      const int column = unit % Tile::kRowUnits;
      const int query = unit / Tile::kRowUnits % kQueryTile;
      const int head = next_head_ + unit / (Tile::kRowUnits * kQueryTile);
      const int swizzled = Tile::kRowUnits > 4 ? unit ^ ((query & 1) << 2) : unit;
      const bool inside =
          query < block.queries && head < block.heads && column * 16 < block.row_bytes;
      const int offset = (query * block.heads + head) * block.row_bytes + column * 16;
      ptx::cp_async_16(stage + swizzled * 16, block.q + (inside ? offset : 0), inside ? 16 : 0);
    }
    ptx::cp_async_commit_group();
    next_head_ += Tile::kStageHeads;
    if (next_head_ >= block.heads) next_head_ = 0;
  }
  static_assert(kQueryTile * kMaxHeads * kMaxDim * 2 < (int64_t{1} << 31),
                "a block's offsets are 32-bit");

  int slot_, next_head_;
};

// weights[h * 8 + g] = the weights of queries g and g + 8: one 8-byte load a head.
__device__ __forceinline__ void load_weights(float2* shared, const float* weights, int valid,
                                             int heads) {
  float* out = reinterpret_cast<float*>(shared);
  for (int i = threadIdx.x; i < kQueryTile * heads; i += kScoreThreads) {
    const int query = i / heads, head = i % heads;
    const float w = query < valid ? weights[static_cast<int64_t>(query) * heads + head] : 0.0f;
    out[(head * 8 + query % 8) * 2 + query / 8] = w;
  }
}

// The first key of the calling thread's warp in a tile.
template <class Tile>
__device__ __forceinline__ uint32_t warp_key(uint32_t tile, uint32_t thread) {
  return tile + thread / 32 * Tile::kWarpKeys;
}

// Scores the tile of keys from `tile` on: scores[j][2 * r + i] is that of query
// g + 8 r and key warp_key + 8 j + 2 t + i (g = lane / 4, t = lane % 4).  All warps
// of the CTA call it together.
template <class Tile>
__device__ __forceinline__ void score_tile(ScoreShared& shared, QueryStream<Tile>& stream,
                                           const float2* weights, uint32_t tile,
                                           float (&scores)[Tile::kNTiles][4]) {
  const ScoreBlock& block = shared.block;
  uint32_t b[Tile::kNTiles][Tile::kSteps][2];
#pragma unroll
  for (int j = 0; j < Tile::kNTiles; ++j) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const uint32_t key = warp_key<Tile>(tile, threadIdx.x) + 8 * j + g;
    const uint8_t* row = block.k + static_cast<int64_t>(key) * block.row_bytes;
#pragma unroll
    for (int c = 0; c < Tile::kChunks; ++c) {
      const int byte = c * 64 + t * 16;
      uint4 raw = make_uint4(0, 0, 0, 0);
      if (key < block.keys && byte < block.row_bytes) {
        raw = __ldg(reinterpret_cast<const uint4*>(row + byte));
      }
      const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
      for (int s = 0; s < Tile::kChunkSteps; ++s) {
        uint32_t (&fragment)[2] = b[j][c * Tile::kChunkSteps + s];
        if constexpr (Tile::kFp8) {
          f16_from_e4m3(words[s], fragment[0], fragment[1]);
        } else {
          fragment[0] = words[2 * s];
          fragment[1] = words[2 * s + 1];
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) scores[j][i] = 0.0f;
  }

#pragma unroll 1
  for (int head0 = 0; head0 < block.heads; head0 += Tile::kStageHeads) {
    const uint32_t stage = stream.next(shared);
    const int heads = min(Tile::kStageHeads, block.heads - head0);
    // Anew for each stage: cheaper than registers through the loop.
    const int lane = ptx::tid_x() % 32, g = lane / 4, t = lane % 4;
    // Chunk c of query g lies at c ^ (g & 1), and so does that of query g + 8.
    constexpr bool kSwizzled = Tile::kRowUnits > 4;
    uint32_t even = stage + g * Tile::kRowBytes + t * 16 + (kSwizzled ? (g & 1) * 64 : 0);
    const float2* weight = weights + head0 * 8 + g;
    const float2* const weight_end = weight + heads * 8;
#pragma unroll 1
    for (; weight != weight_end; weight += 8) {
      float acc[Tile::kNTiles][4];
#pragma unroll
      for (int j = 0; j < Tile::kNTiles; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[j][i] = 0.0f;
      }
#pragma unroll
      for (int c = 0; c < Tile::kChunks; ++c) {
        const uint32_t at = (c % 2 ? even ^ 64 : even) + c / 2 * 128;
        const uint4 upper = ptx::ld_shared_v4(at);
        const uint4 lower = ptx::ld_shared_v4(at + 8 * Tile::kRowBytes);
        const uint32_t words0[4] = {upper.x, upper.y, upper.z, upper.w};
        const uint32_t words1[4] = {lower.x, lower.y, lower.z, lower.w};
#pragma unroll
        for (int s = 0; s < Tile::kChunkSteps; ++s) {
          uint32_t a[4];
          if constexpr (Tile::kFp8) {
            f16_from_e4m3(words0[s], a[0], a[2]);
            f16_from_e4m3(words1[s], a[1], a[3]);
          } else {
            a[0] = words0[2 * s];
            a[1] = words1[2 * s];
            a[2] = words0[2 * s + 1];
            a[3] = words1[2 * s + 1];
          }
#pragma unroll
          for (int j = 0; j < Tile::kNTiles; ++j) {
            const uint32_t (&fragment)[2] = b[j][c * Tile::kChunkSteps + s];
            if constexpr (Tile::kFp8) {
              ptx::mma_m16n8k16_f16(acc[j], a, fragment[0], fragment[1]);
            } else {
              ptx::mma_m16n8k16_bf16(acc[j], a, fragment[0], fragment[1]);
            }
          }
        }
      }
      const float2 w = *weight;
#pragma unroll
      for (int j = 0; j < Tile::kNTiles; ++j) {
        scores[j][0] = fmaf(w.x, ptx::max_nan(acc[j][0], 0.0f), scores[j][0]);
        scores[j][1] = fmaf(w.x, ptx::max_nan(acc[j][1], 0.0f), scores[j][1]);
        scores[j][2] = fmaf(w.y, ptx::max_nan(acc[j][2], 0.0f), scores[j][2]);
        scores[j][3] = fmaf(w.y, ptx::max_nan(acc[j][3], 0.0f), scores[j][3]);
      }
      even += kQueryTile * Tile::kRowBytes;
    }
  }

  const uint32_t thread = ptx::tid_x();
  const uint32_t first = warp_key<Tile>(tile, thread) + thread % 4 * 2;
#pragma unroll
  for (int j = 0; j < Tile::kNTiles; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t key = first + 8 * j + i;
      const float scale = key < block.keys ? __ldg(block.k_scale + key) : 0.0f;
      scores[j][i] = scale * scores[j][i];
      scores[j][2 + i] = scale * scores[j][2 + i];
    }
  }
}

}  // namespace jax_fused_topk

#endif  // JAX_FUSED_TOPK_CUDA_SCORE_TILE_CUH_
