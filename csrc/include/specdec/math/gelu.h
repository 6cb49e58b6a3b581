// gelu(x) = x P(X <= x) for a standard normal X, exactly and with a tanh, with the same bits on every
// backend (Hendrycks and Gimpel, 2016, https://arxiv.org/abs/1606.08415).
#pragma once

#include "specdec/math/erf.h"
#include "specdec/math/tanh.h"

namespace specdec {

SPECDEC_HOST_DEVICE float gelu(float x) {
  constexpr float kInverseRootOf2 = 0x1.6a09e6p-1f;
  return exact_mul(exact_mul(0.5f, x), exact_add(1.0f, erf_approx(exact_mul(x, kInverseRootOf2))));
}

constexpr float kGeluCubic = 0.044715f;
constexpr float kGeluScale = 0x1.988454p-1f;  // sqrt(2 / pi)

SPECDEC_HOST_DEVICE float gelu_tanh(float x) {
  const float cube = exact_mul(exact_mul(x, x), x);
  const float inner = exact_mul(kGeluScale, exact_fma(kGeluCubic, cube, x));
  return exact_mul(exact_mul(0.5f, x), exact_add(1.0f, tanh_approx(inner)));
}

}  // namespace specdec
