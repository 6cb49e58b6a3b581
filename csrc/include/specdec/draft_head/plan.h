// The schedule of the fused draft_head (csrc/kernels/draft_head/draft_head.cuh): the sequence of
// phases, which the kernel, its ring of weights and the tests all iterate over, and the tiles of
// weights that each block streams.
//
// Elements are processed in passes of up to 32 rows, two tiles of mma.m16n8k16. A pass goes through
// the phases
//
//   gather | fc | for each layer: projections | rotate | attend | output | gate_up | down
//   at the end: logits | grow
//
// and the grid waits for the end of each phase. A draft is a sequence of passes of three kinds:
//
//   new       32 new elements, up to their keys and values in the last layer
//   kept      the last new element of each row, for a parallel head also the mask elements: the
//             rest of the last layer and the logits; after the last such pass grow makes the first
//             level
//   frontier  32 nodes that are expanded, through all phases; after the last pass of a level grow
//             makes the next one
//
// So for most new elements only what other elements attend to is computed. A pass streams the
// weights of its phases once.
#pragma once

#include "specdec/core/platform.h"

namespace specdec {

constexpr int kPassRows = 32;
constexpr int kTileOuts = 8;       // weight rows of a tile, the N of mma.m16n8k16
constexpr int kPanelTiles = 8;     // tiles that share one read of their inputs
constexpr int kSliceBytes = 1024;  // most bytes of a weight row in one stage of the ring
constexpr int kUnitBytes = 64;     // bytes of a weight row that a warp loads at a time
constexpr int kMaxDraftLayers = 8;
constexpr int kMaxDraftDepth = 64;
constexpr int kMaxDraftBatch = 128;
constexpr int kMaxDraftTopK = 32;  // one child per lane
constexpr int kMaxDraftHeadDim = 256;

enum class DraftOp : uint8_t {
  kGather,       // norms of the target's features
  kFc,           // the input of layer 0
  kProjections,  // queries, keys and values
  kRotate,       // norms and rotation of heads, the cache, the residual
  kAttend,
  kOutput,  // projection of the attended values, added to the residual
  kGateUp,
  kDown,    // added to the residual
  kLogits,  // lm_head; the best tokens found by each block, the feedback
  kGrow,    // the children of the nodes, the nodes that are expanded next, the tree
};

SPECDEC_HOST_DEVICE bool is_product(DraftOp op) {
  return op != DraftOp::kGather && op != DraftOp::kRotate && op != DraftOp::kAttend &&
         op != DraftOp::kGrow;
}

// The properties of a draft that determine its schedule.
struct DraftPlan {
  int num_layers;
  bool gathers;      // the features of new elements are normed
  bool has_fc;       // new elements go through fc
  bool feeds_fc;     // drafted elements go through fc too, all with their embedding (EAGLE-1, MTP)
  bool is_parallel;  // P-EAGLE: the kept elements give all levels
  int batch;
  int depth;  // levels below the root
  // Number of nodes of a row that are expanded for the level below depth i; one for level 0, the
  // root.
  int16_t widths[kMaxDraftDepth];

  SPECDEC_HOST_DEVICE int kept_width() const { return is_parallel ? depth : 1; }
  // The largest number of nodes of a row that are expanded for one level.
  SPECDEC_HOST_DEVICE int frontier_width() const {
    int width = 1;
    for (int level = 1; level < depth; ++level) {
      width = widths[level] > width ? widths[level] : width;
    }
    return width;
  }
  // The number of elements of a row in a kept pass or for a frontier.
  SPECDEC_HOST_DEVICE int max_width() const { return is_parallel ? depth : frontier_width(); }
};

enum class PassKind : uint8_t { kNew, kKept, kFrontier };

struct DraftPass {
  PassKind kind;
  int level;      // depth of the nodes of a frontier; otherwise 0
  int first_row;  // among all rows of its kind (and level)
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
  // Whether the phase is the first of its pass.
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
  // Numbers of phases: gather, fc, six per layer, logits, grow.
  static constexpr int kLayers = 2;
  static constexpr int kLayerOps = 6;
  SPECDEC_HOST_DEVICE int layers_end() const { return kLayers + kLayerOps * plan_->num_layers; }
  // The number of the phase after rotate in the last layer.
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

// The largest number of phases of a draft with at most num_new new elements per row.
inline int most_phases(const DraftPlan& plan, int num_new) {
  const int masks = plan.kept_width() - 1;
  int count = 0;
  for (DraftCursor cursor(plan, plan.batch * (num_new + masks)); !cursor.is_done(); cursor.next()) {
    ++count;
  }
  return count;
}

enum class DraftLaunches { kOne, kOnePerPhase };

// One launch for the whole draft wherever its blocks can wait for each other, for any number of
// rows. A barrier of the grid costs 1 to 2 us, less than the launch that would replace it, and the
// ring streams the next phase's weights across a barrier, which is impossible across launches.
// Separate launches would not help with many rows either, because those cost passes of 32 rows in
// both cases. One launch per phase is for GPUs or services that can't keep all blocks resident (MPS
// with a share of the GPU), and for profilers, which then show each phase.
inline DraftLaunches choose_launches(bool can_cooperate, bool wants_phases) {
  return can_cooperate && !wants_phases ? DraftLaunches::kOne : DraftLaunches::kOnePerPhase;
}

SPECDEC_HOST_DEVICE constexpr int64_t tiles_of(int64_t outs) {
  return outs / kTileOuts + (outs % kTileOuts > 0 ? 1 : 0);
}

// The tiles of a weight matrix, and the range of them that a block streams: contiguous, and at most
// one tile (two of a pair) longer than another block's. The order of the sum behind an output does
// not depend on the block, so results do not depend on the number of blocks.
//
// In memory a matrix is either [outs, ins] or in tiles, in the order of their numbers:
//
//   [tiles][ceil(row bytes / kUnitBytes)][kTileOuts][kUnitBytes], where unused bytes have no effect
//
// In tiles, a slice of a tile is one piece of memory instead of a piece of each row.
struct TileSchedule {
  int outs;
  bool is_paired;  // gate and up: tile 2 i has rows of gate, tile 2 i + 1 the same rows of up

  SPECDEC_HOST_DEVICE int part() const { return is_paired ? outs / 2 : outs; }
  SPECDEC_HOST_DEVICE int first_tile(int block, int num_blocks) const {
    return static_cast<int>(tiles_of(part()) * block / num_blocks) * (is_paired ? 2 : 1);
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
