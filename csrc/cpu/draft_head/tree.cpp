#include "tree.h"

#include <algorithm>
#include <functional>
#include <limits>

#include "specdec/tree/build_dynamic_tree.h"

namespace specdec {

int64_t draft_slots(const DraftShape& shape, bool is_parallel) {
  if (is_parallel) return shape.depth - 1;
  if (shape.is_dynamic()) return (shape.depth - 1) * shape.top_k;
  int64_t slots = 0;
  for (int64_t node = 1; node < shape.num_choices; ++node) {
    for (int64_t child = node; child < shape.num_choices; ++child) {
      if (shape.choices(child, 0) == node) {
        ++slots;
        break;
      }
    }
  }
  return slots;
}

namespace cpu {
namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

}  // namespace

void DraftTrees::begin(const DraftShape& shape, bool is_parallel, int64_t batch) {
  shape_ = shape;
  is_parallel_ = is_parallel;
  batch_ = batch;
  level_ = 0;
  width_ = 1;
  first_slot_ = 0;
  words_ = (draft_slots(shape, false) + 63) / 64;
  num_candidates_ = shape.num_candidates();
  count_levels();
  frontier_.assign(batch, {0, kRootParent, 0, 0.0f, true});
  ancestors_.assign(batch * words_, 0);
  scores_.assign(batch * num_candidates_, kMinusInfinity);
  tokens_.assign(batch * num_candidates_, 0);
  parents_.assign(batch * num_candidates_, kInactiveParent);
  places_.resize(batch * num_candidates_);
  selected_.resize(shape.nodes);
}

void DraftTrees::count_levels() {
  level_ends_.assign(shape_.depth, shape_.top_k);
  if (shape_.is_dynamic()) {
    for (int64_t level = 1; level < shape_.depth; ++level) {
      level_ends_[level] = level_ends_[level - 1] + shape_.top_k * shape_.top_k;
    }
    return;
  }
  is_expanded_.assign(num_candidates_, false);
  int64_t level = 0, level_begin = 0;
  for (int64_t candidate = 0; candidate < num_candidates_; ++candidate) {
    const int64_t parent = shape_.choices(candidate, 0) - 1;
    if (parent >= level_begin) {
      level_begin = candidate;
      ++level;
    }
    if (parent >= 0) is_expanded_[parent] = true;
    level_ends_[level] = candidate + 1;
  }
}

void DraftTrees::add_children(int64_t row, int64_t i, std::span<const DraftChild> children) {
  const int64_t level_begin = level_ == 0 ? 0 : level_ends_[level_ - 1];
  if (shape_.is_dynamic()) {
    const int64_t count = std::min(shape_.top_k, std::ssize(children));
    for (int64_t j = 0; j < count; ++j) {
      add_child(row, i, level_begin + i * shape_.top_k + j, children[j]);
    }
    return;
  }
  for (int64_t candidate = level_begin; candidate < level_ends_[level_]; ++candidate) {
    const int64_t rank = shape_.choices(candidate, 1);
    if (shape_.choices(candidate, 0) - 1 != node(row, i).candidate) continue;
    if (rank < std::ssize(children)) add_child(row, i, candidate, children[rank]);
  }
}

void DraftTrees::add_child(int64_t row, int64_t i, int64_t candidate, const DraftChild& child) {
  const float score = node(row, i).score + child.log_prob;
  if (!(score > kMinusInfinity)) return;
  const int64_t index = row * num_candidates_ + candidate;
  scores_[index] = score;
  tokens_[index] = child.token;
  parents_[index] = node(row, i).candidate;
  places_[index] = i;
}

void DraftTrees::finish_level() {
  const int64_t level_begin = level_ == 0 ? 0 : level_ends_[level_ - 1];
  if (++level_ == shape_.depth) return;
  int64_t next_width = shape_.top_k;
  if (!shape_.is_dynamic()) {
    next_width = std::count(is_expanded_.begin() + level_begin,
                            is_expanded_.begin() + level_ends_[level_ - 1], true);
  }
  next_.clear();
  for (int64_t row = 0; row < batch_; ++row) {
    shape_.is_dynamic() ? choose_best(row) : choose_static(row);
    next_.resize((row + 1) * next_width, {0, kRootParent, 0, kMinusInfinity, false});
  }
  if (level_ > 1) first_slot_ += width_;
  see_ancestors(next_width);
  frontier_.swap(next_);
  ancestors_.swap(next_ancestors_);
  width_ = next_width;
}

void DraftTrees::choose_static(int64_t row) {
  const int64_t level_begin = level_ == 1 ? 0 : level_ends_[level_ - 2];
  for (int64_t candidate = level_begin; candidate < level_ends_[level_ - 1]; ++candidate) {
    if (!is_expanded_[candidate]) continue;
    const int64_t index = row * num_candidates_ + candidate;
    next_.push_back({tokens_[index], candidate, places_[index], scores_[index],
                     parents_[index] != kInactiveParent});
  }
}

uint64_t DraftTrees::key(int64_t row, int64_t candidate) const {
  const int64_t index = row * num_candidates_ + candidate;
  return candidate_key(scores_[index], parents_[index], candidate);
}

// Collects (key, ~candidate) of the candidates from `begin` to the end of the level.
void DraftTrees::rank(int64_t row, int64_t begin) {
  ranked_.clear();
  for (int64_t candidate = begin; candidate < level_ends_[level_ - 1]; ++candidate) {
    if (const uint64_t k = key(row, candidate); k > 0) {
      ranked_.push_back(k << 32 | ~static_cast<uint32_t>(candidate));
    }
  }
}

// Chooses by score; equal scores by candidate.
void DraftTrees::choose_best(int64_t row) {
  rank(row, level_ == 1 ? 0 : level_ends_[level_ - 2]);
  const int64_t count = std::min(shape_.top_k, std::ssize(ranked_));
  std::partial_sort(ranked_.begin(), ranked_.begin() + count, ranked_.end(), std::greater<>());
  for (int64_t i = 0; i < count; ++i) {
    const int64_t candidate = ~static_cast<uint32_t>(ranked_[i]);
    const int64_t index = row * num_candidates_ + candidate;
    next_.push_back({tokens_[index], candidate, places_[index], scores_[index], true});
  }
}

// The key of the last candidate that would be in the tree; 0 if the tree has room for more.
uint64_t DraftTrees::last_selected_key(int64_t row) {
  const int64_t selected = shape_.nodes - 1;
  rank(row, 0);
  if (std::ssize(ranked_) < selected) return 0;
  if (selected == 0) return std::numeric_limits<uint64_t>::max();
  const auto last = ranked_.begin() + selected - 1;
  std::nth_element(ranked_.begin(), last, ranked_.end(), std::greater<>());
  return *last >> 32;
}

// A descendant is no better than its ancestor, and comes after all present candidates.
void DraftTrees::drop_hopeless() {
  if (!shape_.is_dynamic() || is_complete()) return;
  int64_t width = 0;
  for (int64_t row = 0; row < batch_; ++row) {
    const uint64_t bar = last_selected_key(row);
    for (int64_t i = 0; i < width_; ++i) {
      FrontierNode& node = frontier_[row * width_ + i];
      node.is_alive = node.is_alive && key(row, node.candidate) > bar;
      if (node.is_alive) width = std::max(width, i + 1);
    }
  }
  for (int64_t row = 0; row < batch_; ++row) {
    std::copy_n(frontier_.begin() + row * width_, width, frontier_.begin() + row * width);
    std::copy_n(ancestors_.begin() + row * width_ * words_, width * words_,
                ancestors_.begin() + row * width * words_);
  }
  width_ = width;
}

// Fills the ancestors of next_: what the parent in the frontier sees, and the node itself.
void DraftTrees::see_ancestors(int64_t next_width) {
  next_ancestors_.assign(batch_ * next_width * words_, 0);
  for (int64_t row = 0; row < batch_; ++row) {
    for (int64_t i = 0; i < next_width; ++i) {
      const FrontierNode& node = next_[row * next_width + i];
      if (!node.is_alive) continue;
      int64_t* bits = next_ancestors_.data() + (row * next_width + i) * words_;
      std::copy_n(ancestors_.data() + (row * width_ + node.parent) * words_, words_, bits);
      const int64_t slot = first_slot_ + i;
      bits[slot / 64] |= static_cast<int64_t>(uint64_t{1} << slot % 64);
    }
  }
}

void DraftTrees::finish(int64_t row, int64_t root, int64_t* tokens, int64_t* parents,
                        float* scores) {
  if (shape_.is_dynamic()) {
    finish_dynamic(row, root, tokens, parents, scores);
  } else {
    finish_static(row, tokens, parents, scores);
  }
  tokens[0] = root;
  parents[0] = kRootParent;
  scores[0] = 0.0f;
}

void DraftTrees::finish_static(int64_t row, int64_t* tokens, int64_t* parents,
                               float* scores) const {
  for (int64_t candidate = 0; candidate < num_candidates_; ++candidate) {
    const int64_t index = row * num_candidates_ + candidate, parent = parents_[index];
    tokens[candidate + 1] = tokens_[index];
    parents[candidate + 1] = parent == kInactiveParent ? kInactiveParent : parent + 1;
    scores[candidate + 1] = scores_[index];
  }
}

void DraftTrees::finish_dynamic(int64_t row, int64_t root, int64_t* tokens, int64_t* parents,
                                float* scores) {
  static constexpr ParallelFor kInline{[](void*, int64_t count, int64_t, ParallelFor::Body body,
                                          void* context) { body(0, count, context); }};
  const int64_t first = row * num_candidates_;
  build_dynamic_tree({.scores = {scores_.data() + first, num_candidates_, 1},
                      .tokens = {tokens_.data() + first, num_candidates_, 1},
                      .parents = {parents_.data() + first, num_candidates_, 1},
                      .root_tokens = {&root, 1},
                      .batch = 1,
                      .candidates = num_candidates_,
                      .nodes = shape_.nodes,
                      .tree_tokens = tokens,
                      .tree_parents = parents,
                      .selected = selected_.data()},
                     kInline);
  for (int64_t node = 1; node < shape_.nodes; ++node) {
    scores[node] = selected_[node] < 0 ? kMinusInfinity : scores_[first + selected_[node]];
  }
}

}  // namespace cpu
}  // namespace specdec
