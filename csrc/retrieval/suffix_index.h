// The sorted suffixes of a growing text: how often any string occurred, and what followed it.
//
// The text is a sequence of documents, each ended by kEnd; the last one may still be open. A string
// occurs inside a document, never across a kEnd. An occurrence is *followed* if a token comes after
// it.
//
// Structure. The positions of all tokens, sorted by the kDepth tokens that begin there, form a few
// sorted runs over consecutive parts of the text (log-structured merge, O'Neil et al. 1996; each
// run is a suffix array, Manber and Myers 1990, cut at kDepth). In a run the occurrences of a
// string are neighbours, found by binary search, and among them those with the same next token are
// neighbours too. A run is merged into the previous one as soon as that one is less than
// kMergeRatio times as long. The last positions of an open document, whose kDepth tokens are not
// complete yet, are in no run and are searched one by one.
//
// Example (kDepth 3, one run, $ is kEnd):
//
//   position  0 1 2 3 4 5 6        order      3    0    4    1      5    2
//   token     a b c a b c $        begins     abc  abc  bc$  bca    c$   cab
//
//   "b" occurs at 4 and 1, which are neighbours; both are followed by c. "c" occurs at 5 and 2 and
//   is followed at 2 only.
//
// Cost. Text and order take 4 bytes per token each, at most 10 in all with unused capacity; a merge
// temporarily takes up to 4 more. Appending: log(size) merge steps per token, amortised.
// Occurrences of a string: one binary search per run.
//
// Not thread-safe: while one thread appends, no other may use the index.
#pragma once

#include <cstdint>
#include <vector>

#include "tokens.h"

namespace specdec {

// The followed occurrences of one string.
struct Occurrences {
  struct Range {
    int32_t begin, end;  // in the order of the index
  };

  int32_t length = 0;           // length of the string
  int64_t count = 0;            // number of occurrences
  std::vector<Range> sorted;    // not empty, at most one per run
  std::vector<int32_t> recent;  // positions that are in no run yet
};

// A token that follows occurrences of a string.
struct Continuation {
  int32_t token;
  int64_t count;   // number of occurrences of the string with the token appended
  int32_t latest;  // where the last of these begins; 0 if there are more than kMaxTied
};

class SuffixIndex {
 public:
  static constexpr int32_t kDepth = 64;
  static constexpr int32_t kEnd = -1;
  static constexpr int64_t kMaxSize = int64_t{1} << 30;
  // The latest of equally frequent continuations is determined for up to this many occurrences.
  static constexpr int64_t kMaxTied = 16;

  // Appends tokens to the open document. Throws std::invalid_argument for an id outside [0,
  // kMaxTokenId] and std::length_error beyond kMaxSize; then nothing is appended.
  void append(const TokenView& tokens);

  // Ends the open document. The next tokens begin a new one.
  void end_document();

  // Removes the first `count` entries of the text, which must be whole documents.
  void drop_front(int64_t count);

  // Occurrences of the last 1, 2, ... tokens of text[0..length), up to max_length tokens (at most
  // kDepth - 1) or to the longest string that occurs.
  std::vector<Occurrences> find_suffixes(const int32_t* text, int64_t length,
                                         int64_t max_length) const;

  // The tokens that follow the occurrences of a string of fewer than kDepth tokens: all that do so
  // at least min_count times, and perhaps others. Order: most frequent first, then latest, then
  // smallest.
  std::vector<Continuation> continuations(const Occurrences& string, int64_t min_count) const;

  // The occurrences of the string with `token` appended.
  Occurrences appended(const Occurrences& string, int32_t token) const;

  const std::vector<int32_t>& text() const { return text_; }
  int64_t size() const { return static_cast<int64_t>(text_.size()); }
  int64_t num_runs() const { return static_cast<int64_t>(run_begins_.size()); }
  // Bytes allocated, unused capacity included.
  int64_t memory_bytes() const;

 private:
  using Range = Occurrences::Range;

  // The token `offset` after the position that is i-th in the order.
  int32_t token_at(int32_t i, int32_t offset) const { return text_[order_[i] + offset]; }
  Range run(size_t index) const;
  Range find_string(Range run, const int32_t* string, int32_t length) const;
  Range find_token(Range range, int32_t offset, int32_t token) const;
  bool add_followed(Range range, Occurrences* string) const;
  Continuation count_continuation(const Occurrences& string, int32_t token) const;
  bool before(int32_t a, int32_t b) const;
  void sort_until(int64_t end);
  void merge_runs();

  std::vector<int32_t> text_;
  std::vector<int32_t> order_;       // positions < sorted_, run after run
  std::vector<int32_t> run_begins_;  // in order_
  int64_t sorted_ = 0;
};

}  // namespace specdec
