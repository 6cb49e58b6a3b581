// Suffix decoding (Oliaro et al. 2024): drafts what followed the last tokens most often, in the
// text of the request and in past outputs. Specification: specdec_ext/reference/suffix.py.
#pragma once

#include <cstdint>
#include <deque>
#include <shared_mutex>
#include <vector>

#include "suffix_index.h"

namespace specdec {

struct SuffixRule {
  int64_t num_draft_tokens;  // upper bound
  int64_t max_match;         // most tokens to look up
  double factor;             // a match of m tokens drafts at most factor * m + offset
  double offset;
  double min_probability;  // of the path to a drafted token, by counts
  bool tree;               // all likely continuations, not only the most frequent one of each node

  // Bounds the number of continuations per node.
  static constexpr double kMinProbability = 0.01;

  // Throws std::invalid_argument for a rule that drafts nothing or too much.
  void check() const;
};

// The draft nodes of one tree without the root: entry i is tree node i + 1.
struct SuffixDraft {
  std::vector<int64_t> tokens;
  std::vector<int64_t> parents;  // 0 is the root; parents[i] <= i
  int64_t match_length = 0;
  double score = 0;  // sum of the tokens' probabilities, the expected number of accepted tokens
};

// Past outputs, oldest first. The oldest are removed when there is no room. Thread-safe. After
// std::bad_alloc a history can only be destroyed.
class SuffixHistory {
 public:
  // Throws std::invalid_argument unless 2 <= max_tokens <= SuffixIndex::kMaxSize.
  explicit SuffixHistory(int64_t max_tokens);

  // Adds outputs, of which the i-th has counts[i] tokens. Only the end of an output with max_tokens
  // or more is kept. Throws std::invalid_argument as SuffixIndex::append does; then nothing is
  // added.
  void add(const TokenView& tokens, const std::vector<int64_t>& counts);

  // Copies all tokens in order, and how many belong to each output.
  void copy(std::vector<int64_t>* tokens, std::vector<int64_t>* counts) const;

  // Returns the better one of `best` and the draft from past outputs.
  SuffixDraft draft(const SuffixIndex& request, const SuffixRule& rule, SuffixDraft best) const;

  int64_t max_tokens() const { return max_tokens_; }
  int64_t num_tokens() const;
  int64_t num_outputs() const;
  int64_t memory_bytes() const;
  // An upper bound of all tokens in the history, which evictions don't lower; -1 if it is empty.
  int64_t largest_token() const;

 private:
  void make_room(int64_t size);

  int64_t max_tokens_;
  mutable std::shared_mutex mutex_;
  SuffixIndex index_;
  std::deque<int64_t> counts_;
  int64_t largest_token_ = -1;
};

// Returns the better one of `best` and the draft that `index` gives for the last tokens of
// `request`.
SuffixDraft draft_suffix(const SuffixIndex& index, const SuffixIndex& request,
                         const SuffixRule& rule, SuffixDraft best);

}  // namespace specdec
