// Incremental n-gram index over the tokens of one sequence. It drafts by the rule of the op
// ngram_draft (specdec/tree/ngram_draft.h), without searching the text.
//
// Structure. One NgramTable per n maps each distinct n-gram to the position where it last ended,
// and links every position to the previous one where the same n-gram ended. When a token is
// appended, a hit in the table is verified against the tokens, so links are exact: hash collisions
// cost time but never give a wrong draft, and propose() computes no hashes.
//
// Cost. extend: max_ngram hash steps and one table operation per n (amortised) for each token.
// propose: at most kMaxOccurrences links per n and as many walks down the trie, for any length of
// the text. Memory: at most 8 + 24 * (max_ngram - min_ngram + 1) bytes per token, plus a constant.
//
// Not thread-safe: while one thread extends an index, no other may use it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "specdec/cpu/ngram_trie.h"
#include "tokens.h"

namespace specdec {

// Largest draft: nodes are numbered in 32 bits, the root included.
inline constexpr int64_t kMaxDraftTokens = INT32_MAX - 1;

// Throws std::invalid_argument unless 0 <= num_tokens <= kMaxDraftTokens and num_branches >= 1.
void check_draft_size(int64_t num_tokens, int64_t num_branches);

// All occurrences of the n-grams of one length.
class NgramTable {
 public:
  static constexpr int32_t kNone = -1;

  NgramTable(int64_t length, uint64_t hash_multiplier);

  // Adds the n-gram that ends at the last of `tokens`, which are all tokens of the text so far (at
  // least `length`). `hash` is its ngram_hash. Must be called once for every token.
  void append(const std::vector<int32_t>& tokens, uint64_t hash);

  // The last position before `end` where the same n-gram ended, or kNone.
  int32_t previous(int32_t end) const {
    const int64_t index = end - length_ + 1;
    return index < 0 ? kNone : previous_[index];
  }

  int64_t length() const { return length_; }
  int64_t memory_bytes() const;

 private:
  size_t home(uint64_t hash) const { return hash >> hash_shift_; }
  size_t next(size_t slot) const { return (slot + 1) & (slots_.size() - 1); }
  void grow(const std::vector<int32_t>& tokens);

  int64_t length_;
  uint64_t hash_multiplier_;
  // Open addressing, linear probing, at most half full: the last end position of each distinct
  // n-gram, or kNone. The size is 2^(64 - hash_shift_).
  std::vector<int32_t> slots_;
  int hash_shift_;
  size_t num_used_ = 0;
  std::vector<int32_t> previous_;  // [end - length + 1]
};

class NgramIndex {
 public:
  // 2^64 / golden ratio, odd. Tests pass other multipliers: with 0 all n-grams collide.
  static constexpr uint64_t kHashMultiplier = 0x9E3779B97F4A7C15;

  // Throws std::invalid_argument unless 1 <= min_ngram <= max_ngram <= kMaxNgram.
  NgramIndex(int64_t min_ngram, int64_t max_ngram, uint64_t hash_multiplier = kHashMultiplier);

  // Appends tokens. Throws std::invalid_argument for an id outside [0, kMaxTokenId] and
  // std::length_error for more than 2^31 - 1 tokens in total; in both cases nothing is appended.
  // After std::bad_alloc the index can only be destroyed.
  void extend(const TokenView& tokens);

  // Returns the last token, or 0 if there is none, as the root of at most num_tokens draft nodes on
  // at most num_branches paths; of none if the last min_ngram tokens did not occur before. Throws
  // as check_draft_size does.
  cpu::TokenTrie propose(int64_t num_tokens, int64_t num_branches) const;

  // The largest n in [min_ngram, max_ngram] whose last n tokens occurred before, or 0.
  int64_t match_length() const;

  int64_t size() const { return static_cast<int64_t>(tokens_.size()); }
  // Bytes allocated, unused capacity included.
  int64_t memory_bytes() const;

 private:
  uint64_t hash_multiplier_;
  std::vector<int32_t> tokens_;
  std::vector<NgramTable> tables_;  // n = min_ngram .. max_ngram
};

}  // namespace specdec
