// Packs bfloat16 inputs as IntegerInputs (products.h) with AVX2.
#pragma once

#include "specdec/cpu/isa.h"

#ifdef SPECDEC_X86

#include <immintrin.h>

#include "cpu/products/products.h"

namespace specdec::cpu {

#define SPECDEC_PACK_INLINE inline __attribute__((always_inline)) SPECDEC_TARGET_AVX2

// What the formats of integers_kernel.h need of it.
struct IntegerPacking {
  SPECDEC_PACK_INLINE static __m256i load_floats(const BFloat16* p) {
    const __m128i eight = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_slli_epi32(_mm256_cvtepu16_epi32(eight), 16);
  }

  SPECDEC_PACK_INLINE static int32_t largest_magnitude(const BFloat16* inputs) {
    const __m256i magnitude = _mm256_set1_epi16(0x7FFF);
    __m256i largest = _mm256_setzero_si256();
#pragma GCC unroll 4
    for (int i = 0; i < 64; i += 16) {
      const __m256i sixteen = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(inputs + i));
      largest = _mm256_max_epi16(largest, _mm256_and_si256(sixteen, magnitude));
    }
    const __m128i by8 =
        _mm_max_epi16(_mm256_castsi256_si128(largest), _mm256_extracti128_si256(largest, 1));
    // The instruction finds the smallest.
    const __m128i inverted = _mm_minpos_epu16(_mm_sub_epi16(_mm_set1_epi16(0x7FFF), by8));
    return (0x7FFF - _mm_extract_epi16(inverted, 0)) << 16;
  }

  SPECDEC_PACK_INLINE static void pack_integers(const BFloat16* inputs, float up, int64_t half,
                                                IntegerInputs& unit) {
    const __m256 factor = _mm256_set1_ps(up);
    const auto integers = [&](int i) SPECDEC_TARGET_AVX2 {
      return _mm256_cvtps_epi32(
          _mm256_mul_ps(_mm256_castsi256_ps(load_floats(inputs + i)), factor));
    };
#pragma GCC unroll 2
    for (int block = 0; block < 2; ++block) {
      __m256i sums = _mm256_setzero_si256();
#pragma GCC unroll 2
      for (int p = 0; p < 2; ++p) {
        const __m256i a = integers(32 * block + 16 * p), b = integers(32 * block + 16 * p + 8);
        // [a0 a1 a2 a3 b0 b1 b2 b3 | a4 a5 a6 a7 b4 b5 b6 b7]
        const __m256i words = _mm256_packs_epi32(a, b);
        sums = _mm256_add_epi32(sums, _mm256_madd_epi16(words, _mm256_set1_epi16(1)));
        // [a0 a2 b0 b2, a1 a3 b1 b3 | a4 a6 b4 b6, a5 a7 b5 b7]
        const __m256i split =
            _mm256_shuffle_epi8(words, _mm256_broadcastsi128_si256(_mm_setr_epi8(
                                           0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15)));
        // [a0 a2 b0 b2, a4 a6 b4 b6 | a1 a3 b1 b3, a5 a7 b5 b7]
        const __m256i halves = _mm256_permute4x64_epi64(split, 0xD8);
        const __m256i ordered = _mm256_shuffle_epi32(halves, 0xD8);
        int16_t* even = unit.numbers[p] + 16 * half + 8 * block;
        int16_t* odd = unit.numbers[2 + p] + 16 * half + 8 * block;
        _mm_storeu_si128(reinterpret_cast<__m128i*>(even), _mm256_castsi256_si128(ordered));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(odd), _mm256_extracti128_si256(ordered, 1));
      }
      // Sums of pairs, [a01 a23 b01 b23 | a45 a67 b45 b67] of both p: lanes 0 to 3 are a0..3, a4..7,
      // b0..3, b4..7.
      const __m128i low = _mm256_castsi256_si128(sums), high = _mm256_extracti128_si256(sums, 1);
      const __m128i fours = _mm_hadd_epi32(low, high);  // a0..3, b0..3, a4..7, b4..7
      _mm_storeu_si128(reinterpret_cast<__m128i*>(unit.sums + 8 * half + 4 * block),
                       _mm_shuffle_epi32(fours, 0xD8));
    }
  }
};

#undef SPECDEC_PACK_INLINE

}  // namespace specdec::cpu

#endif
