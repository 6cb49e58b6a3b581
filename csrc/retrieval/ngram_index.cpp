#include "ngram_index.h"

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

namespace specdec {
namespace {

constexpr int kInitialHashShift = 60;  // 16 slots

// The hash of an n-gram reads its tokens from the last to the first. So one computation gives the
// hashes of all n-grams that end at a position. Tables use the high bits.
uint64_t hash_step(uint64_t hash, int32_t token, uint64_t multiplier) {
  hash = (hash ^ static_cast<uint32_t>(token)) * multiplier;
  return hash ^ (hash >> 32);
}

uint64_t ngram_hash(const std::vector<int32_t>& tokens, int32_t end, int64_t length,
                    uint64_t multiplier) {
  uint64_t hash = 0;
  for (int64_t i = end; i > end - length; --i) hash = hash_step(hash, tokens[i], multiplier);
  return hash;
}

// The endless text that follows the occurrence that ends at `end`.
class Continuation {
 public:
  Continuation(const std::vector<int32_t>& tokens, int32_t end)
      : first_(tokens.data() + end + 1), period_(static_cast<int64_t>(tokens.size()) - 1 - end) {}

  int32_t operator[](int64_t depth) const { return first_[depth % period_]; }

 private:
  const int32_t* first_;
  int64_t period_;
};

// Enumerates the end positions of earlier occurrences of the last tokens, in the order of the rule.
class OccurrenceScan {
 public:
  OccurrenceScan(const std::vector<int32_t>& tokens, const std::vector<NgramTable>& tables)
      : tokens_(tokens),
        tables_(tables),
        last_(static_cast<int32_t>(tokens.size()) - 1),
        end_(last_),
        table_(static_cast<int64_t>(tables.size()) - 1) {}

  std::optional<int32_t> next() {
    while (table_ >= 0 && num_found_ < NgramIndex::kMaxOccurrences) {
      end_ = tables_[table_].previous(end_);
      if (end_ == NgramTable::kNone) {
        --table_;
        end_ = last_;
      } else if (!found_with_longer_ngram()) {
        ++num_found_;
        return end_;
      }
    }
    return std::nullopt;
  }

 private:
  // A shorter n is reached only after all occurrences of n + 1 were visited: those that agree in
  // one more token.
  bool found_with_longer_ngram() const {
    if (table_ + 1 == static_cast<int64_t>(tables_.size())) return false;
    const int64_t length = tables_[table_].length();
    return end_ >= length && tokens_[end_ - length] == tokens_[last_ - length];
  }

  const std::vector<int32_t>& tokens_;
  const std::vector<NgramTable>& tables_;
  int32_t last_;
  int32_t end_;
  int64_t table_;
  int64_t num_found_ = 0;
};

// The trie of continuations. Node 0 is the root; node i + 1 is entry i of the draft.
class DraftTrie {
 public:
  explicit DraftTrie(int64_t max_tokens) : max_tokens_(max_tokens) {}

  int64_t num_free() const { return max_tokens_ - static_cast<int64_t>(draft_.tokens.size()); }
  int64_t num_branches() const { return num_branches_; }
  NgramDraft release() { return std::move(draft_); }

  // Adds `continuation` with up to half of the free nodes, unless an existing branch equals it down
  // to the leaf.
  void add_branch(const Continuation& continuation) {
    const auto [node, depth] = descend(continuation);
    if (depth > 0 && first_child_[node] == kNone) return;
    append(continuation, node, depth, (num_free() + 1) / 2);
    ++num_branches_;
  }

  // Gives all free nodes to the branch that `continuation` made.
  void deepen(const Continuation& continuation) {
    const auto [node, depth] = descend(continuation);
    append(continuation, node, depth, num_free());
  }

 private:
  static constexpr int32_t kNone = -1;
  struct Place {
    int32_t node;
    int64_t depth;
  };

  // The deepest node of the trie that `continuation` reaches.
  Place descend(const Continuation& continuation) const {
    Place place{0, 0};
    for (;;) {
      const int32_t child = find_child(place.node, continuation[place.depth]);
      if (child == kNone) return place;
      place = {child, place.depth + 1};
    }
  }

  int32_t find_child(int32_t node, int32_t token) const {
    int32_t child = first_child_[node];
    while (child != kNone && draft_.tokens[child - 1] != token) child = next_sibling_[child];
    return child;
  }

  // Adds continuation[depth .. depth + count) as a chain below `node`, which is at `depth`.
  void append(const Continuation& continuation, int32_t node, int64_t depth, int64_t count) {
    for (const int64_t stop = depth + count; depth < stop; ++depth) {
      draft_.tokens.push_back(continuation[depth]);
      draft_.parents.push_back(node);
      const auto child = static_cast<int32_t>(draft_.tokens.size());
      first_child_.push_back(kNone);
      next_sibling_.push_back(first_child_[node]);
      first_child_[node] = child;
      node = child;
    }
  }

