// The phases of the fused draft_head that make trees (draft_begin.cuh, draft_logits.cuh,
// draft_grow.cuh), emulated without the layers between them: a node's logits come from one of a few
// tables. Compared with the CPU op's trees (cpu/draft_head_tree.h) over plainly computed children,
// level by level.
#include <algorithm>
#include <cmath>
#include <deque>
#include <random>
#include <span>
#include <vector>

#include "check.h"
#include "cpu/draft_head_tree.h"
#include "kernels/draft_begin.cuh"
#include "kernels/draft_grow.cuh"

namespace specdec {
namespace {

using Ints = std::vector<int64_t>;
using Floats = std::vector<float>;

// In place of the layers.
struct Model {
  const float* tables;  // [num_tables, draft_vocab] logits, not scaled
  int num_tables;
  int draft_vocab;
  DraftNode* nodes;     // [depth, batch, frontier_width] what each level expanded
  uint64_t* ancestors;  // [depth, batch, frontier_width, words]

  // The table of a node's children. Of a parallel head all nodes of a level have the root's.
  const float* logits(int64_t row, int64_t level, int64_t token, int64_t candidate) const {
    const int64_t hash = row * 7 + level * 13 + token * 3 + (candidate + 1) * 5;
    return tables + hash % num_tables * draft_vocab;
  }
};

// Rows of a pass of lists, of what these phases read.
template <typename T>
void load_rows(const DraftBlock<T>& block, const DraftPass& pass) {
  const DraftPlan& plan = block.params.plan;
  const int width = pass.kind == PassKind::kKept ? plan.kept_width() : plan.widths[pass.level];
  if (static_cast<int>(threadIdx.x) < pass.num_rows) {
    const int list = pass.first_row + static_cast<int>(threadIdx.x);
    PassRow row{};
    row.batch_row = list / width;
    row.place = list % width;
    row.list = row.memory = list;
    block.shared.rows[threadIdx.x] = row;
  }
  for (int row = block.warp(); row < pass.num_rows; row += kConsumerWarps) {
    const void* residual =
        block.row(block.params.scratch.residual, pass.first_row + row, block.params.hidden);
    const float inverse =
        inverse_root_mean_square<T>(residual, block.params.hidden, block.params.eps);
    if (block.lane() == 0) block.shared.inverses[row] = inverse;
  }
  block.sync();
}

template <typename T>
const float* logits_of(const DraftBlock<T>& block, const DraftPass& pass, int row,
                       const Model& model) {
  const PassRow element = block.shared.rows[row];
  const int64_t root = block.params.roots[element.batch_row];
  if (pass.kind == PassKind::kKept) {
    return model.logits(element.batch_row, element.place, root, kRootParent);
  }
  const int first = block.shared.first_element[element.batch_row];
  if (block.shared.first_element[element.batch_row + 1] == first) return model.tables;
  const DraftTreeRow tree(block.params, element.batch_row);
  const DraftNode node = tree.nodes(pass.level)[element.place];
  if (!node.is_alive) return model.tables;
  return model.logits(element.batch_row, pass.level, node.token, node.candidate);
}

// The panels of the product with lm_head.
template <typename T>
void run_logits(const DraftBlock<T>& block, const DraftPass& pass, const Model& model) {
  const TileSchedule schedule{model.draft_vocab, false};
  const int64_t end = schedule.first_tile(block.index() + 1, block.count());
  begin_logits(block, pass);
  for (int64_t first = schedule.first_tile(block.index(), block.count()); first < end;
       first += kPanelTiles) {
    for (int row = block.warp(); row < pass.num_rows; row += kConsumerWarps) {
      const float* logits = logits_of(block, pass, row, model);
      PanelValues values;
      for (int i = 0; i < 2; ++i) {
        const int64_t tile = first + i * 4 + block.lane() / 8;
        const bool exists = tile < end && block.lane() % 8 < schedule.num_outs(tile);
        values.out[i] = exists ? schedule.first_out(tile) + block.lane() % 8 : -1;
        values.value[i] = exists ? logits[values.out[i]] : 1e30f;
      }
      add_logits(block, row, values);
    }
  }
  finish_logits(block, pass);
}

// What this level expands, for the comparison.
template <typename T>
void record(const DraftBlock<T>& block, int level, const Model& model) {
  const DraftKernelParams& params = block.params;
  const int64_t width = params.plan.frontier_width(), words = params.words;
  for (int64_t row = 0; row < params.plan.batch; ++row) {
    const DraftTreeRow tree(params, row);
    const int64_t at = (level * params.plan.batch + row) * width;
    std::copy_n(tree.nodes(level), width, model.nodes + at);
    std::copy_n(tree.ancestors(level), width * words, model.ancestors + at * words);
  }
}

template <typename T>
__global__ void __launch_bounds__(kDraftThreads, 1)
    draft_trees(DraftKernelParams params, Model model) {
  SPECDEC_SHARED(DraftShared, shared);
  SPECDEC_DYNAMIC_SHARED(float, reduce);
  const DraftBlock<T> block{params, shared, reduce.template as<unsigned char>(), reduce, 0};
  begin_draft(block);
  const int num_new = shared.first_element[params.plan.batch];
  if (num_new == 0) return;
  for (DraftCursor cursor(params.plan, num_new); !cursor.is_done(); cursor.next()) {
    const DraftPass pass = cursor.pass();
    if (cursor.op() != DraftOp::kLogits && cursor.op() != DraftOp::kGrow) continue;
    if (block.warp() < kConsumerWarps) {
      if (cursor.op() == DraftOp::kGrow) {
        grow(block, pass);
      } else {
        load_rows(block, pass);
        run_logits(block, pass, model);
      }
    }
    grid_barrier(static_cast<GridBarrier*>(params.sync.barrier));
    const bool has_frontier = !params.plan.is_parallel && pass.level + 1 < params.plan.depth;
    if (cursor.op() == DraftOp::kGrow && has_frontier && block.index() == 0 && threadIdx.x == 0) {
      record(block, pass.level + 1, model);
    }
  }
}

struct Case {
  Ints choices = {};  // none: a dynamic tree
  int depth, top_k, nodes;
  bool is_parallel = false;
  Ints counts = {2};
  int draft_vocab = 50;
  bool has_map = false;
  float logit_scale = 1;
  bool norm_output = false;
  int num_blocks = 2;
};

constexpr int kNumNew = 3, kHidden = 24, kFeatureWidth = 40, kCapacity = 2000, kPositions = 300;
constexpr int kNumTables = 9;

// The memory of a launch, each array by itself for AddressSanitizer, without a number that means
// anything.
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

// A call, its launch and what is to come out.
template <typename T>
class Run {
 public:
  Run(const Case& c, Floats tables) : case_(c), tables_(std::move(tables)) {
    const int64_t batch = std::ssize(c.counts);
    vocab_ = c.has_map ? 3 * c.draft_vocab : c.draft_vocab;
    for (int64_t i = 0; i < c.draft_vocab; ++i) map_.push_back(3 * (c.draft_vocab - 1 - i) + 1);
    lengths_.assign(batch, 7);
    positions_.assign(batch, 9);
    tokens_.assign(batch * kNumNew, 1);
    for (int64_t row = 0; row < batch; ++row) roots_.push_back(row % vocab_);
    shape_ = {{c.choices.data(), 2, 1}, std::ssize(c.choices) / 2, c.depth, c.top_k, c.nodes};
    fill_params();
  }

