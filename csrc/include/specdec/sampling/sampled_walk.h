// The decisions of verify_sampled.h for one row, shared by the CPU op and the CUDA kernel.
//
// A walk asks for passes over the vocabulary and is given their results:
//
//   kStatistics  of the distributions at `node`           -> on_statistics
//   kMasses      of `residual` at `node`, see residual.h  -> on_masses
//   kDraw        of a token from `residual` at `node`     -> on_draw
//
// until it asks for kDone. A chain of K accepted tokens takes K + 1 statistics and one draw. A
// rejection takes a pass of masses only if another sibling is left to try. Block verification tries
// the longest prefix first, so its masses end with the first prefix that is accepted.
//
// Every pass moves to a later node or, in block verification, one level up, so a walk ends for any
// distributions.
#pragma once

#include "specdec/math/pick.h"
#include "specdec/sampling/residual.h"
#include "specdec/sampling/rng.h"
#include "specdec/verify_sampled.h"

namespace specdec {

enum class Pass : int32_t { kStatistics, kMasses, kDraw, kDone };

// A visited node, to which block verification can return.
struct WalkLevel {
  int32_t node;
  NodeStatistics statistics;
  float keep;
};

// Levels is an array of `nodes` WalkLevel. Removed is an array of `nodes` int32_t, the tokens of
// the rejected children at the visited node. Elements are read and written as a whole.
template <typename Levels, typename Removed>
class SampledWalk {
 public:
  SPECDEC_HOST_DEVICE SampledWalk(const VerifySampledParams& params, int64_t row, Levels levels,
                                  Removed removed)
      : params_(params), row_(row), levels_(levels), removed_(removed) {}

  Pass pass;
  int32_t node;
  int32_t depth;  // depth of node
  ResidualDistribution residual;
  int32_t num_removed;

  // Whether statistics need the draft distribution: a leaf has none.
  SPECDEC_HOST_DEVICE bool has_child() const { return child_ < params_.nodes; }

  SPECDEC_HOST_DEVICE void start() {
    num_accepted_ = -1;
    next_token_ = -1;
    status_ = MatchStatus::kOk;
    if (params_.parents(row_, 0) == kRootParent) {
      visit(0, 0, 1.0f);
    } else {
      pass = Pass::kDone;
    }
  }

  SPECDEC_HOST_DEVICE void on_statistics(const NodeStatistics& statistics) {
    const bool is_nan = statistics.max != statistics.max;
    if (is_nan || !(statistics.target_mass > 0.0f)) {
      status_ = is_nan ? MatchStatus::kNaN : MatchStatus::kNoFiniteLogit;
      pass = Pass::kDone;
      return;
    }
    levels_[depth] = WalkLevel{node, statistics, keep_};
    num_accepted_ = depth;
    residual = {finite_reference(statistics.max), 1.0f, 0.0f};
    target_mass_ = statistics.target_mass;
    draft_mass_ = statistics.draft_mass;
    if (params_.rule == SampledRule::kBlock) {
      extend_block();
    } else {
      try_children();
    }
  }

  SPECDEC_HOST_DEVICE void on_masses(const Masses& masses) {
    if (params_.rule == SampledRule::kBlock) {
      decide_block(masses.residual);
      return;
    }
    if (masses.residual > 0.0f) {
      target_mass_ = masses.residual;
    } else {
      residual.draft_scale = previous_scale_;
    }
    draft_mass_ = masses.draft;
    try_children();
  }

  // kNoPick: the residual is 0 everywhere, so the draw uses the distribution it was computed from.
  SPECDEC_HOST_DEVICE void on_draw(Pick pick) {
    if (pick == kNoPick) {
      residual.draft_scale = previous_scale_;
      previous_scale_ = 0.0f;
      return;
    }
    next_token_ = picked_token(pick);
    pass = Pass::kDone;
  }

  SPECDEC_HOST_DEVICE void write_outputs() const {
    int64_t* path = params_.path + row_ * params_.nodes;
    for (int64_t i = 0; i < params_.nodes; ++i) {
      path[i] = -1;
      if (i <= num_accepted_) {
        const WalkLevel level = levels_[i];
        path[i] = level.node;
      }
    }
    params_.num_accepted[row_] = num_accepted_;
    params_.next_token[row_] = next_token_;
    params_.status[row_] = static_cast<int64_t>(status_);
  }

  SPECDEC_HOST_DEVICE NoiseStream noise(int64_t noise_depth, Purpose purpose) const {
    return NoiseStream::make_round(params_.seeds[row_], params_.row_ids[row_],
                                   params_.root_positions[row_], noise_depth, purpose);
  }

 private:
  SPECDEC_HOST_DEVICE void visit(int64_t new_node, int32_t new_depth, float keep) {
    node = static_cast<int32_t>(new_node);
    depth = new_depth;
    keep_ = keep;
    num_removed = 0;
    ordinal_ = -1;
    child_ = new_node;
    next_child();
    previous_scale_ = 0.0f;
    pass = Pass::kStatistics;
  }