  int64_t max_tokens_;
  int64_t num_branches_ = 0;
  NgramDraft draft_;
  std::vector<int32_t> first_child_{kNone};  // [node], latest child first
  std::vector<int32_t> next_sibling_{kNone};
};

int64_t vector_bytes(const std::vector<int32_t>& values) {
  return static_cast<int64_t>(values.capacity() * sizeof(int32_t));
}

}  // namespace

void check_draft_size(int64_t num_tokens, int64_t num_branches) {
  if (num_tokens < 0 || num_tokens > kMaxDraftTokens) {
    throw std::invalid_argument("num_tokens must be in [0, " + std::to_string(kMaxDraftTokens) +
                                "], got " + std::to_string(num_tokens));
  }
  if (num_branches < 1) {
    throw std::invalid_argument("num_branches must be at least 1 (1 drafts a chain), got " +
                                std::to_string(num_branches));
  }
}

NgramTable::NgramTable(int64_t length, uint64_t hash_multiplier)
    : length_(length),
      hash_multiplier_(hash_multiplier),
      slots_(size_t{1} << (64 - kInitialHashShift), kNone),
      hash_shift_(kInitialHashShift) {}

void NgramTable::append(const std::vector<int32_t>& tokens, uint64_t hash) {
  const auto end = static_cast<int32_t>(tokens.size()) - 1;
  const int32_t* ngram = tokens.data() + end - length_ + 1;
  size_t slot = home(hash);
  for (; slots_[slot] != kNone; slot = next(slot)) {
    const int32_t candidate = slots_[slot];
    if (std::equal(ngram, ngram + length_, tokens.data() + candidate - length_ + 1)) {
      previous_.push_back(candidate);
      slots_[slot] = end;
      return;
    }
  }
  previous_.push_back(kNone);
  slots_[slot] = end;
  if (++num_used_ * 2 > slots_.size()) grow(tokens);
}

void NgramTable::grow(const std::vector<int32_t>& tokens) {
  std::vector<int32_t> old_slots(slots_.size() * 2, kNone);
  old_slots.swap(slots_);
  --hash_shift_;
  for (const int32_t end : old_slots) {
    if (end == kNone) continue;
    size_t slot = home(ngram_hash(tokens, end, length_, hash_multiplier_));
    while (slots_[slot] != kNone) slot = next(slot);
    slots_[slot] = end;
  }
}

int64_t NgramTable::memory_bytes() const { return vector_bytes(slots_) + vector_bytes(previous_); }

NgramIndex::NgramIndex(int64_t min_ngram, int64_t max_ngram, uint64_t hash_multiplier)
    : hash_multiplier_(hash_multiplier) {
  if (min_ngram < 1) {
    throw std::invalid_argument("min_ngram must be at least 1, got " + std::to_string(min_ngram));
  }
  if (max_ngram < min_ngram) {
    throw std::invalid_argument("max_ngram must be at least min_ngram = " +
                                std::to_string(min_ngram) + ", got " + std::to_string(max_ngram));
  }
  if (max_ngram > kMaxNgram) {
    throw std::invalid_argument("max_ngram must be at most " + std::to_string(kMaxNgram) +
                                " (each length costs memory and time), got " +
                                std::to_string(max_ngram));
  }
  tables_.reserve(max_ngram - min_ngram + 1);
  for (int64_t n = min_ngram; n <= max_ngram; ++n) tables_.emplace_back(n, hash_multiplier);
}

void NgramIndex::extend(const TokenView& tokens) {
  check_tokens(tokens);
  if (tokens.count > INT32_MAX - size()) {
    throw std::length_error("an n-gram index holds at most 2147483647 tokens: it has " +
                            std::to_string(size()) + " and was given " +
                            std::to_string(tokens.count) + " more; start a new index");
  }
  for (int64_t i = 0; i < tokens.count; ++i) {
    tokens_.push_back(static_cast<int32_t>(tokens[i]));
    uint64_t hash = 0;
    int64_t length = 0;
    for (NgramTable& table : tables_) {
      if (table.length() > size()) break;
      while (length < table.length()) {
        hash = hash_step(hash, tokens_[size() - 1 - length++], hash_multiplier_);
      }
      table.append(tokens_, hash);
    }
  }
}

NgramDraft NgramIndex::propose(int64_t num_tokens, int64_t num_branches) const {
  check_draft_size(num_tokens, num_branches);
  if (num_tokens == 0 || tokens_.empty()) return {};
  OccurrenceScan occurrences(tokens_, tables_);
  const auto first = occurrences.next();
  if (!first) return {};

  DraftTrie trie(num_tokens);
  trie.add_branch({tokens_, *first});
  while (trie.num_free() > 0 && trie.num_branches() < num_branches) {
    const auto end = occurrences.next();
    if (!end) break;
    trie.add_branch({tokens_, *end});
  }
  trie.deepen({tokens_, *first});
  return trie.release();
}

int64_t NgramIndex::match_length() const {
  const auto last = static_cast<int32_t>(tokens_.size()) - 1;
  for (auto table = tables_.rbegin(); table != tables_.rend(); ++table) {
    if (table->previous(last) != NgramTable::kNone) return table->length();
  }
  return 0;
}

int64_t NgramIndex::memory_bytes() const {
  int64_t bytes =
      vector_bytes(tokens_) + static_cast<int64_t>(tables_.capacity() * sizeof(NgramTable));
  for (const NgramTable& table : tables_) bytes += table.memory_bytes();
  return bytes;
}

}  // namespace specdec
