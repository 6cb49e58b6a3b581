// Counter-based noise: the Gumbel value of (seed, row, position, token). It has the same bits on
// every backend and does not depend on the tree, the launch or the order of evaluation.
//
//   bits = lane (token & 3) of Philox4x32-10(key = seed, counter = (token >> 2, position, row,
//          purpose))
//   v    = min((bits + 0.5) * 2^-32, 1 - 2^-24)
//   e    = -log1p(-v)
//   g    = -log(e)
//
// arg-max(logit + g) and arg-max(weight / e) with weight = exp(logit) draw from the same
// distribution. The second, an exponential race, suits weights that can be zero.
//
// v is small where g is large, so the tail that decides an arg-max has the full resolution of
// float32: g ranges from -2.8116 to 22.8738, and ties are rare. (The formula -log(-log(u)) with
// u = (bits + 0.5) * 2^-24 reaches u = 1, and its ties are visible at vocabularies of 128k.)
//
// Numerics: float32 with explicit rounding (platform.h); no libm, no subnormals, no branch. The
// error of g against float64 at the same float32 v is below 1.1e-6 (half an ulp at 16 is 9.5e-7),
// and below 3.5e-7 for g < 8. Rounding v to float32 adds less than 1e-6 above g = -1.5. Below it
// the values are coarse (0.025 at the very end), but only 1 draw in 88 is there, and such a draw
// decides no arg-max. python_tests/verify/test_rng.py measures both.
//
// Philox: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
#pragma once

#include "specdec/core/platform.h"

