// The noise of many tokens.
#pragma once

#include "specdec/sampling/rng.h"

namespace specdec::cpu {

// Writes the noise of tokens first .. first + count - 1. If there are ids, token i has the noise of
// token ids[i], and ids out of range have arbitrary noise.
void fill_noise(const NoiseStream& noise, const View1<const int64_t>& ids, int64_t first,
                int64_t count, float* out);

}  // namespace specdec::cpu
