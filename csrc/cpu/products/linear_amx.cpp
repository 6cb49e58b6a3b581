// linear of bfloat16 on AMX, the matrix units of some x86 processors.
#include "specdec/cpu/isa.h"

#ifdef SPECDEC_X86

#include <immintrin.h>

// GCC 12 warns about its own intrinsics (bug 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

#define SPECDEC_LINEAR_TARGET SPECDEC_TARGET_AMX
#include "cpu/runtime/amx_tiles.h"
#include "loops/matrix_units_kernel.h"
#include "loops/transpose.h"

namespace specdec::cpu {
namespace {

struct AmxLinearTiles : AmxTiles, Transposes {
  using AmxTiles::AmxTiles;

  // Outputs 2 p and 2 p + 1 are rounded into pairs of all rows, and words are transposed from then on.
  SPECDEC_LINEAR_INLINE static void round_outputs(const float (*sums)[16], const float* bias,
                                          BFloat16 (*rows)[16]) {
    const __m512i row = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i interleaved =
        _mm512_add_epi32(row, _mm512_slli_epi32(_mm512_add_epi32(row, _mm512_set1_epi32(16)), 16));
    __m512i pairs[8];
    SPECDEC_UNROLL for (int i = 0; i < 8; ++i) {
      const auto first = _mm512_add_ps(_mm512_load_ps(sums[2 * i]), _mm512_set1_ps(bias[2 * i]));
      const auto second =
          _mm512_add_ps(_mm512_load_ps(sums[2 * i + 1]), _mm512_set1_ps(bias[2 * i + 1]));
      pairs[i] = _mm512_permutexvar_epi16(interleaved, (__m512i)_mm512_cvtne2ps_pbh(second, first));
    }
    __m512i fours[2][4];  // lane l of [h][k]: the pairs 4 h to 4 h + 3 of row 4 l + k
    SPECDEC_UNROLL for (int half = 0; half < 2; ++half) {
      const __m512i* own = pairs + 4 * half;
      const __m512i low01 = _mm512_unpacklo_epi32(own[0], own[1]);
      const __m512i low23 = _mm512_unpacklo_epi32(own[2], own[3]);
      const __m512i high01 = _mm512_unpackhi_epi32(own[0], own[1]);
      const __m512i high23 = _mm512_unpackhi_epi32(own[2], own[3]);
      fours[half][0] = _mm512_unpacklo_epi64(low01, low23);
      fours[half][1] = _mm512_unpackhi_epi64(low01, low23);
      fours[half][2] = _mm512_unpacklo_epi64(high01, high23);
      fours[half][3] = _mm512_unpackhi_epi64(high01, high23);
    }
    const __m512i lanes01 = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
    const __m512i lanes23 = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
    SPECDEC_UNROLL for (int k = 0; k < 4; ++k) {
      const __m512i low = _mm512_permutex2var_epi64(fours[0][k], lanes01, fours[1][k]);
      const __m512i high = _mm512_permutex2var_epi64(fours[0][k], lanes23, fours[1][k]);
      store_row(_mm512_castsi512_si256(low), rows[k]);
      store_row(_mm512_extracti64x4_epi64(low, 1), rows[4 + k]);
      store_row(_mm512_castsi512_si256(high), rows[8 + k]);
      store_row(_mm512_extracti64x4_epi64(high, 1), rows[12 + k]);
    }
  }

 private:
  SPECDEC_LINEAR_INLINE static void store_row(__m256i row, BFloat16* p) {
    _mm256_store_si256(reinterpret_cast<__m256i*>(p), row);
  }
};

}  // namespace

Products products_amx(const Products& products) { return with_matrix_units<AmxLinearTiles>(products); }

}  // namespace specdec::cpu

#endif
