// exp(x) for x <= 0: the weight of a score relative to the largest one, the same bits on every
// backend (roundings are written out, platform.h; no libm, no subnormals, no branch).
//
//   x = n log(2) + r with |r| <= log(2) / 2;  e^r = 1 + r + r^2 P(r);  e^x = 2^n e^r
//
// Error below 1 unit in the last place (8.1e-8 relative), and never decreasing in x: both were
// checked for every float32 in the range, and are sampled by csrc/selftest/numbers.cpp.
#pragma once

#include "specdec/platform.h"

namespace specdec {

// Below this the result is 0; above it, it is a normal number.
constexpr float kSmallestExponent = -87.0f;

// x > 0 counts as 0, -inf gives 0. Not for NaN.
SPECDEC_HOST_DEVICE float exp_nonpositive(float x) {
  constexpr float kLog2E = 0x1.715476p+0f;
  constexpr float kLog2High = 0x1.62e400p-1f;  // 15 bits: n * kLog2High is exact
  constexpr float kLog2Low = 0x1.7f7d1cp-20f;
  constexpr float kToInteger = 0x1.8p+23f;  // adding it rounds to an integer in the low bits
  x = x < 0.0f ? x : 0.0f;
  const float clamped = x > kSmallestExponent ? x : kSmallestExponent;
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
  const int32_t exponent = float_to_bits(shifted) - float_to_bits(kToInteger);
  const int32_t bits = float_to_bits(exact_add(1.0f, p)) + exponent * (1 << 23);
  return x < kSmallestExponent ? 0.0f : bits_to_float(bits);
}

}  // namespace specdec
