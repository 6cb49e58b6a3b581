// The order of work of the fused draft_head (csrc/kernels/draft_head.cuh): the table of its phases,
// which the kernel, the ring of its weights and the tests walk alike, and the tiles of weights
// that every block streams.
//
// Elements go in passes of up to 32 rows, two tiles of mma.m16n8k16, through the phases
//
//   gather | fc | of each layer: projections | rotate | attend | output | gate_up | down
//   and at the end: logits | grow
//
// and the grid waits for all of a phase before the next. A draft is a sequence of passes:
//
//   new       32 new elements, until the last layer has their keys and values
//   kept      of each row the last new element, of a parallel head the mask elements too: the rest
//             of the last layer and the logits; behind the last pass grow makes the first level
//   frontier  32 nodes that are expanded, through everything; behind the last pass of a level grow
//             makes the next one
//
// so of most new elements only what others attend to is computed. A pass streams the weights of its
// phases once.
#pragma once

#include "specdec/core/platform.h"

namespace specdec {

constexpr int kPassRows = 32;
constexpr int kTileOuts = 8;       // weight rows of a tile, the N of mma.m16n8k16
constexpr int kPanelTiles = 8;     // tiles that share one reading of their inputs
constexpr int kSliceBytes = 1024;  // of a weight row, at most, in a stage of the ring
constexpr int kMaxDraftLayers = 8;
constexpr int kMaxDraftDepth = 64;
constexpr int kMaxDraftBatch = 128;
constexpr int kMaxDraftTopK = 32;  // one for each lane
constexpr int kMaxDraftHeadDim = 256;

enum class DraftOp : uint8_t {
  kGather,       // norms of the target's features
  kFc,           // the input of layer 0
  kProjections,  // queries, keys and values
  kRotate,       // norms and rotation of heads, the cache, the residual
  kAttend,
  kOutput,  // of attention, onto the residual
  kGateUp,
  kDown,    // onto the residual
  kLogits,  // lm_head; the best tokens that each block finds, the feedback
  kGrow,    // the children of the nodes, those that are expanded next, the tree
};

SPECDEC_HOST_DEVICE bool is_product(DraftOp op) {
  return op != DraftOp::kGather && op != DraftOp::kRotate && op != DraftOp::kAttend &&
         op != DraftOp::kGrow;
}

// What the order depends on.
struct DraftPlan {
  int num_layers;
  bool gathers;      // the features of new elements are normed
  bool has_fc;       // for new elements
  bool feeds_fc;     // for drafted ones, too: EAGLE-1
  bool is_parallel;  // P-EAGLE: the kept elements give all levels
  int batch;
  int depth;  // levels below the root
  // Nodes of a row that are expanded for the level below depth i; of level 0 one, the root.
  int16_t widths[kMaxDraftDepth];

  SPECDEC_HOST_DEVICE int kept_width() const { return is_parallel ? depth : 1; }
  // The most nodes of a row that are expanded for a level.
  SPECDEC_HOST_DEVICE int frontier_width() const {
    int width = 1;
    for (int level = 1; level < depth; ++level) {
      width = widths[level] > width ? widths[level] : width;
    }
    return width;
  }
  // Elements of a row in a pass that is not of new ones.
  SPECDEC_HOST_DEVICE int max_width() const { return is_parallel ? depth : frontier_width(); }
};

enum class PassKind : uint8_t { kNew, kKept, kFrontier };

struct DraftPass {
  PassKind kind;
  int level;      // depth of the nodes of a frontier; else 0
  int first_row;  // among all of its kind (and level)
  int num_rows;   // 1 .. kPassRows
  bool is_last;
};

// The passes and phases of a draft with `num_new` > 0 new elements, in order:
//
//   for (DraftCursor cursor(plan, num_new); !cursor.is_done(); cursor.next()) { ... }
class DraftCursor {
 public:
  DraftCursor() = default;  // for shared memory
  SPECDEC_HOST_DEVICE DraftCursor(const DraftPlan& plan, int num_new)
      : plan_(&plan), is_done_(false) {
    begin_rows(PassKind::kNew, 0, num_new);
    skip_absent();
  }

  SPECDEC_HOST_DEVICE bool is_done() const { return is_done_; }
  SPECDEC_HOST_DEVICE const DraftPass& pass() const { return pass_; }
  // The phase is the first of its pass.
  SPECDEC_HOST_DEVICE bool begins_pass() const { return begins_pass_; }
  SPECDEC_HOST_DEVICE int layer() const {
    return at_ < kLayers || at_ >= layers_end() ? 0 : (at_ - kLayers) / kLayerOps;
  }
  SPECDEC_HOST_DEVICE DraftOp op() const {
    if (at_ < kLayers) return static_cast<DraftOp>(at_);
    if (at_ >= layers_end()) return at_ == layers_end() ? DraftOp::kLogits : DraftOp::kGrow;
    return static_cast<DraftOp>(kLayers + (at_ - kLayers) % kLayerOps);
  }