namespace specdec {

// The fourth word of the counter separates the uses of one seed: the purpose in its low 8 bits, and
// above it a depth for the purposes of one step. The noise of kMatch belongs to the absolute
// position of the drawn token, all other noise to (position of the step's root, depth of the node
// below it). Root and depth must not be added: a step verifies draft tokens that it then rejects,
// the next step comes to the same absolute positions, and using noise twice biases block
// verification.
enum class Purpose : uint32_t {
  kMatch = 0,
  kDraft = 1,     // the drafter's own draws; index: token >> 2
  kAccept = 2,    // accepting a draft token; index: its rank among its siblings, lane 0
  kResidual = 3,  // the token that ends the step; index: token >> 2
};

struct Philox4 {
  uint32_t lane[4];
};

SPECDEC_HOST_DEVICE uint32_t multiply_high(uint32_t a, uint32_t b) {
  return static_cast<uint32_t>((static_cast<uint64_t>(a) * b) >> 32);
}

constexpr uint32_t kPhiloxMultiplier0 = 0xD2511F53, kPhiloxMultiplier1 = 0xCD9E8D57;
constexpr uint32_t kPhiloxWeyl0 = 0x9E3779B9, kPhiloxWeyl1 = 0xBB67AE85;
constexpr int kPhiloxRounds = 10;

SPECDEC_HOST_DEVICE Philox4 philox_round(const Philox4& c, uint32_t key0, uint32_t key1) {
  return {{multiply_high(kPhiloxMultiplier1, c.lane[2]) ^ c.lane[1] ^ key0,
           kPhiloxMultiplier1 * c.lane[2],
           multiply_high(kPhiloxMultiplier0, c.lane[0]) ^ c.lane[3] ^ key1,
           kPhiloxMultiplier0 * c.lane[0]}};
}

// The rounds are unrolled by recursion, because compilers don't vectorise a loop that contains one.
template <int kRounds>
SPECDEC_HOST_DEVICE Philox4 philox4x32(const Philox4& counter, uint32_t key0, uint32_t key1) {
  const Philox4 next = philox_round(counter, key0, key1);
  if constexpr (kRounds == 1) {
    return next;
  } else {
    return philox4x32<kRounds - 1>(next, key0 + kPhiloxWeyl0, key1 + kPhiloxWeyl1);
  }
}

// log(1 + f) for f in [sqrt(1/2) - 1, sqrt(2) - 1]: f - f^2/2 + f^3 * P(f). The relative error of
// the polynomial is 3.2e-9 (weighted minimax fit of degree 8, coefficients rounded to float32).
SPECDEC_HOST_DEVICE float log1p_core(float f) {
  float p = 0x1.1457a6p-4f;
  p = exact_fma(p, f, -0x1.de3c16p-4f);
  p = exact_fma(p, f, 0x1.e6f06ap-4f);
  p = exact_fma(p, f, -0x1.fc2208p-4f);
  p = exact_fma(p, f, 0x1.233768p-3f);
  p = exact_fma(p, f, -0x1.555c4ep-3f);
  p = exact_fma(p, f, 0x1.99a4b6p-3f);
  p = exact_fma(p, f, -0x1.000006p-2f);
  p = exact_fma(p, f, 0x1.555548p-2f);
  return exact_fma(exact_mul(f, f), exact_fma(p, f, -0.5f), f);
}

// x = mantissa * 2^exponent with mantissa in [sqrt(1/2), sqrt(2)); x is positive and normal.
struct SplitFloat {
  float mantissa;
  int32_t exponent;
};

SPECDEC_HOST_DEVICE SplitFloat split_float(float x) {
  constexpr int32_t kSqrtHalfBits = 0x3F3504F3;
  const int32_t bits = float_to_bits(x);
  const int32_t exponent = (bits - kSqrtHalfBits) >> 23;
  return {bits_to_float(bits - exponent * (1 << 23)), exponent};
}

// -log1p(-v).
SPECDEC_HOST_DEVICE float exponential(uint32_t bits) {
  constexpr float kLog2 = 0x1.62e430p-1f;
  constexpr float kLargestV = 1.0f - 0x1p-24f;
  const float scaled = exact_mul(exact_add(static_cast<float>(bits), 0.5f), 0x1p-32f);
  const float v = scaled < kLargestV ? scaled : kLargestV;

  const SplitFloat survivor = split_float(exact_add(1.0f, -v));
  // If 1 - v >= sqrt(1/2), the argument of log1p is -v itself, which 1 - v would have rounded. Both
  // values are computed and one is selected, so that the loop over tokens has no branch.
  const float offset = exact_add(survivor.mantissa, -1.0f);
  const float f = survivor.exponent == 0 ? -v : offset;
  return -exact_fma(static_cast<float>(survivor.exponent), kLog2, log1p_core(f));
}

// A lower bound of exponential(b) for every b >= bits: v <= -log1p(-v), and for 1 - v >= sqrt(1/2)
// the polynomial only adds to v.
SPECDEC_HOST_DEVICE float exponential_bound(uint32_t bits) {
  return exact_mul(exact_add(static_cast<float>(bits), 0.5f), 0x1p-32f);
}

// An upper bound of gumbel(): g(0) = 33 log(2) = 22.8738, g(1) = 21.78.
constexpr float kMaxGumbel = 22.875f;

SPECDEC_HOST_DEVICE float gumbel(uint32_t bits) {
  constexpr float kLog2 = 0x1.62e430p-1f;
  const SplitFloat split = split_float(exponential(bits));
  return -exact_fma(static_cast<float>(split.exponent), kLog2,
                    log1p_core(exact_add(split.mantissa, -1.0f)));
}

// An upper bound of gumbel(b) for every b >= bits, at most 0.07 above gumbel(bits) if that is above
// 5. -log(-log1p(-v)) <= -log(v), and the bits of a float, read as an integer, give a lower bound
// of its logarithm that is linear between powers of two. The last digit of the factor is rounded up
// by more than the errors of gumbel() and of this computation.
SPECDEC_HOST_DEVICE float gumbel_bound(uint32_t bits) {
  constexpr int32_t kOneBits = 127 << 23;
  constexpr float kLog2RoundedUp = 0.69315f;
  const float v = exact_mul(exact_add(static_cast<float>(bits), 0.5f), 0x1p-32f);
  return exact_mul(static_cast<float>(kOneBits - float_to_bits(v)), kLog2RoundedUp * 0x1p-23f);
}

// A value of the grid (k + 0.5) * 2^-23, without rounding: strictly between 0 and 1.
SPECDEC_HOST_DEVICE float uniform(uint32_t bits) {
  return exact_mul(exact_add(static_cast<float>(bits >> 9), 0.5f), 0x1p-23f);
}

// The noise of one (seed, row, position, purpose). A token or another index selects a value.
struct NoiseStream {
  uint32_t key0;
  uint32_t key1;
  uint32_t position;
  uint32_t row;
  uint32_t purpose = static_cast<uint32_t>(Purpose::kMatch);

  // Uses only the low 32 bits of position and row.
  static SPECDEC_HOST_DEVICE NoiseStream make(int64_t seed, int64_t row, int64_t position) {
    const uint64_t key = static_cast<uint64_t>(seed);
    return {static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32),
            static_cast<uint32_t>(position), static_cast<uint32_t>(row)};
  }

  // The noise of a node `depth` levels below the root of a step.
  static SPECDEC_HOST_DEVICE NoiseStream make_round(int64_t seed, int64_t row,
                                                    int64_t root_position, int64_t depth,
                                                    Purpose purpose) {
    NoiseStream stream = make(seed, row, root_position);
    stream.purpose = static_cast<uint32_t>(purpose) | static_cast<uint32_t>(depth) << 8;
    return stream;
  }

  // The bits of tokens 4 * group .. 4 * group + 3.
  SPECDEC_HOST_DEVICE Philox4 group_bits(uint32_t group) const {
    return philox4x32<kPhiloxRounds>({{group, position, row, purpose}}, key0, key1);
  }
  SPECDEC_HOST_DEVICE uint32_t token_bits(uint32_t token) const {
    const Philox4 bits = group_bits(token / 4);
    const uint32_t low = token % 2 == 0 ? bits.lane[0] : bits.lane[1];
    const uint32_t high = token % 2 == 0 ? bits.lane[2] : bits.lane[3];
    return token % 4 < 2 ? low : high;  // an index would put the lanes into memory
  }
};

}  // namespace specdec
