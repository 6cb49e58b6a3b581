// ngram_draft: drafts by copying what followed earlier occurrences of a row's last tokens (prompt
// lookup, Saxena 2023, but with the most recent occurrence instead of the first).
//
// Rule. Let the text be t[0..L). An occurrence ends at a position e < L-1; its length is the number
// n of last tokens that also end there, counted up to max_ngram, and at least min_ngram.
// Occurrences are visited in descending order of length, for one length the most recent first; at
// most kMaxOccurrences. The continuation of the occurrence that ends at e is t[e+1], t[e+2], ...;
// at the end of the text it goes on with its own draft (the overlapping copy of LZ77), so it never
// ends and repeats with period L-1-e. Continuations are merged into one trie:
//
//   The first continuation is branch 1. Every further continuation that leaves the trie before a
//   leaf adds a branch. Each branch adds at most half (rounded up) of the free nodes. After
//   num_branches branches, or when no node or occurrence is left, the remaining free nodes deepen
//   the first branch.
//
// Example: min_ngram = 1, max_ngram = 2, 5 nodes below the root, num_branches = 2
//
//   position  0 1 2 3 4 5 6 7
//   token     5 6 7 8 5 6 9 5       last 2 tokens (9 5): new. Last 1 token (5): ends at 4 and at 0
//
//   continuation of 4: 6 9 5 6 9 .. adds (5+1)/2 = 3 nodes: 6 9 5;  2 nodes are free
//   continuation of 0: 6 7 8 5 6 .. shares 6, adds (2+1)/2 = 1 node: 7;  1 node is free
//   the first branch gets the last node: 6
//
//   node      0 (root) 1 2 3 4 5
//   token     5        6 9 5 7 6
//   parent             0 1 2 1 3
#pragma once

#include "specdec/core/parallel.h"
#include "specdec/core/tree.h"

namespace specdec {

constexpr int64_t kMaxNgram = 64;        // bounds the cost of a comparison
constexpr int64_t kMaxOccurrences = 64;  // bounds the cost of a proposal

// The text of a row.
struct NgramText {
  View1<const int64_t> tokens;
  int64_t size;  // 0: inactive row
};

struct NgramDraftParams {
  View2<const int64_t> columns;     // [batch, capacity]
  View1<const int64_t> lengths;     // [batch] columns of the row up to the end of its text
  View1<const int64_t> num_padded;  // [batch] columns before its text; null: 0
  int64_t batch;
  int64_t capacity;      // 0 .. 2^31 - 1
  int64_t nodes;         // 1 .. kMaxNodes, the root included
  int64_t min_ngram;     // 1 .. max_ngram
  int64_t max_ngram;     // .. kMaxNgram
  int64_t num_branches;  // 1 ..

  int64_t* tokens;         // [batch, nodes] 0 where absent
  int64_t* parents;        // [batch, nodes] kInactiveParent where absent
  int64_t* match_lengths;  // [batch] length of the first occurrence; 0: none

  // A row is inactive unless 0 <= num_padded < length <= capacity.
  SPECDEC_HOST_DEVICE NgramText text(int64_t row) const {
    const int64_t first = num_padded.data == nullptr ? 0 : num_padded[row], end = lengths[row];
    if (first < 0 || first >= end || end > capacity) return {{nullptr, 0}, 0};
    return {{&columns(row, first), columns.column_stride}, end - first};
  }
  // How many occurrences can change the draft: further ones than the first only add branches.
  SPECDEC_HOST_DEVICE int64_t occurrences() const {
    return num_branches == 1 ? 1 : kMaxOccurrences;
  }
};

// The number of tokens, up to max_ngram, in which the text up to position `end` and the text up to
// position `last` > end agree, from their ends on.
SPECDEC_HOST_DEVICE int64_t match_length(const View1<const int64_t>& text, int64_t end,
                                         int64_t last, int64_t max_ngram) {
  const int64_t most = end + 1 < max_ngram ? end + 1 : max_ngram;
  int64_t length = 0;
  while (length < most && text[end - length] == text[last - length]) ++length;
  return length;
}

namespace cpu {
void ngram_draft(const NgramDraftParams& params, const ParallelFor& parallel_for);
}  // namespace cpu

}  // namespace specdec
