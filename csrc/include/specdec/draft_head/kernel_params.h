// What the fused CUDA draft_head (csrc/kernels/draft_head.cuh) gets: the head, the call and memory,
// as one plain struct that fits into the parameters of a launch.
//
// Elements have rows of memory of their own. An element that goes on to the logits, the last new
// one of a batch row (of a parallel head: and its mask elements) or a node that is expanded, is a
// *list*: list = batch row * width of the pass + its place there. Its row of memory is its list,
// and so is its place among the lists of children. Other new elements use the kPassRows rows behind
// the last list.
#pragma once

#include "plan.h"
#include "specdec/draft_head.h"

namespace specdec {

// Types of weights; activations and what is not a matrix have the head's FloatType. The 8-bit ones
// have a float32 scale for each output.
enum class DraftWeightType { kSame, kInt8, kFloat8 };  // kFloat8: e4m3

struct DraftMatrix {
  const void* weight;  // [outs, ins], rows aligned to 16 bytes; null: absent
  const float* scale;  // [outs]; null: 1
  const void* bias;    // [outs] or null
  int outs;
  int ins;
};

struct DraftLayer {
  const void* input_norm;   // [hidden]; null in the first layer of EAGLE-1
  DraftMatrix projections;  // queries, keys, values: [(heads + 2 * kv_heads) * head_dim, attended]
  const void* query_norm;   // [head_dim] or null
  const void* key_norm;     // [head_dim] or null
  DraftMatrix output;       // [hidden, heads * head_dim]
  const void* post_norm;    // [hidden]
  DraftMatrix gate_up;      // [2 * intermediate, hidden]
  DraftMatrix down;         // [hidden, intermediate]
  int window;               // tokens that are seen; 0: all
};

// A node that is expanded.
struct DraftNode {
  int64_t token;
  int32_t candidate;  // kRootParent: the root
  int32_t parent;     // its place in the frontier before
  float score;        // cumulative log-probability
  int32_t is_alive;   // 0: there is no such node, and nothing of it may be used
};

// The keys of a row are attended to in splits of kSplitKeys slots, or of as many times that as
// keep them to kMaxSplits. They depend on nothing but the slots of the row.
constexpr int kSplitKeys = 128;
constexpr int kMaxSplits = 64;

// Of some numbers: the largest, and the sum of exp(number - largest) over all of them.
struct ExpSum {
  float largest;
  float sum;
};

// Memory of a launch, uninitialised. T is the head's type.
//   lists = batch * max_width         rows = lists + kPassRows
//   queries = heads * head_dim        projections = queries + 2 * kv_heads * head_dim
//   words = of 64 bits, for the slots of all nodes that are expanded
struct DraftScratch {
  void* zeros;            // [max(hidden, feature_width)] T, for elements that do not exist
  void* features;         // [kPassRows, feature_width] T, normed
  void* residual;         // [rows, hidden] T
  void* projected;        // [rows, projections] T
  void* queries;          // [rows, queries] T, normed and rotated
  void* attended;         // [rows, queries] T
  void* inner;            // [rows, intermediate] T
  void* feedback;         // [2, lists, hidden] T, of the levels in turn
  ExpSum* split_sums;     // [kPassRows, heads, kMaxSplits]
  float* split_values;    // [kPassRows, heads, kMaxSplits, head_dim]
  uint64_t* picks;        // [lists, blocks, top_k] Picks of draft ids, best first, kNoPick behind
  ExpSum* logit_sums;     // [lists, blocks]
  int64_t* child_tokens;  // [lists, top_k] of the target
  float* child_scores;    // [lists, top_k] log-probabilities, best first, -inf behind the last
  float* scores;          // [batch, candidates] cumulative, -inf: absent
  int64_t* tokens;        // [batch, candidates]
  int64_t* parents;       // [batch, candidates] candidate, kRootParent or kInactiveParent
  int32_t* places;        // [batch, candidates] of a static tree's candidate in its frontier, or -1
  DraftNode* nodes;       // [2, batch, frontier_width], of the levels in turn
  uint64_t* ancestors;    // [2, batch, frontier_width, words] slots that a node sees, its own
                          // included, counted from the first behind the committed ones; of a
                          // parallel head none
  int64_t* selected;      // [batch, tree nodes]
};

// Zero before the first launch that uses it, and after each; one at a time may.
struct DraftSync {
  void* barrier;       // GridBarrier
  uint32_t* arrivals;  // [kPassRows * heads * dimension panels] splits that are done
};

struct DraftKernelParams {
  DraftPlan plan;
  DraftScratch scratch;
  DraftSync sync;

  // The head, as in draft_head.h.
  bool is_eagle1;
  bool norm_before_residual;
  bool norm_output;
  int hidden;
  int intermediate;
  int heads;
  int kv_heads;
  int head_dim;
  int feature_width;
  int num_features;
  int64_t vocab;
  int64_t mask_token;
  float eps;
  float logit_scale;
  const void* embedding;           // [vocab, hidden]
  const int64_t* draft_to_target;  // [draft_vocab] or null
  const void* input_norm;          // [feature_width] or null
  const void* fc_norm;             // [feature_width] or null
  DraftMatrix fc;
  const void* hidden_norm;    // [hidden]; null: EAGLE-1
  const void* norm;           // [hidden]; null: EAGLE-1
  const void* mask_features;  // [feature_width] or null
  DraftMatrix lm_head;
  DraftLayer layers[kMaxDraftLayers];

  // What to draft, as in draft_head.h.
  View2<const int64_t> choices;         // [num_choices, 2]
  int num_choices;                      // 0: a dynamic tree
  int16_t level_ends[kMaxDraftDepth];   // candidates up to the end of a level
  int16_t first_slots[kMaxDraftDepth];  // slots of nodes expanded above level i; [0], [1]: 0
  int num_candidates;
  int top_k;
  int nodes;
  int words;

  // The call, as in draft_head.h; pointers of rows are aligned to 16 bytes.
  View2<const float> cosines;
  View2<const float> sines;
  int rotary_half;
  int64_t num_positions;
  HeadCache keys;
  HeadCache values;
  int64_t capacity;
  View2<const int64_t> tokens;  // [batch, num_new]
  int num_new;
  const void* features;
  int64_t features_row_stride;
  int64_t features_item_stride;
  View1<const int64_t> counts;
  View1<const int64_t> lengths;
  View1<const int64_t> positions;
  View1<const int64_t> roots;
  int64_t* tree_tokens;   // [batch, nodes]
  int64_t* tree_parents;  // [batch, nodes]
  float* tree_scores;     // [batch, nodes]

  SPECDEC_HOST_DEVICE int query_outs() const { return heads * head_dim; }
  SPECDEC_HOST_DEVICE int key_value_outs() const { return 2 * kv_heads * head_dim; }
  SPECDEC_HOST_DEVICE int projection_outs() const { return query_outs() + key_value_outs(); }
  SPECDEC_HOST_DEVICE int lists() const { return plan.batch * plan.max_width(); }
};
static_assert(sizeof(DraftKernelParams) <= 32764, "kernel parameters");

}  // namespace specdec