  // Sets child_ to the next child that the rule looks at, or `nodes`.
  SPECDEC_HOST_DEVICE void next_child() {
    ++ordinal_;
    const bool only_first = params_.rule != SampledRule::kRecursive;
    if (only_first && ordinal_ > 0) {
      child_ = params_.nodes;
      return;
    }
    do {
      ++child_;
    } while (child_ < params_.nodes && params_.parents(row_, child_) != node);
  }

  // Rules 2 and 4.
  SPECDEC_HOST_DEVICE void try_children() {
    pass = Pass::kDraw;
    for (; has_child() && has_draft_mass(draft_mass_); next_child()) {
      const float draft = draft_of_child();
      if (!(draft > 0.0f)) continue;
      const float scale = exact_div(target_mass_, draft_mass_);
      const float weight = residual_weight(target_of_child(), draft, residual);
      if (exact_mul(accept_uniform(depth, ordinal_), exact_mul(scale, draft)) < weight) {
        visit(child_, depth + 1, 1.0f);
        return;
      }
      removed_[num_removed++] = static_cast<int32_t>(params_.tokens(row_, child_));
      previous_scale_ = residual.draft_scale;
      residual.draft_scale = exact_add(residual.draft_scale, scale);
      next_child();
      if (has_child()) pass = Pass::kMasses;
      return;
    }
  }

  // Rule 3: moves to the next token of the chain, or back from its end.
  SPECDEC_HOST_DEVICE void extend_block() {
    const bool has_draft = has_child() && has_draft_mass(draft_mass_);
    const float draft = has_draft ? draft_of_child() : 0.0f;
    if (!(draft > 0.0f)) {
      pass = Pass::kDraw;  // at the end of the chain h is keep, and the draw is from the target
      const bool accepted = depth == 0 || accept_uniform(depth - 1, 0) < keep_;
      if (!accepted) try_prefix(depth - 1);
      return;
    }
    const float kept = exact_mul(keep_, target_of_child());
    const float offered = exact_mul(exact_div(target_mass_, draft_mass_), draft);
    const float limited = kept < offered ? exact_div(kept, offered) : 1.0f;
    if (kept > 0.0f && limited > 0.0f) {
      visit(child_, depth + 1, limited);
    } else {
      try_prefix(depth);  // no longer prefix can be accepted
    }
  }

  // Asks for the residual mass that decides whether the prefix up to new_depth is accepted.
  SPECDEC_HOST_DEVICE void try_prefix(int32_t new_depth) {
    const WalkLevel level = levels_[new_depth];
    depth = new_depth;
    node = level.node;
    num_accepted_ = new_depth;
    keep_ = level.keep;
    target_mass_ = level.statistics.target_mass;
    residual = {finite_reference(level.statistics.max), keep_,
                exact_div(target_mass_, level.statistics.draft_mass)};
    pass = depth == 0 ? Pass::kDraw : Pass::kMasses;
  }

  SPECDEC_HOST_DEVICE void decide_block(float residual) {
    const float deficit = exact_mul(target_mass_, exact_add(1.0f, -keep_));
    const float total = exact_add(residual, deficit);
    if (total == 0.0f || exact_mul(accept_uniform(depth - 1, 0), total) < residual) {
      pass = Pass::kDraw;
    } else {
      try_prefix(depth - 1);
    }
  }

  SPECDEC_HOST_DEVICE float accept_uniform(int64_t noise_depth, int64_t ordinal) const {
    const NoiseStream stream = noise(noise_depth, Purpose::kAccept);
    return uniform(stream.group_bits(static_cast<uint32_t>(ordinal)).lane[0]);
  }

  // 0 for a child that cannot have been drawn.
  SPECDEC_HOST_DEVICE float draft_of_child() const {
    const int64_t token = params_.tokens(row_, child_);
    if (token < 0 || token >= params_.vocab) return 0.0f;
    for (int32_t i = 0; i < num_removed; ++i) {
      if (removed_[i] == token) return 0.0f;
    }
    return draft_weight(params_.draft_probs[row_ * params_.draft_batch_stride +
                                            node * params_.draft_node_stride + token]);
  }

  SPECDEC_HOST_DEVICE float target_of_child() const {
    const int64_t offset = row_ * params_.logits_batch_stride + node * params_.logits_node_stride +
                           params_.tokens(row_, child_);
    return target_weight(load_logit(params_.logits, params_.logits_type, offset),
                         residual.reference);
  }

  static SPECDEC_HOST_DEVICE float load_logit(const void* logits, FloatType type, int64_t offset) {
    if (type == FloatType::kFloat32) return static_cast<const float*>(logits)[offset];
    if (type == FloatType::kBFloat16) {
      return to_float(static_cast<const BFloat16*>(logits)[offset]);
    }
    return to_float(static_cast<const Float16*>(logits)[offset]);
  }

  const VerifySampledParams& params_;
  int64_t row_;
  Levels levels_;
  Removed removed_;

  int64_t child_;         // the child that the rule looks at, or nodes
  int32_t ordinal_;       // its rank among its siblings
  float keep_;            // block: keep of the visited node
  float target_mass_;     // of residual
  float draft_mass_;      // draft mass without the removed tokens
  float previous_scale_;  // residual.draft_scale before the last subtraction
  int32_t num_accepted_;
  int64_t next_token_;
  MatchStatus status_;
};

}  // namespace specdec
