// Coupled drafts: a drafter adds the noise of the match rule to its logits, so that its best tokens
// are those that the target probably draws. Specification: specdec_ext/reference/couple_logits.py.
#pragma once

#include "specdec/sampling/rng.h"

namespace specdec {

// The noise of the rows of a batch.
struct DraftNoise {
  View1<const float> temperatures;  // [rows]; null: no row has noise
  View1<const int64_t> seeds;       // [rows]
  View1<const int64_t> row_ids;     // [rows]

  // The draft's temperature of a row; 0: the row has no noise.
  SPECDEC_HOST_DEVICE float temperature(int64_t row) const {
    if (temperatures.data == nullptr) return 0.0f;
    const float given = temperatures[row];
    return given > 0.0f ? given : 0.0f;  // not for NaN
  }
  // The noise of the token at this position.
  SPECDEC_HOST_DEVICE NoiseStream stream(int64_t row, int64_t position) const {
    return NoiseStream::make(seeds[row], row_ids[row], position);
  }
};

SPECDEC_HOST_DEVICE float coupled_logit(float logit, float temperature, float noise) {
  return exact_add(exact_div(logit, temperature), noise);
}

}  // namespace specdec
