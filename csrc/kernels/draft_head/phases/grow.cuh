// Builds the trees of the fused draft_head level by level: children from what all blocks found in
// the logits, candidates, the nodes to expand next, and at the end the tree.
// csrc/cpu/draft_head/tree.h and logits.h specify the result.
//
// Each batch row belongs to one block, and no other block touches its tree, so barriers of the
// block separate the steps: a warp merges a list of children, a thread handles a candidate.
// block.reduce holds the ranks of a dynamic tree's candidates.
//
// An illegal number in draft_to_target sets the score of the root to NaN and is not used as a
// child, so nothing is read through it. At the end such a tree is the root alone.
#pragma once

#include "kernels/draft_head/tree.cuh"
#include "kernels/tree/dynamic_tree.cuh"
#include "logits.cuh"

namespace specdec {

static_assert(kTreeWords * 4 <= kReduceBytes && kMaxDraftTopK * kMaxDraftTopK * 8 <= kReduceBytes);
constexpr int kTreeItems = static_cast<int>(kMaxCandidates) / kDraftThreads;

// Adds the sums of all blocks, in a fixed order. All lanes of a warp call it together.
__device__ __forceinline__ ExpSum merge_sums(const ExpSum* parts, int count) {
  const int lane = threadIdx.x % kWarpSize;
  float largest = bits_to_float(kMinusInfinityBits);
  for (int i = lane; i < count; i += kWarpSize) {
    if (parts[i].largest > largest) largest = parts[i].largest;
  }
  largest = warp_max(largest);
  if (largest == bits_to_float(kMinusInfinityBits)) return {largest, 0.0f};
  float sum = 0;
  for (int i = lane; i < count; i += kWarpSize) {
    sum = exact_add(sum, rescaled_sum(parts[i], largest));
  }
  return {largest, warp_sum(sum)};
}

// Finds the children of a list, best first. One warp calls it; returns false if draft_to_target is
// illegal.
__device__ __forceinline__ bool find_children(const DraftKernelParams& params, int64_t list,
                                              int num_blocks) {
  const DraftScratch& scratch = params.scratch;
  const int lane = threadIdx.x % kWarpSize, top_k = params.top_k;
  const Pick* picks = scratch.picks + list * num_blocks * top_k;
  const Pick pick = merge_picks(num_blocks, top_k, [&](int block, int place) {
    return picks[static_cast<int64_t>(block) * top_k + place];
  });
  const ExpSum total = merge_sums(scratch.logit_sums + list * num_blocks, num_blocks);
  bool is_legal = true;
  if (lane < top_k) {
    const float log_sum = logf(total.sum);
    bool exists = pick != kNoPick && log_sum == log_sum;
    int64_t token = exists ? picked_token(pick) : 0;
    if (exists && params.draft_to_target != nullptr) token = params.draft_to_target[token];
    is_legal = token >= 0 && token < params.vocab;
    exists = exists && is_legal;
    const float log_prob = exact_add(exact_add(pick_score(pick), -total.largest), -log_sum);
    scratch.child_tokens[list * top_k + lane] = token;
    scratch.child_scores[list * top_k + lane] =
        exists ? log_prob : bits_to_float(kMinusInfinityBits);
  }
  return warp_all(is_legal);
}

// A number that orders the candidates of a level by (score descending, index ascending): the best
// one is the largest, and those that do not exist are the smallest. No two are equal.
__device__ __forceinline__ uint64_t ranked_candidate(float score, int64_t parent, int candidate) {
  const uint64_t key = candidate_key(score, parent, candidate);
  return key << 32 | ~static_cast<uint32_t>(candidate);
}

// Makes the candidates of a level from the children of its nodes: node i has list first_list + i;
// in a parallel head all nodes have first_list. `ranked` gets the candidates of a dynamic tree.
__device__ __forceinline__ void add_candidates(const DraftTreeRow& tree, int level,
                                               int64_t first_list,
                                               const SharedSpan<uint64_t>& ranked) {
  const DraftKernelParams& params = tree.params;
  const DraftScratch& scratch = params.scratch;
  const int begin = tree.level_begin(level);
  for (int i = begin + static_cast<int>(threadIdx.x); i < tree.level_end(level);
       i += kDraftThreads) {
    const int32_t place = tree.parent_place(i, level), rank = tree.rank(i, level);
    const bool is_legal = place >= 0 && rank >= 0;
    const DraftNode node = tree.nodes(level)[max(place, 0)];
    const int64_t list = first_list + (params.plan.is_parallel ? 0 : max(place, 0));
    const int64_t child = list * params.top_k + max(rank, 0);
    const float sum = exact_add(node.score, scratch.child_scores[child]);
    const bool exists = is_legal && node.is_alive && sum > bits_to_float(kMinusInfinityBits);
    const float score = exists ? sum : bits_to_float(kMinusInfinityBits);
    const int64_t parent = exists ? node.candidate : kInactiveParent;
    tree.scores()[i] = score;
    tree.tokens()[i] = exists ? scratch.child_tokens[child] : 0;
    tree.parents()[i] = parent;
    if (tree.is_dynamic()) ranked[i - begin] = ranked_candidate(score, parent, i);
  }
}

// Marks all nodes of a level as not alive.
__device__ __forceinline__ void clear_nodes(const DraftTreeRow& tree, int level) {
  for (int i = threadIdx.x; i < tree.params.plan.widths[level]; i += kDraftThreads) {
    tree.nodes(level)[i] = {};
  }
}

// Chooses the nodes of the next level that are expanded: in a dynamic tree the best candidates,
// each of which counts the better ones; in a static tree those with children. If there are fewer
// than `widths`, which choices may cause, the remaining nodes are not alive.
__device__ __forceinline__ void choose_nodes(const DraftTreeRow& tree, int level,
                                             const SharedSpan<uint64_t>& ranked) {
  const int begin = tree.level_begin(level), count = tree.level_end(level) - begin;
  for (int i = threadIdx.x; i < count; i += kDraftThreads) {
    int place = 0;
    if (tree.is_dynamic()) {
      const uint64_t own = ranked[i];
      for (int other = 0; other < count; ++other) place += ranked[other] > own ? 1 : 0;
      if (place >= tree.params.top_k) continue;
    } else {
      place = tree.places()[begin + i];
      if (place < 0) continue;
    }
    const int candidate = begin + i;
    const bool exists = tree.parents()[candidate] != kInactiveParent;
    tree.nodes(level + 1)[place] = {.token = tree.tokens()[candidate],
                                    .candidate = candidate,
                                    .parent = exists ? tree.parent_place(candidate, level) : 0,
                                    .score = tree.scores()[candidate],
                                    .is_alive = exists};
  }
}

// Gives each node the slots that its parent sees and its own. A node that is not alive also sees
// its own slot: a softmax over nothing would make its values NaN, and NaN times the weight 0 would
// reach other nodes.
__device__ __forceinline__ void see_ancestors(const DraftTreeRow& tree, int next) {
  const DraftKernelParams& params = tree.params;
  const int words = params.words;
  for (int i = threadIdx.x; i < params.plan.widths[next] * words; i += kDraftThreads) {
    const int place = i / words, word = i % words;
    const DraftNode node = tree.nodes(next)[place];
    const int slot = params.first_slots[next] + place;
    uint64_t bits = slot / 64 == word ? uint64_t{1} << slot % 64 : 0;
    if (node.is_alive) {
      bits |= tree.ancestors(next - 1)[static_cast<int64_t>(node.parent) * words + word];
    }
    tree.ancestors(next)[i] = bits;
  }
}

// Writes the tree over the root, which is already stored.
template <typename T>
__device__ __forceinline__ void finish_tree(const DraftBlock<T>& block, const DraftTreeRow& tree) {
  const DraftKernelParams& params = tree.params;
  if (!tree.is_dynamic()) {
    for (int i = threadIdx.x; i < params.num_candidates; i += kDraftThreads) {
      if (tree.parents()[i] == kInactiveParent) continue;
      tree.tree_tokens()[i + 1] = tree.tokens()[i];
      tree.tree_parents()[i + 1] = tree.parents()[i] + 1;
      tree.tree_scores()[i + 1] = tree.scores()[i];
    }
    return;
  }
  const int64_t pitch = params.num_candidates;
  const BuildDynamicTreeParams selection{.scores = {params.scratch.scores, pitch, 1},
                                         .tokens = {params.scratch.tokens, pitch, 1},
                                         .parents = {params.scratch.parents, pitch, 1},
                                         .root_tokens = params.roots,
                                         .batch = params.plan.batch,
                                         .candidates = pitch,
                                         .nodes = params.nodes,
                                         .tree_tokens = params.tree_tokens,
                                         .tree_parents = params.tree_parents,
                                         .selected = params.scratch.selected};
  const auto sync = [&] { block.sync(); };
  DynamicTree<kTreeItems, decltype(sync)>(selection, tree.row, block.reduce.template as<uint32_t>(),
                                          kDraftThreads, sync)
      .build();
  block.sync();  // all nodes are selected
  const int64_t* selected = params.scratch.selected + tree.row * params.nodes;
  for (int node = 1 + static_cast<int>(threadIdx.x); node < params.nodes; node += kDraftThreads) {
    if (selected[node] >= 0) tree.tree_scores()[node] = tree.scores()[selected[node]];
  }
}

// Grows the level below `level`.
template <typename T>
__device__ __forceinline__ void grow_level(const DraftBlock<T>& block, const DraftTreeRow& tree,
                                           int level, int64_t first_list) {
  const DraftPlan& plan = tree.params.plan;
  const auto ranked = block.reduce.template as<uint64_t>();
  add_candidates(tree, level, first_list, ranked);
  if (level + 1 < plan.depth) clear_nodes(tree, level + 1);
  block.sync();  // all candidates of the level are stored
  if (level + 1 < plan.depth) {
    choose_nodes(tree, level, ranked);
    block.sync();  // the nodes of the next level are stored
    if (!plan.is_parallel) see_ancestors(tree, level + 1);
  } else if (const float root = *tree.tree_scores(); root == root) {
    finish_tree(block, tree);
  }
}

// After the last pass of a level: grows its children. A parallel head has one list per level and
// grows all levels here.
template <typename T>
__device__ __forceinline__ void grow(const DraftBlock<T>& block, const DraftPass& pass) {
  const DraftKernelParams& params = block.params;
  const DraftPlan& plan = params.plan;
  const int lists = plan.is_parallel ? plan.depth : plan.widths[pass.level];
  for (int row = block.index(); row < plan.batch; row += block.count()) {
    const int first = block.shared.first_element[row], end = block.shared.first_element[row + 1];
    if (first == end) continue;
    const DraftTreeRow tree(params, row);
    const int64_t first_list = static_cast<int64_t>(row) * lists;
    for (int i = block.warp(); i < lists; i += kDraftWarps) {
      const bool is_legal = find_children(params, first_list + i, block.count());
      if (!is_legal && block.lane() == 0) *tree.tree_scores() = NAN;
    }
    block.sync();  // the children of all lists are stored
    const int levels = plan.is_parallel ? plan.depth : pass.level + 1;
    for (int level = pass.level; level < levels; ++level) {
      grow_level(block, tree, level, first_list + (plan.is_parallel ? level : 0));
    }
  }
}

}  // namespace specdec
