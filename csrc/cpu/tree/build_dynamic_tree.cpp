// CPU op build_dynamic_tree: rows in parallel. Parents come first, so one pass over the candidates
// gives the effective keys; nth_element on (key, ~index) finds the selection without sorting the
// rest, and a pass over the candidates in order numbers the nodes.
#include "specdec/tree/build_dynamic_tree.h"

#include <algorithm>
#include <functional>

namespace specdec::cpu {
namespace {

// Writes (effective key, ~index) of the eligible candidates; returns their number.
int64_t rank_candidates(const BuildDynamicTreeParams& params, int64_t row, uint64_t* ranked) {
  uint32_t keys[kMaxCandidates];
  int64_t count = 0;
  for (int64_t i = 0; i < params.candidates; ++i) {
    const int64_t parent = params.parents(row, i);
    keys[i] = candidate_key(params.scores(row, i), parent, i);
    if (keys[i] > 0 && parent >= 0) keys[i] = std::min(keys[i], keys[parent]);
    if (keys[i] > 0) ranked[count++] = uint64_t{keys[i]} << 32 | ~static_cast<uint32_t>(i);
  }
  return count;
}

void build_row(const BuildDynamicTreeParams& params, int64_t row) {
  const int64_t nodes = params.nodes;
  int64_t* tree_tokens = params.tree_tokens + row * nodes;
  int64_t* tree_parents = params.tree_parents + row * nodes;
  int64_t* selected = params.selected + row * nodes;
  std::fill_n(tree_tokens, nodes, 0);
  std::fill_n(tree_parents, nodes, kInactiveParent);
  std::fill_n(selected, nodes, -1);
  if (params.root_tokens[row] < 0) return;
  tree_tokens[0] = params.root_tokens[row];
  tree_parents[0] = kRootParent;

  uint64_t ranked[kMaxCandidates];
  int64_t count = rank_candidates(params, row, ranked);
  if (count > nodes - 1) {
    std::nth_element(ranked, ranked + nodes - 1, ranked + count, std::greater<>());
    count = nodes - 1;
  }
  const auto candidate = [](uint64_t rank) { return int64_t{~static_cast<uint32_t>(rank)}; };
  std::sort(ranked, ranked + count,
            [&](uint64_t a, uint64_t b) { return candidate(a) < candidate(b); });

  int16_t numbers[kMaxCandidates];  // node of a selected candidate
  for (int64_t n = 0; n < count; ++n) {
    const int64_t i = candidate(ranked[n]), parent = params.parents(row, i), node = n + 1;
    numbers[i] = static_cast<int16_t>(node);
    tree_tokens[node] = params.tokens(row, i);
    tree_parents[node] = parent == kRootParent ? 0 : numbers[parent];
    selected[node] = i;
  }
}

}  // namespace

void build_dynamic_tree(const BuildDynamicTreeParams& params, const ParallelFor& parallel_for) {
  constexpr int64_t kGrainCandidates = 8192;
  const int64_t grain = kGrainCandidates / (params.candidates + params.nodes) + 1;
  parallel_for(params.batch, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) build_row(params, row);
  });
}

}  // namespace specdec::cpu
