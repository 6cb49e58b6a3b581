// The element types of logits: float32 and the two 16-bit formats, as storage that converts to
// float32 on the host and on the device.
#pragma once

#ifdef __CUDACC__
#include <cuda_fp16.h>
#endif

#include <cstdlib>

#include "specdec/platform.h"

namespace specdec {

enum class LogitsType { kFloat32, kBFloat16, kFloat16 };

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
  // Rebias the exponent from 15 to 127; infinity and NaN go to the top of float32's range.
  const int32_t rebiased = (magnitude << 13) + (magnitude >= 0x7C00 ? 224 << 23 : 112 << 23);
  const int32_t subnormal = float_to_bits(static_cast<float>(magnitude) * 0x1p-24f);
  return bits_to_float(sign | (magnitude < 0x0400 ? subnormal : rebiased));
#endif
}

// function(T{}) with the element type T.
template <typename F>
auto with_logits_type(LogitsType type, const F& function) {
  switch (type) {
    case LogitsType::kFloat32:
      return function(float{});
    case LogitsType::kBFloat16:
      return function(BFloat16{});
    case LogitsType::kFloat16:
      return function(Float16{});
  }
  std::abort();  // not a LogitsType
}

}  // namespace specdec
