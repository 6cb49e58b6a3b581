// The phases of the fused draft_head that make trees (kernels/draft_head/phases/begin.cuh,
// logits.cuh, grow.cuh), against the CPU op.
#include <random>

#include "testing/selftest/check.h"
#include "tree_run.h"

namespace specdec {
namespace {

using namespace draft_test;

template <typename Next>
Floats make_tables(const Case& c, const Next& next) {
  Floats tables(kNumTables * c.draft_vocab);
  for (float& logit : tables) logit = next();
  return tables;
}

const Ints kChain{0, 0, 1, 0, 2, 0, 3, 0};
const Ints kIrregular{0, 0, 0, 2, 0, 3, 1, 0, 1, 1, 3, 1, 4, 0, 6, 2, 8, 0};

// 32 children of the root with two each, of which most have one child: more than 64 slots.
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
      {.choices = {0, 0}, .depth = 1, .top_k = 1, .nodes = 2},
      {.choices = kChain, .depth = 4, .top_k = 1, .nodes = 5, .counts = {2, 0, 3}},
      {.choices = kChain, .depth = 4, .top_k = 3, .nodes = 7, .has_map = true},
      {.choices = kIrregular, .depth = 4, .top_k = 4, .nodes = 10, .counts = {0, 1, 3, 0, 2}},
      {.choices = kIrregular, .depth = 4, .top_k = 4, .nodes = 12, .draft_vocab = 3},
      {.choices = wide, .depth = 3, .top_k = 32, .nodes = wide_nodes, .draft_vocab = 150},
      {.depth = 1, .top_k = 3, .nodes = 3, .counts = Ints(40, 1), .draft_vocab = 9},
      {.depth = 4, .top_k = 5, .nodes = 24, .counts = {1, 0, 2, 3}, .draft_vocab = 300},
      {.depth = 3, .top_k = 10, .nodes = 60, .draft_vocab = 67, .has_map = true},
      {.depth = 3, .top_k = 6, .nodes = 40, .counts = {0, 3}, .draft_vocab = 4},
      {.depth = 4, .top_k = 32, .nodes = 1024, .draft_vocab = 40},
      {.choices = kChain, .depth = 4, .top_k = 1, .nodes = 5, .is_parallel = true},
      {.choices = kIrregular, .depth = 4, .top_k = 4, .nodes = 10, .is_parallel = true},
      {.depth = 3, .top_k = 7, .nodes = 30, .is_parallel = true, .counts = {1, 0, 2}},
  };
}

void test_trees() {
  std::mt19937 random(7);
  std::normal_distribution<float> normal(0, 2);
  constexpr float kFew[] = {0, 0, -INFINITY, NAN, -0.0f};
  int turn = 0;
  for (const Case& c : cases()) {
    const auto test = [&](const auto& next) {
      const int num_blocks = std::vector{1, 2, 5}[turn++ % 3];
      const std::vector<bool> is_illegal(c.counts.size(), false);
      Run<float>(c, num_blocks, make_tables(c, next)).launch().check(is_illegal);
    };
    test([&] { return normal(random); });
    test([&] { return kFew[random() % 5]; });  // ties; sums of exponentials are exact
    // Few finite logits, and lists that +inf leaves without children.
    test([&] {
      if (random() % 20 > 0) return -INFINITY;
      return random() % 9 > 0 ? normal(random) : INFINITY;
    });
    test([] { return -INFINITY; });
  }
}

template <typename T>
void test_feedback() {
  std::mt19937 random(10);
  std::normal_distribution<float> normal;
  for (const bool norm_output : {false, true}) {
    Case c{.depth = 3, .top_k = 6, .nodes = 9, .counts = {1, 0, 2, 2}};
    c.norm_output = norm_output;
    c.logit_scale = 0.25f;
    Run<T> run(c, 2, make_tables(c, [&] { return normal(random); }));
    run.launch().check(std::vector<bool>(c.counts.size(), false));
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
  Run<float> run(c, 2, make_tables(c, [&] { return normal(random); }));
  const int64_t slots = 2 * c.top_k, end = std::ssize(c.counts);
  run.lengths[2] = kCapacity - slots - 1;
  run.lengths[3] = kCapacity - slots - 2;  // the largest legal one
  run.positions[4] = kPositions - 3;
  run.positions[5] = kPositions - 4;  // the largest legal one
  run.tokens[3 * kNumNew + 2] = -5;   // beyond counts
  run.roots[6] = 3 * c.draft_vocab;
  run.tokens[7 * kNumNew + 1] = 3 * c.draft_vocab;
  run.lengths[8] = -1;  // reads nothing
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
                 .has_map = true};
    Run<float> run(c, 5, make_tables(c, [&] { return normal(random); }));
    run.map[3] = -1;
    run.map[44] = int64_t{1} << 40;
    run.launch().check(std::vector<bool>(c.counts.size(), false));
  }
}

}  // namespace

void test_draft_tree_phases() {
  test_trees();
  test_feedback<float>();
  test_feedback<__nv_bfloat16>();
  test_feedback<__half>();
  test_illegal_numbers();
  test_illegal_map();
}

}  // namespace specdec
