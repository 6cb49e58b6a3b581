// exp(x) for x <= 0: the weight of a score relative to the largest one. It has the same bits on
// every backend (explicit rounding as in platform.h; no libm, no subnormals, no branch).
//
//   x = n log(2) + r with |r| <= log(2) / 2;  e^r = 1 + r + r^2 P(r);  e^x = 2^n e^r
//
// The error is below 1 unit in the last place (8.1e-8 relative), and the function is monotonic.
// Both were checked for every float32 in the range; csrc/testing/selftest/numbers.cpp checks
// samples.
#pragma once

#include "specdec/core/platform.h"

namespace specdec {

// Below this the result is 0; above it the result is a normal number.
constexpr float kSmallestExponent = -87.0f;

// x > 0 counts as 0, -inf gives 0, NaN stays NaN: if the operands of a comparison are unordered,
// the second one is taken, like by the instructions for minimum and maximum.
SPECDEC_HOST_DEVICE float exp_nonpositive(float x) {
  constexpr float kLog2E = 0x1.715476p+0f;
  constexpr float kLog2High = 0x1.62e400p-1f;  // 15 bits, so n * kLog2High is exact
  constexpr float kLog2Low = 0x1.7f7d1cp-20f;
  constexpr float kToInteger = 0x1.8p+23f + 127;  // adding it leaves n + 127 in the low bits
  x = 0.0f < x ? 0.0f : x;
  const float clamped = kSmallestExponent > x ? kSmallestExponent : x;
  const float shifted = exact_fma(clamped, kLog2E, kToInteger);
  const float n = exact_add(shifted, -kToInteger);
  float r = exact_fma(n, -kLog2High, clamped);
  r = exact_fma(n, -kLog2Low, r);
  // The polynomial's relative error is 3.8e-9 (weighted minimax fit, coefficients rounded).
  float p = 0x1.6a241ap-10f;
  p = exact_fma(p, r, 0x1.1239f2p-7f);
  p = exact_fma(p, r, 0x1.5558f2p-5f);
  p = exact_fma(p, r, 0x1.555492p-3f);
  p = exact_fma(p, r, 0x1.fffffcp-2f);
  p = exact_fma(exact_mul(r, r), p, r);
  const uint32_t exponent = static_cast<uint32_t>(float_to_bits(shifted)) << 23;
  const float scale = bits_to_float(static_cast<int32_t>(exponent));  // 2^n
  return x < kSmallestExponent ? 0.0f : exact_fma(p, scale, scale);
}

}  // namespace specdec
