// CPU op merge_trees: rows in parallel, the nodes of a row in order.
#include "specdec/tree/merge_trees.h"

#include <vector>

#include "specdec/cpu/token_trie.h"

namespace specdec::cpu {
namespace {

void add_tree(TokenTrie& trie, const MergedTree& tree, int64_t row, int64_t max_nodes) {
  const ParentsRow links = tree.links(row);
  std::vector<int32_t> places(tree.nodes, TokenTrie::kNone);  // node of the tree -> of the trie
  places[0] = 0;
  for (int64_t node = 1; node < tree.nodes; ++node) {
    const int32_t parent = links.link_is_legal(node) ? places[links[node]] : TokenTrie::kNone;
    if (parent == TokenTrie::kNone) continue;
    const int64_t token = tree.tokens(row, node);
    places[node] = trie.find_child(parent, token);
    if (places[node] == TokenTrie::kNone && trie.num_nodes() < max_nodes) {
      places[node] = trie.add_child(parent, token);
    }
  }
}

void merge_row(const MergeTreesParams& params, int64_t row) {
  int64_t* tokens = params.tokens + row * params.nodes;
  int64_t* parents = params.parents + row * params.nodes;
  if (!params.takes_part(0, row)) return write_inactive_row(params.nodes, tokens, parents);
  TokenTrie trie(params.trees[0].tokens(row, 0));
  for (int64_t i = 0; i < params.num_trees; ++i) {
    if (params.takes_part(i, row)) add_tree(trie, params.trees[i], row, params.nodes);
  }
  trie.write(params.nodes, tokens, parents);
}

}  // namespace

std::optional<std::string> find_other_root(const MergeTreesParams& params) {
  for (int64_t row = 0; row < params.batch; ++row) {
    if (!params.takes_part(0, row)) continue;
    for (int64_t i = 1; i < params.num_trees; ++i) {
      const MergedTree& tree = params.trees[i];
      if (!tree.links(row).row_is_active() || params.takes_part(i, row)) continue;
      return "tokens[" + std::to_string(i) + "] has the root " +
             std::to_string(tree.tokens(row, 0)) + " in row " + std::to_string(row) +
             "; expected " + std::to_string(params.trees[0].tokens(row, 0)) +
             ", the root of tokens[0]: pass trees of the same rows";
    }
  }
  return std::nullopt;
}

void merge_trees(const MergeTreesParams& params, const ParallelFor& parallel_for) {
  constexpr int64_t kGrainNodes = 4096;
  parallel_for(params.batch, kGrainNodes / (params.nodes * params.num_trees) + 1,
               [&](int64_t begin, int64_t end) {
                 for (int64_t row = begin; row < end; ++row) merge_row(params, row);
               });
}

}  // namespace specdec::cpu
