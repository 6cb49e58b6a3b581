// The loops of PairedTiles for AVX-512 with arithmetic in bfloat16.
#include "tiles_isa.h"

#ifdef SPECDEC_X86
#include <immintrin.h>

#include <cstddef>
#include <cstring>

#define SPECDEC_TILES_TARGET SPECDEC_TARGET_AMX
#include "pair_values.h"

namespace specdec::cpu {
namespace {

constexpr int64_t kBlockRows = 4;                        // rows whose sums stay in registers,
constexpr int64_t kVectors = kColumnBlock / kPairWords;  // with so many vectors each
constexpr int64_t kWords = kTileKeys / 2;                // of the weights of a row
constexpr int64_t kDimWords = kDimBlock / 2;

#define SPECDEC_TILES_INLINE inline __attribute__((always_inline)) SPECDEC_TILES_TARGET

template <int64_t kRows>
using Sums = __m512[kRows][kVectors];

// sums[r][v] += pairs[v * stride] * words[r * word_stride], the second product of each pair first.
template <int64_t kRows>
SPECDEC_TILES_INLINE void add_products(const void* words, int64_t word_stride, const void* pairs,
                                       int64_t stride, Sums<kRows>& sums) {
  __m512bh factors[kVectors];
  SPECDEC_TILES_UNROLL for (int64_t v = 0; v < kVectors; ++v) {
    factors[v] = (__m512bh)_mm512_loadu_si512(static_cast<const uint32_t*>(pairs) + v * stride);
  }
  SPECDEC_TILES_UNROLL for (int64_t r = 0; r < kRows; ++r) {
    int32_t word;
    std::memcpy(&word, static_cast<const std::byte*>(words) + r * word_stride * sizeof(word),
                sizeof(word));
    const __m512bh other = (__m512bh)_mm512_set1_epi32(word);
    SPECDEC_TILES_UNROLL for (int64_t v = 0; v < kVectors; ++v) {
      sums[r][v] = _mm512_dpbf16_ps(sums[r][v], factors[v], other);
    }
  }
}

// sums[r, j] = the products of kDimBlock dimensions of queries r and keys j.
template <int64_t kRows>
SPECDEC_TILES_INLINE void dot_block(const float* queries, const float* keys, int64_t words,
                                    Sums<kRows>& sums) {
  SPECDEC_TILES_UNROLL for (int64_t r = 0; r < kRows; ++r) {
    SPECDEC_TILES_UNROLL for (int64_t v = 0; v < kVectors; ++v) sums[r][v] = _mm512_setzero_ps();
  }
  SPECDEC_TILES_UNROLL for (int64_t word = 0; word < kDimWords; ++word) {
    add_products<kRows>(queries + word, words, keys + word * kTileKeys, kPairWords, sums);
  }
}

template <int64_t kRows>
SPECDEC_TILES_TARGET void dot_products_of(const float* queries, const float* keys, int64_t words,
                                          float* out, int64_t out_stride) {
  Sums<kRows> totals;
  dot_block<kRows>(queries, keys, words, totals);
  for (int64_t word = kDimWords; word < words; word += kDimWords) {
    Sums<kRows> sums;
    dot_block<kRows>(queries + word, keys + word * kTileKeys, words, sums);
    SPECDEC_TILES_UNROLL for (int64_t r = 0; r < kRows; ++r) {
      SPECDEC_TILES_UNROLL for (int64_t v = 0; v < kVectors; ++v) {
        totals[r][v] = _mm512_add_ps(totals[r][v], sums[r][v]);
      }
    }
  }
  SPECDEC_TILES_UNROLL for (int64_t r = 0; r < kRows; ++r) {
    SPECDEC_TILES_UNROLL for (int64_t v = 0; v < kVectors; ++v) {
      _mm512_storeu_ps(out + r * out_stride + v * kPairWords, totals[r][v]);
    }
  }
}

SPECDEC_TILES_TARGET void dot_products(const float* queries, const float* keys, int64_t words,
                                       int64_t rows, float* out, int64_t out_stride) {
  int64_t row = 0;
  for (; row + kBlockRows <= rows; row += kBlockRows) {
    dot_products_of<kBlockRows>(queries + row * words, keys, words, out + row * out_stride,
                                out_stride);
  }
  for (; row < rows; row += kRowBlock) {
    dot_products_of<kRowBlock>(queries + row * words, keys, words, out + row * out_stride,
                               out_stride);
  }
}

template <int64_t kRows>
SPECDEC_TILES_TARGET void multiply_add_to(const uint32_t (*weights)[kWords], const PairTile* pairs,
                                          PairRange given, int64_t columns, float* out) {
  for (int64_t column = 0; column < columns; column += kColumnBlock) {
    Sums<kRows> sums;
    SPECDEC_TILES_UNROLL for (int64_t r = 0; r < kRows; ++r) {
      SPECDEC_TILES_UNROLL for (int64_t v = 0; v < kVectors; ++v) {
        sums[r][v] = _mm512_loadu_ps(out + r * columns + column + v * kPairWords);
      }
    }
    const PairTile* tile = pairs + column / kPairWords;
    for (int64_t pair = given.begin; pair < given.end; ++pair) {
      add_products<kRows>(weights[0] + pair, kWords, tile[0][pair],
                          sizeof(PairTile) / sizeof(uint32_t), sums);
    }
    SPECDEC_TILES_UNROLL for (int64_t r = 0; r < kRows; ++r) {
      SPECDEC_TILES_UNROLL for (int64_t v = 0; v < kVectors; ++v) {
        _mm512_storeu_ps(out + r * columns + column + v * kPairWords, sums[r][v]);
      }
    }
  }
}

SPECDEC_TILES_INLINE void round(const float* weights, uint32_t (&words)[kWords]) {
  const __m512 low = _mm512_loadu_ps(weights), high = _mm512_loadu_ps(weights + kPairWords);
  _mm512_storeu_si512(words, (__m512i)_mm512_cvtne2ps_pbh(high, low));
}

SPECDEC_TILES_TARGET bool multiply_add(const float* weights, int64_t weight_stride,
                                       const BFloat16* const* values, int64_t columns, int64_t rows,
                                       float* out) {
  alignas(64) PairTile pairs[kMaxPairedDim / kPairWords];
  const PairRange given = given_pairs(values);
  if (!pair_values(values, given, columns, pairs)) return false;
  alignas(64) uint32_t words[kBlockRows][kWords];
  for (int64_t row = 0; row < rows;) {
    const int64_t count = row + kBlockRows <= rows ? kBlockRows : kRowBlock;
    for (int64_t r = 0; r < count; ++r) round(weights + (row + r) * weight_stride, words[r]);
    float* sums = out + row * columns;
    count == kBlockRows ? multiply_add_to<kBlockRows>(words, pairs, given, columns, sums)
                        : multiply_add_to<kRowBlock>(words, pairs, given, columns, sums);
    row += count;
  }
  return true;
}

SPECDEC_TILES_TARGET void multiply_add_row(const float* weights, const BFloat16* const* values,
                                           int64_t columns, float* out) {
  alignas(64) PairTile pairs[kMaxPairedDim / kPairWords];
  const PairRange given = given_pairs(values);
  pair_values(values, given, columns, pairs);
  alignas(64) uint32_t words[1][kWords];
  round(weights, words[0]);
  multiply_add_to<1>(words, pairs, given, columns, out);
}

}  // namespace

const PairedTiles& paired_tiles_avx512_bf16() {
  static constexpr PairedTiles kTiles{.row_block = kRowBlock,
                                      .takes_words = true,
                                      .is_in_order = true,
                                      .begin = [] {},
                                      .end = [] {},
                                      .dot_products = dot_products,
                                      .multiply_add = multiply_add,
                                      .multiply_add_row = multiply_add_row};
  return kTiles;
}

}  // namespace specdec::cpu
#endif
