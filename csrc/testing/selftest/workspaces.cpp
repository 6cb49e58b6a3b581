// The contents of a workspace before a launch have no effect, and nothing is written beyond its end.
#include <algorithm>
#include <bit>
#include <random>
#include <vector>

#include "check.h"
#include "specdec/launchers.h"

namespace specdec {
namespace {

constexpr size_t kGuardBytes = 64;

// The result of run(workspace, result) with workspaces of zeros and of ones, which are NaN.
template <typename Run>
std::vector<float> run_twice(int64_t workspace_bytes, size_t result_size, const Run& run) {
  std::vector<float> results[2];
  for (const bool ones : {false, true}) {
    const std::byte fill{static_cast<uint8_t>(ones ? 0xFF : 0)};
    std::vector<std::byte> workspace(workspace_bytes + kGuardBytes, fill);
    std::vector<float>& result = results[ones];
    result.resize(result_size);
    CHECK(run(workspace.data(), result.data()) == cudaSuccess);
    CHECK(std::all_of(workspace.end() - kGuardBytes, workspace.end(),
                      [&](std::byte each) { return each == fill; }));
  }
  const auto same_bits = [](float a, float b) {
    return std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b);
  };
  CHECK(std::equal(results[0].begin(), results[0].end(), results[1].begin(), same_bits));
  return results[0];
}

std::vector<float> random_floats(size_t count, std::mt19937& random) {
  std::normal_distribution<float> normal(0, 2);
  std::vector<float> values(count);
  for (float& value : values) value = normal(random);
  return values;
}

// Rows with an empty, a short and a long prefix and without active nodes, with and without a window.
void test_attention_workspace() {
  constexpr int64_t kBatch = 4, kHeads = 4, kKvHeads = 2, kNodes = 3, kDim = 64, kSlots = 700;
  std::mt19937 random(7);
  const std::vector<float> query = random_floats(kBatch * kHeads * kNodes * kDim, random);
  const std::vector<float> key = random_floats(kBatch * kKvHeads * kSlots * kDim, random);
  const std::vector<float> value = random_floats(key.size(), random);
  const std::vector<int64_t> ancestors = {1, 3, 5, 1, 3, 7, 1, 3, 5, 0, 0, 0};
  const std::vector<int64_t> starts(kBatch, 0), lengths = {0, 130, 690, 500}, blocks = lengths;
  const KvTensor keys{key.data(), kKvHeads * kSlots * kDim, kSlots * kDim, kDim};
  const KvTensor values{value.data(), keys.page_stride, keys.head_stride, keys.slot_stride};
  for (const int64_t window : {0, 5, 130, 300}) {
    TreeAttentionParams params{.query = query.data(),
                               .type = FloatType::kFloat32,
                               .query_batch_stride = kHeads * kNodes * kDim,
                               .query_head_stride = kNodes * kDim,
                               .query_node_stride = kDim,
                               .key = keys,
                               .value = values,
                               .page_table = {},
                               .num_pages = kBatch,
                               .page_size = kSlots,
                               .pages_per_row = 1,
                               .ancestors = ancestors.data(),
                               .ancestors_batch_stride = kNodes,
                               .ancestors_node_stride = 1,
                               .ancestors_word_stride = 1,
                               .prefix_starts = {starts.data(), 1},
                               .prefix_lengths = {lengths.data(), 1},
                               .block_starts = {blocks.data(), 1},
                               .batch = kBatch,
                               .heads = kHeads,
                               .kv_heads = kKvHeads,
                               .nodes = kNodes,
                               .words = 1,
                               .head_dim = kDim,
                               .scale = 0.125f,
                               .window = window,
                               .softcap = 0,
                               .output = nullptr};
    run_twice(tree_attention_workspace_bytes(params), query.size(),
              [&](void* workspace, float* out) {
                params.output = out;
                return launch_tree_attention(params, workspace, nullptr);
              });
  }
}

// A nucleus of all tokens, of the top k, top-k alone and min-p alone; a row with NaN.
void test_filter_workspace() {
  constexpr int64_t kRows = 5;
  std::mt19937 random(8);
  for (const int64_t vocab : {1, 130, 5003, 6144}) {
    std::vector<float> logits = random_floats(kRows * vocab, random);
    logits[kRows * vocab - 1] = NAN;
    const std::vector<float> temperature = {0.5f, 1, 1.5f, 1, 1};
    const std::vector<float> top_p = {0.9f, 0.5f, 1, 1, 0.5f}, min_p = {0, 0.01f, 0, 0.1f, 0.1f};
    const std::vector<int64_t> top_k = {0, 37, 50, 0, 3};
    SampleFilterParams params{.logits = logits.data(),
                              .logits_type = FloatType::kFloat32,
                              .logits_row_stride = vocab,
                              .temperature = {temperature.data(), 1},
                              .top_k = {top_k.data(), 1},
                              .top_p = {top_p.data(), 1},
                              .min_p = {min_p.data(), 1},
                              .rows = kRows,
                              .vocab = vocab,
                              .scores = nullptr};
    run_twice(sample_filter_workspace_bytes(params), logits.size(),
              [&](void* workspace, float* scores) {
                params.scores = scores;
                return launch_sample_filter(params, workspace, nullptr);
              });
  }
}

}  // namespace

void test_workspaces() {
  test_attention_workspace();
  test_filter_workspace();
}

}  // namespace specdec
