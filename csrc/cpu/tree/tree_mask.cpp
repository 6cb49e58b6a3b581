// CPU op tree_mask: rows in parallel; per row one pass down the nodes. Because parents[i] < i, a
// node's bits and path are its parent's plus itself. A pass back up links the children, so that
// siblings are in ascending order.
#include "specdec/tree/tree_mask.h"

#include <algorithm>

namespace specdec::cpu {
namespace {

void row_mask(const TreeMaskParams& params, int64_t row) {
  const int64_t nodes = params.nodes, words = params.words;
  const ParentsRow parents{&params.parents(row, 0), params.parents.column_stride};
  const int64_t root_position = params.root_positions[row];
  int64_t* ancestors = params.ancestors + row * nodes * words;
  int64_t* depths = params.depths + row * nodes;
  int64_t* positions = params.positions + row * nodes;
  int64_t* first_child = params.first_child + row * nodes;
  int64_t* next_sibling = params.next_sibling + row * nodes;
  int64_t* paths = params.paths + row * nodes * nodes;

  for (int64_t node = 0; node < nodes; ++node) {
    int64_t* bits = ancestors + node * words;
    int64_t* path = paths + node * nodes;
    int64_t depth = -1;
    std::fill_n(bits, words, 0);
    if (parents.link_is_legal(node)) {
      const int64_t parent = parents[node];
      depth = node == 0 ? 0 : depths[parent] < 0 ? -1 : depths[parent] + 1;
      if (depth > 0) {
        std::copy_n(ancestors + parent * words, words, bits);
        std::copy_n(paths + parent * nodes, depth, path);
      }
    }
    if (depth >= 0) {
      bits[node / 64] |= static_cast<int64_t>(uint64_t{1} << (node % 64));
      path[depth] = node;
    }
    std::fill(path + depth + 1, path + nodes, -1);
    depths[node] = depth;
    positions[node] = root_position + std::max<int64_t>(depth, 0);
    first_child[node] = -1;
  }
  for (int64_t node = nodes - 1; node >= 0; --node) {
    next_sibling[node] = -1;
    if (depths[node] > 0) {
      next_sibling[node] = first_child[parents[node]];
      first_child[parents[node]] = node;
    }
  }
}

}  // namespace

void tree_mask(const TreeMaskParams& params, const ParallelFor& parallel_for) {
  constexpr int64_t kGrainElements = 1 << 15;
  const int64_t grain = kGrainElements / (params.nodes * params.nodes) + 1;
  parallel_for(params.batch, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) row_mask(params, row);
  });
}

}  // namespace specdec::cpu
