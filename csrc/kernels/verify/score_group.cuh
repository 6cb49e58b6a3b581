// Groups of four neighbouring tokens of a row, which a thread loads and stores at once.
#pragma once

#include "specdec/core/float_types.h"
#include "specdec/device/cuda.cuh"
#include "specdec/sampling/filter_search.h"

namespace specdec {

constexpr int kGroup = 4;  // tokens of a thread

template <typename T>
struct alignas(kGroup * sizeof(T)) ScoreGroup {
  T values[kGroup];
};

// Four scores of a row, -inf beyond its end.
template <typename T>
__device__ __forceinline__ ScoreGroup<float> load_scores(const T* row, int64_t first, int64_t vocab,
                                                         bool aligned) {
  ScoreGroup<float> scores;
  if (aligned && first < vocab) {
    const ScoreGroup<T> group = load_global<ScoreGroup<T>>(row + first);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) scores.values[i] = to_float(group.values[i]);
  } else {
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      scores.values[i] =
          first + i < vocab ? to_float(row[first + i]) : key_score(kMinusInfinityKey);
    }
  }
  return scores;
}

__device__ __forceinline__ void store_scores(float* row, int64_t first, int64_t vocab, bool aligned,
                                             const ScoreGroup<float>& scores) {
  if (aligned && first < vocab) {
    store_global(row + first, scores);
  } else {
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      if (first + i < vocab) row[first + i] = scores.values[i];
    }
  }
}

}  // namespace specdec
