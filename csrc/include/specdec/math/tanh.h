// tanh(x) with explicit rounding (platform.h), the same bits on every backend.
//
//   |x| < 0.55:  x + x^3 P(x^2)            otherwise:  (1 - e) / (1 + e), e = exp(-2 |x|)
//
// The error is below 2 units in the last place. The function is odd, and NaN stays NaN.
#pragma once

#include "specdec/math/exp.h"

namespace specdec {

SPECDEC_HOST_DEVICE float tanh_approx(float x) {
  constexpr int32_t kSignBit = INT32_MIN;
  constexpr float kSmall = 0.55f;
  const int32_t sign = float_to_bits(x) & kSignBit;
  const float magnitude = bits_to_float(float_to_bits(x) ^ sign);

  const float square = exact_mul(x, x);
  // Weighted minimax fit, coefficients rounded: relative error 4.3e-9.
  float p = -0x1.96cf6cp-8f;
  p = exact_fma(p, square, 0x1.58828ep-6f);
  p = exact_fma(p, square, -0x1.b91372p-5f);
  p = exact_fma(p, square, 0x1.110cb2p-3f);
  p = exact_fma(p, square, -0x1.55554ap-2f);
  const float small = exact_fma(exact_mul(x, square), p, x);

  const float e = exp_nonpositive(-2.0f * magnitude);
  const float large = exact_add(1.0f, -e) / exact_add(1.0f, e);
  return magnitude >= kSmall ? bits_to_float(float_to_bits(large) | sign) : small;
}

}  // namespace specdec
