// float16 for emulated kernels, with the bits of the CUDA header: rounded to nearest even, every
// NaN becomes 0x7FFF.
#pragma once

#include <bit>
#include <cstdint>
#include <limits>

#include "vector_types.h"

struct __half {
  uint16_t bits;
};

struct alignas(4) __half2 {
  __half x, y;
};

inline __half __ushort_as_half(uint16_t bits) { return {bits}; }
inline uint16_t __half_as_ushort(__half value) { return value.bits; }

inline float __half2float(__half value) {
  const uint32_t sign = uint32_t{value.bits} >> 15 << 31, magnitude = value.bits & 0x7FFFu;
  if (magnitude > 0x7C00) return std::numeric_limits<float>::quiet_NaN();
  uint32_t bits = (magnitude << 13) + (112u << 23);  // exponent and fraction at their new places
  if (magnitude == 0x7C00) bits = 255u << 23;
  if (magnitude < 0x400) bits = std::bit_cast<uint32_t>(static_cast<float>(magnitude) * 0x1p-24f);
  return std::bit_cast<float>(bits | sign);
}

inline __half __float2half_rn(float value) {
  if (value != value) return {0x7FFF};
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint16_t sign = static_cast<uint16_t>(bits >> 31 << 15);
  const float magnitude = std::bit_cast<float>(bits & 0x7FFFFFFF);
  if (magnitude >= 65520) return {static_cast<uint16_t>(sign | 0x7C00)};
  if (magnitude < 0x1p-14f) {
    // Subnormal: the sum with a number whose last place is 2^-24 is rounded there.
    const float sum = magnitude + 0x1p-1f;
    return {static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(sum) & 0x7FF))};
  }
  const uint32_t rebiased = std::bit_cast<uint32_t>(magnitude) - (112u << 23);
  const uint32_t half_less_tie = 0xFFF + (rebiased >> 13 & 1);
  return {static_cast<uint16_t>(sign | (rebiased + half_less_tie) >> 13)};
}
inline __half __float2half(float value) { return __float2half_rn(value); }

inline __half2 __floats2half2_rn(float x, float y) {
  return {__float2half_rn(x), __float2half_rn(y)};
}
inline float2 __half22float2(__half2 pair) { return {__half2float(pair.x), __half2float(pair.y)}; }
