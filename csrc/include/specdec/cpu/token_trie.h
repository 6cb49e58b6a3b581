// A tree whose nodes have tokens, on the host. Siblings have different tokens.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "specdec/core/tree.h"

namespace specdec::cpu {

// Nodes are numbered in the order in which they were added; node 0 is the root.
class TokenTrie {
 public:
  static constexpr int32_t kNone = -1;

  explicit TokenTrie(int64_t root) { add(kNone, root); }

  int64_t num_nodes() const { return static_cast<int64_t>(tokens_.size()); }
  bool is_leaf(int32_t node) const { return first_child_[node] == kNone; }
  // Without the root: entry i is node i + 1.
  std::vector<int64_t> tokens() const { return {tokens_.begin() + 1, tokens_.end()}; }
  std::vector<int64_t> parents() const { return {parents_.begin() + 1, parents_.end()}; }

  // The child of `node` with this token, or kNone.
  int32_t find_child(int32_t node, int64_t token) const {
    int32_t child = first_child_[node];
    while (child != kNone && tokens_[child] != token) child = next_sibling_[child];
    return child;
  }

  // Adds a child to `node`, which has none with this token.
  int32_t add_child(int32_t node, int64_t token) {
    const auto child = static_cast<int32_t>(tokens_.size());
    add(node, token);
    next_sibling_[child] = first_child_[node];
    first_child_[node] = child;
    return child;
  }

  // Writes the tree as a row of a batch with at least as many nodes.
  void write(int64_t nodes, int64_t* tokens, int64_t* parents) const {
    std::fill(std::copy(tokens_.begin(), tokens_.end(), tokens), tokens + nodes, 0);
    std::fill(std::copy(parents_.begin(), parents_.end(), parents), parents + nodes,
              kInactiveParent);
  }

 private:
  void add(int32_t parent, int64_t token) {
    tokens_.push_back(token);
    parents_.push_back(parent);
    first_child_.push_back(kNone);
    next_sibling_.push_back(kNone);
  }

  std::vector<int64_t> tokens_;
  std::vector<int64_t> parents_;
  std::vector<int32_t> first_child_;  // latest child first
  std::vector<int32_t> next_sibling_;
};
static_assert(TokenTrie::kNone == kRootParent);

// Writes a row without nodes.
inline void write_inactive_row(int64_t nodes, int64_t* tokens, int64_t* parents) {
  std::fill_n(tokens, nodes, 0);
  std::fill_n(parents, nodes, kInactiveParent);
}

}  // namespace specdec::cpu
