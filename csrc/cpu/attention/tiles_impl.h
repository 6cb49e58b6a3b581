// The loops of tiles.h, for one instruction set. The including file defines
//   SPECDEC_TILES_TARGET   the target attribute, or nothing
//   kBlockRows             number of rows whose sums stay in registers, with kColumnBlock columns
//                          each; kRowBlock or more
//   transpose_block        out[d * kTileKeys + i] = rows[i][dim + d] for i and d below kBlock
// The loops are plain, for compilers to vectorise. Inner loops have 32 iterations or more, because
// shorter ones are unrolled to scalars before the vectoriser sees them.
#pragma once

#include <algorithm>
#include <cstring>
#include <limits>

#include "cpu/math/rounded.h"
#include "specdec/math/tanh.h"
#include "tiles.h"

namespace specdec::cpu {
namespace {

constexpr int64_t kLanes = 32;

template <typename T>
SPECDEC_HOST_DEVICE void convert_row(const void* row, int64_t count, float* out) {
  const T* values = static_cast<const T*>(row);
  for (int64_t i = 0; i < count; ++i) out[i] = to_float(values[i]);
}

SPECDEC_TILES_TARGET void load_row(FloatType type, const void* row, int64_t count, float* out) {
  switch (type) {
    case FloatType::kFloat32:
      return convert_row<float>(row, count, out);
    case FloatType::kBFloat16:
      return convert_row<BFloat16>(row, count, out);
    case FloatType::kFloat16:
      return convert_row<Float16>(row, count, out);
  }
}

SPECDEC_TILES_TARGET void load_columns(FloatType type, const void* const* rows, int64_t head_dim,
                                       float* out) {
  constexpr int64_t kMaxStagedDim = 128;  // dimensions staged at a time: 16 keys stay in L1
  alignas(64) float stage[kBlock][kMaxStagedDim];
  for (int64_t key = 0; key < kTileKeys; key += kBlock) {
    for (int64_t dim = 0; dim < head_dim; dim += kMaxStagedDim) {
      const int64_t count = std::min(kMaxStagedDim, head_dim - dim);
      const int64_t padded = round_up(count, kBlock);
      const float* block[kBlock];
      for (int64_t i = 0; i < kBlock; ++i) {
        const auto* row = static_cast<const std::byte*>(rows[key + i]) + dim * element_size(type);
        if (type == FloatType::kFloat32 && count == padded) {
          block[i] = reinterpret_cast<const float*>(row);
        } else {
          load_row(type, row, count, stage[i]);
          std::fill(stage[i] + count, stage[i] + padded, 0.0f);
          block[i] = stage[i];
        }
      }
      for (int64_t d = 0; d < padded; d += kBlock) {
        transpose_block(block, d, out + (dim + d) * kTileKeys + key);
      }
    }
  }
}

// Whether kBlockRows rows from `row` on are computed together, and not in blocks of kRowBlock. Behind an odd
// number, a last row is not left alone: it would take as long as two, and there is no padding behind it.
SPECDEC_HOST_DEVICE bool starts_block(int64_t row, int64_t rows) {
  return row + kBlockRows <= rows && (kBlockRows % 2 == 0 || row + kBlockRows + 1 != rows);
}

template <int64_t kRows>
using BlockSums = float[kRows][kColumnBlock];

// sums[r, j] += a[r, k] * b(k)[j] for k in [begin, end), in the order of k.
template <int64_t kRows, typename B>
SPECDEC_HOST_DEVICE void add_products(const float* a, int64_t a_stride, const B& b, int64_t begin,
                                      int64_t end, BlockSums<kRows>& sums) {
  for (int64_t k = begin; k < end; ++k) {
    const float* row = b(k);
    asm volatile("" : "+r"(row));  // otherwise GCC joins two iterations and does not vectorise them
    float factors[kRows];
    SPECDEC_TILES_UNROLL for (int64_t r = 0; r < kRows; ++r) factors[r] = a[r * a_stride + k];
    // Rows are the inner loop, so that one vector of `row` is in a register at a time, not all of them.
    for (int64_t j = 0; j < kColumnBlock; ++j) {
      SPECDEC_TILES_UNROLL for (int64_t r = 0; r < kRows; ++r) {
        sums[r][j] = exact_fma(factors[r], row[j], sums[r][j]);
      }
    }
  }
}

// Changes an index so that the second number of each pair comes before the first.
constexpr int64_t kSwapPairs = 1;

// sums[r, j] = the products of kDimBlock dimensions of queries r and keys j. kSwap is 0 or kSwapPairs.
template <int64_t kRows, int64_t kSwap>
SPECDEC_HOST_DEVICE void dot_block(const float* queries, const float* keys, int64_t head_dim,
                                   BlockSums<kRows>& sums) {
  SPECDEC_TILES_UNROLL for (int64_t r = 0; r < kRows; ++r) {
    for (int64_t j = 0; j < kTileKeys; ++j) {
      sums[r][j] = exact_mul(queries[r * head_dim + kSwap], keys[kSwap * kTileKeys + j]);
    }
  }
  SPECDEC_TILES_UNROLL for (int64_t i = 1; i < kDimBlock; ++i) {
    const int64_t d = i ^ kSwap;
    SPECDEC_TILES_UNROLL for (int64_t r = 0; r < kRows; ++r) {
      for (int64_t j = 0; j < kTileKeys; ++j) {
        sums[r][j] = exact_fma(queries[r * head_dim + d], keys[d * kTileKeys + j], sums[r][j]);
      }
    }
  }
}

template <int64_t kRows, int64_t kSwap>
SPECDEC_TILES_TARGET void dot_products_of(const float* queries, const float* keys, int64_t head_dim,
                                          float* out, int64_t out_stride) {
  static_assert(kTileKeys == kColumnBlock);
  BlockSums<kRows> totals;
  dot_block<kRows, kSwap>(queries, keys, head_dim, totals);
  for (int64_t dim = kDimBlock; dim < head_dim; dim += kDimBlock) {
    BlockSums<kRows> sums;
    dot_block<kRows, kSwap>(queries + dim, keys + dim * kTileKeys, head_dim, sums);
    SPECDEC_TILES_UNROLL for (int64_t r = 0; r < kRows; ++r) {
      for (int64_t j = 0; j < kColumnBlock; ++j) {
        totals[r][j] = exact_add(totals[r][j], sums[r][j]);
      }
    }
  }
  for (int64_t r = 0; r < kRows; ++r) {
    for (int64_t j = 0; j < kColumnBlock; ++j) out[r * out_stride + j] = totals[r][j];
  }
}

template <int64_t kSwap>
SPECDEC_TILES_TARGET void dot_products(const float* queries, const float* keys, int64_t head_dim,
                                       int64_t rows, float* out, int64_t out_stride) {
  int64_t row = 0;
  for (; starts_block(row, rows); row += kBlockRows) {
    dot_products_of<kBlockRows, kSwap>(queries + row * head_dim, keys, head_dim,
                                       out + row * out_stride, out_stride);
  }
  for (; row < rows; row += kRowBlock) {
    dot_products_of<kRowBlock, kSwap>(queries + row * head_dim, keys, head_dim,
                                      out + row * out_stride, out_stride);
  }
}

// Not inlined, because GCC keeps sums in memory where it knows `count`.
template <int64_t kRows>
SPECDEC_TILES_TARGET __attribute__((noinline)) void multiply_add_to(const float* weights,
                                                                    int64_t weight_stride,
                                                                    const float* const* values,
                                                                    int64_t count, int64_t columns,
                                                                    float* out) {
  if (count == 0) return;
  for (int64_t column = 0; column < columns; column += kColumnBlock) {
    const auto value = [values, column](int64_t k) { return values[k] + column; };
    float* block = out + column;
    // The first products read the sums in memory: compilers copy blocks in parts that are narrower
    // than vectors, and a processor waits before it reads a vector that was written in parts.
    BlockSums<kRows> sums;
    for (int64_t r = 0; r < kRows; ++r) {
      const float factor = weights[r * weight_stride];
      for (int64_t j = 0; j < kColumnBlock; ++j) {
        sums[r][j] = exact_fma(factor, value(0)[j], block[r * columns + j]);
      }
    }
    add_products<kRows>(weights, weight_stride, value, 1, count, sums);
    for (int64_t r = 0; r < kRows; ++r) {
      std::copy_n(sums[r], kColumnBlock, block + r * columns);
    }
  }
}

SPECDEC_TILES_TARGET void multiply_add(const float* weights, int64_t weight_stride,
                                       const float* const* values, int64_t count, int64_t columns,
                                       int64_t rows, float* out) {
  int64_t row = 0;
  for (; starts_block(row, rows); row += kBlockRows) {
    multiply_add_to<kBlockRows>(weights + row * weight_stride, weight_stride, values, count,
                                columns, out + row * columns);
  }
  for (; row < rows; row += kRowBlock) {
    multiply_add_to<kRowBlock>(weights + row * weight_stride, weight_stride, values, count, columns,
                               out + row * columns);
  }
}

SPECDEC_TILES_TARGET void multiply_add_row(float weight, const float* row, float* out,
                                           int64_t columns) {
  for (int64_t j = 0; j < columns; ++j) out[j] = exact_fma(weight, row[j], out[j]);
}

// out[i] = weights[i] rounded to bfloat16, with the second one of each pair first.
SPECDEC_TILES_TARGET void round_and_swap(const float* weights, float* out) {
  uint64_t pairs[kTileKeys / 2];
  float in_order[kTileKeys];
  for (int64_t i = 0; i < kTileKeys; ++i) in_order[i] = rounded<BFloat16>(weights[i]);
  std::memcpy(pairs, in_order, sizeof(pairs));
  for (int64_t i = 0; i < kTileKeys / 2; ++i) pairs[i] = pairs[i] << 32 | pairs[i] >> 32;
  std::memcpy(out, pairs, sizeof(pairs));
}

// PairedTiles::multiply_add: the loops of multiply_add in another order.
SPECDEC_TILES_TARGET bool multiply_add_pairs(const float* weights, int64_t weight_stride,
                                             const BFloat16* const* values, int64_t columns,
                                             int64_t rows, float* out) {
  constexpr int64_t kRounded = 48;  // rows at a time, a multiple of any kBlockRows
  alignas(64) float floats[kTileKeys * kMaxPairedDim], rounded[kRounded][kTileKeys];
  const float* swapped[kTileKeys];
  uint16_t largest[kLanes] = {};
  const PairRange given = given_pairs(values);
  const int64_t begin = 2 * given.begin, end = 2 * given.end;
  for (int64_t i = begin; i < end; ++i) {
    float* row = floats + i * columns;
    swapped[i ^ kSwapPairs] = row;
    if (values[i] == nullptr) {
      std::fill_n(row, columns, 0.0f);
      continue;
    }
    load_row(FloatType::kBFloat16, values[i], columns, row);
    for (int64_t j = 0; j < columns; j += kLanes) {
      for (int64_t lane = 0; lane < kLanes; ++lane) {
        largest[lane] = std::max<uint16_t>(largest[lane], values[i][j + lane].bits & kExponent);
      }
    }
  }
  if (*std::max_element(largest, largest + kLanes) == kExponent) return false;
  for (int64_t first = 0; first < rows; first += kRounded) {
    const int64_t count = std::min(kRounded, rows - first);
    for (int64_t r = 0; r < round_up(count, kRowBlock); ++r) {
      round_and_swap(weights + (first + r) * weight_stride, rounded[r]);
    }
    multiply_add(rounded[0] + begin, kTileKeys, swapped + begin, end - begin, columns, count,
                 out + first * columns);
  }
  return true;
}

SPECDEC_TILES_TARGET void multiply_add_pairs_of_row(const float* weights,
                                                    const BFloat16* const* values, int64_t columns,
                                                    float* out) {
  float own_weights[kTileKeys];
  const BFloat16* own_values[kTileKeys];
  int64_t count = 0;
  for (int64_t i = 0; i < kTileKeys; ++i) {
    const int64_t k = i ^ kSwapPairs;
    if (values[k] == nullptr) continue;
    own_weights[count] = rounded<BFloat16>(weights[k]);
    own_values[count++] = values[k];
  }
  for (int64_t column = 0; column < columns; column += kColumnBlock) {
    float sums[kColumnBlock];
    std::copy_n(out + column, kColumnBlock, sums);
    for (int64_t k = 0; k < count; ++k) {
      const BFloat16* value = own_values[k] + column;
      for (int64_t j = 0; j < kColumnBlock; ++j) {
        sums[j] = exact_fma(own_weights[k], to_float(value[j]), sums[j]);
      }
    }
    std::copy_n(sums, kColumnBlock, out + column);
  }
}

SPECDEC_HOST_DEVICE float larger(float a, float b) { return a > b ? a : b; }

// Combines all lanes into lane 0, by halves: five dependent steps instead of 31.
template <typename Combine>
SPECDEC_HOST_DEVICE float combine_lanes(float* lanes, const Combine& combine) {
  _Pragma("GCC unroll 8") for (int64_t distance = kLanes / 2; distance > 0; distance /= 2) {
    for (int64_t lane = 0; lane < distance; ++lane) {
      lanes[lane] = combine(lanes[lane], lanes[lane + distance]);
    }
  }
  return lanes[0];
}

// exp(score - maximum)
SPECDEC_HOST_DEVICE float softmax_weight(float score, float maximum) {
  return exp_nonpositive(exact_add(score, -maximum));
}

SPECDEC_TILES_TARGET SoftmaxStats softmax(const ScoreRule& rule, int64_t first, int64_t end,
                                          float* row) {
  constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
  const int64_t lanes_begin = first / kLanes * kLanes, lanes_end = round_up(end, kLanes);
  std::fill_n(row, lanes_begin, 0.0f);
  std::fill_n(row + lanes_end, kSplitKeys - lanes_end, 0.0f);

  for (int64_t i = lanes_begin; i < lanes_end; ++i) row[i] = exact_mul(row[i], rule.scale);
  if (rule.softcap > 0) {
    for (int64_t i = lanes_begin; i < lanes_end; ++i) {
      row[i] = exact_mul(rule.softcap, tanh_approx(row[i] / rule.softcap));
    }
  }
  for (int64_t i = lanes_begin; i < first; ++i) row[i] = kMinusInfinity;
  for (int64_t i = end; i < lanes_end; ++i) row[i] = kMinusInfinity;

  float maxima[kLanes];
  std::fill_n(maxima, kLanes, kMinusInfinity);
  for (int64_t i = lanes_begin; i < lanes_end; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane)
      maxima[lane] = larger(row[i + lane], maxima[lane]);
  }
  const float maximum = combine_lanes(maxima, larger);

