// Operands of products in registers, loaded without ldmatrix.
//
// A product sums over k, and its result does not change if both factors permute k in the same way.
// So a lane loads 16 contiguous bytes along k, at byte 16 (lane % 4) of each 64 bytes of a row, and
// calls every four elements of them a quad: the four values of k that mma.m16n8k16 expects in that
// lane. Rows are row-major as in torch. A lane loads rows lane / 4 and lane / 4 + 8 of the left
// factor (activations or queries), and row lane / 4 of the right one (weights or keys). Example,
// bfloat16, lane 5: elements 8 .. 15 of row 1 (and 9), which are two quads.
//
// The result is the fragment of mma: c[0], c[1] are row lane / 4, columns 2 (lane % 4) and the next
// one; c[2], c[3] are the same columns of row lane / 4 + 8. float32 uses fma_m16n8k16 instead;
// everything else is common.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "specdec/core/platform.h"
#include "specdec/device/cuda.cuh"

namespace specdec {

struct Int8 {
  uint8_t bits;
};
struct Float8 {  // the format e4m3
  uint8_t bits;
};

constexpr int kTileRows = 16;  // the M of mma.m16n8k16

// Four contiguous elements along k.
template <typename T>
struct Quad {
  uint32_t bits[sizeof(T)];
};

template <typename T>
constexpr int kVectorElements = 16 / static_cast<int>(sizeof(T));
template <typename T>
constexpr int kVectorQuads = kVectorElements<T> / 4;

template <typename T>
__device__ __forceinline__ void multiply(float (&c)[4], const Quad<T>& low, const Quad<T>& high,
                                         const Quad<T>& b) {
  if constexpr (std::is_same_v<T, float>) {
    float a_low[4], a_high[4], right[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      a_low[i] = bits_to_float(static_cast<int32_t>(low.bits[i]));
      a_high[i] = bits_to_float(static_cast<int32_t>(high.bits[i]));
      right[i] = bits_to_float(static_cast<int32_t>(b.bits[i]));
    }
    fma_m16n8k16(c, a_low, a_high, right);
  } else {
    const uint32_t a[4] = {low.bits[0], high.bits[0], low.bits[1], high.bits[1]};
    mma_m16n8k16<T>(c, a, b.bits);
  }
}

// 16 bytes of elements of T.
template <typename T>
struct Vector {
  uint4 bytes;

  __device__ __forceinline__ Quad<T> quad(int i) const {
    if constexpr (sizeof(T) == 4) {
      return {{bytes.x, bytes.y, bytes.z, bytes.w}};
    } else {
      return i == 0 ? Quad<T>{{bytes.x, bytes.y}} : Quad<T>{{bytes.z, bytes.w}};
    }
  }

  __device__ __forceinline__ void unpack_to(float (&values)[kVectorElements<T>]) const {
    const uint32_t words[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (sizeof(T) == 4) {
        values[i] = bits_to_float(static_cast<int32_t>(words[i]));
      } else {
        const float2 pair = unpack<T>(words[i]);
        values[2 * i] = pair.x;
        values[2 * i + 1] = pair.y;
      }
    }
  }

  __device__ __forceinline__ static Vector packed(const float (&values)[kVectorElements<T>]) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (sizeof(T) == 4) {
        words[i] = static_cast<uint32_t>(float_to_bits(values[i]));
      } else {
        words[i] = pack<T>(values[2 * i], values[2 * i + 1]);
      }
    }
    return {make_uint4(words[0], words[1], words[2], words[3])};
  }
};

__device__ __forceinline__ float load_float(const float* at) { return *at; }
__device__ __forceinline__ float load_float(const __nv_bfloat16* at) {
  return __bfloat162float(*at);
}
__device__ __forceinline__ float load_float(const __half* at) { return __half2float(*at); }

__device__ __forceinline__ void store_float(float* at, float value) { *at = value; }
__device__ __forceinline__ void store_float(__nv_bfloat16* at, float value) {
  *at = __float2bfloat16_rn(value);
}
__device__ __forceinline__ void store_float(__half* at, float value) {
  *at = __float2half_rn(value);
}

// The 16 bytes from element k on of a row of `width` elements, with zeros beyond its end; aligned.
template <typename T>
__device__ __forceinline__ Vector<T> load_vector(const void* row, int k, int width) {
  if (k >= width) return {make_uint4(0, 0, 0, 0)};
  return {load_global<uint4>(static_cast<const T*>(row) + k)};
}

// 1 / root mean square. The order of the sum depends on the width alone. All lanes of a warp call
// it and get the result.
template <typename T>
__device__ __forceinline__ float inverse_root_mean_square(const void* row, int width, float eps) {
  constexpr int kGroup = 8;  // loads in flight
  constexpr int kStep = kWarpSize * kVectorElements<T>;
  const int lane = threadIdx.x % kWarpSize;
  float sum = 0;
  for (int first = lane * kVectorElements<T>; first < width; first += kGroup * kStep) {
    Vector<T> vectors[kGroup];
#pragma unroll
    for (int i = 0; i < kGroup; ++i) vectors[i] = load_vector<T>(row, first + i * kStep, width);
#pragma unroll
    for (const Vector<T>& vector : vectors) {
      float values[kVectorElements<T>];
      vector.unpack_to(values);
#pragma unroll
      for (const float value : values) sum = exact_fma(value, value, sum);
    }
  }
  sum = warp_sum(sum);
  return exact_div(1.0f, sqrtf(exact_add(exact_div(sum, static_cast<float>(width)), eps)));
}

// RMS norm of a vector (Zhang & Sennrich 2019), with one rounding.
template <typename T>
__device__ __forceinline__ Vector<T> normed(const Vector<T>& x, const Vector<T>& weight,
                                            float inverse) {
  float values[kVectorElements<T>], weights[kVectorElements<T>];
  x.unpack_to(values);
  weight.unpack_to(weights);
#pragma unroll
  for (int i = 0; i < kVectorElements<T>; ++i) {
    values[i] = exact_mul(exact_mul(values[i], inverse), weights[i]);
  }
  return Vector<T>::packed(values);
}

// Converts four 8-bit weights. Their scale is applied to the sum. Integers below 2^8 and e4m3
// values are exact in both 16-bit types.
template <typename T, typename W>
__device__ __forceinline__ Quad<T> decode(uint32_t word) {
  float values[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t byte = word >> 8 * i & 0xFF;
    if constexpr (std::is_same_v<W, Int8>) {
      // 2^23 + (x + 128), minus 2^23 + 128.
      values[i] = exact_add(bits_to_float(static_cast<int32_t>(0x4B000000u | (byte ^ 0x80))),
                            -0x1.0001p+23f);
    } else {
      // Moves exponent and fraction to their places, also for subnormals. The factor is
      // 2^(127 - 7).
      const float magnitude = bits_to_float(static_cast<int32_t>((byte & 0x7F) << 20)) * 0x1p120f;
      values[i] = byte & 0x80 ? -magnitude : magnitude;
    }
  }
  return {{pack<T>(values[0], values[1]), pack<T>(values[2], values[3])}};
}

// Quad i of 16 bytes of weights.
template <typename T, typename W>
__device__ __forceinline__ Quad<T> weight_quad(const uint4& bytes, int i) {
  if constexpr (sizeof(W) == 1) {
    const uint32_t words[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
    return decode<T, W>(words[i]);
  } else {
    return Vector<T>{bytes}.quad(i);
  }
}

}  // namespace specdec
