// attention_tiles.h for AVX-512.
#include "attention_tiles_isa.h"

#ifdef SPECDEC_X86
#include <immintrin.h>

#define SPECDEC_TILES_TARGET SPECDEC_TARGET_AVX512

namespace specdec::cpu {
namespace {

constexpr int64_t kBlockRows = 4;

// Four rounds of interleaving vector i with vector i + 8 transpose a 16 x 16 block: each round
// moves one bit of the row number into the column number.
SPECDEC_TARGET_AVX512 void transpose_block(const float* in, int64_t stride, float* out) {
  const __m512i low = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
  __m512 a[16], b[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_ps(in + i * stride);
#pragma GCC unroll 2
  for (int round = 0; round < 2; ++round) {
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      b[2 * i] = _mm512_permutex2var_ps(a[i], low, a[i + 8]);
      b[2 * i + 1] = _mm512_permutex2var_ps(a[i], high, a[i + 8]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      a[2 * i] = _mm512_permutex2var_ps(b[i], low, b[i + 8]);
      a[2 * i + 1] = _mm512_permutex2var_ps(b[i], high, b[i + 8]);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) _mm512_storeu_ps(out + i * kTileKeys, a[i]);
}

}  // namespace
}  // namespace specdec::cpu

#include "attention_tiles_impl.h"

namespace specdec::cpu {

const AttentionTiles& attention_tiles_avx512() { return kTiles; }

}  // namespace specdec::cpu
#endif
