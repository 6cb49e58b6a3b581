// Launches the kernel of tree_kernel.h and compares the result level by level with the CPU op's
// trees (cpu/draft_head/tree.h) over children that are computed in the simplest way.
#pragma once

#include <cmath>
#include <deque>
#include <span>
#include <vector>

#include "cpu/draft_head/tree.h"
#include "testing/selftest/check.h"
#include "tree_kernel.h"

namespace specdec::draft_test {

using Ints = std::vector<int64_t>;
using Floats = std::vector<float>;

struct Case {
  Ints choices = {};  // empty: a dynamic tree
  int depth, top_k, nodes;
  bool is_parallel = false;
  Ints counts = {2};
  int draft_vocab = 50;
  bool has_map = false;
  float logit_scale = 1;
  bool norm_output = false;
};

constexpr int kNumNew = 3, kHidden = 24, kFeatureWidth = 40, kCapacity = 2000, kPositions = 300;
constexpr int kNumTables = 9;

// The memory of a launch. Each array is a separate allocation for AddressSanitizer, with
// meaningless initial values.
class Memory {
 public:
  template <typename Value>
  Value* add(int64_t count) {
    blocks_.emplace_back(count * sizeof(Value), std::byte{0xA5});
    return reinterpret_cast<Value*>(blocks_.back().data());
  }

 private:
  std::deque<std::vector<std::byte>> blocks_;
};

// A call, its launch and the expected result.
template <typename T>
class Run {
 public:
  Run(const Case& c, int num_blocks, Floats tables)
      : case_(c), num_blocks_(num_blocks), tables_(std::move(tables)) {
    const int64_t batch = std::ssize(c.counts);
    vocab_ = c.has_map ? 3 * c.draft_vocab : c.draft_vocab;
    for (int64_t i = 0; i < c.draft_vocab; ++i) map.push_back(3 * (c.draft_vocab - 1 - i) + 1);
    lengths.assign(batch, 7);
    positions.assign(batch, 9);
    tokens.assign(batch * kNumNew, 1);
    for (int64_t row = 0; row < batch; ++row) roots.push_back(row % vocab_);
    shape_ = {{c.choices.data(), 2, 1}, std::ssize(c.choices) / 2, c.depth, c.top_k, c.nodes};
    fill_params();
  }

  // May be changed before launch().
  Ints lengths, positions, tokens, roots, map;

  Run& launch() {
    params_.tokens = {tokens.data(), kNumNew, 1};
    params_.counts = {case_.counts.data(), 1};
    params_.lengths = {lengths.data(), 1};
    params_.positions = {positions.data(), 1};
    params_.roots = {roots.data(), 1};
    params_.draft_to_target = case_.has_map ? map.data() : nullptr;
    CHECK(specdec::launch(draft_trees<T>,
                          {.grid_x = num_blocks_,
                           .grid_y = 1,
                           .block = kDraftThreads,
                           .stream = nullptr,
                           .dynamic_shared_bytes = kReduceBytes,
                           .cooperative = true},
                          params_, model_) == cudaSuccess);
    return *this;
  }

  // Compares everything. is_illegal[row]: one of the row's numbers is illegal.
  void check(const std::vector<bool>& is_illegal) {
    active_.clear();
    for (int64_t row = 0; row < params_.plan.batch; ++row) {
      if (case_.counts[row] > 0 && !is_illegal[row]) active_.push_back(row);
    }
    is_broken_.assign(params_.plan.batch, false);
    cpu::DraftTrees trees, hopeful;
    grow(trees, false);
    grow(hopeful, true);
    for (int64_t row = 0; row < params_.plan.batch; ++row) {
      const auto at = std::find(active_.begin(), active_.end(), row);
      const bool is_alone = at == active_.end() || is_broken_[row];
      if (!is_alone) {
        check_tree(trees, at - active_.begin(), row);
        check_tree(hopeful, at - active_.begin(), row);
      } else {
        check_root_alone(row, is_illegal[row] || is_broken_[row]);
      }
    }
    const T* zeros = static_cast<const T*>(params_.scratch.zeros);
    CHECK(std::all_of(zeros, zeros + kFeatureWidth, [](T zero) { return to_float(zero) == 0; }));
    if (!active_.empty()) check_feedback();
  }

