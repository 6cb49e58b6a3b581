// Puts values of bfloat16 into pairs. The including file defines SPECDEC_TILES_TARGET, a target attribute or
// nothing.
#pragma once

#include <algorithm>
#include <cstring>

#include "tiles.h"

namespace specdec::cpu {
namespace {

constexpr int64_t kPairWords = 16;  // words of a vector

// [p][j] is column j of the values 2 p (low bits) and 2 p + 1 of a tile.
using PairTile = uint32_t[kTileKeys / 2][kPairWords];

// Stores a range of pairs, kPairWords of the columns in each PairTile. Null values are zeros. Returns whether
// all are finite.
SPECDEC_TILES_TARGET bool pair_values(const BFloat16* const* values, PairRange range,
                                      int64_t columns, PairTile* pairs) {
  static constexpr BFloat16 kZeros[kMaxPairedDim] = {};
  uint32_t largest[kColumnBlock] = {};
  for (int64_t pair = range.begin; pair < range.end; ++pair) {
    const BFloat16* first = values[2 * pair] ? values[2 * pair] : kZeros;
    const BFloat16* second = values[2 * pair + 1] ? values[2 * pair + 1] : kZeros;
    for (int64_t column = 0; column < columns; column += kColumnBlock) {
      uint32_t words[kColumnBlock];
      for (int64_t j = 0; j < kColumnBlock; ++j) {
        const uint32_t low = first[column + j].bits, high = second[column + j].bits;
        largest[j] = std::max({largest[j], low & kExponent, high & kExponent});
        words[j] = low | high << 16;
      }
      for (int64_t i = 0; i < kColumnBlock / kPairWords; ++i) {
        std::memcpy(pairs[column / kPairWords + i][pair], words + i * kPairWords,
                    sizeof(pairs[0][0]));
      }
    }
  }
  return *std::max_element(largest, largest + kColumnBlock) < kExponent;
}

}  // namespace
}  // namespace specdec::cpu
