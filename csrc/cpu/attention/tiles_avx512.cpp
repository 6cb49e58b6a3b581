// The loops of tiles.h for AVX-512.
#include "tiles_isa.h"

#ifdef SPECDEC_X86
#include <immintrin.h>

// GCC 12 warns about its own intrinsics (bug 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

#define SPECDEC_TILES_TARGET SPECDEC_TARGET_AVX512

namespace specdec::cpu {
namespace {

constexpr int64_t kBlockRows = 4;

// Loads four dimensions of the rows i, i + 4, i + 8 and i + 12 into the quarters of a vector.
SPECDEC_TARGET_AVX512 __m512 load_quarters(const float* const* rows, int64_t dim) {
  __m512 quarters = _mm512_castps128_ps512(_mm_loadu_ps(rows[0] + dim));
  quarters = _mm512_insertf32x4(quarters, _mm_loadu_ps(rows[4] + dim), 1);
  quarters = _mm512_insertf32x4(quarters, _mm_loadu_ps(rows[8] + dim), 2);
  return _mm512_insertf32x4(quarters, _mm_loadu_ps(rows[12] + dim), 3);
}

// The loads place whole quarters; then 4 x 4 blocks are transposed within them.
SPECDEC_TARGET_AVX512 void transpose_block(const float* const* rows, int64_t dim, float* out) {
#pragma GCC unroll 4
  for (int64_t d = 0; d < kBlock; d += 4) {
    const __m512 a = load_quarters(rows, dim + d), b = load_quarters(rows + 1, dim + d);
    const __m512 c = load_quarters(rows + 2, dim + d), e = load_quarters(rows + 3, dim + d);
    const __m512 ab01 = _mm512_unpacklo_ps(a, b), ab23 = _mm512_unpackhi_ps(a, b);
    const __m512 ce01 = _mm512_unpacklo_ps(c, e), ce23 = _mm512_unpackhi_ps(c, e);
    _mm512_storeu_ps(out + d * kTileKeys, _mm512_shuffle_ps(ab01, ce01, 0x44));
    _mm512_storeu_ps(out + (d + 1) * kTileKeys, _mm512_shuffle_ps(ab01, ce01, 0xEE));
    _mm512_storeu_ps(out + (d + 2) * kTileKeys, _mm512_shuffle_ps(ab23, ce23, 0x44));
    _mm512_storeu_ps(out + (d + 3) * kTileKeys, _mm512_shuffle_ps(ab23, ce23, 0xEE));
  }
}

}  // namespace
}  // namespace specdec::cpu

#include "tiles_impl.h"

namespace specdec::cpu {

const TilesOfIsa& attention_tiles_avx512() { return kTiles; }

}  // namespace specdec::cpu
#endif
