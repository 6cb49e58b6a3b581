// verify_rejection, verify_recursive, verify_block: walk a draft tree whose tokens were sampled
// from known probabilities, so that what is emitted has the target's distribution.
//
// At a node, `target` is the softmax of its logits and `draft` the distribution that its children
// were drawn from, without replacement, in node order. u is uniform in (0, 1), drawn anew for every
// child.
//
//   recursive  (rule 4) child x is accepted if u * draft(x) < target(x). Otherwise
//              target <- norm(max(target - draft, 0)), draft(x) <- 0, draft <- norm(draft), and the
//              next child is tried. If no child is accepted, the token is drawn from the updated
//              `target` and the walk ends. The comparison is strict, so a token of target
//              probability 0 is never accepted.
//   rejection  (rule 2) the same for the first child only: the rule for chains.
//   block      (rule 3) for the chain x_1 .. x_K of first children, with keep_0 = 1 and
//                keep_i = min(keep_{i-1} * target_{i-1}(x_i) / draft_{i-1}(x_i), 1)
//                res_i  = sum_v max(keep_i * target_i(v) - draft_i(v), 0)
//                h_i    = res_i / (res_i + 1 - keep_i) for i < K (0 / 0 = 1), h_K = keep_K,
//              the chain is accepted up to the last i with u_i < h_i (0 if there is none). The next
//              token is drawn from norm(max(keep_i * target_i - draft_i, 0)) or, for i = K, from
//              target_K.
//
// If a residual max(target - draft, 0) is 0 everywhere, the target that it was computed from
// replaces it. Draft probabilities need not be normalised; NaN, infinities and negative ones count
// as 0. A child that cannot have been drawn is skipped as if it were not in the tree, and in a
// chain it ends the chain: its token is outside the vocabulary, has draft probability 0, repeats an
// earlier sibling's, or no draft mass is left.
//
// Sources: Leviathan, Kalman, Matias 2023 and Chen et al. 2023 (rejection); Sun et al. 2024, "Block
// verification accelerates speculative decoding"; Jeon et al. 2024 and Yang et al. 2024 (recursive
// rejection without replacement).
#pragma once

#include "specdec/core/float_types.h"
#include "specdec/core/parallel.h"
#include "specdec/core/tree.h"
#include "specdec/verify_match.h"

namespace specdec {

enum class SampledRule { kRejection, kRecursive, kBlock };

struct VerifySampledParams {
  SampledRule rule;
  const void* logits;  // [batch, nodes, vocab], last dimension contiguous
  FloatType logits_type;
  int64_t logits_batch_stride;          // elements
  int64_t logits_node_stride;           // elements
  const float* draft_probs;             // [batch, nodes, vocab], last dimension contiguous
  int64_t draft_batch_stride;           // elements
  int64_t draft_node_stride;            // elements
  View2<const int64_t> tokens;          // [batch, nodes]
  View2<const int64_t> parents;         // [batch, nodes]
  View1<const int64_t> root_positions;  // [batch] unpadded tokens before the root
  View1<const int64_t> seeds;           // [batch]
  View1<const int64_t> row_ids;         // [batch]
  int64_t batch;
  int64_t nodes;  // 1 .. kMaxNodes
  int64_t vocab;  // 1 .. 2^31 - 1

  int64_t* path;          // [batch, nodes] accepted node at each depth, -1 beyond
  int64_t* num_accepted;  // [batch]        -1: inactive row
  int64_t* next_token;    // [batch]        -1: inactive row or status != 0
  int64_t* status;        // [batch]        MatchStatus of the examined nodes
};

// Bytes of device memory that launch_verify_sampled needs. The memory need not be initialised.
int64_t verify_sampled_workspace_bytes(const VerifySampledParams& params);

namespace cpu {
void verify_sampled(const VerifySampledParams& params, const ParallelFor& parallel_for);
}  // namespace cpu

}  // namespace specdec
