// Arg-max over a vocabulary in integers, so that the result does not depend on the order of the
// reduction.
//
// Keys of float32 scores are integers in the order of the scores, with -0 = +0. A pick packs (key,
// ~token) into 64 bits, so the larger pick has the larger score and, at equal scores, the lower
// token. Example: the score 1.5 of tokens 7 and 9 gives the key 0xBFC00000 and the picks
// 0xBFC00000FFFFFFF8 (token 7, which wins) and 0xBFC00000FFFFFFF6.
#pragma once

#include "specdec/core/platform.h"

namespace specdec {

// -0 + 0 is +0 and every other value is unchanged, so equal scores get equal keys.
SPECDEC_HOST_DEVICE int32_t canonical_bits(float score) {
  return float_to_bits(exact_add(score, 0.0f));
}

// A signed integer that is ordered like the float; the function is its own inverse. Not for NaN.
SPECDEC_HOST_DEVICE int32_t ordered_key(int32_t bits) { return bits ^ ((bits >> 31) & 0x7FFFFFFF); }

// The bits of |x| are above this exactly if x is NaN.
constexpr int32_t kInfinityBits = 0x7F800000;
constexpr int32_t kMinusInfinityBits = static_cast<int32_t>(0xFF800000u);
constexpr int32_t kMinusInfinityKey = kMinusInfinityBits ^ 0x7FFFFFFF;

using Pick = uint64_t;

constexpr Pick kNoPick = 0;              // no score above -inf: loses to every pick
constexpr Pick kNaNPick = ~uint64_t{0};  // a score was NaN: wins over every pick

// key > kMinusInfinityKey, token < 2^31.
SPECDEC_HOST_DEVICE Pick make_pick(int32_t key, int64_t token) {
  const uint32_t unsigned_key = static_cast<uint32_t>(key) ^ 0x80000000u;
  return (static_cast<uint64_t>(unsigned_key) << 32) | ~static_cast<uint32_t>(token);
}

SPECDEC_HOST_DEVICE int64_t picked_token(Pick pick) { return ~static_cast<uint32_t>(pick); }

SPECDEC_HOST_DEVICE float pick_score(Pick pick) {
  const uint32_t key = static_cast<uint32_t>(pick >> 32) ^ 0x80000000u;
  return bits_to_float(ordered_key(static_cast<int32_t>(key)));
}

}  // namespace specdec