  // To be changed before launch().
  Ints lengths_, positions_, tokens_, roots_, map_;

  Run& launch() {
    params_.tokens = {tokens_.data(), kNumNew, 1};
    params_.counts = {case_.counts.data(), 1};
    params_.lengths = {lengths_.data(), 1};
    params_.positions = {positions_.data(), 1};
    params_.roots = {roots_.data(), 1};
    params_.draft_to_target = case_.has_map ? map_.data() : nullptr;
    CHECK(specdec::launch(draft_trees<T>,
                          {.grid_x = case_.num_blocks,
                           .grid_y = 1,
                           .block = kDraftThreads,
                           .stream = nullptr,
                           .dynamic_shared_bytes = kReduceBytes,
                           .cooperative = true},
                          params_, model_) == cudaSuccess);
    return *this;
  }

  // Compares everything. is_illegal[row]: one of its numbers is.
  void check(const std::vector<bool>& is_illegal) {
    active_.clear();
    for (int64_t row = 0; row < params_.plan.batch; ++row) {
      if (case_.counts[row] > 0 && !is_illegal[row]) active_.push_back(row);
    }
    is_broken_.assign(params_.plan.batch, false);
    cpu::DraftTrees trees;
    trees.begin(shape_, case_.is_parallel, std::ssize(active_));
    while (!active_.empty() && !trees.is_complete()) {
      find_children(trees);
      trees.grow([&](int64_t b, int64_t list) -> std::span<const cpu::DraftChild> {
        return children_[b][list];
      });
      if (!trees.is_complete() && !case_.is_parallel) check_frontier(trees);
    }
    for (int64_t row = 0; row < params_.plan.batch; ++row) {
      const auto at = std::find(active_.begin(), active_.end(), row);
      const bool is_alone = at == active_.end() || is_broken_[row];
      if (!is_alone) {
        check_tree(trees, at - active_.begin(), row);
      } else {
        check_root_alone(row, is_illegal[row] || is_broken_[row]);
      }
    }
    const T* zeros = static_cast<const T*>(params_.scratch.zeros);
    CHECK(std::all_of(zeros, zeros + kFeatureWidth, [](T zero) { return to_float(zero) == 0; }));
    if (!active_.empty()) check_feedback();
  }

