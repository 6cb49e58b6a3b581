// CPU op adjust_logits: one task per node. What the nodes of a row share is found once per row: the
// distinct tokens of its text, and the columns that may complete an n-gram.
//
// Loops over the vocabulary are plain, for compilers to vectorise, and are compiled for several
// instruction sets. All give the same bits, because every operation is elementwise.
#include "specdec/adjust_logits.h"

#include <vector>

#include "specdec/cpu/isa.h"

namespace specdec::cpu {
namespace {

constexpr int64_t kGrainTokens = 32768;  // below this, waking a thread costs more than it saves

// A set of tokens of the vocabulary.
class TokenSet {
 public:
  explicit TokenSet(int64_t vocab) : words_((vocab + 63) / 64) {}

  bool contains(int64_t token) const { return words_[token / 64] >> (token % 64) & 1; }
  void add(int64_t token) { words_[token / 64] |= uint64_t{1} << (token % 64); }
  void remove(int64_t token) { words_[token / 64] &= ~(uint64_t{1} << (token % 64)); }

 private:
  std::vector<uint64_t> words_;
};

// The tokens of a row, for TextEnd.
struct RowText {
  const AdjustLogitsParams& params;
  int64_t row;

  int64_t token(int64_t node) const { return params.tokens(row, node); }
  int64_t parent(int64_t node) const { return params.parents(row, node); }
  int64_t column(int64_t i) const { return params.text(row, i); }
};

bool has(const AdjustLogitsParams& params, Adjustment kind) {
  for (int64_t i = 0; i < params.count; ++i) {
    if (params.adjustments(i, 0) == static_cast<int64_t>(kind)) return true;
  }
  return false;
}

// What the nodes of a row share.
struct RowPlan {
  std::vector<int64_t> depths;     // of each node, -1: inactive
  std::vector<int64_t> penalised;  // distinct tokens of the text that the penalty reads
  std::optional<TokenSet> is_penalised;
  std::vector<int64_t> candidates;  // columns whose token may complete an n-gram of a node

  RowPlan() = default;
  RowPlan(const AdjustLogitsParams& params, int64_t row) : depths(params.nodes, -1) {
    const ParentsRow parents{&params.parents(row, 0), params.parents.column_stride};
    for (int64_t node = 0; node < params.nodes; ++node) {
      if (!parents.link_is_legal(node)) continue;
      const int64_t above = node == 0 ? -1 : depths[parents[node]];
      if (node == 0 || above >= 0) depths[node] = above + 1;
    }
    if (depths[0] < 0) return;  // an inactive row, whose other arguments may be anything
    if (has(params, Adjustment::kPenalise)) find_penalised(params, row);
    if (has(params, Adjustment::kBan)) find_candidates(params, row);
  }

 private:
  void find_penalised(const AdjustLogitsParams& params, int64_t row) {
    is_penalised.emplace(params.vocab);
    for (int64_t i = std::max<int64_t>(params.skips[row], 0); i < params.lengths[row]; ++i) {
      const int64_t token = params.text(row, i);
      if (token < 0 || token >= params.vocab || is_penalised->contains(token)) continue;
      is_penalised->add(token);
      penalised.push_back(token);
    }
  }

  // The columns whose token before them is the last one of a node, as far as the token's low bits
  // tell. All columns, if an n-gram is one token.
  void find_candidates(const AdjustLogitsParams& params, int64_t row) {
    constexpr int64_t kLowBits = 1 << 12;
    const int64_t size = params.ngram_sizes[row], length = params.lengths[row];
    if (size < 1) return;
    TokenSet lasts(kLowBits);
    if (length > 0) lasts.add(params.text(row, length - 1) & (kLowBits - 1));
    for (int64_t node = 1; node < params.nodes; ++node) {
      if (depths[node] > 0) lasts.add(params.tokens(row, node) & (kLowBits - 1));
    }
    for (int64_t i = size - 1; i < length; ++i) {
      if (size == 1 || lasts.contains(params.text(row, i - 1) & (kLowBits - 1))) {
        candidates.push_back(i);
      }
    }
  }
};

template <typename T>
SPECDEC_HOST_DEVICE void widen_row(const T* logits, int64_t vocab, float* scores) {
  for (int64_t i = 0; i < vocab; ++i) scores[i] = to_float(logits[i]);
}

SPECDEC_HOST_DEVICE void add_row(const float* table, int64_t vocab, float* scores) {
  for (int64_t i = 0; i < vocab; ++i) scores[i] = exact_add(scores[i], table[i]);
}

SPECDEC_HOST_DEVICE void overwrite_row(const float* table, int64_t vocab, float* scores) {
  for (int64_t i = 0; i < vocab; ++i) scores[i] = overwritten(scores[i], table[i]);
}

// The adjustments of one node.
class Node {
 public:
  Node(const AdjustLogitsParams& params, const RowPlan& plan, int64_t row, int64_t node,
       TokenSet& seen)
      : params_(params),
        plan_(plan),
        text_{params, row},
        row_(row),
        node_(node),
        seen_(seen),
        scores_(params.scores + (row * params.nodes + node) * params.vocab) {}

