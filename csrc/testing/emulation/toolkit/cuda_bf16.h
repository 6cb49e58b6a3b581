// bfloat16 for emulated kernels, with the bits of the CUDA header: rounded to nearest even, every
// NaN becomes 0x7FFF.
#pragma once

#include <bit>
#include <cstdint>

#include "vector_types.h"

struct __nv_bfloat16 {
  uint16_t bits;
};

struct alignas(4) __nv_bfloat162 {
  __nv_bfloat16 x, y;
};

inline __nv_bfloat16 __ushort_as_bfloat16(uint16_t bits) { return {bits}; }
inline uint16_t __bfloat16_as_ushort(__nv_bfloat16 value) { return value.bits; }

inline float __bfloat162float(__nv_bfloat16 value) {
  return std::bit_cast<float>(uint32_t{value.bits} << 16);
}

inline __nv_bfloat16 __float2bfloat16_rn(float value) {
  if (value != value) return {0x7FFF};
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t half_less_tie = 0x7FFF + (bits >> 16 & 1);
  return {static_cast<uint16_t>((bits + half_less_tie) >> 16)};
}
inline __nv_bfloat16 __float2bfloat16(float value) { return __float2bfloat16_rn(value); }

inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
  return {__float2bfloat16_rn(x), __float2bfloat16_rn(y)};
}
inline float2 __bfloat1622float2(__nv_bfloat162 pair) {
  return {__bfloat162float(pair.x), __bfloat162float(pair.y)};
}