  // If all scores are -inf, their weights are 0 and not NaN: another split may hold finite ones.
  const float shift = maximum == kMinusInfinity ? 0.0f : maximum;
  float sums[kLanes] = {};
  for (int64_t i = lanes_begin; i < lanes_end; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      row[i + lane] = softmax_weight(row[i + lane], shift);
      sums[lane] = exact_add(sums[lane], row[i + lane]);
    }
  }
  return {maximum, combine_lanes(sums, exact_add)};
}

SPECDEC_TILES_TARGET void merge(const SoftmaxStats& later, const float* later_values,
                                SoftmaxStats* stats, float* values, int64_t columns) {
  const float maximum = larger(later.maximum, stats->maximum);
  if (maximum == -std::numeric_limits<float>::infinity()) {
    stats->sum = exact_add(stats->sum, later.sum);  // both are 0 or NaN
    return;
  }
  const float earlier_weight = softmax_weight(stats->maximum, maximum);
  const float later_weight = softmax_weight(later.maximum, maximum);
  *stats = {maximum, exact_fma(later.sum, later_weight, exact_mul(stats->sum, earlier_weight))};
  for (int64_t j = 0; j < columns; ++j) {
    values[j] = exact_fma(later_values[j], later_weight, exact_mul(values[j], earlier_weight));
  }
}

