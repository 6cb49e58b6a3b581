// sigmoid(x) = 1 / (1 + exp(-x)) and silu(x) = x sigmoid(x), with the same bits on every backend and
// an exponential that cannot overflow.
#pragma once

#include "specdec/math/exp.h"

namespace specdec {

SPECDEC_HOST_DEVICE float sigmoid(float x) {
  const float magnitude = bits_to_float(float_to_bits(x) & 0x7FFFFFFF);
  const float e = exp_nonpositive(-magnitude);
  return exact_div(x < 0.0f ? e : 1.0f, exact_add(1.0f, e));
}

SPECDEC_HOST_DEVICE float silu(float x) { return exact_mul(x, sigmoid(x)); }

}  // namespace specdec
