// tree_mask: derives the structure of draft trees from their parents, once per step.
#pragma once

#include "specdec/core/parallel.h"
#include "specdec/core/tree.h"

namespace specdec {

struct TreeMaskParams {
  View2<const int64_t> parents;         // [batch, nodes]
  View1<const int64_t> root_positions;  // [batch]
  int64_t batch;
  int64_t nodes;  // 1 .. kMaxNodes
  int64_t words;  // ceil(nodes / 64)

  int64_t* ancestors;     // [batch, nodes, words] bits of the node and its ancestors
  int64_t* depths;        // [batch, nodes]        -1: inactive
  int64_t* positions;     // [batch, nodes]        root position + depth; inactive: root position
  int64_t* first_child;   // [batch, nodes]        -1: none
  int64_t* next_sibling;  // [batch, nodes]        -1: none
  int64_t* paths;         // [batch, nodes, nodes] ancestor at each depth, -1 beyond
};

namespace cpu {
void tree_mask(const TreeMaskParams& params, const ParallelFor& parallel_for);
}  // namespace cpu

}  // namespace specdec
