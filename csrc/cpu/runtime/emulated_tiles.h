// The tile registers of amx_tiles.h in plain code, which gives the same bits: for tests on processors
// without them.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#include "specdec/core/float_types.h"

namespace specdec::cpu {

// A subnormal number becomes zero.
inline float flushed(float x) {
  return std::abs(x) < std::numeric_limits<float>::min() ? std::copysign(0.0f, x) : x;
}

class EmulatedTiles {
 public:
  explicit EmulatedTiles(int64_t columns) : columns_(columns) {}
  static void begin(int64_t) {}
  static void end() {}

  template <int kTile>
  void clear() {
    std::memset(tiles_[kTile], 0, sizeof(tiles_[kTile]));
  }
  template <int kTile>
  void load(const void* p, int64_t stride) {
    for (int64_t row = 0; row < kRows; ++row) {
      std::memcpy(tiles_[kTile][row], static_cast<const std::byte*>(p) + row * stride,
                  row_bytes(kTile));
    }
  }
  template <int kTile>
  void store(void* p, int64_t stride) {
    for (int64_t row = 0; row < kRows; ++row) {
      std::memcpy(static_cast<std::byte*>(p) + row * stride, tiles_[kTile][row], row_bytes(kTile));
    }
  }
  template <int kSums, int kLeft, int kRight>
  void multiply_add() {
    for (int64_t m = 0; m < kRows; ++m) {
      for (int64_t n = 0; n < columns_; ++n) {
        float sums[2] = {};  // of the first and of the second elements of pairs
        for (int64_t k = 0; k < kRows; ++k) {
          BFloat16 left[2], right[2];
          std::memcpy(left, &tiles_[kLeft][m][k], sizeof(left));
          std::memcpy(right, &tiles_[kRight][k][n], sizeof(right));
          for (int i = 0; i < 2; ++i) {
            sums[i] = flushed(
                exact_fma(flushed(to_float(left[i])), flushed(to_float(right[i])), sums[i]));
          }
        }
        float& sum = tiles_[kSums][m][n];
        sum = flushed(exact_add(sum, flushed(exact_add(sums[0], sums[1]))));
      }
    }
  }
  template <int kSums, int kLeft, int kRight>
  void add_bytes() {
    for (int64_t m = 0; m < kRows; ++m) {
      for (int64_t n = 0; n < columns_; ++n) {
        int32_t sum;
        std::memcpy(&sum, &tiles_[kSums][m][n], sizeof(sum));
        for (int64_t k = 0; k < kRows; ++k) {
          int8_t left[4], right[4];
          std::memcpy(left, &tiles_[kLeft][m][k], sizeof(left));
          std::memcpy(right, &tiles_[kRight][k][n], sizeof(right));
          for (int i = 0; i < 4; ++i) sum += left[i] * right[i];
        }
        std::memcpy(&tiles_[kSums][m][n], &sum, sizeof(sum));
      }
    }
  }
  static void round(const float* numbers, BFloat16* rounded) {
    for (int64_t i = 0; i < 2 * kRows; ++i) from_float(flushed(numbers[i]), rounded + i);
  }

 private:
  static constexpr int64_t kRows = 16;

  size_t row_bytes(int tile) const {
    const bool is_left = tile == 4 || tile == 5;
    return (is_left ? kRows : columns_) * sizeof(float);
  }

  int64_t columns_;
  float tiles_[8][kRows][kRows];
};

}  // namespace specdec::cpu