  const DraftKernelParams& params() const { return params_; }

 private:
  static float to_float(float x) { return x; }
  static float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
  static T from_float(double x) {
    if constexpr (sizeof(T) == 4)
      return static_cast<T>(x);
    else
      return __float2bfloat16(static_cast<float>(x));
  }

  // Levels of a static tree, and the slots of what they expand.
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
    for (int64_t i = 0; i < lists * kHidden; ++i) residual[i] = from_float(i % 37 - 17);
    for (int64_t i = 0; i < kHidden; ++i) norm[i] = from_float(i % 5 / 4.0);
    scratch.residual = residual;
    params_.norm = norm;
    scratch.feedback = memory_.add<T>(2 * lists * kHidden);
    scratch.picks = memory_.add<uint64_t>(lists * case_.num_blocks * case_.top_k);
    scratch.logit_sums = memory_.add<ExpSum>(lists * case_.num_blocks);
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

  // Of all lists, those of nodes that are not alive as well: their draft_to_target is looked at.
  void find_children(const cpu::DraftTrees& trees) {
    children_.assign(active_.size(), {});
    for (int64_t b = 0; b < std::ssize(active_); ++b) {
      const int64_t row = active_[b], root = roots_[row];
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
      const int64_t token = case_.has_map ? map_[id] : id;
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
          CHECK(model_.ancestors[at * words + word] ==
                static_cast<uint64_t>(trees.ancestors()[(b * trees.width() + i) * words + word]));
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
    trees.finish(b, roots_[row], tokens.data(), parents.data(), scores.data());
    for (int64_t node = 0; node < nodes; ++node) {
      CHECK(params_.tree_tokens[row * nodes + node] == tokens[node]);
      CHECK(params_.tree_parents[row * nodes + node] == parents[node]);
      CHECK(is_close(params_.tree_scores[row * nodes + node], scores[node]));
    }
  }

  void check_root_alone(int64_t row, bool is_illegal) {
    for (int64_t node = 0; node < case_.nodes; ++node) {
      const int64_t at = row * case_.nodes + node;
      CHECK(params_.tree_tokens[at] == (node == 0 ? roots_[row] : 0));
      CHECK(params_.tree_parents[at] == (node == 0 ? kRootParent : kInactiveParent));
      if (node > 0) CHECK(params_.tree_scores[at] == -INFINITY);
    }
    const float score = params_.tree_scores[row * case_.nodes];
    CHECK(is_illegal ? std::isnan(score) : score == 0);
  }

  // Of the last two levels that others are drafted below.
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

template <typename Next>
Floats make_tables(const Case& c, const Next& next) {
  Floats tables(kNumTables * c.draft_vocab);
  for (float& logit : tables) logit = next();
  return tables;
}

const Ints kChain{0, 0, 1, 0, 2, 0, 3, 0};
const Ints kIrregular{0, 0, 0, 2, 0, 3, 1, 0, 1, 1, 3, 1, 4, 0, 6, 2, 8, 0};

// 32 children of the root with two each, of which most have one: more than 64 slots.
Ints wide_tree() {
  Ints choices;
  for (int64_t i = 0; i < 32; ++i) choices.insert(choices.end(), {0, i});
  for (int64_t i = 0; i < 64; ++i) choices.insert(choices.end(), {1 + i / 2, i % 2});
  for (int64_t i = 0; i < 64; i += i % 5 + 1) choices.insert(choices.end(), {33 + i, 1});
  return choices;
}

std::vector<Case> cases() {
  const Ints wide = wide_tree();
  const int wide_nodes = static_cast<int>(std::ssize(wide)) / 2 + 1;
  return {
      {.choices = {0, 0}, .depth = 1, .top_k = 1, .nodes = 2, .num_blocks = 1},
      {.choices = kChain, .depth = 4, .top_k = 1, .nodes = 5, .counts = {2, 0, 3}},
      {.choices = kChain, .depth = 4, .top_k = 3, .nodes = 7, .has_map = true, .norm_output = true},
      {.choices = kIrregular,
       .depth = 4,
       .top_k = 4,
       .nodes = 10,
       .counts = {0, 1, 3, 0, 2},
       .logit_scale = 0.25f,
       .num_blocks = 5},
      {.choices = kIrregular, .depth = 4, .top_k = 4, .nodes = 12, .draft_vocab = 3},
      {.choices = wide, .depth = 3, .top_k = 32, .nodes = wide_nodes, .draft_vocab = 150},
      {.depth = 1, .top_k = 3, .nodes = 3},
      {.depth = 4,
       .top_k = 5,
       .nodes = 24,
       .counts = {1, 0, 2, 3},
       .draft_vocab = 700,
       .has_map = true,
       .norm_output = true,
       .num_blocks = 5},
      {.depth = 3, .top_k = 10, .nodes = 60, .draft_vocab = 67, .num_blocks = 1},
      {.depth = 3, .top_k = 6, .nodes = 40, .counts = {0, 3}, .draft_vocab = 4, .num_blocks = 5},
      {.depth = 2, .top_k = 32, .nodes = 1024, .draft_vocab = 90},
      {.choices = kChain,
       .depth = 4,
       .top_k = 1,
       .nodes = 5,
       .is_parallel = true,
       .counts = {3, 0, 1}},
      {.choices = kIrregular, .depth = 4, .top_k = 4, .nodes = 10, .is_parallel = true},
      {.depth = 3,
       .top_k = 7,
       .nodes = 30,
       .is_parallel = true,
       .counts = {1, 2},
       .has_map = true,
       .num_blocks = 5},
  };
}

template <typename T>
void test_trees() {
  for (const Case& c : cases()) {
    std::mt19937 random(7);
    std::normal_distribution<float> normal(0, 2);
    const std::vector<bool> legal(c.counts.size(), false);
    Run<T>(c, make_tables(c, [&] { return normal(random); })).launch().check(legal);
    // Equal scores, and many that are none. (Sums are exact.)
    const float few[] = {0, 0, -INFINITY, NAN, -0.0f};
    Run<T>(c, make_tables(c, [&] { return few[random() % 5]; })).launch().check(legal);
    // None at all, but for every 40th; +inf leaves a list without children.
    Run<T>(c, make_tables(c,
                          [&] {
                            return random() % 40  ? -INFINITY
                                   : random() % 9 ? normal(random)
                                                  : INFINITY;
                          }))
        .launch()
        .check(legal);
    Run<T>(c, make_tables(c, [] { return -INFINITY; })).launch().check(legal);
  }
}

void test_illegal_numbers() {
  std::mt19937 random(8);
  std::normal_distribution<float> normal;
  const Case c{.depth = 3,
               .top_k = 4,
               .nodes = 12,
               .counts = {-1, kNumNew + 1, 2, 2, 2, 2, 0, 2, 0},
               .has_map = true};
  Run<float> run(c, make_tables(c, [&] { return normal(random); }));
  const int64_t slots = 2 * c.top_k, end = std::ssize(c.counts);
  run.lengths_[2] = kCapacity - slots - 1;
  run.lengths_[3] = kCapacity - slots - 2;  // the largest
  run.positions_[4] = kPositions - 3;
  run.positions_[5] = kPositions - 4;  // the largest
  run.tokens_[3 * kNumNew + 2] = -5;   // behind what counts
  run.roots_[6] = 3 * c.draft_vocab;
  run.tokens_[7 * kNumNew + 1] = 3 * c.draft_vocab;
  run.lengths_[8] = -1;  // reads nothing
  std::vector<bool> is_illegal(end, false);
  for (int row : {0, 1, 2, 4, 6, 7}) is_illegal[row] = true;
  run.launch().check(is_illegal);
}

// Some draft tokens have no target token; rows that draft one get their root alone.
void test_illegal_map() {
  std::mt19937 random(9);
  std::normal_distribution<float> normal;
  for (const Ints& choices : {Ints{}, kIrregular}) {
    const Case c{.choices = choices,
                 .depth = 4,
                 .top_k = 4,
                 .nodes = 12,
                 .counts = {1, 1, 1, 1, 1, 1},
                 .has_map = true,
                 .num_blocks = 5};
    Run<float> run(c, make_tables(c, [&] { return normal(random); }));
    run.map_[3] = -1;
    run.map_[44] = int64_t{1} << 40;
    run.launch().check(std::vector<bool>(c.counts.size(), false));
  }
}

}  // namespace

void test_draft_tree_phases() {
  test_trees<float>();
  test_trees<__nv_bfloat16>();
  test_illegal_numbers();
  test_illegal_map();
}

}  // namespace specdec
