// merge_trees: merges several draft trees of the same rows into one. Paths with a common prefix
// share the nodes of the prefix.
//
// Rule. The result begins with the root of the first tree. The nodes of all trees are visited in
// order, the first tree first. A node whose parent has a place in the result takes the child of
// that place that carries its token; if there is none, it becomes the next node of the result, as
// long as there are fewer than `nodes`. All others, and the nodes below them, are left out.
//
// Example, with 4 nodes: the first tree is 7 -> 1 -> 2, the second 7 -> 1 -> 3 and 7 -> 5 -> 6.
//
//   node      0 1 2 3
//   token     7 1 2 3        1 is shared; 5 has no room, and so 6 is left out
//   parent   -1 0 1 1
#pragma once

#include <optional>
#include <string>

#include "specdec/core/parallel.h"
#include "specdec/core/tree.h"

namespace specdec {

constexpr int64_t kMaxMergedTrees = 8;  // they are parameters of the launch

struct MergedTree {
  View2<const int64_t> tokens;   // [batch, nodes]
  View2<const int64_t> parents;  // [batch, nodes]
  int64_t nodes;                 // 1 .. kMaxNodes

  SPECDEC_HOST_DEVICE ParentsRow links(int64_t row) const {
    return {&parents(row, 0), parents.column_stride};
  }
};

struct MergeTreesParams {
  MergedTree trees[kMaxMergedTrees];
  int64_t num_trees;  // 1 .. kMaxMergedTrees
  int64_t batch;
  int64_t nodes;  // 1 .. kMaxNodes, of the result

  int64_t* tokens;   // [batch, nodes] 0 where absent
  int64_t* parents;  // [batch, nodes] kInactiveParent where absent

  // Whether a tree adds something to this row: the first decides whether the row is active, and the
  // others must have its root.
  SPECDEC_HOST_DEVICE bool takes_part(int64_t tree, int64_t row) const {
    return trees[tree].links(row).row_is_active() &&
           trees[tree].tokens(row, 0) == trees[0].tokens(row, 0);
  }
};

namespace cpu {

// Returns what is wrong with the trees, or nothing. On CUDA a tree with another root is left out.
std::optional<std::string> find_other_root(const MergeTreesParams& params);

void merge_trees(const MergeTreesParams& params, const ParallelFor& parallel_for);

}  // namespace cpu

}  // namespace specdec
