// draft_head on the CPU: a literal example, and rows that do not depend on each other, with memory
// of exactly the required size, for the sanitizers.
#include "specdec/draft_head.h"

#include <algorithm>
#include <cmath>
#include <deque>
#include <random>
#include <vector>

#include "specdec/cpu/panels.h"
#include "testing/selftest/check.h"

namespace specdec {
namespace {

using Ints = std::vector<int64_t>;
using Floats = std::vector<float>;

// A head and the memory of its weights.
struct Head {
  HeadWeights weights{};
  std::deque<Floats> memory;

  const float* add(Floats values) { return memory.emplace_back(std::move(values)).data(); }
};

// Row-major weights as panels.
Floats panels(const Floats& weights, int64_t outs, int64_t ins) {
  const int64_t num_panels = (outs + cpu::kPanelOuts - 1) / cpu::kPanelOuts;
  Floats values(num_panels * ins * cpu::kPanelOuts);
  for (int64_t out = 0; out < outs; ++out) {
    for (int64_t i = 0; i < ins; ++i) {
      values[(out / cpu::kPanelOuts * ins + i) * cpu::kPanelOuts + out % cpu::kPanelOuts] =
          weights[out * ins + i];
    }
  }
  return values;
}

// Row-major weights as panels of codes, which take whole float32.
Floats code_panels(const Floats& weights, int64_t outs, int64_t ins) {
  Floats memory(cpu::panel_bytes(outs, ins, 1) / sizeof(float));
  auto* codes = reinterpret_cast<int8_t*>(memory.data());
  for (int64_t out = 0; out < outs; ++out) {
    int8_t* panel = codes + cpu::panel_bytes(out / cpu::kPanelOuts * cpu::kPanelOuts, ins, 1);
    for (int64_t i = 0; i < ins; ++i) {
      const float code = std::clamp(40.0f * weights[out * ins + i], -127.0f, 127.0f);
      panel[(i / 4 * cpu::kPanelOuts + out % cpu::kPanelOuts) * 4 + i % 4] =
          static_cast<int8_t>(code);
    }
  }
  return memory;
}

struct Draft {
  Ints tokens, parents;
  Floats scores;
  bool operator==(const Draft&) const = default;
};

constexpr int64_t kCapacity = 24;

// Runs rows with empty caches; row r reads counts[r] of the new elements.
Draft run(const HeadWeights& head, DraftShape shape, const Ints& choices, const Ints& tokens,
          const Floats& features, const Ints& counts) {
  const int64_t rows = static_cast<int64_t>(counts.size());
  const int64_t num_new = static_cast<int64_t>(tokens.size()) / rows, half = head.head_dim / 2;
  shape.choices = {choices.data(), 2, 1};
  shape.num_choices = static_cast<int64_t>(choices.size()) / 2;
  Floats cosines, sines;
  for (int64_t i = 0; i < kCapacity * half; ++i) {
    const double angle = static_cast<double>(i / half) / (1 + i % half);
    cosines.push_back(static_cast<float>(std::cos(angle)));
    sines.push_back(static_cast<float>(std::sin(angle)));
  }
  const int64_t row_size = head.kv_heads * kCapacity * head.head_dim;
  Floats keys(std::ssize(head.layers) * rows * row_size, NAN), values = keys;
  const auto cache = [&](Floats& data) -> HeadCache {
    return {data.data(), rows * row_size, row_size, kCapacity * head.head_dim, head.head_dim};
  };
  const Ints zeros(rows, 0), roots(rows, 1);
  Draft draft{Ints(rows * shape.nodes), Ints(rows * shape.nodes), Floats(rows * shape.nodes)};
  const auto problem = cpu::draft_head({.head = head,
                                        .shape = shape,
                                        .cosines = {cosines.data(), half, 1},
                                        .sines = {sines.data(), half, 1},
                                        .rotary_half = half,
                                        .keys = cache(keys),
                                        .values = cache(values),
                                        .capacity = kCapacity,
                                        .tokens = {tokens.data(), num_new, 1},
                                        .features = features.data(),
                                        .features_row_stride = num_new * head.feature_width,
                                        .features_item_stride = head.feature_width,
                                        .counts = {counts.data(), 1},
                                        .lengths = {zeros.data(), 1},
                                        .positions = {zeros.data(), 1},
                                        .roots = {roots.data(), 1},
                                        .rows = rows,
                                        .tree_tokens = draft.tokens.data(),
                                        .tree_parents = draft.parents.data(),
                                        .tree_scores = draft.scores.data()},
                                       kSerial);
  CHECK(!problem);
  return draft;
}

// A head with all kinds of weights, drawn from `next`: EAGLE-1 with one layer or EAGLE-3 with two; matrices
// may have codes.
template <typename Next>
Head make_head(bool is_eagle1, int64_t hidden, int64_t vocab, bool has_codes, const Next& next) {
  Head head;
  HeadWeights& w = head.weights;
  const auto numbers = [&](int64_t count) {
    Floats values(count);
    for (float& value : values) value = next();
    return values;
  };
  const auto vector = [&](int64_t count) { return head.add(numbers(count)); };
  const auto matrix = [&](int64_t outs, int64_t ins) -> HeadMatrix {
    const Floats weights = numbers(outs * ins);
    if (!has_codes) return {head.add(panels(weights, outs, ins)), nullptr, outs, ins};
    return {head.add(code_panels(weights, outs, ins)), nullptr, outs, ins, false, vector(outs)};
  };
  w.type = FloatType::kFloat32;
  w.feeds_fc = is_eagle1;
  w.hidden = hidden;
  w.intermediate = 5;
  w.heads = 2;
  w.kv_heads = 1;
  w.head_dim = 4;
  w.vocab = w.draft_vocab = vocab;
  w.feature_width = hidden;
  w.num_features = 1;
  w.mask_token = -1;
  w.eps = 1e-5f;
  w.logit_scale = 1.0f;
  w.embedding = vector(vocab * hidden);
  w.lm_head = matrix(vocab, hidden);
  w.fc = matrix(hidden, is_eagle1 ? 2 * hidden : hidden);
  w.hidden_norm = is_eagle1 ? nullptr : vector(hidden);
  w.norm = is_eagle1 ? nullptr : vector(hidden);
  for (int64_t i = 0; i < (is_eagle1 ? 1 : 2); ++i) {
    const int64_t attended = w.attended(i == 0);
    w.layers.push_back({.input_norm = is_eagle1 ? nullptr : vector(hidden),
                        .query = matrix(8, attended),
                        .key_value = matrix(8, attended),
                        .query_norm = vector(4),
                        .key_norm = nullptr,
                        .output = matrix(hidden, 8),
                        .post_norm = vector(hidden),
                        .gate_up = matrix(10, hidden),
                        .down = matrix(hidden, 5),
                        .window = 3});
  }
  return head;
}

// A head that uses the last token only: token t is the unit vector t, fc keeps it, the layer adds
// nothing, and lm_head has the probabilities of the next token.
void test_worked_example() {
  Head head = make_head(true, 4, 4, false, [] { return 0.0f; });
  const float probabilities[4][4] = {
      {0.1f, 0.9f, 0, 0}, {0, 0.3f, 0.6f, 0.1f}, {0.02f, 0, 0.08f, 0.9f}, {1, 0, 0, 0}};
  Floats embedding(16), lm_head(16), fc(32);
  for (int64_t token = 0; token < 4; ++token) {
    embedding[token * 4 + token] = fc[token * 8 + token] = 1.0f;
    for (int64_t next = 0; next < 4; ++next) {
      const float probability = probabilities[token][next];
      lm_head[next * 4 + token] = probability > 0 ? std::log(probability) : -200.0f;
    }
  }
  head.weights.embedding = head.add(std::move(embedding));
  head.weights.lm_head.weight = head.add(panels(lm_head, 4, 4));
  head.weights.fc.weight = head.add(panels(fc, 4, 8));

  // The first row has read token 0; the second row reads nothing.
  const Draft draft = run(head.weights, {{}, 0, 3, 2, 6}, {}, {0, 3}, Floats(8), {1, 0});
  CHECK((draft.tokens == Ints{1, 1, 2, 1, 3, 2, 1, 0, 0, 0, 0, 0}));
  CHECK((draft.parents == Ints{-1, 0, 1, 1, 2, 3, -1, -2, -2, -2, -2, -2}));
  const float expected[] = {1.0f, 0.9f, 0.54f, 0.27f, 0.486f, 0.162f};
  for (int64_t node = 0; node < 6; ++node) {
    CHECK(std::fabs(std::exp(draft.scores[node]) - expected[node]) < 1e-5f);
  }
}

void test_rows_are_independent(bool has_codes) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  const Head head = make_head(false, 7, 401, has_codes, [&] { return normal(random); });
  constexpr int64_t kRows = 3, kNew = 5;
  const Ints counts{5, 0, 3};
  Ints tokens;
  Floats features;
  for (int64_t i = 0; i < kRows * kNew; ++i) tokens.push_back(random() % 401);
  for (int64_t i = 0; i < kRows * kNew * 7; ++i) features.push_back(normal(random));
  for (const Ints& choices : {Ints{}, Ints{0, 0, 1, 0, 2, 0}, Ints{0, 0, 0, 2, 1, 0, 1, 1, 4, 2}}) {
    const DraftShape shape{{}, 0, 3, 3, 8};
    const Draft together = run(head.weights, shape, choices, tokens, features, counts);
    for (int64_t row = 0; row < kRows; ++row) {
      const Ints own_tokens(tokens.begin() + row * kNew, tokens.begin() + row * kNew + counts[row]);
      if (own_tokens.empty()) continue;
      const Floats own_features(features.begin() + row * kNew * 7,
                                features.begin() + (row * kNew + counts[row]) * 7);
      const Draft alone =
          run(head.weights, shape, choices, own_tokens, own_features, {counts[row]});
      for (int64_t node = 0; node < shape.nodes; ++node) {
        const int64_t i = row * shape.nodes + node;
        CHECK(together.tokens[i] == alone.tokens[node]);
        CHECK(together.parents[i] == alone.parents[node]);
        CHECK(together.scores[i] == alone.scores[node]);
      }
    }
  }
}

}  // namespace

void test_draft_head() {
  test_worked_example();
  test_rows_are_independent(false);
  test_rows_are_independent(true);
}

}  // namespace specdec