template <typename T>
SPECDEC_HOST_DEVICE void convert_quotients(const float* values, float sum, int64_t count,
                                           void* out) {
  for (int64_t i = 0; i < count; ++i) from_float(values[i] / sum, static_cast<T*>(out) + i);
}

SPECDEC_TILES_TARGET void store_quotients(FloatType type, const float* values, float sum,
                                          int64_t count, void* out) {
  switch (type) {
    case FloatType::kFloat32:
      return convert_quotients<float>(values, sum, count, out);
    case FloatType::kBFloat16:
      return convert_quotients<BFloat16>(values, sum, count, out);
    case FloatType::kFloat16:
      return convert_quotients<Float16>(values, sum, count, out);
  }
}

constexpr TilesOfIsa kTiles{.tiles = {.row_block = kRowBlock,
                                      .load_row = load_row,
                                      .load_columns = load_columns,
                                      .dot_products = dot_products<0>,
                                      .multiply_add = multiply_add,
                                      .multiply_add_row = multiply_add_row,
                                      .softmax = softmax,
                                      .merge = merge,
                                      .store_quotients = store_quotients},
                            .paired = {.row_block = kRowBlock,
                                       .takes_words = false,
                                       .is_in_order = true,
                                       .begin = [] {},
                                       .end = [] {},
                                       .dot_products = dot_products<kSwapPairs>,
                                       .multiply_add = multiply_add_pairs,
                                       .multiply_add_row = multiply_add_pairs_of_row}};

}  // namespace
}  // namespace specdec::cpu
