// Parameters of the fused CUDA draft_head (csrc/kernels/draft_head/draft_head.cuh): the head, the
// call and its memory, as one plain struct that fits into the parameters of a launch.
//
// Every element of a pass has a row of scratch memory. A *list* is an element whose logits are
// computed, so called because it gets a list of children: the last new element of a batch row (of a
// parallel head also its mask elements), or a node that is expanded. Its number,
// batch row * width of the pass + its place in the row, selects both its row of memory and its list
// of children. Other new elements use the kPassRows rows behind the last list.
#pragma once

#include "specdec/draft_head.h"
#include "specdec/draft_head/plan.h"

namespace specdec {

// Types of weight matrices. Activations and all other weights have the head's FloatType. The 8-bit
// types have a float32 scale for each output.
enum class DraftWeightType { kSame, kInt8, kFloat8 };  // kFloat8: e4m3

struct DraftMatrix {
  const void* weight;  // [outs, ins] or in tiles, rows aligned to 16 bytes; null: absent
  const float* scale;  // [outs]; null: 1
  const void* bias;    // [outs] or null
  int outs;
  int ins;
  bool in_tiles;  // TileSchedule in plan.h

  // Bytes of an output's weights in memory, which have `weight_bytes` bytes each.
  SPECDEC_HOST_DEVICE int row_bytes(int weight_bytes) const {
    const int bytes = ins * weight_bytes;
    return in_tiles ? (bytes + kUnitBytes - 1) / kUnitBytes * kUnitBytes : bytes;
  }
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
  int window;               // number of tokens that are seen; 0: all
};

// A node that is expanded.
struct DraftNode {
  int64_t token;
  int32_t candidate;  // kRootParent: the root
  int32_t parent;     // its parent's place in the frontier of the level above
  float score;        // cumulative log-probability
  int32_t is_alive;   // 0: there is no such node, and its other fields must not be used
};

// The keys of a row are attended to in splits of kSplitKeys slots. A row with more than kMaxSplits
// such splits has splits of a multiple of that length. Splits depend on the number of slots of the
// row only.
constexpr int kSplitKeys = 128;
constexpr int kMaxSplits = 64;

// The largest of some numbers, and the sum of exp(number - largest) over them.
struct ExpSum {
  float largest;
  float sum;
};

// Memory of a launch, uninitialised. T is the head's type.
//   lists = batch * max_width         rows = lists + kPassRows
//   queries = heads * head_dim        projections = queries + 2 * kv_heads * head_dim
//   words: number of 64-bit words with a bit for each slot of the expanded nodes
struct DraftScratch {
  void* zeros;            // [max(hidden, feature_width)] T, for elements that do not exist
  void* features;         // [kPassRows, feature_width] T, normed
  void* residual;         // [rows, hidden] T
  void* projected;        // [rows, projections] T
  void* queries;          // [rows, queries] T, normed and rotated
  void* attended;         // [rows, queries] T
  void* inner;            // [rows, intermediate] T
  void* feedback;         // [2, lists, hidden] T, levels alternate
  ExpSum* split_sums;     // [kPassRows, heads, kMaxSplits]
  float* split_values;    // [kPassRows, heads, kMaxSplits, head_dim]
  uint64_t* picks;        // [lists, blocks, top_k] Picks of draft ids, best first, then kNoPick
  ExpSum* logit_sums;     // [lists, blocks]
  int64_t* child_tokens;  // [lists, top_k] target ids
  float* child_scores;    // [lists, top_k] log-probabilities, best first, then -inf
  float* scores;          // [batch, candidates] cumulative, -inf where absent
  int64_t* tokens;        // [batch, candidates]
  int64_t* parents;       // [batch, candidates] candidate, kRootParent or kInactiveParent
  int32_t* places;        // [batch, candidates] static tree: place in the frontier, or -1
  DraftNode* nodes;       // [2, batch, frontier_width], levels alternate
  uint64_t* ancestors;    // [2, batch, frontier_width, words] slots that a node sees, its own
                          // included, from the first behind the committed ones on; unused by
                          // a parallel head
  int64_t* selected;      // [batch, tree nodes]
};

// Zero before the first launch that uses it, and after each launch. Launches must not share it at
// the same time.
struct DraftSync {
  void* barrier;       // GridBarrier
  uint32_t* arrivals;  // [kPassRows * heads * dimension panels] number of splits that are done
};

struct DraftKernelParams {
  DraftPlan plan;
  DraftScratch scratch;
  DraftSync sync;

  // The head, as in draft_head.h.
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
  const void* embedding_norm;  // [hidden] or null
  const void* hidden_norm;     // [hidden] or null
  const void* norm;            // [hidden]; null: EAGLE-1
  const void* mask_features;   // [feature_width] or null
  DraftMatrix lm_head;
  DraftLayer layers[kMaxDraftLayers];

  // What to draft, as in draft_head.h.
  View2<const int64_t> choices;         // [num_choices, 2]
  int num_choices;                      // 0: a dynamic tree
  int16_t level_ends[kMaxDraftDepth];   // number of candidates up to the end of a level
  int16_t first_slots[kMaxDraftDepth];  // first slot of nodes expanded above level i; [0], [1]: 0
  int num_candidates;
  int top_k;
  int nodes;
  int words;

  // The call, as in draft_head.h; row pointers are aligned to 16 bytes.
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
  DraftNoise noise;
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
