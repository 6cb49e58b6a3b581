// The arithmetic of sample_filter that the CPU op and the CUDA kernel share: weights and masses of
// scores, and the search for the score at which a running sum over the scores, in descending order,
// reaches a target. Terms: specdec/sample_filter.h.
#pragma once

#include "specdec/math/exp.h"
#include "specdec/math/pick.h"

namespace specdec {

// The tokens that are kept: those whose key (pick.h) is above `threshold`, and from index
// `first_tie` on also those whose key equals it.
struct KeptTokens {
  int32_t threshold;
  int64_t first_tie;
};

SPECDEC_HOST_DEVICE int32_t score_key(float score) { return ordered_key(canonical_bits(score)); }
SPECDEC_HOST_DEVICE float key_score(int32_t key) { return bits_to_float(ordered_key(key)); }

// Weights of a row's scores relative to its largest score, which must not be -inf. If it is +inf,
// the tokens with that score share all mass.
struct RowWeights {
  float largest;

  static SPECDEC_HOST_DEVICE RowWeights make(int32_t largest_key) {
    constexpr int32_t kLargestFinite = kInfinityBits - 1;
    return {key_score(largest_key < kLargestFinite ? largest_key : kLargestFinite)};
  }
  SPECDEC_HOST_DEVICE float weight(float score) const {
    return exp_nonpositive(exact_add(score, -largest));
  }
  SPECDEC_HOST_DEVICE uint64_t mass(float score) const {
    const uint32_t bits = static_cast<uint32_t>(float_to_bits(weight(score)));
    const uint64_t mantissa = (bits & 0x7FFFFF) | 0x800000;
    const uint32_t shift = 127 - (bits >> 23);  // weight = mantissa * 2^-(23 + shift)
    return (mantissa << 17) >> (shift < 63 ? shift : 63);
  }
};

// The mass that the nucleus must reach: ceil(total * top_p), but at least 1, so that one token
// stays. top_p < 1 is used with 32 fractional bits.
SPECDEC_HOST_DEVICE uint64_t nucleus_mass(uint64_t total, float top_p) {
  const uint64_t share = static_cast<uint64_t>(exact_mul(top_p > 0.0f ? top_p : 0.0f, 0x1p32f));
  const uint64_t low_product = (total & 0xFFFFFFFF) * share;
  const uint64_t mass = (total >> 32) * share + ((low_product + 0xFFFFFFFF) >> 32);
  return mass > 1 ? mass : 1;
}

// Finds the smallest key in [low, high] for which `holds` is true. `holds` must be true at `high`,
// and monotonic. The functions below take this, or another implementation of the same search, as
// `first_key`.
struct Bisection {
  template <typename Predicate>
  SPECDEC_HOST_DEVICE int32_t operator()(int32_t low, int32_t high, const Predicate& holds) const {
    while (low < high) {
      const uint32_t half = (static_cast<uint32_t>(high) - static_cast<uint32_t>(low)) / 2;
      const int32_t middle = static_cast<int32_t>(static_cast<uint32_t>(low) + half);
      if (holds(middle)) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    return low;
  }
};

template <typename FirstKey>
SPECDEC_HOST_DEVICE int32_t min_p_threshold(const RowWeights& weights, int32_t largest_key,
                                            float min_p, const FirstKey& first_key) {
  return first_key(kMinusInfinityKey, largest_key,
                   [&](int32_t key) { return weights.weight(key_score(key)) >= min_p; });
}

// Returns a key at or below the end of the nucleus: the mass of all tokens below it together fits
// into what the nucleus may leave out.
template <typename FirstKey>
SPECDEC_HOST_DEVICE int32_t nucleus_bound(const RowWeights& weights, int32_t largest_key,
                                          uint64_t total, uint64_t nucleus, int64_t vocab,
                                          const FirstKey& first_key) {
  const uint64_t negligible = (total - nucleus) / static_cast<uint64_t>(vocab);
  return first_key(kMinusInfinityKey, largest_key,
                   [&](int32_t key) { return weights.mass(key_score(key)) > negligible; });
}

// Counts tokens in a search.
struct CountWeight {
  SPECDEC_HOST_DEVICE uint64_t operator()(int32_t) const { return 1; }
};
struct MassWeight {
  RowWeights weights;
  SPECDEC_HOST_DEVICE uint64_t operator()(int32_t key) const {
    return weights.mass(key_score(key));
  }
};

struct KeyRange {
  int32_t low;
  int32_t high;
};

// The non-decreasing position of a key by which a level of the search fills its buckets: the key
// itself, or the bits of its weight. Weights spread evenly over the distances to the largest score,
// while keys crowd into few buckets if there are scores on both sides of 0.
struct KeyPosition {
  SPECDEC_HOST_DEVICE int32_t operator()(int32_t key) const { return key; }
};
struct WeightPosition {
  RowWeights weights;
  SPECDEC_HOST_DEVICE int32_t operator()(int32_t key) const {
    return float_to_bits(weights.weight(key_score(key)));
  }
};

// One level of the search for a key in a range, with kCount buckets of 2^shift positions each.
// Three levels by key leave a single key.
struct KeyBuckets {
  static constexpr int kCount = 2048;
  int32_t first;
  int shift;

  template <typename Position>
  static SPECDEC_HOST_DEVICE KeyBuckets make(const KeyRange& range, const Position& position) {
    const int32_t first = position(range.low);
    const uint32_t last =
        static_cast<uint32_t>(position(range.high)) - static_cast<uint32_t>(first);
    int shift = 0;
    while (last >> shift >= kCount) ++shift;
    return {first, shift};
  }
  // The bucket of a position in the range.
  SPECDEC_HOST_DEVICE uint32_t index(int32_t position) const {
    return (static_cast<uint32_t>(position) - static_cast<uint32_t>(first)) >> shift;
  }
  // The keys of the range that fall into this bucket, which is not empty.
  template <typename Position, typename FirstKey>
  SPECDEC_HOST_DEVICE KeyRange keys(uint32_t bucket, const KeyRange& range,
                                    const Position& position, const FirstKey& first_key) const {
    int32_t high = range.high;
    if (index(position(high)) > bucket) {
      high =
          first_key(range.low, high, [&](int32_t key) { return index(position(key)) > bucket; }) -
          1;
    }
    const int32_t low =
        first_key(range.low, high, [&](int32_t key) { return index(position(key)) >= bucket; });
    return {low, high};
  }
};

}  // namespace specdec
