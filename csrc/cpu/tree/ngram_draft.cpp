// CPU op ngram_draft: rows in parallel. One scan from the end of a row's text keeps the latest ends
// of each length; it stops when enough occurrences of the largest length are known.
#include "specdec/tree/ngram_draft.h"

#include <vector>

#include "specdec/cpu/ngram_trie.h"

namespace specdec::cpu {
namespace {

struct Occurrences {
  std::vector<int64_t> ends;  // in the order of the rule
  int64_t length;             // of the first
};

Occurrences find_occurrences(const NgramDraftParams& params, const View1<const int64_t>& text,
                             int64_t last) {
  const size_t wanted = static_cast<size_t>(params.occurrences());
  std::vector<int64_t> ends_of[kMaxNgram + 1];  // by length, latest first
  const std::vector<int64_t>& longest = ends_of[params.max_ngram];
  for (int64_t end = last - 1; end >= 0 && longest.size() < wanted; --end) {
    if (text[end] != text[last]) continue;
    const int64_t length = match_length(text, end, last, params.max_ngram);
    if (ends_of[length].size() < wanted) ends_of[length].push_back(end);
  }
  Occurrences found{{}, 0};
  for (int64_t length = params.max_ngram; length >= params.min_ngram; --length) {
    if (found.ends.empty() && !ends_of[length].empty()) found.length = length;
    for (const int64_t end : ends_of[length]) {
      if (found.ends.size() < wanted) found.ends.push_back(end);
    }
  }
  return found;
}

void draft_row(const NgramDraftParams& params, int64_t row) {
  int64_t* tokens = params.tokens + row * params.nodes;
  int64_t* parents = params.parents + row * params.nodes;
  const auto [text, size] = params.text(row);
  params.match_lengths[row] = 0;
  if (size == 0) return write_inactive_row(params.nodes, tokens, parents);
  const auto [ends, length] = find_occurrences(params, text, size - 1);
  size_t num_visited = 0;
  merge_continuations(text, size, params.nodes - 1, params.num_branches,
                      [&]() -> std::optional<int64_t> {
                        if (num_visited == ends.size()) return std::nullopt;
                        return ends[num_visited++];
                      })
      .write(params.nodes, tokens, parents);
  params.match_lengths[row] = length;
}

}  // namespace

void ngram_draft(const NgramDraftParams& params, const ParallelFor& parallel_for) {
  constexpr int64_t kGrainTokens = 1 << 16;
  parallel_for(params.batch, kGrainTokens / (params.capacity + params.nodes) + 1,
               [&](int64_t begin, int64_t end) {
                 for (int64_t row = begin; row < end; ++row) draft_row(params, row);
               });
}

}  // namespace specdec::cpu