  // Visits (token, its column, the place before it) on the path, from the node up.
  template <typename Visit>
  void for_each_on_path(const Visit& visit) const {
    int64_t column = params_.lengths[row_] + plan_.depths[node_];
    for (int64_t above = node_; above > 0; above = text_.parent(above)) {
      visit(text_.token(above), --column, TextEnd{text_.parent(above), params_.lengths[row_]});
    }
  }

  void penalise() const {
    const float penalty = params_.penalties[row_];
    for (const int64_t token : plan_.penalised) scores_[token] = penalised(scores_[token], penalty);
    for_each_on_path([&](int64_t token, int64_t column, TextEnd) {
      if (!is_in_vocab(token) || column < params_.skips[row_]) return;
      if (plan_.is_penalised->contains(token) || seen_.contains(token)) return;
      seen_.add(token);
      scores_[token] = penalised(scores_[token], penalty);
    });
    for_each_on_path([&](int64_t token, int64_t, TextEnd) {
      if (is_in_vocab(token)) seen_.remove(token);
    });
  }

  void ban() const {
    const int64_t size = params_.ngram_sizes[row_];
    if (size < 1) return;
    const TextEnd end{node_, params_.lengths[row_]};
    const auto ban_repeated = [&](int64_t token, TextEnd before) {
      if (is_in_vocab(token) && same_endings(text_, before, end, size - 1)) {
        scores_[token] = kRemovedScore;
      }
    };
    for (const int64_t i : plan_.candidates) ban_repeated(text_.column(i), TextEnd{0, i});
    for_each_on_path([&](int64_t token, int64_t column, TextEnd before) {
      if (column >= size - 1) ban_repeated(token, before);
    });
  }

  void adjust(CpuIsa isa) const {
    if (plan_.depths[node_] < 0) return;
    const int64_t columns = params_.lengths[row_] + plan_.depths[node_];
    for (int64_t i = 0; i < params_.count; ++i) {
      const float* table = params_.tables + i * params_.table_stride;
      switch (adjustment_at(params_, i, columns)) {
        case Adjustment::kAdd:
          build_for<add_row>(isa)(table, params_.vocab, scores_);
          break;
        case Adjustment::kOverwrite:
          build_for<overwrite_row>(isa)(table, params_.vocab, scores_);
          break;
        case Adjustment::kPenalise:
          penalise();
          break;
        case Adjustment::kBan:
          ban();
          break;
        default:
          break;
      }
    }
  }

 private:
  bool is_in_vocab(int64_t token) const { return token >= 0 && token < params_.vocab; }

  const AdjustLogitsParams& params_;
  const RowPlan& plan_;
  RowText text_;
  int64_t row_, node_;
  TokenSet& seen_;  // empty between calls
  float* scores_;
};

std::string problem(const char* name, int64_t index, const std::string& value,
                    const std::string& expected) {
  return std::string(name) + "[" + std::to_string(index) + "] = " + value + "; expected " +
         expected;
}

}  // namespace

std::optional<std::string> find_invalid_argument(const AdjustLogitsParams& params) {
  for (int64_t row = 0; row < params.batch; ++row) {
    if (params.parents(row, 0) != kRootParent) continue;  // inactive
    const int64_t length = params.lengths[row];
    if (length < 0 || length > params.columns) {
      return problem("lengths", row, std::to_string(length),
                     "a number of columns of text, 0 to " + std::to_string(params.columns));
    }
    if (!(params.penalties[row] > 0.0f)) {
      return problem("penalties", row, std::to_string(params.penalties[row]),
                     "a positive number, 1 is off");
    }
    if (params.ngram_sizes[row] < 0) {
      return problem("ngram_sizes", row, std::to_string(params.ngram_sizes[row]),
                     "0 (off) or more");
    }
  }
  for (int64_t i = 0; i < params.count; ++i) {
    const int64_t kind = params.adjustments(i, 0), kinds = static_cast<int64_t>(Adjustment::kCount);
    if (kind < 0 || kind >= kinds) {
      return problem("adjustments", i, "kind " + std::to_string(kind),
                     "a kind of 0 to " + std::to_string(kinds - 1));
    }
  }
  return std::nullopt;
}

void adjust_logits(const AdjustLogitsParams& params, const ParallelFor& parallel_for) {
  const CpuIsa isa = cpu_isa();
  std::vector<RowPlan> plans(params.batch);
  const int64_t row_grain = std::max<int64_t>(1, kGrainTokens / (params.columns + params.nodes));
  parallel_for(params.batch, row_grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) plans[row] = RowPlan(params, row);
  });
  const int64_t grain = std::max<int64_t>(1, kGrainTokens / params.vocab);
  with_float_type(params.logits_type, [&]<typename T>(T) {
    const auto widen = build_for<widen_row<T>>(isa);
    parallel_for(params.batch * params.nodes, grain, [&](int64_t begin, int64_t end) {
      TokenSet seen(params.vocab);
      for (int64_t i = begin; i < end; ++i) {
        const int64_t row = i / params.nodes, node = i % params.nodes;
        const T* logits = static_cast<const T*>(params.logits) + row * params.logits_batch_stride +
                          node * params.logits_node_stride;
        widen(logits, params.vocab, params.scores + i * params.vocab);
        Node(params, plans[row], row, node, seen).adjust(isa);
      }
    });
  });
}

}  // namespace specdec::cpu
