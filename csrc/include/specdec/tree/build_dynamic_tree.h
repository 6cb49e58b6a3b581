// build_dynamic_tree: selects the best candidates of a dynamic draft (EAGLE-2) as a tree.
//
// A candidate is a drafted token with the cumulative log-probability of its path. It is ranked by
// its effective score, the lowest score on its path from the root, and is eligible if that is above
// -inf and every link of the path is legal. The best nodes - 1 eligible candidates are selected in
// the order (effective score descending, candidate index ascending).
//
// Every selection is a tree: a parent's effective score is at least that of its child, and its
// index is smaller. So a parent precedes its children in this order, and each prefix of the order
// is closed under ancestors, whatever the ties. In a draft a child never scores higher than its
// parent, so effective scores equal the scores.
#pragma once

#include "specdec/core/parallel.h"
#include "specdec/core/tree.h"
#include "specdec/math/pick.h"

namespace specdec {

// Bounds the shared memory of the CUDA kernel and the stack of the CPU op.
constexpr int64_t kMaxCandidates = 4096;

struct BuildDynamicTreeParams {
  View2<const float> scores;         // [batch, candidates]
  View2<const int64_t> tokens;       // [batch, candidates]
  View2<const int64_t> parents;      // [batch, candidates] earlier candidate or -1, the root
  View1<const int64_t> root_tokens;  // [batch] -1: inactive row
  int64_t batch;
  int64_t candidates;  // 0 .. kMaxCandidates
  int64_t nodes;       // 1 .. kMaxNodes, the root included

  int64_t* tree_tokens;   // [batch, nodes] 0 where absent
  int64_t* tree_parents;  // [batch, nodes] kInactiveParent where absent
  int64_t* selected;      // [batch, nodes] candidate index; -1 where absent and for the root
};

// Maps a score to an unsigned integer of the same order, with -0 = +0. Returns 0, which is below
// all others, for NaN, -inf, and a parent that is neither the root nor an earlier candidate.
SPECDEC_HOST_DEVICE uint32_t candidate_key(float score, int64_t parent, int64_t candidate) {
  const bool link_is_legal = parent >= kRootParent && parent < candidate;
  if (!link_is_legal || !(score > bits_to_float(kMinusInfinityBits))) return 0;
  return static_cast<uint32_t>(ordered_key(canonical_bits(score))) ^ 0x80000000u;
}

namespace cpu {
void build_dynamic_tree(const BuildDynamicTreeParams& params, const ParallelFor& parallel_for);
}  // namespace cpu

}  // namespace specdec