  SPECDEC_HOST_DEVICE void next() {
    begins_pass_ = false;
    ++at_;
    skip_absent();
  }

 private:
  // Phases are numbered: gather, fc, six of each layer, logits, grow.
  static constexpr int kLayers = 2;
  static constexpr int kLayerOps = 6;
  SPECDEC_HOST_DEVICE int layers_end() const { return kLayers + kLayerOps * plan_->num_layers; }
  // Behind rotate of the last layer.
  SPECDEC_HOST_DEVICE int cached() const { return layers_end() - kLayerOps + 2; }

  SPECDEC_HOST_DEVICE void begin_rows(PassKind kind, int level, int total) {
    total_ = total;
    pass_ = {kind, level, -kPassRows, kPassRows, false};
    next_rows();
  }
  SPECDEC_HOST_DEVICE void next_rows() {
    pass_.first_row += kPassRows;
    const int left = total_ - pass_.first_row;
    pass_.num_rows = left < kPassRows ? left : kPassRows;
    pass_.is_last = left <= kPassRows;
    at_ = pass_.kind == PassKind::kKept ? cached() : 0;
    end_ = pass_.kind == PassKind::kNew ? cached() : layers_end() + (pass_.is_last ? 2 : 1);
    begins_pass_ = true;
  }
  SPECDEC_HOST_DEVICE void next_pass() {
    if (!pass_.is_last) return next_rows();
    if (pass_.kind == PassKind::kNew) {
      return begin_rows(PassKind::kKept, 0, plan_->batch * plan_->kept_width());
    }
    const int level = pass_.level + 1;
    if (plan_->is_parallel || level >= plan_->depth) {
      is_done_ = true;
      return;
    }
    begin_rows(PassKind::kFrontier, level, plan_->batch * plan_->widths[level]);
  }
  SPECDEC_HOST_DEVICE bool is_present() const {
    const bool is_new = pass_.kind == PassKind::kNew;
    if (at_ == 0) return is_new && plan_->gathers;
    if (at_ == 1) return is_new ? plan_->has_fc : plan_->feeds_fc;
    return true;
  }
  SPECDEC_HOST_DEVICE void skip_absent() {
    while (!is_done_ && (at_ >= end_ || !is_present())) {
      if (at_ >= end_) {
        next_pass();
      } else {
        ++at_;
      }
    }
  }

  const DraftPlan* plan_;
  DraftPass pass_;
  int total_;
  int at_;
  int end_;
  bool begins_pass_;
  bool is_done_;
};

// Phases of a draft with at most num_new new elements in each row.
inline int most_phases(const DraftPlan& plan, int num_new) {
  const int masks = plan.kept_width() - 1;
  int count = 0;
  for (DraftCursor cursor(plan, plan.batch * (num_new + masks)); !cursor.is_done(); cursor.next()) {
    ++count;
  }
  return count;
}

enum class DraftLaunches { kOne, kOnePerPhase };

// One launch for the whole draft wherever its blocks can wait for each other. At any number of
// rows: a barrier of the grid costs 1 to 2 us, less than the launch that would replace it, and the
// ring streams the next phase's weights across it, which a launch can't. Passes of 32 rows are what
// many rows cost, and they would be the same in launches of their own. What launches of each phase
// are good for: a GPU or a service (MPS with a share of it) that can't keep all blocks resident,
// and a profiler, which shows them one by one.
inline DraftLaunches choose_launches(bool can_cooperate, bool wants_phases) {
  return can_cooperate && !wants_phases ? DraftLaunches::kOne : DraftLaunches::kOnePerPhase;
}

// The tiles of a weight matrix, and which of them a block streams: neighbours, as many as others
// have or one more (two of a pair). The sum behind an output has an order of its own, whatever the
// block, so results do not depend on the number of blocks.
struct TileSchedule {
  int outs;
  bool is_paired;  // gate above up: tile 2 i has rows of gate, tile 2 i + 1 the same rows of up

  SPECDEC_HOST_DEVICE int part() const { return is_paired ? outs / 2 : outs; }
  SPECDEC_HOST_DEVICE int first_tile(int block, int num_blocks) const {
    const int64_t units = part() / kTileOuts + (part() % kTileOuts > 0 ? 1 : 0);
    return static_cast<int>(units * block / num_blocks) * (is_paired ? 2 : 1);
  }
  SPECDEC_HOST_DEVICE int first_out(int tile) const {
    return is_paired ? tile / 2 * kTileOuts + tile % 2 * part() : tile * kTileOuts;
  }
  SPECDEC_HOST_DEVICE int num_outs(int tile) const {
    const int left = part() - (is_paired ? tile / 2 : tile) * kTileOuts;
    return left < kTileOuts ? left : kTileOuts;
  }
};

}  // namespace specdec
