// The trees of draft_head, level by level: which nodes of a level are expanded, with which slots
// and ancestors, and what is left of them at the end.
#pragma once

#include <span>
#include <vector>

#include "specdec/draft_head.h"

namespace specdec::cpu {

// The children of a node, best first.
struct DraftChild {
  int64_t token;  // of the target
  float log_prob;
};

// A node that is expanded.
struct FrontierNode {
  int64_t token;
  int64_t candidate;  // kRootParent: the root
  int64_t parent;     // its place in the frontier before
  float score;        // cumulative log-probability
  bool is_alive;      // false: there is no such node, and nothing of it may be used
};

// The trees of `batch` rows. Every row expands as many nodes of a level; where there are fewer, the
// rest is not alive.
class DraftTrees {
 public:
  void begin(const DraftShape& shape, bool is_parallel, int64_t batch);

  // The nodes to expand now; at first, of each row, its root.
  int64_t width() const { return width_; }
  const FrontierNode& node(int64_t row, int64_t i) const { return frontier_[row * width_ + i]; }
  // Their first slot, counted from the first behind the committed elements.
  int64_t first_slot() const { return first_slot_; }
  // [batch, width, words] bits of the slots that each sees, its own included, counted likewise.
  const std::vector<int64_t>& ancestors() const { return ancestors_; }
  int64_t words() const { return words_; }
  // The depth of their nodes.
  int64_t level() const { return level_; }
  bool is_complete() const { return level_ == shape_.depth || width_ == 0; }

  // Which of a row's lists of children belongs to node i: a parallel head has one for each level.
  int64_t list(int64_t i) const { return is_parallel_ ? level_ : i; }

  // Gives children(row, list) to the frontier and makes the next one.
  template <typename Children>
  void grow(const Children& children) {
    for (int64_t row = 0; row < batch_; ++row) {
      for (int64_t i = 0; i < width_; ++i) {
        if (node(row, i).is_alive) add_children(row, i, children(row, list(i)));
      }
    }
    finish_level();
  }

  // Takes from the frontier of a dynamic tree what cannot have a descendant among the best of all
  // candidates. The trees stay the same.
  void drop_hopeless();

  // The tree of a row; `root` is its node 0. Outputs [nodes].
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
  int64_t level_;  // levels that are complete
  int64_t width_;
  int64_t first_slot_;
  int64_t words_;
  std::vector<FrontierNode> frontier_;  // [batch, width]
  std::vector<int64_t> ancestors_;      // [batch, width, words]
  std::vector<FrontierNode> next_;      // those of the next level
  std::vector<int64_t> next_ancestors_;

  // Candidates, level by level: the nodes of a static tree without the root, or all children of a
  // dynamic one, top_k for each node of a frontier.
  int64_t num_candidates_;
  std::vector<int64_t> level_ends_;  // [depth] candidates up to the end of a level
  std::vector<bool> is_expanded_;    // [candidates] of a static tree
  std::vector<float> scores_;        // [batch, candidates]; -inf: absent
  std::vector<int64_t> tokens_;      // [batch, candidates]
  std::vector<int64_t> parents_;     // [batch, candidates] candidate, kRootParent, kInactiveParent
  std::vector<int64_t> places_;      // [batch, candidates] of the parent in its frontier
  std::vector<uint64_t> ranked_;
  std::vector<int64_t> selected_;  // [nodes]
};

}  // namespace specdec::cpu
