#include "philox.h"

#ifdef SPECDEC_X86
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"  // both inside GCC 12's own header
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif

namespace specdec::cpu {
namespace {

void bits_baseline(const NoiseStream& noise, uint32_t first_group, uint32_t* bits) {
  for (uint32_t group = 0; group < kBulkGroups; ++group) {
    const Philox4 words = noise.group_bits(first_group + group);
    bits[4 * group] = words.lane[0];
    bits[4 * group + 1] = words.lane[1];
    bits[4 * group + 2] = words.lane[2];
    bits[4 * group + 3] = words.lane[3];
  }
}

#ifdef SPECDEC_X86
// One counter word of one group per 64-bit lane, in its low half. The multiplication reads only
// that half, so a product can be used directly as the next low word and, shifted, as the next high
// word. The upper halves are never used. Groups are assigned to the lanes so that interleaving
// pairs of words at the end, which works within 128 bits, leaves the tokens in order.

SPECDEC_TARGET_AVX512 void bits_avx512(const NoiseStream& noise, uint32_t first_group,
                                       uint32_t* bits) {
  constexpr int kGroups = 8;  // groups per vector
  constexpr int kVectors = kBulkGroups / kGroups;
  const __m512i multiplier0 = _mm512_set1_epi64(kPhiloxMultiplier0);
  const __m512i multiplier1 = _mm512_set1_epi64(kPhiloxMultiplier1);
  const __m512i deal = _mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0);
  __m512i word0[kVectors], word1[kVectors], word2[kVectors], word3[kVectors];
  for (int v = 0; v < kVectors; ++v) {
    word0[v] =
        _mm512_add_epi32(deal, _mm512_set1_epi32(static_cast<int>(first_group + v * kGroups)));
    word1[v] = _mm512_set1_epi32(static_cast<int>(noise.position));
    word2[v] = _mm512_set1_epi32(static_cast<int>(noise.row));
    word3[v] = _mm512_set1_epi32(static_cast<int>(noise.purpose));
  }
  uint32_t key0 = noise.key0, key1 = noise.key1;
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const __m512i keys0 = _mm512_set1_epi32(static_cast<int>(key0));
    const __m512i keys1 = _mm512_set1_epi32(static_cast<int>(key1));
    for (int v = 0; v < kVectors; ++v) {
      constexpr int kXorOfThree = 0x96;
      const __m512i product0 = _mm512_mul_epu32(word0[v], multiplier0);
      const __m512i product1 = _mm512_mul_epu32(word2[v], multiplier1);
      const __m512i high0 = _mm512_srli_epi64(product0, 32);
      const __m512i high1 = _mm512_srli_epi64(product1, 32);
      word0[v] = _mm512_ternarylogic_epi32(high1, word1[v], keys0, kXorOfThree);
      word1[v] = product1;
      word2[v] = _mm512_ternarylogic_epi32(high0, word3[v], keys1, kXorOfThree);
      word3[v] = product0;
    }
    key0 += kPhiloxWeyl0;
    key1 += kPhiloxWeyl1;
  }
  for (int v = 0; v < kVectors; ++v) {
    constexpr __mmask16 kUpperHalves = 0xAAAA;
    const __m512i low =
        _mm512_mask_mov_epi32(word0[v], kUpperHalves, _mm512_slli_epi64(word1[v], 32));
    const __m512i high =
        _mm512_mask_mov_epi32(word2[v], kUpperHalves, _mm512_slli_epi64(word3[v], 32));
    uint32_t* out = bits + 4 * kGroups * v;
    _mm512_storeu_si512(out, _mm512_unpacklo_epi64(low, high));
    _mm512_storeu_si512(out + 2 * kGroups, _mm512_unpackhi_epi64(low, high));
  }
}

// Two vectors of four groups at a time: more would not fit into 16 registers.
SPECDEC_TARGET_AVX2 void bits_avx2(const NoiseStream& noise, uint32_t first_group, uint32_t* bits) {
  constexpr int kGroups = 4;  // groups per vector
  constexpr int kVectors = 2;
  const __m256i multiplier0 = _mm256_set1_epi64x(kPhiloxMultiplier0);
  const __m256i multiplier1 = _mm256_set1_epi64x(kPhiloxMultiplier1);
  const __m256i deal = _mm256_set_epi64x(3, 1, 2, 0);
  for (uint32_t done = 0; done < kBulkGroups; done += kGroups * kVectors) {
    __m256i word0[kVectors], word1[kVectors], word2[kVectors], word3[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      const uint32_t first = first_group + done + v * kGroups;
      word0[v] = _mm256_add_epi32(deal, _mm256_set1_epi32(static_cast<int>(first)));
      word1[v] = _mm256_set1_epi32(static_cast<int>(noise.position));
      word2[v] = _mm256_set1_epi32(static_cast<int>(noise.row));
      word3[v] = _mm256_set1_epi32(static_cast<int>(noise.purpose));
    }
    uint32_t key0 = noise.key0, key1 = noise.key1;
    for (int round = 0; round < kPhiloxRounds; ++round) {
      const __m256i keys0 = _mm256_set1_epi32(static_cast<int>(key0));
      const __m256i keys1 = _mm256_set1_epi32(static_cast<int>(key1));
      for (int v = 0; v < kVectors; ++v) {
        const __m256i product0 = _mm256_mul_epu32(word0[v], multiplier0);
        const __m256i product1 = _mm256_mul_epu32(word2[v], multiplier1);
        const __m256i high0 = _mm256_srli_epi64(product0, 32);
        const __m256i high1 = _mm256_srli_epi64(product1, 32);
        word0[v] = _mm256_xor_si256(_mm256_xor_si256(high1, word1[v]), keys0);
        word1[v] = product1;
        word2[v] = _mm256_xor_si256(_mm256_xor_si256(high0, word3[v]), keys1);
        word3[v] = product0;
      }
      key0 += kPhiloxWeyl0;
      key1 += kPhiloxWeyl1;
    }
    for (int v = 0; v < kVectors; ++v) {
      constexpr int kUpperHalves = 0xAA;
      const __m256i low =
          _mm256_blend_epi32(word0[v], _mm256_slli_epi64(word1[v], 32), kUpperHalves);
      const __m256i high =
          _mm256_blend_epi32(word2[v], _mm256_slli_epi64(word3[v], 32), kUpperHalves);
      auto* out = reinterpret_cast<__m256i*>(bits + 4 * (done + kGroups * v));
      _mm256_storeu_si256(out, _mm256_unpacklo_epi64(low, high));
      _mm256_storeu_si256(out + 1, _mm256_unpackhi_epi64(low, high));
    }
  }
}
#endif

}  // namespace

BulkBits bulk_bits(CpuIsa isa) {
  return SPECDEC_FOR_ISA(isa, bits_baseline, bits_avx2, bits_avx512);
}

}  // namespace specdec::cpu
