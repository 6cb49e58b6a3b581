// The ops: on the CPU against literal examples, as CUDA kernels on the emulator against the CPU on
// random cases. python_tests/ compares the CPU ops with their specification, specdec_ext/reference.
#include <algorithm>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "check.h"
#include "specdec/launchers.h"

namespace specdec {
namespace {

using Ints = std::vector<int64_t>;

// Random trees; some links are inactive, point forward or are meaningless.
Ints random_parents(int64_t batch, int64_t nodes, std::mt19937& random) {
  Ints parents(batch * nodes);
  for (int64_t i = 0; i < batch * nodes; ++i) {
    const int64_t node = i % nodes;
    parents[i] = node == 0 ? kRootParent : static_cast<int64_t>(random() % node);
    if (random() % 8 == 0) parents[i] = static_cast<int64_t>(random() % (nodes + 4)) - 3;
  }
  return parents;
}

struct TreeMaskOutputs {
  Ints ancestors, depths, positions, first_child, next_sibling, paths;
  bool operator==(const TreeMaskOutputs&) const = default;
};

template <typename Run>
TreeMaskOutputs run_tree_mask(const Ints& parents, int64_t batch, int64_t nodes, const Run& run) {
  const int64_t words = (nodes + 63) / 64;
  const Ints root_positions(batch, 100);
  TreeMaskOutputs out;
  out.ancestors.resize(batch * nodes * words);
  out.paths.resize(batch * nodes * nodes);
  for (Ints* output : {&out.depths, &out.positions, &out.first_child, &out.next_sibling}) {
    output->resize(batch * nodes);
  }
  run(TreeMaskParams{.parents = {parents.data(), nodes, 1},
                     .root_positions = {root_positions.data(), 1},
                     .batch = batch,
                     .nodes = nodes,
                     .words = words,
                     .ancestors = out.ancestors.data(),
                     .depths = out.depths.data(),
                     .positions = out.positions.data(),
                     .first_child = out.first_child.data(),
                     .next_sibling = out.next_sibling.data(),
                     .paths = out.paths.data()});
  return out;
}

void test_tree_mask() {
  const auto on_cpu = [](const TreeMaskParams& params) { cpu::tree_mask(params, kSerial); };
  const auto emulated = [](const TreeMaskParams& params) {
    CHECK(launch_tree_mask(params, nullptr) == cudaSuccess);
  };
  const TreeMaskOutputs example = run_tree_mask({-1, 0, 0, 1, 1}, 1, 5, on_cpu);
  CHECK((example.ancestors == Ints{1, 3, 5, 11, 19}));
  CHECK((example.depths == Ints{0, 1, 1, 2, 2}));
  CHECK((example.positions == Ints{100, 101, 101, 102, 102}));
  CHECK((example.first_child == Ints{1, 3, -1, -1, -1}));
  CHECK((example.next_sibling == Ints{-1, 2, -1, 4, -1}));

  std::mt19937 random(1);
  for (int64_t nodes : {1, 2, 31, 32, 33, 63, 64, 65, 130, 257, 1024}) {
    const Ints parents = random_parents(3, nodes, random);
    CHECK(run_tree_mask(parents, 3, nodes, emulated) == run_tree_mask(parents, 3, nodes, on_cpu));
  }
}

struct DynamicTreeOutputs {
  Ints tokens, parents, selected;
  bool operator==(const DynamicTreeOutputs&) const = default;
};

template <typename Run>
DynamicTreeOutputs run_dynamic_tree(const std::vector<float>& scores, const Ints& parents,
                                    int64_t batch, int64_t nodes, const Run& run) {
  const int64_t candidates = static_cast<int64_t>(scores.size()) / batch;
  Ints tokens(scores.size()), root_tokens(batch, 7);
  std::iota(tokens.begin(), tokens.end(), 10);
  DynamicTreeOutputs out{Ints(batch * nodes), Ints(batch * nodes), Ints(batch * nodes)};
  run(BuildDynamicTreeParams{.scores = {scores.data(), candidates, 1},
                             .tokens = {tokens.data(), candidates, 1},
                             .parents = {parents.data(), candidates, 1},
                             .root_tokens = {root_tokens.data(), 1},
                             .batch = batch,
                             .candidates = candidates,
                             .nodes = nodes,
                             .tree_tokens = out.tokens.data(),
                             .tree_parents = out.parents.data(),
                             .selected = out.selected.data()});
  return out;
}

void test_build_dynamic_tree() {
  const auto on_cpu = [](const BuildDynamicTreeParams& params) {
    cpu::build_dynamic_tree(params, kSerial);
  };
  const auto emulated = [](const BuildDynamicTreeParams& params) {
    CHECK(launch_build_dynamic_tree(params, nullptr) == cudaSuccess);
  };
  const DynamicTreeOutputs example =
      run_dynamic_tree({-0.5f, -0.9f, -0.5f, -3.0f, -0.1f}, {-1, -1, 0, 0, 1}, 1, 4, on_cpu);
  CHECK((example.tokens == Ints{7, 10, 11, 12}));
  CHECK((example.parents == Ints{-1, 0, 0, 1}));
  CHECK((example.selected == Ints{-1, 0, 1, 2}));

  std::mt19937 random(4);
  for (int64_t candidates : {1, 31, 128, 129, 710, 4096}) {
    std::vector<float> scores(2 * candidates);
    Ints parents(2 * candidates);
    for (int64_t i = 0; i < 2 * candidates; ++i) {
      scores[i] = random() % 9 == 0 ? NAN : -static_cast<float>(random() % 40);
      parents[i] = static_cast<int64_t>(random() % (i % candidates + 1)) - 1 - (random() % 9 == 0);
    }
    for (int64_t nodes : {1, 2, 60, 1024}) {
      CHECK(run_dynamic_tree(scores, parents, 2, nodes, emulated) ==
            run_dynamic_tree(scores, parents, 2, nodes, on_cpu));
    }
  }
}

struct NgramOutputs {
  Ints tokens, parents, match_lengths;
  bool operator==(const NgramOutputs&) const = default;
};

struct NgramRule {
  int64_t nodes, min_ngram, max_ngram, num_branches;
};

template <typename Run>
NgramOutputs run_ngram_draft(const Ints& text, const Ints& lengths, const NgramRule& rule,
                             const Run& run) {
  const auto batch = static_cast<int64_t>(lengths.size());
  const int64_t capacity = static_cast<int64_t>(text.size()) / batch;
  NgramOutputs out{Ints(batch * rule.nodes), Ints(batch * rule.nodes), Ints(batch)};
  run(NgramDraftParams{.columns = {text.data(), capacity, 1},
                       .lengths = {lengths.data(), 1},
                       .num_padded = {},
                       .batch = batch,
                       .capacity = capacity,
                       .nodes = rule.nodes,
                       .min_ngram = rule.min_ngram,
                       .max_ngram = rule.max_ngram,
                       .num_branches = rule.num_branches,
                       .tokens = out.tokens.data(),
                       .parents = out.parents.data(),
                       .match_lengths = out.match_lengths.data()});
  return out;
}

void test_ngram_draft() {
  const auto on_cpu = [](const NgramDraftParams& params) { cpu::ngram_draft(params, kSerial); };
  const auto emulated = [](const NgramDraftParams& params) {
    CHECK(launch_ngram_draft(params, nullptr) == cudaSuccess);
  };
  // The example of ngram_draft.h, with a token behind the text.
  const NgramOutputs example =
      run_ngram_draft({5, 6, 7, 8, 5, 6, 9, 5, 5}, {8}, {6, 1, 2, 2}, on_cpu);
  CHECK((example.tokens == Ints{5, 6, 9, 5, 7, 6}));
  CHECK((example.parents == Ints{-1, 0, 1, 2, 1, 3}));
  CHECK((example.match_lengths == Ints{1}));

  std::mt19937 random(5);
  for (int64_t capacity : {1, 2, 33, 256, 257, 700, 9000}) {
    for (int64_t words : {1, 2, 9}) {
      Ints text(2 * capacity);
      for (int64_t& token : text) token = static_cast<int64_t>(random() % words);
      const Ints lengths{capacity, static_cast<int64_t>(random() % (capacity + 2))};
      for (const NgramRule& rule : {NgramRule{11, 2, 6, 1}, {40, 1, 9, 5}, {1024, 1, 64, 100}}) {
        CHECK(run_ngram_draft(text, lengths, rule, emulated) ==
              run_ngram_draft(text, lengths, rule, on_cpu));
      }
    }
  }
}

struct MergedOutputs {
  Ints tokens, parents;
  bool operator==(const MergedOutputs&) const = default;
};

// Two trees of the same rows.
struct MergeCase {
  int64_t batch, nodes[2];
  Ints tokens[2], parents[2];
};

template <typename Run>
MergedOutputs run_merge_trees(const MergeCase& c, int64_t nodes, const Run& run) {
  MergedOutputs out{Ints(c.batch * nodes), Ints(c.batch * nodes)};
  MergeTreesParams params{.trees = {},
                          .num_trees = 2,
                          .batch = c.batch,
                          .nodes = nodes,
                          .tokens = out.tokens.data(),
                          .parents = out.parents.data()};
  for (int i = 0; i < 2; ++i) {
    params.trees[i] = {.tokens = {c.tokens[i].data(), c.nodes[i], 1},
                       .parents = {c.parents[i].data(), c.nodes[i], 1},
                       .nodes = c.nodes[i]};
  }
  run(params);
  return out;
}

void test_merge_trees() {
  const auto on_cpu = [](const MergeTreesParams& params) {
    CHECK(!cpu::find_other_root(params));
    cpu::merge_trees(params, kSerial);
  };
  const auto emulated = [](const MergeTreesParams& params) {
    CHECK(launch_merge_trees(params, nullptr) == cudaSuccess);
  };
  // The example of merge_trees.h.
  const MergeCase example{1, {3, 5}, {{7, 1, 2}, {7, 1, 3, 5, 6}}, {{-1, 0, 1}, {-1, 0, 1, 0, 3}}};
  const MergedOutputs merged = run_merge_trees(example, 4, on_cpu);
  CHECK((merged.tokens == Ints{7, 1, 2, 3}));
  CHECK((merged.parents == Ints{-1, 0, 1, 1}));

  std::mt19937 random(6);
  for (const auto& [first, second] : {std::pair{1, 1}, {2, 33}, {60, 11}, {300, 64}}) {
    MergeCase c{3, {first, second}, {}, {}};
    for (int i = 0; i < 2; ++i) {
      c.parents[i] = random_parents(c.batch, c.nodes[i], random);
      for (int64_t k = 0; k < c.batch * c.nodes[i]; ++k) {
        c.tokens[i].push_back(k % c.nodes[i] == 0 ? 5 : static_cast<int64_t>(random() % 3));
      }
    }
    for (int64_t nodes : {1, 2, 64, 1024}) {
      CHECK(run_merge_trees(c, nodes, emulated) == run_merge_trees(c, nodes, on_cpu));
    }
  }
}

struct MatchOutputs {
  Ints path, num_accepted, next_token, status;
  bool operator==(const MatchOutputs&) const = default;
};

struct MatchCase {
  int64_t batch, nodes, vocab;
  FloatType type;
  std::vector<uint16_t> half_logits;  // storage of the 16-bit types
  std::vector<float> logits;
  Ints tokens, parents, root_positions, seeds, row_ids;
  std::unique_ptr<bool[]> stochastic;
};

MatchCase random_match_case(int64_t batch, int64_t nodes, int64_t vocab, FloatType type,
                            std::mt19937& random) {
  MatchCase c{batch, nodes, vocab, type, {}, {}, {}, {}, {}, {}, {}, nullptr};
  std::normal_distribution<float> normal(0, 3);
  c.logits.resize(batch * nodes * vocab);
  for (float& logit : c.logits) logit = random() % 4 == 0 ? -INFINITY : normal(random);
  // A few NaN, of which some are visited and some are not.
  for (int64_t i = 0; i < batch; ++i) c.logits[random() % c.logits.size()] = NAN;
  if (type != FloatType::kFloat32) {
    for (int64_t i = 0; i < batch * nodes * vocab; ++i) {
      c.half_logits.push_back(static_cast<uint16_t>(random()));
    }
  }
  c.parents = random_parents(batch, nodes, random);
  for (int64_t i = 0; i < batch * nodes; ++i) {
    c.tokens.push_back(static_cast<int64_t>(random() % std::min<int64_t>(vocab, 5)));
  }
  c.stochastic = std::make_unique<bool[]>(batch);
  for (int64_t row = 0; row < batch; ++row) {
    c.root_positions.push_back(static_cast<int64_t>(random() % 5000));
    c.seeds.push_back(static_cast<int64_t>(random() * 0x9E3779B97F4A7C15u));
    c.row_ids.push_back(row);
    c.stochastic[row] = random() % 2 == 0;
  }
  return c;
}

template <typename Run>
MatchOutputs run_match(const MatchCase& c, const Run& run) {
  MatchOutputs out{Ints(c.batch * c.nodes), Ints(c.batch), Ints(c.batch), Ints(c.batch)};
  const bool wide = c.type == FloatType::kFloat32;
  run(VerifyMatchParams{
      .logits = wide ? static_cast<const void*>(c.logits.data()) : c.half_logits.data(),
      .logits_type = c.type,
      .logits_batch_stride = c.nodes * c.vocab,
      .logits_node_stride = c.vocab,
      .tokens = {c.tokens.data(), c.nodes, 1},
      .parents = {c.parents.data(), c.nodes, 1},
      .root_positions = {c.root_positions.data(), 1},
      .seeds = {c.seeds.data(), 1},
      .row_ids = {c.row_ids.data(), 1},
      .stochastic = {c.stochastic.get(), 1},
      .batch = c.batch,
      .nodes = c.nodes,
      .vocab = c.vocab,
      .path = out.path.data(),
      .num_accepted = out.num_accepted.data(),
      .next_token = out.next_token.data(),
      .status = out.status.data()});
  return out;
}

void test_verify_match() {
  const auto on_cpu = [](const VerifyMatchParams& params) { cpu::verify_match(params, kSerial); };
  const auto emulated = [](const VerifyMatchParams& params) {
    std::vector<std::byte> workspace(verify_match_workspace_bytes(params), std::byte{0xAB});
    std::vector<uint32_t> counters(params.batch);
    CHECK(launch_verify_match(params, counters.data(), workspace.data(), nullptr) == cudaSuccess);
    for (const uint32_t counter : counters) CHECK(counter == 0);
  };
  std::mt19937 random(2);
  int64_t num_accepted = 0, num_bad = 0;
  for (FloatType type : {FloatType::kFloat32, FloatType::kBFloat16, FloatType::kFloat16}) {
    for (int64_t vocab : {1, 2, 3, 5, 64, 127, 4097, 9000}) {
      const MatchCase c = random_match_case(4, vocab < 100 ? 19 : 3, vocab, type, random);
      const MatchOutputs expected = run_match(c, on_cpu);
      CHECK(run_match(c, emulated) == expected);
      for (int64_t row = 0; row < c.batch; ++row) {
        num_accepted += std::max<int64_t>(expected.num_accepted[row], 0);
        num_bad += expected.status[row] != 0;
      }
    }
  }
  CHECK(num_accepted > 10);  // enough cases accept something
  CHECK(num_bad > 3);
}

// One cache per entry of `layout`, filled with distinct bytes.
struct Caches {
  std::vector<std::vector<std::byte>> storage;
  std::vector<CacheTensor> tensors;
};

Caches make_caches(int64_t batch, int64_t slots, const std::vector<std::pair<int, int>>& layout) {
  Caches caches;
  for (const auto& [heads, slot_bytes] : layout) {
    auto& bytes = caches.storage.emplace_back(batch * heads * slots * slot_bytes);
    for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(i * 37 + i / 251);
    caches.tensors.push_back({.data = bytes.data(),
                              .layout = {.page_stride = heads * slots * slot_bytes,
                                         .head_stride = slots * slot_bytes,
                                         .slot_stride = slot_bytes,
                                         .pages = batch,
                                         .page_size = slots,
                                         .heads = heads,
                                         .slot_bytes = slot_bytes}});
  }
  return caches;
}

void test_kv_compact() {
  std::mt19937 random(3);
  const std::vector<std::vector<std::pair<int, int>>> layouts = {
      {{1, 16}},
      {{2, 256}, {3, 48}},
      {{2, 8}, {1, 24}},
      {{1, 7}},
      {{2, 6}, {1, 2}},
      {{3, 4}},
      std::vector<std::pair<int, int>>(131, {1, 32})};
  for (const auto& layout : layouts) {
    for (int64_t nodes : {1, 5, 40, 1024}) {
      const int64_t batch = 3, slots = nodes + 9;
      Ints path(batch * nodes), accepted, sources, targets;
      for (int64_t row = 0; row < batch; ++row) {
        const auto begin = path.begin() + row * nodes;
        std::iota(begin, begin + nodes, 0);
        std::shuffle(begin, begin + nodes, random);
        accepted.push_back(static_cast<int64_t>(random() % (nodes + 1)) - 1);
        sources.push_back(static_cast<int64_t>(random() % 10));
        targets.push_back(static_cast<int64_t>(random() % 10));
      }
      const KvMoves moves{.path = {path.data(), nodes, 1},
                          .num_accepted = {accepted.data(), 1},
                          .source_starts = {sources.data(), 1},
                          .target_starts = {targets.data(), 1},
                          .page_table = {},
                          .row_pages = 1,
                          .batch = batch,
                          .nodes = nodes};
      Caches expected = make_caches(batch, slots, layout);
      Caches actual = make_caches(batch, slots, layout);
      CHECK(!cpu::find_invalid_move(expected.tensors, moves));
      cpu::kv_compact(expected.tensors, moves, kSerial);
      CHECK(launch_kv_compact(actual.tensors, moves, nullptr) == cudaSuccess);
      CHECK(actual.storage == expected.storage);
    }
  }
}

}  // namespace

void test_ops() {
  test_tree_mask();
  test_build_dynamic_tree();
  test_ngram_draft();
  test_merge_trees();
  test_verify_match();
  test_kv_compact();
}

}  // namespace specdec
