// The inner loops of the CPU op tree_attention, compiled once per instruction set. All builds give
// the same bits: every operation is elementwise float32 with explicit rounding, and every sum has a
// fixed order.
#pragma once

#include "specdec/core/float_types.h"

namespace specdec::cpu {

constexpr int64_t kTileKeys = 32;     // with 128 dimensions as float32, half of L1
constexpr int64_t kSplitKeys = 256;   // keys per split, a multiple of kTileKeys
constexpr int64_t kRowBlock = 2;      // query rows are padded to multiples of this,
constexpr int64_t kColumnBlock = 32;  // and columns of values to multiples of this
constexpr int64_t kDimBlock = 16;

constexpr int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// The softmax statistics of a row of scores: the maximum (-inf if the row sees no key) and the sum
// of exp(score - maximum).
struct SoftmaxStats {
  float maximum;
  float sum;
};

struct ScoreRule {
  float scale;
  float softcap;  // 0: none
};

struct AttentionTiles {
  // out[i] = rows[0][i] as float32.
  void (*load_row)(FloatType type, const void* row, int64_t count, float* out);

  // Stores keys as columns: out[d, key] of [head_dim padded to 16, kTileKeys] = rows[key][d].
  void (*load_columns)(FloatType type, const void* const* rows, int64_t head_dim, float* out);

  // out[r, key] = queries[r] . keys[key] for queries [rows, head_dim] and keys as columns; head_dim
  // is a multiple of kDimBlock. Fixed order: kDimBlock products are summed one after the other,
  // then these sums.
  void (*dot_products)(const float* queries, const float* keys, int64_t head_dim, int64_t rows,
                       float* out, int64_t out_stride);

  // out[r, j] += weights[r, k] * values[k][j] for `count` rows of values, in the order of k.
  void (*multiply_add)(const float* weights, int64_t weight_stride, const float* const* values,
                       int64_t count, int64_t columns, int64_t rows, float* out);

  // The same for one row and one k.
  void (*multiply_add_row)(float weight, const float* value, float* out, int64_t columns);

  // Turns a row of kSplitKeys dot products into exp(score - maximum) for first <= key < end and
  // into 0 elsewhere.
  SoftmaxStats (*softmax)(const ScoreRule& rule, int64_t first, int64_t end, float* row);

  // Merges the statistics and weighted values of a later split into those of an earlier one.
  void (*merge)(const SoftmaxStats& later, const float* later_values, SoftmaxStats* stats,
                float* values, int64_t columns);

  // out[i] = values[i] / sum, rounded to the type.
  void (*store_quotients)(FloatType type, const float* values, float sum, int64_t count, void* out);
};

// The loops for the instruction set that cpu_isa() chose.
const AttentionTiles& attention_tiles();

}  // namespace specdec::cpu
