#include "tensor_core.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

namespace specdec::emulation {
namespace {

constexpr int kFloatBits = 23;  // fraction bits of float32
constexpr int kMinExponent = -126;

// significand 2^(exponent - fraction bits); a normal number has a significand of 1 to 2.
struct Term {
  int64_t significand;
  int exponent;
};

// With kFloatBits fraction bits. Subnormal numbers have the exponent of the smallest normal ones.
Term term_of(float x, int min_exponent) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const int field = static_cast<int>(bits >> kFloatBits & 0xFF);
  int64_t significand = bits & 0x7FFFFF;
  if (field > 0) significand |= 1 << kFloatBits;
  int exponent = field > 0 ? field - 127 : kMinExponent;
  if (exponent < min_exponent) {
    significand >>= std::min(min_exponent - exponent, kFloatBits + 1);
    exponent = min_exponent;
  }
  return {bits >> 31 != 0 ? -significand : significand, exponent};
}

float round_towards_zero(double exact) {
  if (std::abs(exact) >= 0x1p128) return static_cast<float>(exact);
  const float nearest = static_cast<float>(exact);
  return std::abs(double{nearest}) > std::abs(exact) ? std::nextafter(nearest, 0.0f) : nearest;
}

// c plus the products; those of 16-bit floats are exact in double, and their sum nearly so.
template <int kCount>
double exact_sum(const float* a, const float* b, float c) {
  double sum = c;
  for (int i = 0; i < kCount; ++i) sum += double{a[i]} * double{b[i]};
  return sum;
}

template <int kCount>
float aligned_sum(const float* a, const float* b, float c, int min_exponent, int fraction_bits) {
  const double exact = exact_sum<kCount>(a, b, c);
  if (std::isnan(exact)) return std::bit_cast<float>(0x7FFFFFFF);
  if (std::isinf(exact)) return static_cast<float>(exact);
  Term terms[kCount + 1];  // with 2 kFloatBits fraction bits
  const Term addend = term_of(c, kMinExponent);
  terms[kCount] = {addend.significand << kFloatBits, addend.exponent};
  for (int i = 0; i < kCount; ++i) {
    const Term left = term_of(a[i], min_exponent), right = term_of(b[i], min_exponent);
    terms[i] = {left.significand * right.significand, left.exponent + right.exponent};
  }
  int largest = kMinExponent;
  for (Term& term : terms) {
    if (term.significand == 0) term.exponent = kMinExponent;
    largest = std::max(largest, term.exponent);
  }
  int64_t sum = 0;
  for (const Term& term : terms) {
    const int shift = std::min(2 * kFloatBits - fraction_bits + largest - term.exponent, 63);
    sum += term.significand < 0 ? -(-term.significand >> shift) : term.significand >> shift;
  }
  return round_towards_zero(std::ldexp(static_cast<double>(sum), largest - fraction_bits));
}

}  // namespace

float add_products(const float (&a)[16], const float (&b)[16], float c, int min_exponent) {
  switch (tensor_core) {
    case TensorCore::kAmpere:
      c = aligned_sum<8>(a, b, c, min_exponent, 24);
      return aligned_sum<8>(a + 8, b + 8, c, min_exponent, 24);
    case TensorCore::kHopper:
      return aligned_sum<16>(a, b, c, min_exponent, 25);
    case TensorCore::kExact:
      break;
  }
  return static_cast<float>(exact_sum<16>(a, b, c));
}

}  // namespace specdec::emulation

// For tests (python_tests/helpers/ops/emulation.py).
extern "C" __attribute__((visibility("default"))) void specdec_set_tensor_core(int core) {
  specdec::emulation::tensor_core = static_cast<specdec::emulation::TensorCore>(core);
}