 private:
  void grow(cpu::DraftTrees& trees, bool drops_hopeless) {
    trees.begin(shape_, case_.is_parallel, std::ssize(active_));
    while (!active_.empty() && !trees.is_complete()) {
      find_children(trees);
      trees.grow([&](int64_t b, int64_t list) -> std::span<const cpu::DraftChild> {
        return children_[b][list];
      });
      if (drops_hopeless) {
        trees.drop_hopeless();
      } else if (!trees.is_complete() && !case_.is_parallel) {
        check_frontier(trees);
      }
    }
  }

  static float to_float(float x) { return x; }
  static float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
  static float to_float(__half x) { return __half2float(x); }
  static T from_float(float x) {
    if constexpr (std::is_same_v<T, float>) return x;
    if constexpr (std::is_same_v<T, __nv_bfloat16>) return __float2bfloat16(x);
    if constexpr (std::is_same_v<T, __half>) return __float2half(x);
  }

  // Describes the levels of a static tree, and the slots of the nodes that they expand.
  void fill_levels() {
    const Case& c = case_;
    DraftPlan& plan = params_.plan;
    plan.widths[0] = 1;
    if (shape_.is_dynamic()) {
      for (int level = 0; level < c.depth; ++level) {
        params_.level_ends[level] = static_cast<int16_t>(c.top_k + level * c.top_k * c.top_k);
        if (level > 0) plan.widths[level] = static_cast<int16_t>(c.top_k);
      }
    } else {
      Ints depths{0};
      for (int64_t i = 0; i < shape_.num_choices; ++i) {
        depths.push_back(depths[shape_.choices(i, 0)] + 1);
        params_.level_ends[depths.back() - 1] = static_cast<int16_t>(i + 1);
        bool has_child = false;
        for (int64_t j = 0; j < shape_.num_choices; ++j) has_child |= shape_.choices(j, 0) == i + 1;
        if (has_child) ++plan.widths[depths.back()];
      }
    }
    for (int level = 2; level < c.depth; ++level) {
      params_.first_slots[level] =
          static_cast<int16_t>(params_.first_slots[level - 1] + plan.widths[level - 1]);
    }
  }

  void fill_params() {
    const Case& c = case_;
    DraftPlan& plan = params_.plan;
    plan.num_layers = 1;
    plan.is_parallel = c.is_parallel;
    plan.batch = static_cast<int>(std::ssize(c.counts));
    plan.depth = c.depth;
    fill_levels();
    params_.norm_output = c.norm_output;
    params_.hidden = kHidden;
    params_.feature_width = kFeatureWidth;
    params_.vocab = vocab_;
    params_.eps = 1e-5f;
    params_.logit_scale = c.logit_scale;
    params_.choices = shape_.choices;
    params_.num_choices = static_cast<int>(shape_.num_choices);
    params_.num_candidates = static_cast<int>(shape_.num_candidates());
    params_.top_k = c.top_k;
    params_.nodes = c.nodes;
    params_.words = static_cast<int>((draft_slots(shape_, false) + 63) / 64);
    params_.capacity = kCapacity;
    params_.num_positions = kPositions;
    params_.num_new = kNumNew;
    fill_memory();
  }

