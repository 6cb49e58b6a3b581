// The step that both kernels of tree_attention.cu repeat: a warp attends from 16 query rows (or a
// multiple of 16) to one tile of keys and values in shared memory, with an online softmax.
//
// A tile has 32 keys (16 for more than 128 dimensions, 8 if these are float32). Its rows have kDim
// elements, zeros beyond head_dim, and 16 bytes of padding. This makes an odd number of 16-byte
// chunks, so that the 8 rows of an ldmatrix lie in different banks.
//
// Registers follow the C fragment of mma.m16n8k16: of each 16 x 8 block, a lane holds rows lane / 4
// and lane / 4 + 8, columns 2 (lane % 4) and the next one. Products of 16-bit types are
// mma.m16n8k16; those of float32 are fused multiply-adds on the same fragments.
//
// The result of a query row depends on its own queries, the keys at each place of the tile and
// which of them it sees. All roundings outside mma are explicit, so that every instantiation and
// every place of a row in a block gives the same bits.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "specdec/device/cuda.cuh"
#include "specdec/math/tanh.h"
#include "specdec/tree_attention.h"

namespace specdec {

constexpr int kTileRows = 16;

template <typename Element, int kDimensions>
struct AttentionTile {
  using T = Element;
  static constexpr int kDim = kDimensions;
  static constexpr bool kIsFloat = sizeof(T) == 4;
  static constexpr int kChunk = 16 / sizeof(T);  // elements of a 16-byte copy
  static constexpr int kKeys = kDim <= 128 ? 32 : kIsFloat ? 8 : 16;
  static constexpr int kStride = kDim + kChunk;
  static constexpr int kElements = kKeys * kStride;  // of the keys, and of the values
  static constexpr int kKeyBlocks = kKeys / 8;
  static constexpr int kDimBlocks = kDim / 8;
  static_assert(kDim % 16 == 0 && kStride / kChunk % 2 == 1);
};

// The keys of a tile that a query row sees: [first, end).
struct SeenKeys {
  int first;
  int end;
};

// The accumulators of 16 query rows. Arrays of 2 hold the lane's rows lane / 4 and lane / 4 + 8.
template <class Tile>
struct AttentionState {
  float maximum[2];
  float sum[2];
  float values[Tile::kDimBlocks][4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      maximum[i] = -INFINITY;
      sum[i] = 0;
    }
#pragma unroll
    for (int d = 0; d < Tile::kDimBlocks; ++d) {
#pragma unroll
      for (int i = 0; i < 4; ++i) values[d][i] = 0;
    }
  }
};

// exp(score - maximum), rounded to 8 or 11 bits for the 16-bit types.
template <class Tile>
__device__ __forceinline__ float softmax_weight(float score, float maximum) {
  const float x = exact_add(score, -maximum);
  if constexpr (Tile::kIsFloat) {
    return exp_nonpositive(x);
  } else {
    constexpr float kLog2E = 0x1.715476p+0f;
    return exp2f(exact_mul(x, kLog2E));
  }
}

__device__ __forceinline__ float larger(float a, float b) { return a > b ? a : b; }

// The number that is subtracted from scores. Rows without a finite score get weights 0 instead of
// NaN.
__device__ __forceinline__ float finite_shift(float maximum) {
  return maximum == -INFINITY ? 0.0f : maximum;
}

// scores += queries . keys on 16-bit types; queries are [kRowTiles * 16, kStride].
template <class Tile, int kRowTiles>
__device__ __forceinline__ void dot_products_mma(const SharedSpan<typename Tile::T>& queries,
                                                 const SharedSpan<typename Tile::T>& keys,
                                                 float (&scores)[kRowTiles][Tile::kKeyBlocks][4]) {
  const int lane = threadIdx.x % kWarpSize;
  const int query = lane % 16 * Tile::kStride + lane / 16 * 8;
  const int key = (lane / 16 * 8 + lane % 8) * Tile::kStride + lane / 8 % 2 * 8;
#pragma unroll 2
  for (int dim = 0; dim < Tile::kDim; dim += 16) {
    uint32_t a[kRowTiles][4];
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
      ldmatrix_x4(a[tile], queries.pointer(query + tile * kTileRows * Tile::kStride + dim));
    }
#pragma unroll
    for (int block = 0; block < Tile::kKeyBlocks; block += 2) {
      uint32_t r[4];
      ldmatrix_x4(r, keys.pointer(key + block * 8 * Tile::kStride + dim));
      const uint32_t even[2] = {r[0], r[1]}, odd[2] = {r[2], r[3]};
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile) {
        mma_m16n8k16<typename Tile::T>(scores[tile][block], a[tile], even);
        mma_m16n8k16<typename Tile::T>(scores[tile][block + 1], a[tile], odd);
      }
    }
  }
}

