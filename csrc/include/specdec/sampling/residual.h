// Residual distributions over a vocabulary: the weight of one token, and the order in which weights
// are added, so that every backend, thread count and launch shape gets the same bits.
//
// Target weights are exp(logit - max), in [0, 1]; their sum is the target mass. All rules of
// verify_sampled.h use weights of one form,
//
//   weight(v) = max(target_scale * target(v) - draft_scale * draft(v), 0),
//
// so a rejected token adds one number and needs no copy of a distribution. For recursive rejection:
// let the current residual be weight / mass with draft_scale A, and let D be the mass of the
// remaining draft. A child x is accepted if u * (mass / D) * draft(x) < weight(x). If not,
//
//   max(max(t - A d, 0) - (mass / D) d, 0) = max(t - (A + mass / D) d, 0),
//
// so the next residual has draft_scale A + mass / D. A rejected x has weight 0 from then on,
// because its (mass / D) * draft(x) was the larger one. Example: target weights (1, 0.5, 0.5), mass
// 2, draft (0.9, 0.1, 0): a rejected token 0 leaves draft_scale 2 / 1 and the weights
// (0, 0.3, 0.5), then D = 0.1 and mass 0.8.
//
// Order of a sum over the vocabulary: a segment of 1024 tokens is 8 rows of 128 lanes. Its rows are
// added one after the other, then its lanes by halving (i + 64, i + 32, ...). Segment s belongs to
// column s % 32. A column adds its segments one after the other, then columns are added by halving.
// On the GPU a warp adds a segment (lane = 4 * thread + i), and columns are lanes or warps.
#pragma once

#include "specdec/core/platform.h"
#include "specdec/math/exp.h"

namespace specdec {

constexpr int64_t kSegment = 1024;
constexpr int kSumLanes = 128;
constexpr int kSumColumns = 32;

SPECDEC_HOST_DEVICE int64_t num_segments(int64_t vocab) {
  return (vocab + kSegment - 1) / kSegment;
}

constexpr float kLargestFloat = 0x1.fffffep+127f;

// The reference of the weights. It is finite, so that infinite logits give weight 1 and none gives
// NaN.
SPECDEC_HOST_DEVICE float finite_reference(float max) {
  max = max < kLargestFloat ? max : kLargestFloat;
  return max > -kLargestFloat ? max : -kLargestFloat;
}

SPECDEC_HOST_DEVICE float target_weight(float logit, float reference) {
  return exp_nonpositive(exact_add(logit, -reference));
}

SPECDEC_HOST_DEVICE float draft_weight(float probability) {
  return probability > 0.0f && probability <= kLargestFloat ? probability : 0.0f;
}

struct ResidualDistribution {
  float reference;  // of the target weights
  float target_scale;
  float draft_scale;
};

SPECDEC_HOST_DEVICE float residual_weight(float target, float draft,
                                          const ResidualDistribution& residual) {
  const float weight =
      exact_fma(-residual.draft_scale, draft, exact_mul(residual.target_scale, target));
  return weight > 0.0f ? weight : 0.0f;
}

// Whether children can have been drawn from the remaining draft. The bounds keep every scale finite
// and normal. Skipping children because of the mass left for them never changes the emitted
// distribution.
SPECDEC_HOST_DEVICE bool has_draft_mass(float mass) { return mass >= 0x1p-64f && mass <= 0x1p+64f; }

// Statistics of one segment of a node's distributions and, after merging, of the whole node. `max`
// is NaN if any logit is NaN.
struct NodeStatistics {
  float max;
  float target_mass;  // relative to finite_reference(max)
  float draft_mass;
};

// The target mass of a segment, relative to the node's reference.
SPECDEC_HOST_DEVICE float rescaled_mass(const NodeStatistics& segment, float reference) {
  return exact_mul(segment.target_mass, target_weight(finite_reference(segment.max), reference));
}

struct Masses {
  float residual;
  float draft;  // without the removed tokens
};

}  // namespace specdec
