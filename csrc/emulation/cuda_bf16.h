// bfloat16 for emulated kernels: storage and conversion to float32.
#pragma once

#include <cstdint>
#include <cstring>

struct __nv_bfloat16 {
  uint16_t bits;
};

inline float __bfloat162float(__nv_bfloat16 value) {
  const uint32_t wide = uint32_t{value.bits} << 16;
  float result;
  std::memcpy(&result, &wide, sizeof(result));
  return result;
}
