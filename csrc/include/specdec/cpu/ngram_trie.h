// What the two host implementations of n-gram drafting share: the op ngram_draft and the
// incremental NgramIndex. Rule: specdec/tree/ngram_draft.h. They differ in how they find occurrences.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "specdec/cpu/token_trie.h"
#include "specdec/tree/ngram_draft.h"

namespace specdec::cpu {

// Returns what is wrong with the limits of an n-gram's length, or nothing.
inline std::optional<std::string> find_invalid_ngram(int64_t min_ngram, int64_t max_ngram) {
  if (min_ngram < 1) return "min_ngram must be at least 1, got " + std::to_string(min_ngram);
  if (max_ngram < min_ngram) {
    return "max_ngram must be at least min_ngram = " + std::to_string(min_ngram) + ", got " +
           std::to_string(max_ngram);
  }
  if (max_ngram > kMaxNgram) {
    return "max_ngram must be at most " + std::to_string(kMaxNgram) +
           " (each length costs memory and time), got " + std::to_string(max_ngram);
  }
  return std::nullopt;
}

// Returns what is wrong with a number of branches, or nothing.
inline std::optional<std::string> find_invalid_branches(int64_t num_branches) {
  if (num_branches >= 1) return std::nullopt;
  return "num_branches must be at least 1 (1 drafts a chain), got " + std::to_string(num_branches);
}

// The trie of continuations of a text. `Text` is anything with [].
template <typename Text>
class NgramTrie {
 public:
  NgramTrie(const Text& text, int64_t size, int64_t max_tokens)
      : text_(text), size_(size), max_nodes_(max_tokens + 1), trie_(text[size - 1]) {}

  int64_t num_free() const { return max_nodes_ - trie_.num_nodes(); }
  int64_t num_branches() const { return num_branches_; }
  TokenTrie release() { return std::move(trie_); }

  // Adds the continuation of the occurrence that ends at `end` with up to half of the free nodes,
  // unless an existing branch equals it down to the leaf.
  void add_branch(int64_t end) {
    const Place place = descend(end);
    if (place.depth > 0 && trie_.is_leaf(place.node)) return;
    append(end, place, (num_free() + 1) / 2);
    ++num_branches_;
  }

  // Gives all free nodes to the branch that the occurrence made.
  void deepen(int64_t end) { append(end, descend(end), num_free()); }

 private:
  struct Place {
    int32_t node;
    int64_t depth;
  };

  // The endless text that follows an occurrence.
  int64_t continuation(int64_t end, int64_t depth) const {
    return text_[end + 1 + depth % (size_ - 1 - end)];
  }

  // The deepest node of the trie that the continuation reaches.
  Place descend(int64_t end) const {
    Place place{0, 0};
    for (;;) {
      const int32_t child = trie_.find_child(place.node, continuation(end, place.depth));
      if (child == TokenTrie::kNone) return place;
      place = {child, place.depth + 1};
    }
  }

  void append(int64_t end, Place place, int64_t count) {
    for (const int64_t stop = place.depth + count; place.depth < stop; ++place.depth) {
      place.node = trie_.add_child(place.node, continuation(end, place.depth));
    }
  }

  const Text& text_;
  int64_t size_;
  int64_t max_nodes_;
  int64_t num_branches_ = 0;
  TokenTrie trie_;
};

// Merges the continuations of occurrences of a text of `size` > 0 tokens. next_end() returns where
// the next occurrence ends, in the order of the rule, or nothing.
template <typename Text, typename NextEnd>
TokenTrie merge_continuations(const Text& text, int64_t size, int64_t num_tokens,
                              int64_t num_branches, const NextEnd& next_end) {
  NgramTrie<Text> trie(text, size, num_tokens);
  std::optional<int64_t> first;
  while (trie.num_free() > 0 && trie.num_branches() < num_branches) {
    const std::optional<int64_t> end = next_end();
    if (!end) break;
    if (!first) first = end;
    trie.add_branch(*end);
  }
  if (first) trie.deepen(*first);
  return trie.release();
}

}  // namespace specdec::cpu
