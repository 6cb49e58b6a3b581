// The inner loops of the CPU op tree_attention, compiled once per instruction set. All builds give
// the same bits: every operation is elementwise float32 with explicit rounding, and every sum has a
// fixed order.
#pragma once

#include "specdec/core/float_types.h"

namespace specdec::cpu {

constexpr int64_t kTileKeys = 32;     // with 128 dimensions as float32, half of L1
constexpr int64_t kSplitKeys = 256;   // keys per split, a multiple of kTileKeys
constexpr int64_t kRowBlock = 2;      // query rows are computed so many at a time or more,
constexpr int64_t kColumnBlock = 32;  // and columns of values in multiples of this
constexpr int64_t kDimBlock = 16;
constexpr int64_t kMaxPairedDim = 256;
constexpr uint32_t kExponent = 0x7F80;  // of a bfloat16; all of it in infinity and NaN

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

// The loops for bfloat16, which multiply numbers in pairs: neighbouring dimensions of queries and keys, and
// weights and values of neighbouring positions, in tiles that begin at a multiple of kTileKeys. Weights are
// rounded to bfloat16. There are two orders:
//   vector units   as vdpbf16ps: the second product of a pair before the first. kDimBlock products of a query
//                  and a key are summed, then these sums; values are added to a sum one after the other
//   matrix units   every sum takes 32 products in the order of amx_tiles.h
struct PairedTiles {
  int64_t row_block;  // as in AttentionTiles, like dot_products below
  // Whether queries and keys are words of two numbers, and not float32.
  bool takes_words;
  // Whether pairs of values are added to a sum one after the other, so that a tile may be added in parts.
  bool is_in_order;

  // Before and after the loops, in the thread that runs them.
  void (*begin)();
  void (*end)();

  // As AttentionTiles::dot_products, for queries [rows, head_dim] and keys as columns, or with words in
  // place of dimensions.
  void (*dot_products)(const float* queries, const float* keys, int64_t head_dim, int64_t rows,
                       float* out, int64_t out_stride);

  // out[r, j] += weights[r, k] * values[k][j] for kTileKeys values and all rows.
  // Null values are zeros. Weights must be 0 where a row does not see the value. Does nothing and
  // returns false if a value is not finite, because 0 times it is NaN.
  bool (*multiply_add)(const float* weights, int64_t weight_stride, const BFloat16* const* values,
                       int64_t columns, int64_t rows, float* out);

  // The same for one row and the values that it sees; the others are null. Any value is taken.
  void (*multiply_add_row)(const float* weights, const BFloat16* const* values, int64_t columns,
                           float* out);
};

// Pairs [begin, end) of a tile; pair p is the positions 2 p and 2 p + 1.
struct PairRange {
  int64_t begin = 0;
  int64_t end = kTileKeys / 2;
};

// The smallest range outside which all values are null.
inline PairRange given_pairs(const BFloat16* const* values) {
  const auto is_null = [values](int64_t pair) {
    return values[2 * pair] == nullptr && values[2 * pair + 1] == nullptr;
  };
  PairRange pairs;
  while (pairs.begin < pairs.end && is_null(pairs.end - 1)) --pairs.end;
  while (pairs.begin < pairs.end && is_null(pairs.begin)) ++pairs.begin;
  return pairs;
}

struct AttentionTiles {
  // Memory of query rows is padded to multiples of this. The loops may use it for rows behind the last one.
  int64_t row_block;

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

  // Null, or the loops that replace multiply_add and multiply_add_row. row_block and dot_products are theirs.
  const PairedTiles* paired = nullptr;
};

// The loops for the instruction set that cpu_isa() chose. Keys and values of bfloat16 are paired if
// head_dim is a multiple of 32, at most kMaxPairedDim.
const AttentionTiles& attention_tiles(FloatType type, int64_t head_dim);

}  // namespace specdec::cpu
