// The loops of tiles.h for AVX2 with FMA.
#include "tiles_isa.h"

#ifdef SPECDEC_X86
#include <immintrin.h>

#define SPECDEC_TILES_TARGET SPECDEC_TARGET_AVX2

namespace specdec::cpu {
namespace {

constexpr int64_t kBlockRows = 2;

SPECDEC_TARGET_AVX2 void interleave(__m256 x, __m256 y, __m256* low, __m256* high) {
  const __m256 even = _mm256_unpacklo_ps(x, y), odd = _mm256_unpackhi_ps(x, y);
  *low = _mm256_permute2f128_ps(even, odd, 0x20);
  *high = _mm256_permute2f128_ps(even, odd, 0x31);
}

// Three rounds of interleaving vector i with vector i + 4 transpose an 8 x 8 block: each round
// moves one bit of the row number into the column number.
SPECDEC_TARGET_AVX2 void transpose_8x8(const float* const* rows, int64_t dim, float* out) {
  __m256 a[8], b[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) a[i] = _mm256_loadu_ps(rows[i] + dim);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) interleave(a[i], a[i + 4], &b[2 * i], &b[2 * i + 1]);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) interleave(b[i], b[i + 4], &a[2 * i], &a[2 * i + 1]);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) interleave(a[i], a[i + 4], &b[2 * i], &b[2 * i + 1]);
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) _mm256_storeu_ps(out + i * kTileKeys, b[i]);
}

SPECDEC_TARGET_AVX2 void transpose_block(const float* const* rows, int64_t dim, float* out) {
  for (int64_t row = 0; row < kBlock; row += 8) {
    for (int64_t d = 0; d < kBlock; d += 8) {
      transpose_8x8(rows + row, dim + d, out + d * kTileKeys + row);
    }
  }
}

}  // namespace
}  // namespace specdec::cpu

#include "tiles_impl.h"

namespace specdec::cpu {

const AttentionTiles& attention_tiles_avx2() { return kTiles; }

}  // namespace specdec::cpu
#endif