// state.values += weights values on 16-bit types, to which the weights are rounded.
template <class Tile, int kRowTiles>
__device__ __forceinline__ void add_values_mma(
    const float (&weights)[kRowTiles][Tile::kKeyBlocks][4],
    const SharedSpan<typename Tile::T>& values, AttentionState<Tile> (&states)[kRowTiles]) {
  using T = typename Tile::T;
  const int lane = threadIdx.x % kWarpSize;
  const int value = lane % 16 * Tile::kStride + lane / 16 * 8;
#pragma unroll
  for (int block = 0; block < Tile::kKeyBlocks; block += 2) {
    uint32_t a[kRowTiles][4];
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
      const float (&even)[4] = weights[tile][block], (&odd)[4] = weights[tile][block + 1];
      a[tile][0] = pack<T>(even[0], even[1]);
      a[tile][1] = pack<T>(even[2], even[3]);
      a[tile][2] = pack<T>(odd[0], odd[1]);
      a[tile][3] = pack<T>(odd[2], odd[3]);
    }
#pragma unroll
    for (int dim = 0; dim < Tile::kDimBlocks; dim += 2) {
      uint32_t r[4];
      ldmatrix_x4_trans(r, values.pointer(value + block * 8 * Tile::kStride + dim * 8));
      const uint32_t even[2] = {r[0], r[1]}, odd[2] = {r[2], r[3]};
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile) {
        mma_m16n8k16<T>(states[tile].values[dim], a[tile], even);
        mma_m16n8k16<T>(states[tile].values[dim + 1], a[tile], odd);
      }
    }
  }
}

// Adds four products of a row of queries and a row of keys to `sum`.
__device__ __forceinline__ float add_products(const float4& a, const float4& b, float sum) {
  sum = exact_fma(a.x, b.x, sum);
  sum = exact_fma(a.y, b.y, sum);
  sum = exact_fma(a.z, b.z, sum);
  return exact_fma(a.w, b.w, sum);
}

// scores += queries . keys on float32. Sums of 16 consecutive products are added up.
template <class Tile>
__device__ __forceinline__ void dot_products_fma(const SharedSpan<float>& queries,
                                                 const SharedSpan<float>& keys,
                                                 float (&scores)[Tile::kKeyBlocks][4]) {
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int block = 0; block < Tile::kKeyBlocks; ++block) {
    const int key = (block * 8 + lane % 4 * 2) * Tile::kStride;
#pragma unroll 1
    for (int dim = 0; dim < Tile::kDim; dim += 16) {
      float sums[4] = {};
#pragma unroll
      for (int d = dim; d < dim + 16; d += 4) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int query = (lane / 4 + i / 2 * 8) * Tile::kStride;
          sums[i] = add_products(load_shared<float4>(queries.pointer(query + d)),
                                 load_shared<float4>(keys.pointer(key + i % 2 * Tile::kStride + d)),
                                 sums[i]);
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[block][i] = exact_add(scores[block][i], sums[i]);
    }
  }
}

// state.values += weights values on float32. 8 keys are summed first: short sums lose less
// precision.
template <class Tile>
__device__ __forceinline__ void add_values_fma(const float (&weights)[Tile::kKeyBlocks][4],
                                               const SharedSpan<float>& values,
                                               AttentionState<Tile>& state) {
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int block = 0; block < Tile::kKeyBlocks; ++block) {
    float upper[8], lower[8];  // of the lane's two rows
#pragma unroll
    for (int key = 0; key < 8; ++key) {
      const int source = lane / 4 * 4 + key / 2;
      upper[key] = shuffle(weights[block][key % 2], source);
      lower[key] = shuffle(weights[block][key % 2 + 2], source);
    }
#pragma unroll
    for (int dim = 0; dim < Tile::kDimBlocks; ++dim) {
      const int column = dim * 8 + lane % 4 * 2;
      float sums[4] = {};
#pragma unroll
      for (int key = 0; key < 8; ++key) {
        const float2 value =
            load_shared<float2>(values.pointer((block * 8 + key) * Tile::kStride + column));
        sums[0] = exact_fma(upper[key], value.x, sums[0]);
        sums[1] = exact_fma(upper[key], value.y, sums[1]);
        sums[2] = exact_fma(lower[key], value.x, sums[2]);
        sums[3] = exact_fma(lower[key], value.y, sums[3]);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) state.values[dim][i] = exact_add(state.values[dim][i], sums[i]);
    }
  }
}

