// erf(x) with explicit rounding (platform.h), the same bits on every backend.
//
//   |x| < 1:  x + x P(x^2)            otherwise:  1 - exp(-Q(|x|))
//
// The error is below 1.2 units in the last place, which was checked for every float32;
// csrc/testing/selftest/numbers.cpp checks samples. The function is odd, and NaN stays NaN.
#pragma once

#include "specdec/math/exp.h"

namespace specdec {

SPECDEC_HOST_DEVICE float erf_approx(float x) {
  constexpr int32_t kSignBit = INT32_MIN;
  const int32_t sign = float_to_bits(x) & kSignBit;
  const float magnitude = bits_to_float(float_to_bits(x) ^ sign);

  const float square = exact_mul(x, x);
  // Minimax fits, coefficients rounded. The relative error of the first is 1.3e-9, the absolute
  // error of erf by the second is 1.1e-9.
  float p = 0x1.49696ap-14f;
  p = exact_fma(p, square, -0x1.a3f6bcp-11f);
  p = exact_fma(p, square, 0x1.5405aap-8f);
  p = exact_fma(p, square, -0x1.b7f90cp-6f);
  p = exact_fma(p, square, 0x1.ce2cf8p-4f);
  p = exact_fma(p, square, -0x1.81273ep-2f);
  p = exact_fma(p, square, 0x1.06eba8p-3f);
  const float small = exact_fma(x, p, x);

  const float t = 4.0f < magnitude ? 4.0f : magnitude;  // erf(4) rounds to 1
  float q = -0x1.852ea8p-13f;
  q = exact_fma(q, t, 0x1.814dbap-9f);
  q = exact_fma(q, t, -0x1.654298p-6f);
  q = exact_fma(q, t, 0x1.a60ac2p-4f);
  q = exact_fma(q, t, 0x1.46c57ap-1f);
  q = exact_fma(q, t, 0x1.2085b6p+0f);
  q = exact_fma(q, t, 0x1.72da96p-12f);
  const float large = exact_add(1.0f, -exp_nonpositive(-q));
  return magnitude >= 1.0f ? bits_to_float(float_to_bits(large) | sign) : small;
}

}  // namespace specdec
