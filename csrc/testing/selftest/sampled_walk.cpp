// Decisions of specdec/sampling/sampled_walk.h that only rounding can cause, driven by hand: a
// residual that is 0 everywhere. Also the bound that lets the CPU op skip draws.
#include "specdec/sampling/sampled_walk.h"

#include <vector>

#include "check.h"

namespace specdec {
namespace {

// One row: a root with the children 1 and 2 (tokens 0 and 1) or, as a chain, 0 - 1 - 2. The logits
// exclude token 0, so that it is always rejected, and draft distributions are uniform.
struct Row {
  std::vector<float> logits, draft_probs;
  std::vector<int64_t> tokens{0, 0, 1}, parents, zeros{0}, path = std::vector<int64_t>(3);
  int64_t num_accepted, next_token, status;
  WalkLevel levels[3];
  int32_t removed[3];
  VerifySampledParams params;

  Row(SampledRule rule, std::vector<int64_t> links) : parents(std::move(links)) {
    for (int node = 0; node < 3; ++node) {
      logits.insert(logits.end(), {-INFINITY, 0});
      draft_probs.insert(draft_probs.end(), {0.5f, 0.5f});
    }
    params = {.rule = rule,
              .logits = logits.data(),
              .logits_type = FloatType::kFloat32,
              .logits_batch_stride = 6,
              .logits_node_stride = 2,
              .draft_probs = draft_probs.data(),
              .draft_batch_stride = 6,
              .draft_node_stride = 2,
              .tokens = {tokens.data(), 3, 1},
              .parents = {parents.data(), 3, 1},
              .root_positions = {zeros.data(), 1},
              .seeds = {zeros.data(), 1},
              .row_ids = {zeros.data(), 1},
              .batch = 1,
              .nodes = 3,
              .vocab = 2,
              .path = path.data(),
              .num_accepted = &num_accepted,
              .next_token = &next_token,
              .status = &status};
  }

  SampledWalk<WalkLevel*, int32_t*> walk() { return {params, 0, levels, removed}; }
};

constexpr NodeStatistics kUniformDraft{0, 1, 1};

void test_an_empty_residual_leaves_the_target() {
  Row row(SampledRule::kRecursive, {-1, 0, 0});
  auto walk = row.walk();
  walk.start();
  CHECK(walk.pass == Pass::kStatistics && walk.has_child());
  walk.on_statistics(kUniformDraft);
  CHECK(walk.pass == Pass::kMasses && walk.residual.draft_scale == 1 && walk.num_removed == 1);
  walk.on_masses({0, 0.5f});
  CHECK(walk.residual.draft_scale == 0);  // token 1 was tried against the target and has all of it
  CHECK(walk.pass == Pass::kStatistics && walk.node == 2 && walk.depth == 1);
}

void test_an_empty_residual_is_drawn_from_the_target() {
  Row row(SampledRule::kRejection, {-1, 0, 0});
  auto walk = row.walk();
  walk.start();
  walk.on_statistics(kUniformDraft);
  CHECK(walk.pass == Pass::kDraw && walk.residual.draft_scale == 1);
  walk.on_draw(kNoPick);
  CHECK(walk.pass == Pass::kDraw && walk.residual.draft_scale == 0);
  walk.on_draw(make_pick(0, 1));
  CHECK(walk.pass == Pass::kDone);
  walk.write_outputs();
  CHECK(row.num_accepted == 0 && row.next_token == 1 && row.path[0] == 0 && row.path[1] == -1);
}

// 0 / 0: if nothing is left to correct, the prefix is accepted.
void test_block_accepts_an_empty_residual() {
  Row row(SampledRule::kBlock, {-1, 0, 1});
  row.tokens = {0, 1, 0};
  row.params.tokens.data = row.tokens.data();
  auto walk = row.walk();
  walk.start();
  walk.on_statistics(kUniformDraft);
  CHECK(walk.pass == Pass::kStatistics && walk.node == 1);
  walk.on_statistics(kUniformDraft);
  CHECK(walk.pass == Pass::kMasses && walk.depth == 1 && walk.residual.target_scale == 1);
  walk.on_masses({0, 0});
  CHECK(walk.pass == Pass::kDraw && walk.depth == 1);
}

void test_exponential_bound() {
  CHECK(exponential_bound(0) == 0x1p-33f && exponential(0) == 0x1p-33f);
  for (uint64_t bits = 0; bits < uint64_t{1} << 32; bits += bits < 100'000 ? 1 : 4999) {
    const uint32_t word = static_cast<uint32_t>(bits);
    CHECK(exponential_bound(word) <= exponential(word));
    CHECK(uniform(word) > 0 && uniform(word) < 1);
  }
  CHECK(uniform(0) == 0x1p-24f && uniform(UINT32_MAX) == 1 - 0x1p-24f);
}

}  // namespace

void test_sampled_walk() {
  test_an_empty_residual_leaves_the_target();
  test_an_empty_residual_is_drawn_from_the_target();
  test_block_accepts_an_empty_residual();
  test_exponential_bound();
}

}  // namespace specdec
