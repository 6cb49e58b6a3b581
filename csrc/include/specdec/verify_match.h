// verify_match: walks a draft tree along tokens drawn from the target.
//
// The match rule: at each visited node, starting at the root, one token is drawn from the node's
// processed target distribution, as the arg-max of logit + Gumbel noise (greedy: without noise). If
// children carry the token, the walk descends to the first of them; otherwise the token is emitted
// and the walk ends. The draw does not depend on the tree, so what is emitted has the target's
// distribution for every tree.
#pragma once

#include "specdec/core/float_types.h"
#include "specdec/core/parallel.h"
#include "specdec/core/tree.h"

namespace specdec {

enum class MatchStatus : int64_t { kOk = 0, kNaN = 1, kNoFiniteLogit = 2 };

struct VerifyMatchParams {
  const void* logits;  // [batch, nodes, vocab], last dimension contiguous
  FloatType logits_type;
  int64_t logits_batch_stride;          // elements
  int64_t logits_node_stride;           // elements
  View2<const int64_t> tokens;          // [batch, nodes]
  View2<const int64_t> parents;         // [batch, nodes]
  View1<const int64_t> root_positions;  // [batch] unpadded tokens before the root
  View1<const int64_t> seeds;           // [batch]
  View1<const int64_t> row_ids;         // [batch]
  View1<const bool> stochastic;         // [batch] false: greedy
  int64_t batch;
  int64_t nodes;  // 1 .. kMaxNodes
  int64_t vocab;  // 1 .. 2^31 - 1

  int64_t* path;          // [batch, nodes] visited node at each depth, -1 beyond
  int64_t* num_accepted;  // [batch]        -1: inactive row
  int64_t* next_token;    // [batch]        -1: inactive row or status != 0
  int64_t* status;        // [batch]        MatchStatus
};

// Bytes of device memory that launch_verify_match needs. The memory need not be initialised.
int64_t verify_match_workspace_bytes(const VerifyMatchParams& params);

namespace cpu {
void verify_match(const VerifyMatchParams& params, const ParallelFor& parallel_for);
}  // namespace cpu

}  // namespace specdec