  void fill_memory() {
    const int64_t batch = params_.plan.batch, lists = params_.lists();
    const int64_t candidates = batch * params_.num_candidates, nodes = batch * params_.nodes;
    const int64_t frontier = batch * params_.plan.frontier_width();
    DraftScratch& scratch = params_.scratch;
    scratch.zeros = memory_.add<T>(std::max(kHidden, kFeatureWidth));
    T* residual = memory_.add<T>((lists + kPassRows) * kHidden);
    T* norm = memory_.add<T>(kHidden);
    for (int64_t i = 0; i < lists * kHidden; ++i)
      residual[i] = from_float(static_cast<float>(i % 37 - 17));
    for (int64_t i = 0; i < kHidden; ++i) norm[i] = from_float(static_cast<float>(i % 5) / 4);
    scratch.residual = residual;
    params_.norm = norm;
    scratch.feedback = memory_.add<T>(2 * lists * kHidden);
    scratch.picks = memory_.add<uint64_t>(lists * num_blocks_ * case_.top_k);
    scratch.logit_sums = memory_.add<ExpSum>(lists * num_blocks_);
    scratch.child_tokens = memory_.add<int64_t>(lists * case_.top_k);
    scratch.child_scores = memory_.add<float>(lists * case_.top_k);
    scratch.scores = memory_.add<float>(candidates);
    scratch.tokens = memory_.add<int64_t>(candidates);
    scratch.parents = memory_.add<int64_t>(candidates);
    scratch.places = memory_.add<int32_t>(candidates);
    scratch.nodes = memory_.add<DraftNode>(2 * frontier);
    scratch.ancestors = memory_.add<uint64_t>(case_.is_parallel ? 0 : 2 * frontier * params_.words);
    scratch.selected = memory_.add<int64_t>(nodes);
    params_.tree_tokens = memory_.add<int64_t>(nodes);
    params_.tree_parents = memory_.add<int64_t>(nodes);
    params_.tree_scores = memory_.add<float>(nodes);
    params_.sync.barrier = &barrier_;
    model_ = {tables_.data(), kNumTables, case_.draft_vocab,
              memory_.add<DraftNode>(frontier * case_.depth),
              memory_.add<uint64_t>(frontier * case_.depth * params_.words)};
  }

  // Finds the children of all lists, also of nodes that are not alive, because the kernel reads
  // their draft_to_target too.
  void find_children(const cpu::DraftTrees& trees) {
    children_.assign(active_.size(), {});
    for (int64_t b = 0; b < std::ssize(active_); ++b) {
      const int64_t row = active_[b], root = roots[row];
      const int64_t lists = case_.is_parallel ? case_.depth : trees.width();
      for (int64_t list = 0; list < lists; ++list) {
        const float* logits = model_.tables;
        if (case_.is_parallel || trees.level() == 0) {
          logits = model_.logits(row, list, root, kRootParent);
        } else if (const cpu::FrontierNode& node = trees.node(b, list); node.is_alive) {
          logits = model_.logits(row, trees.level(), node.token, node.candidate);
        }
        children_[b].push_back(best_children(row, logits));
      }
    }
  }

  std::vector<cpu::DraftChild> best_children(int64_t row, const float* logits) {
    std::vector<std::pair<float, int64_t>> ranked;
    double sum = 0;
    for (int64_t id = 0; id < case_.draft_vocab; ++id) {
      const float score = logits[id] * case_.logit_scale;
      if (score > -INFINITY) ranked.emplace_back(score, id);
    }
    std::stable_sort(ranked.begin(), ranked.end(),
                     [](const auto& a, const auto& b) { return a.first > b.first; });
    if (ranked.empty() || ranked[0].first == INFINITY) return {};
    for (const auto& [score, id] : ranked) sum += std::exp(double{score} - double{ranked[0].first});
    const float log_sum = std::log(static_cast<float>(sum));
    std::vector<cpu::DraftChild> children;
    for (const auto& [score, id] : ranked) {
      if (std::ssize(children) == case_.top_k) break;
      const int64_t token = case_.has_map ? map[id] : id;
      if (token < 0 || token >= vocab_) is_broken_[row] = true;
      children.push_back({token, score - ranked[0].first - log_sum});
    }
    return children;
  }

  static bool is_close(float a, float b) {
    return a == b || std::fabs(a - b) <= 1e-5f * (1 + std::fabs(b));
  }

