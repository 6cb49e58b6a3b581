// draft_head: runs a draft head of the EAGLE family (Li et al. 2024, 2025; P-EAGLE, Hui et al.
// 2026) on the tokens that were committed since its last run, and drafts a tree. Specification:
// specdec_ext/reference/draft_head.py.
//
// An element is one input of the head: a token with the features of the position before it, or with
// the feedback of its parent node. The head's cache holds keys and values of the committed elements
// of row r in slots 0 .. lengths[r] - 1. New elements follow, and behind them, for the duration of
// the call, the elements of the draft:
//
//   slots    [ committed | new elements | mask elements, or the nodes that were expanded ]
//
// The result of a row depends on that row alone. It has the same bits whatever else is computed
// with it, and however its elements are divided over calls.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "specdec/core/float_types.h"
#include "specdec/core/parallel.h"
#include "specdec/core/tree.h"
#include "specdec/sampling/coupling.h"

namespace specdec {

// The element at a position predicts the token this many positions further: it has read the token
// at the next one.
inline constexpr int64_t kPredictsAhead = 2;

// The tensors of a head have one type and are contiguous, but weight matrices may have 8 bits. They
// are stored in panels (specdec/cpu/panels.h) for the CPU, and in tiles (specdec/draft_head/plan.h) or
// as [outs, ins] for the kernel.
struct HeadMatrix {
  const void* weight;  // null: absent
  const void* bias;    // [outs] or null
  int64_t outs;
  int64_t ins;
  bool in_tiles = false;
  const float* scale = nullptr;  // [outs] of weights of 8 bits
};

struct HeadLayer {
  const void* input_norm;  // [hidden]; null in the first layer of EAGLE-1
  HeadMatrix query;        // [heads * head_dim, attended]; for the kernel followed by key_value
  HeadMatrix key_value;    // [2 * kv_heads * head_dim, attended]: keys, then values
  const void* query_norm;  // [head_dim] or null
  const void* key_norm;    // [head_dim] or null
  HeadMatrix output;       // [hidden, heads * head_dim]
  const void* post_norm;   // [hidden]
  HeadMatrix gate_up;      // [2 * intermediate, hidden]: gate, then up
  HeadMatrix down;         // [hidden, intermediate]
  int64_t window;          // number of tokens that are seen; 0: all
};

struct HeadWeights {
  FloatType type;
  bool feeds_fc;  // embedding and features go through fc together, in drafting too (EAGLE-1, MTP)
  bool norm_before_residual;
  bool norm_output;
  int64_t hidden;
  int64_t intermediate;
  int64_t heads;
  int64_t kv_heads;
  int64_t head_dim;
  int64_t vocab;
  int64_t draft_vocab;
  int64_t feature_width;
  int64_t num_features;
  int64_t mask_token;  // of P-EAGLE; otherwise -1
  float eps;
  float logit_scale;
  const void* embedding;           // [vocab, hidden]
  HeadMatrix lm_head;              // [draft_vocab, hidden]
  const int64_t* draft_to_target;  // [draft_vocab] or null
  const void* input_norm;          // [feature_width] or null
  const void* fc_norm;             // [feature_width] or null: one norm per feature, side by side
  HeadMatrix fc;                   // [hidden, feature_width (+ hidden: feeds_fc)] or absent
  const void* embedding_norm;      // [hidden] or null: of the embedding before fc, if feeds_fc
  const void* hidden_norm;         // [hidden]: of the input of layer 0; if feeds_fc, of the
                                   // features before fc, or null
  const void* norm;                // [hidden]; null: EAGLE-1
  const void* mask_features;       // [feature_width] or null
  std::vector<HeadLayer> layers;

  bool is_parallel() const { return mask_token >= 0; }
  int64_t attended(bool first_layer) const {
    return first_layer && !feeds_fc ? 2 * hidden : hidden;
  }
};

// [layers, rows, kv_heads, capacity, head_dim], last dimension contiguous; strides in elements.
struct HeadCache {
  void* data;
  int64_t layer_stride;
  int64_t row_stride;
  int64_t head_stride;
  int64_t slot_stride;
};

// The shape of a draft. A static tree lists in level order, for each node except the root, its
// parent and its rank among the parent's children; a chain is (0, 0), (1, 0), (2, 0). A dynamic
// tree (EAGLE-2) expands the top_k best nodes of each level by top_k children and keeps the best
// nodes - 1 of all.
struct DraftShape {
  View2<const int64_t> choices;  // [num_choices, 2] (parent, rank)
  int64_t num_choices;           // below nodes: the remaining nodes are absent; 0: a dynamic tree
  int64_t depth;                 // levels below the root
  int64_t top_k;                 // children per node; for a static tree the largest rank + 1
  int64_t nodes;                 // 1 .. kMaxNodes, the root included

  bool is_dynamic() const { return num_choices == 0; }
  // Number of nodes that are scored, without the root.
  int64_t num_candidates() const {
    return is_dynamic() ? top_k + (depth - 1) * top_k * top_k : num_choices;
  }
};

struct DraftHeadParams {
  const HeadWeights& head;
  DraftShape shape;
  View2<const float> cosines;  // [positions, rotary / 2], last dimension contiguous
  View2<const float> sines;
  int64_t rotary_half;
  HeadCache keys;
  HeadCache values;
  int64_t capacity;
  View2<const int64_t> tokens;     // [rows, new]
  const void* features;            // [rows, new, feature_width], last dimension contiguous
  int64_t features_row_stride;     // elements
  int64_t features_item_stride;    // elements
  View1<const int64_t> counts;     // [rows] new elements; 0: the row gets its root alone
  View1<const int64_t> lengths;    // [rows] committed elements
  View1<const int64_t> positions;  // [rows] of the first new element
  View1<const int64_t> roots;      // [rows] token of node 0
  DraftNoise noise;                // is added to logits; the root has position positions + counts
  int64_t rows;

  int64_t* tree_tokens;   // [rows, nodes] 0 where absent
  int64_t* tree_parents;  // [rows, nodes] kInactiveParent where absent
  float* tree_scores;     // [rows, nodes] cumulative log-probabilities, -inf where absent
};

// Number of slots that a draft needs behind the new elements.
int64_t draft_slots(const DraftShape& shape, bool is_parallel);

namespace cpu {
// Every number that addresses memory must be valid, except those in draft_to_target: returns what
// is wrong with an entry that was drafted, or nothing.
std::optional<std::string> draft_head(const DraftHeadParams& params,
                                      const ParallelFor& parallel_for);
}  // namespace cpu

}  // namespace specdec
