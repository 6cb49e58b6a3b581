// The floating-point types that ops take: float32 and the two 16-bit formats, as storage types that
// convert to float32 exactly and from float32 to the nearest, ties to even, on host and device.
// Host conversions select instead of branching, so that loops vectorise.
#pragma once

#ifdef __CUDACC__
#include <cuda_fp16.h>
#endif

#include <cstdlib>

#include "specdec/core/platform.h"

namespace specdec {

enum class FloatType { kFloat32, kBFloat16, kFloat16 };

constexpr int64_t element_size(FloatType type) { return type == FloatType::kFloat32 ? 4 : 2; }

struct BFloat16 {
  uint16_t bits;
};

struct Float16 {
  uint16_t bits;
};

SPECDEC_HOST_DEVICE float to_float(float value) { return value; }

SPECDEC_HOST_DEVICE float to_float(BFloat16 value) {
  return bits_to_float(static_cast<int32_t>(uint32_t{value.bits} << 16));
}

SPECDEC_HOST_DEVICE float to_float(Float16 value) {
#ifdef __CUDA_ARCH__
  return __half2float(__ushort_as_half(value.bits));
#else
  const int32_t sign = (value.bits & 0x8000) << 16;
  const int32_t magnitude = value.bits & 0x7FFF;
  // Changes the exponent's bias from 15 to 127. Infinity and NaN go to the top of float32's range.
  const int32_t rebiased = (magnitude << 13) + (magnitude >= 0x7C00 ? 224 << 23 : 112 << 23);
  const int32_t subnormal = float_to_bits(static_cast<float>(magnitude) * 0x1p-24f);
  return bits_to_float(sign | (magnitude < 0x0400 ? subnormal : rebiased));
#endif
}

SPECDEC_HOST_DEVICE void from_float(float value, float* out) { *out = value; }

SPECDEC_HOST_DEVICE void from_float(float value, BFloat16* out) {
  const uint32_t bits = static_cast<uint32_t>(float_to_bits(value));
  const uint32_t rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
  out->bits = static_cast<uint16_t>(value == value ? rounded : 0x7FC0);
}

SPECDEC_HOST_DEVICE void from_float(float value, Float16* out) {
  const uint32_t bits = static_cast<uint32_t>(float_to_bits(value));
  const uint32_t sign = bits >> 16 & 0x8000;
  const uint32_t magnitude = bits & 0x7FFFFFFF;
  // Adding 0.5 leaves the rounded bits of a subnormal half in the low bits of the sum.
  const float sum = exact_add(bits_to_float(static_cast<int32_t>(magnitude)), 0.5f);
  const uint32_t subnormal = static_cast<uint32_t>(float_to_bits(sum)) - 0x3F000000;
  const uint32_t rebiased = magnitude - (uint32_t{112} << 23);
  const uint32_t normal = (rebiased + 0x0FFF + (magnitude >> 13 & 1)) >> 13;
  const uint32_t finite = magnitude < 0x38800000 ? subnormal : normal;  // 2^-14: smallest normal
  const uint32_t rounded = magnitude < 0x47800000 ? finite : 0x7C00;    // 2^16: infinity
  out->bits = static_cast<uint16_t>(sign | (value == value ? rounded : 0x7E00));
}

// Calls function(T{}) with the element type T.
template <typename F>
auto with_float_type(FloatType type, const F& function) {
  switch (type) {
    case FloatType::kFloat32:
      return function(float{});
    case FloatType::kBFloat16:
      return function(BFloat16{});
    case FloatType::kFloat16:
      return function(Float16{});
  }
  std::abort();  // type is not a FloatType
}

}  // namespace specdec