  void check_frontier(const cpu::DraftTrees& trees) {
    const int64_t pitch = params_.plan.frontier_width(), words = params_.words;
    CHECK(trees.width() == params_.plan.widths[trees.level()]);
    CHECK(trees.first_slot() == params_.first_slots[trees.level()]);
    for (int64_t b = 0; b < std::ssize(active_); ++b) {
      const int64_t row = active_[b];
      if (is_broken_[row]) continue;
      for (int64_t i = 0; i < trees.width(); ++i) {
        const int64_t at = (trees.level() * params_.plan.batch + row) * pitch + i;
        const cpu::FrontierNode& expected = trees.node(b, i);
        const DraftNode& node = model_.nodes[at];
        CHECK(node.is_alive == expected.is_alive);
        for (int64_t word = 0; word < words; ++word) {
          uint64_t seen = trees.ancestors()[(b * trees.width() + i) * words + word];
          const int64_t slot = trees.first_slot() + i;
          if (!expected.is_alive && slot / 64 == word) seen = uint64_t{1} << slot % 64;  // itself
          CHECK(model_.ancestors[at * words + word] == seen);
        }
        if (!expected.is_alive) continue;
        CHECK(node.token == expected.token && node.candidate == expected.candidate);
        CHECK(node.parent == expected.parent && is_close(node.score, expected.score));
      }
    }
  }

  void check_tree(cpu::DraftTrees& trees, int64_t b, int64_t row) {
    const int64_t nodes = case_.nodes;
    Ints tokens(nodes, 0), parents(nodes, kInactiveParent);
    Floats scores(nodes, -INFINITY);
    trees.finish(b, roots[row], tokens.data(), parents.data(), scores.data());
    for (int64_t node = 0; node < nodes; ++node) {
      CHECK(params_.tree_tokens[row * nodes + node] == tokens[node]);
      CHECK(params_.tree_parents[row * nodes + node] == parents[node]);
      CHECK(is_close(params_.tree_scores[row * nodes + node], scores[node]));
    }
  }

  void check_root_alone(int64_t row, bool is_illegal) {
    for (int64_t node = 0; node < case_.nodes; ++node) {
      const int64_t at = row * case_.nodes + node;
      CHECK(params_.tree_tokens[at] == (node == 0 ? roots[row] : 0));
      CHECK(params_.tree_parents[at] == (node == 0 ? kRootParent : kInactiveParent));
      if (node > 0) CHECK(params_.tree_scores[at] == -INFINITY);
    }
    const float score = params_.tree_scores[row * case_.nodes];
    CHECK(is_illegal ? std::isnan(score) : score == 0);
  }

  // Checks the feedback of the last two levels that have levels below.
  void check_feedback() {
    const DraftPlan& plan = params_.plan;
    const T* residual = static_cast<const T*>(params_.scratch.residual);
    const T* weights = static_cast<const T*>(params_.norm);
    for (int level = std::max(0, plan.depth - 3); level + 1 < plan.depth; ++level) {
      if (plan.is_parallel) break;
      const T* feedback =
          static_cast<const T*>(params_.scratch.feedback) + level % 2 * params_.lists() * kHidden;
      for (int list = 0; list < plan.batch * plan.widths[level]; ++list) {
        double squares = 0;
        for (int i = 0; i < kHidden; ++i) {
          squares += std::pow(to_float(residual[list * kHidden + i]), 2);
        }
        const double inverse = 1 / std::sqrt(squares / kHidden + 1e-5);
        for (int i = 0; i < kHidden; ++i) {
          const double x = to_float(residual[list * kHidden + i]);
          const double expected = case_.norm_output ? x * inverse * to_float(weights[i]) : x;
          const double error = std::abs(to_float(feedback[list * kHidden + i]) - expected);
          CHECK(error <= (sizeof(T) == 4 ? 1e-5 : 1e-2) * std::abs(expected));
        }
      }
    }
  }

  const Case& case_;
  int num_blocks_;
  Floats tables_;
  int64_t vocab_;
  DraftShape shape_;
  Memory memory_;
  GridBarrier barrier_{};
  DraftKernelParams params_{};
  Model model_;
  Ints active_;
  std::vector<bool> is_broken_;                                      // [batch]
  std::vector<std::vector<std::vector<cpu::DraftChild>>> children_;  // [active][list]
};

}  // namespace specdec::draft_test
