// adjust_logits: adjusts the logits of every node of draft trees by the text up to the node, as
// transformers' logits processors do along a path.
//
// The text of a node is text[row, :lengths[row]], which ends with the root's token, and then the
// tokens on the path from the root to the node. An adjustment applies to the nodes whose text has
// `first` to `end - 1` columns. Adjustments apply in order, each to what the one before left:
//
//   add:       score + table[token]
//   overwrite: table[token], unless that is NaN
//   penalise:  score < 0 ? score * penalty : score / penalty, for each token that the text has from
//              column `skips` on
//   ban:       -inf for each token with which the text would end in an n-gram that it has already
//
// Example of a ban: the text 5 6 7 5 6 has the 3-gram 5 6 7, so 7 can't follow.
//
// Every operation is rounded once, so all backends give the same bits.
#pragma once

#include <algorithm>
#include <limits>
#include <optional>
#include <string>

#include "specdec/core/float_types.h"
#include "specdec/core/parallel.h"
#include "specdec/core/tree.h"

namespace specdec {

// Bounds the shared memory of the kernel. The CPU op has the same limit.
constexpr int64_t kMaxAdjustments = 32;

enum class Adjustment : int64_t { kOff, kAdd, kOverwrite, kPenalise, kBan, kCount };

constexpr int64_t kAdjustmentFields = 3;  // kind, first, end

struct AdjustLogitsParams {
  const void* logits;  // [batch, nodes, vocab], last dimension contiguous
  FloatType logits_type;
  int64_t logits_batch_stride;       // elements
  int64_t logits_node_stride;        // elements
  View2<const int64_t> tokens;       // [batch, nodes]
  View2<const int64_t> parents;      // [batch, nodes]
  View2<const int64_t> text;         // [batch, columns]
  View1<const int64_t> lengths;      // [batch] 0 .. columns
  View1<const int64_t> skips;        // [batch]
  View1<const float> penalties;      // [batch] > 0
  View1<const int64_t> ngram_sizes;  // [batch] off unless > 0
  View2<const int64_t> adjustments;  // [count, 3] kind, first, end
  const float* tables;               // [count, vocab], last dimension contiguous; rows of
  int64_t table_stride;              //   penalties and bans are not read
  int64_t batch;
  int64_t nodes;  // 1 .. kMaxNodes
  int64_t columns;
  int64_t count;  // 0 .. kMaxAdjustments
  int64_t vocab;

  float* scores;  // [batch, nodes, vocab]; the logits at inactive nodes
};

constexpr float kRemovedScore = -std::numeric_limits<float>::infinity();

SPECDEC_HOST_DEVICE float overwritten(float score, float value) {
  return value == value ? value : score;
}

SPECDEC_HOST_DEVICE float penalised(float score, float penalty) {
  return score < 0.0f ? exact_mul(score, penalty) : exact_div(score, penalty);
}

// The kind of an adjustment at a node whose text has `columns` columns.
SPECDEC_HOST_DEVICE Adjustment adjustment_at(const AdjustLogitsParams& params, int64_t index,
                                             int64_t columns) {
  const bool applies =
      params.adjustments(index, 1) <= columns && columns < params.adjustments(index, 2);
  return applies ? static_cast<Adjustment>(params.adjustments(index, 0)) : Adjustment::kOff;
}

// A place in the text of a node: behind the token of `node`, or, at the root, behind `columns`
// columns of the row's text.
struct TextEnd {
  int64_t node;
  int64_t columns;
};

// Returns the token before a place, and goes there. `row` has token(node), parent(node) and
// column(i).
template <typename Row>
SPECDEC_HOST_DEVICE int64_t token_before(const Row& row, TextEnd* end) {
  if (end->node == 0) return row.column(--end->columns);
  const int64_t token = row.token(end->node);
  end->node = row.parent(end->node);
  return token;
}

// Whether the `count` tokens before two places are the same. Both places must have as many.
template <typename Row>
SPECDEC_HOST_DEVICE bool same_endings(const Row& row, TextEnd a, TextEnd b, int64_t count) {
  for (; count > 0; --count) {
    if (token_before(row, &a) != token_before(row, &b)) return false;
  }
  return true;
}

namespace cpu {

// Returns what is wrong with the values of the arguments, or nothing.
std::optional<std::string> find_invalid_argument(const AdjustLogitsParams& params);

// The arguments must be valid.
void adjust_logits(const AdjustLogitsParams& params, const ParallelFor& parallel_for);

}  // namespace cpu

}  // namespace specdec
