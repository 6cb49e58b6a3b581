// Transposes a block of 8 x 8 words of four bytes in registers: float32, or pairs of bfloat16.
#pragma once

#include "specdec/cpu/isa.h"

#ifdef SPECDEC_X86

#include <immintrin.h>

#include <cstdint>

namespace specdec::cpu {

#define SPECDEC_TRANSPOSE_INLINE inline __attribute__((always_inline)) SPECDEC_TARGET_AVX2

// Stores rows[i][column + j] as element i of vector j with store(j, vector).
//
// Loading rows i and i + 4 into the halves of a vector leaves only blocks of 4 x 4 to transpose,
// which needs no shuffle across the halves.
template <typename Store>
SPECDEC_TRANSPOSE_INLINE void transpose_words(const float* const* rows, int64_t column,
                                              const Store& store) {
#pragma GCC unroll 2
  for (int j = 0; j < 8; j += 4) {
    __m256 halves[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      halves[i] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(rows[i] + column + j)),
                                       _mm_loadu_ps(rows[i + 4] + column + j), 1);
    }
    const __m256 low01 = _mm256_unpacklo_ps(halves[0], halves[1]);
    const __m256 low23 = _mm256_unpacklo_ps(halves[2], halves[3]);
    const __m256 high01 = _mm256_unpackhi_ps(halves[0], halves[1]);
    const __m256 high23 = _mm256_unpackhi_ps(halves[2], halves[3]);
    store(j, _mm256_shuffle_ps(low01, low23, 0x44));
    store(j + 1, _mm256_shuffle_ps(low01, low23, 0xEE));
    store(j + 2, _mm256_shuffle_ps(high01, high23, 0x44));
    store(j + 3, _mm256_shuffle_ps(high01, high23, 0xEE));
  }
}

struct StoreWords {
  float* out;
  int64_t stride;
  SPECDEC_TRANSPOSE_INLINE void operator()(int j, __m256 words) const {
    _mm256_storeu_ps(out + j * stride, words);
  }
};

struct StoreSplitPairs {
  float* out;
  int64_t stride;
  SPECDEC_TRANSPOSE_INLINE void operator()(int j, __m256 words) const {
    const __m256i pairs = _mm256_castps_si256(words);
    const __m256i second = _mm256_and_si256(pairs, _mm256_set1_epi32(-0x10000));
    const __m256i first = _mm256_slli_epi32(pairs, 16);
    _mm256_storeu_ps(out + 2 * j * stride, _mm256_castsi256_ps(second));
    _mm256_storeu_ps(out + (2 * j + 1) * stride, _mm256_castsi256_ps(first));
  }
};

// What the formats of linear_kernel.h need of it.
struct Transposes {
  // out[j * stride + i] = rows[i][column + j]
  SPECDEC_TRANSPOSE_INLINE static void transpose(const float* const* rows, int64_t column,
                                                 float* out, int64_t stride) {
    transpose_words(rows, column, StoreWords{out, stride});
  }

  // The same for pairs of bfloat16: the second of pair j becomes float32 in row 2 j, the first in
  // row 2 j + 1.
  SPECDEC_TRANSPOSE_INLINE static void transpose_split(const float* const* rows, int64_t column,
                                                       float* out, int64_t stride) {
    transpose_words(rows, column, StoreSplitPairs{out, stride});
  }
};

#undef SPECDEC_TRANSPOSE_INLINE

}  // namespace specdec::cpu

#endif
