// Transposes a block of 8 x 8 words of four bytes in registers: float32, or pairs of bfloat16.
#pragma once

#include "specdec/cpu/isa.h"

#ifdef SPECDEC_X86

#include <immintrin.h>

#include <cstdint>

namespace specdec::cpu {

#define SPECDEC_TRANSPOSE_INLINE inline __attribute__((always_inline)) SPECDEC_TARGET_AVX2

SPECDEC_TRANSPOSE_INLINE void interleave(__m256 x, __m256 y, __m256* low, __m256* high) {
  const __m256 even = _mm256_unpacklo_ps(x, y), odd = _mm256_unpackhi_ps(x, y);
  *low = _mm256_permute2f128_ps(even, odd, 0x20);
  *high = _mm256_permute2f128_ps(even, odd, 0x31);
}

// Stores rows[i][column + j] as element i of vector j with store(j, vector).
//
// Three rounds of interleaving vector i with vector i + 4: each moves one bit of the row number
// into the column number.
template <typename Store>
SPECDEC_TRANSPOSE_INLINE void transpose_words(const float* const* rows, int64_t column,
                                              const Store& store) {
  __m256 a[8], b[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) a[i] = _mm256_loadu_ps(rows[i] + column);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) interleave(a[i], a[i + 4], &b[2 * i], &b[2 * i + 1]);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) interleave(b[i], b[i + 4], &a[2 * i], &a[2 * i + 1]);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) interleave(a[i], a[i + 4], &b[2 * i], &b[2 * i + 1]);
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) store(i, b[i]);
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

// out[j * stride + i] = rows[i][column + j]
SPECDEC_TRANSPOSE_INLINE void transpose_8x8(const float* const* rows, int64_t column, float* out,
                                            int64_t stride) {
  transpose_words(rows, column, StoreWords{out, stride});
}

// The same for pairs of bfloat16: the second of pair j becomes float32 in row 2 j, the first in row
// 2 j + 1.
SPECDEC_TRANSPOSE_INLINE void transpose_split_8x8(const float* const* rows, int64_t column,
                                                  float* out, int64_t stride) {
  transpose_words(rows, column, StoreSplitPairs{out, stride});
}

#undef SPECDEC_TRANSPOSE_INLINE

}  // namespace specdec::cpu

#endif
