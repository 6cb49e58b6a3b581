// The trees of draft_head, level by level: the nodes of a level that are expanded, with their slots
// and ancestors, and at the end the nodes that form the tree.
#pragma once

#include <span>
#include <vector>

#include "specdec/draft_head.h"

namespace specdec::cpu {

// The children of a node, best first.
struct DraftChild {
  int64_t token;  // target id
  float log_prob;
};

// A node that is expanded.
struct FrontierNode {
  int64_t token;
  int64_t candidate;  // kRootParent: the root
  int64_t parent;     // its parent's place in the frontier of the level above
  float score;        // cumulative log-probability
  bool is_alive;      // false: there is no such node, and its other fields must not be used
};

// The trees of `batch` rows. All rows expand the same number of nodes of a level; if a row has
// fewer, the remaining nodes are not alive.
class DraftTrees {
 public:
  void begin(const DraftShape& shape, bool is_parallel, int64_t batch);

  // Number of nodes per row to expand now; at first one, the root.
  int64_t width() const { return width_; }
  const FrontierNode& node(int64_t row, int64_t i) const { return frontier_[row * width_ + i]; }
  // The first slot of these nodes, relative to the first slot behind the committed elements.
  int64_t first_slot() const { return first_slot_; }
  // [batch, width, words] bits of the slots that each node sees, its own included, in the same
  // order.
  const std::vector<int64_t>& ancestors() const { return ancestors_; }
  int64_t words() const { return words_; }
  // The depth of these nodes.
  int64_t level() const { return level_; }
  bool is_complete() const { return level_ == shape_.depth || width_ == 0; }

  // The list of children of node i; a parallel head has one list per level.
  int64_t list(int64_t i) const { return is_parallel_ ? level_ : i; }

  // Gives the nodes of the frontier children(row, list) and makes the next frontier.
  template <typename Children>
  void grow(const Children& children) {
    for (int64_t row = 0; row < batch_; ++row) {
      for (int64_t i = 0; i < width_; ++i) {
        if (node(row, i).is_alive) add_children(row, i, children(row, list(i)));
      }
    }
    finish_level();
  }

  // Drops nodes from the frontier of a dynamic tree that cannot have a descendant among the best of
  // all candidates. The resulting trees are the same.
  void drop_hopeless();

  // Writes the tree of a row, with `root` as node 0. Outputs are [nodes].
  void finish(int64_t row, int64_t root, int64_t* tokens, int64_t* parents, float* scores);

 private:
  void count_levels();
  void add_children(int64_t row, int64_t i, std::span<const DraftChild> children);
  void add_child(int64_t row, int64_t i, int64_t candidate, const DraftChild& child);
  void finish_level();
  void choose_static(int64_t row);
  uint64_t key(int64_t row, int64_t candidate) const;
  void rank(int64_t row, int64_t begin);
  void choose_best(int64_t row);
  uint64_t last_selected_key(int64_t row);
  void see_ancestors(int64_t next_width);
  void finish_static(int64_t row, int64_t* tokens, int64_t* parents, float* scores) const;
  void finish_dynamic(int64_t row, int64_t root, int64_t* tokens, int64_t* parents, float* scores);

  DraftShape shape_;
  bool is_parallel_;
  int64_t batch_;
  int64_t level_;  // number of complete levels
  int64_t width_;
  int64_t first_slot_;
  int64_t words_;
  std::vector<FrontierNode> frontier_;  // [batch, width]
  std::vector<int64_t> ancestors_;      // [batch, width, words]
  std::vector<FrontierNode> next_;      // nodes of the next level
  std::vector<int64_t> next_ancestors_;

  // Candidates, level by level: the nodes of a static tree without the root, or all children of a
  // dynamic tree, top_k for each node of a frontier.
  int64_t num_candidates_;
  std::vector<int64_t> level_ends_;  // [depth] number of candidates up to the end of a level
  std::vector<bool> is_expanded_;    // [candidates] static tree
  std::vector<float> scores_;        // [batch, candidates] -inf where absent
  std::vector<int64_t> tokens_;      // [batch, candidates]
  std::vector<int64_t> parents_;     // [batch, candidates] candidate, kRootParent, kInactiveParent
  std::vector<int64_t> places_;      // [batch, candidates] the parent's place in its frontier
  std::vector<uint64_t> ranked_;
  std::vector<int64_t> selected_;  // [nodes]
};

}  // namespace specdec::cpu
