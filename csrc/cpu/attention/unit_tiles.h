// The loops of PairedTiles for matrix units. The including file defines SPECDEC_TILES_TARGET, a target
// attribute or nothing, and has the type Tiles of cpu/runtime/amx_tiles.h.
#pragma once

#include <algorithm>
#include <cstring>

#include "cpu/runtime/emulated_tiles.h"
#include "pair_values.h"
#include "tiles.h"

namespace specdec::cpu {

template <class Tiles>
class UnitTiles {
 public:
  static constexpr PairedTiles table() {
    return {.row_block = kTile,
            .takes_words = true,
            .is_in_order = false,
            .begin = begin,
            .end = Tiles::end,
            .dot_products = dot_products,
            .multiply_add = multiply_add,
            .multiply_add_row = multiply_add_row};
  }

 private:
  static constexpr int64_t kTile = 16;  // rows, or words of a row
  static_assert(kTileKeys == 2 * kTile && kPairWords == kTile);

  static void begin() { Tiles::begin(kTile); }

  SPECDEC_TILES_TARGET static void dot_products(const float* queries, const float* keys,
                                                int64_t words, int64_t rows, float* out,
                                                int64_t out_stride) {
    Tiles tiles(kTile);
    const int64_t row_bytes = words * sizeof(float), key_bytes = kTileKeys * sizeof(float);
    const int64_t out_bytes = out_stride * sizeof(float);
    for (int64_t row = 0; row < rows; row += kTile) {
      tiles.template clear<0>();
      tiles.template clear<1>();
      for (int64_t word = 0; word < words; word += kTile) {
        const float* columns = keys + word * kTileKeys;
        tiles.template load<4>(queries + row * words + word, row_bytes);
        tiles.template load<6>(columns, key_bytes);
        tiles.template load<7>(columns + kTile, key_bytes);
        tiles.template multiply_add<0, 4, 6>();
        tiles.template multiply_add<1, 4, 7>();
      }
      tiles.template store<0>(out + row * out_stride, out_bytes);
      tiles.template store<1>(out + row * out_stride + kTile, out_bytes);
    }
  }

  SPECDEC_TILES_TARGET static bool multiply_add(const float* weights, int64_t weight_stride,
                                                const BFloat16* const* values, int64_t columns,
                                                int64_t rows, float* out) {
    alignas(64) PairTile pairs[kMaxPairedDim / kTile];
    if (!pair_values(values, PairRange(), columns, pairs)) return false;
    Tiles tiles(kTile);
    const int64_t out_bytes = columns * sizeof(float);
    for (int64_t row = 0; row < rows; row += kTile) {
      alignas(64) BFloat16 rounded[kTile][kTileKeys];
      for (int64_t r = 0; r < kTile; ++r) {
        Tiles::round(weights + (row + r) * weight_stride, rounded[r]);
      }
      tiles.template load<4>(rounded, sizeof(rounded[0]));
      for (int64_t i = 0; i < columns / kTile; i += 2) {
        float* sums = out + row * columns + i * kTile;
        tiles.template load<0>(sums, out_bytes);
        tiles.template load<1>(sums + kTile, out_bytes);
        tiles.template load<6>(pairs[i], sizeof(pairs[i][0]));
        tiles.template load<7>(pairs[i + 1], sizeof(pairs[i][0]));
        tiles.template multiply_add<0, 4, 6>();
        tiles.template multiply_add<1, 4, 7>();
        tiles.template store<0>(sums, out_bytes);
        tiles.template store<1>(sums + kTile, out_bytes);
      }
    }
    return true;
  }

  SPECDEC_TILES_TARGET static void multiply_add_row(const float* weights,
                                                    const BFloat16* const* values, int64_t columns,
                                                    float* out) {
    alignas(64) BFloat16 rounded[kTileKeys];
    Tiles::round(weights, rounded);
    for (int64_t column = 0; column < columns; column += kColumnBlock) {
      float sums[2][kColumnBlock] = {};  // of the even and of the odd positions
      for (int64_t k = 0; k < kTileKeys; ++k) {
        if (values[k] == nullptr) continue;
        const BFloat16* value = values[k] + column;
        const float weight = flushed(to_float(rounded[k]));
        float* own = sums[k % 2];
        for (int64_t j = 0; j < kColumnBlock; ++j) {
          own[j] = flushed(exact_fma(weight, flushed(to_float(value[j])), own[j]));
        }
      }
      float* total = out + column;
      for (int64_t j = 0; j < kColumnBlock; ++j) {
        total[j] = flushed(exact_add(total[j], flushed(exact_add(sums[0][j], sums[1][j]))));
      }
    }
  }
};

}  // namespace specdec::cpu
