// Transposes a block of 8 x 8 float32 in registers.
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

// out[j * stride + i] = rows[i][column + j]
//
// Three rounds of interleaving vector i with vector i + 4: each moves one bit of the row number
// into the column number.
SPECDEC_TRANSPOSE_INLINE void transpose_8x8(const float* const* rows, int64_t column, float* out,
                                            int64_t stride) {
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
  for (int i = 0; i < 8; ++i) _mm256_storeu_ps(out + i * stride, b[i]);
}

#undef SPECDEC_TRANSPOSE_INLINE

}  // namespace specdec::cpu

#endif