// Turns dot products into scores, -inf for keys that the row does not see.
template <class Tile>
__device__ __forceinline__ void finish_scores(float scale, float softcap, const SeenKeys (&seen)[2],
                                              float (&scores)[Tile::kKeyBlocks][4]) {
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int block = 0; block < Tile::kKeyBlocks; ++block) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float score = exact_mul(scores[block][i], scale);
      if (softcap > 0) score = exact_mul(softcap, tanh_approx(score / softcap));
      const int key = block * 8 + lane % 4 * 2 + i % 2;
      const bool is_seen = key >= seen[i / 2].first && key < seen[i / 2].end;
      scores[block][i] = is_seen ? score : -INFINITY;
    }
  }
}

// Turns scores into weights and rescales the accumulators to the new maximum.
template <class Tile>
__device__ __forceinline__ void update_softmax(float (&scores)[Tile::kKeyBlocks][4],
                                               AttentionState<Tile>& state) {
  float factors[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {  // rows lane / 4 and lane / 4 + 8
    float maximum = state.maximum[half];
#pragma unroll
    for (int block = 0; block < Tile::kKeyBlocks; ++block) {
      maximum = larger(scores[block][2 * half], maximum);
      maximum = larger(scores[block][2 * half + 1], maximum);
    }
    maximum = larger(shuffle_xor(maximum, 1), maximum);
    maximum = larger(shuffle_xor(maximum, 2), maximum);
    const float shift = finite_shift(maximum);
    factors[half] = softmax_weight<Tile>(state.maximum[half], shift);
    float sum = 0;
#pragma unroll
    for (int block = 0; block < Tile::kKeyBlocks; ++block) {
#pragma unroll
      for (int i = 2 * half; i < 2 * half + 2; ++i) {
        scores[block][i] = softmax_weight<Tile>(scores[block][i], shift);
        sum = exact_add(sum, scores[block][i]);
      }
    }
    // All four lanes of the row add in the same order, so they get the same sum.
    sum = exact_add(sum, shuffle_xor(sum, 1));
    sum = exact_add(sum, shuffle_xor(sum, 2));
    state.maximum[half] = maximum;
    state.sum[half] = exact_fma(state.sum[half], factors[half], sum);
  }
  // After the branches of the exponentials, because ptxas copies code that is written between them.
#pragma unroll
  for (int dim = 0; dim < Tile::kDimBlocks; ++dim) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      state.values[dim][i] = exact_mul(state.values[dim][i], factors[i / 2]);
    }
  }
}

// Processes one tile. All lanes of the warp call it, with `seen` of their rows.
template <class Tile, int kRowTiles>
__device__ __forceinline__ void attend_tile(const SharedSpan<typename Tile::T>& queries,
                                            const SharedSpan<typename Tile::T>& keys,
                                            const SharedSpan<typename Tile::T>& values, float scale,
                                            float softcap, const SeenKeys (&seen)[kRowTiles][2],
                                            AttentionState<Tile> (&states)[kRowTiles]) {
  float scores[kRowTiles][Tile::kKeyBlocks][4] = {};
  if constexpr (Tile::kIsFloat) {
    static_assert(kRowTiles == 1);
    dot_products_fma<Tile>(queries, keys, scores[0]);
  } else {
    dot_products_mma<Tile, kRowTiles>(queries, keys, scores);
  }
#pragma unroll
  for (int tile = 0; tile < kRowTiles; ++tile) {
    finish_scores<Tile>(scale, softcap, seen[tile], scores[tile]);
    update_softmax<Tile>(scores[tile], states[tile]);
  }
  if constexpr (Tile::kIsFloat) {
    add_values_fma<Tile>(scores[0], values, states[0]);
  } else {
    add_values_mma<Tile, kRowTiles>(scores, values, states);
  }
}

}  // namespace specdec
