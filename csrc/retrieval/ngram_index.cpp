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

// Enumerates the end positions of earlier occurrences of the last tokens, in the order of the rule.
class OccurrenceScan {
 public:
  OccurrenceScan(const std::vector<int32_t>& tokens, const std::vector<NgramTable>& tables)
      : tokens_(tokens),
        tables_(tables),
        last_(static_cast<int32_t>(tokens.size()) - 1),
        end_(last_),
        table_(static_cast<int64_t>(tables.size()) - 1) {}

  std::optional<int64_t> next() {
    while (table_ >= 0 && num_found_ < kMaxOccurrences) {
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

int64_t vector_bytes(const std::vector<int32_t>& values) {
  return static_cast<int64_t>(values.capacity() * sizeof(int32_t));
}

}  // namespace

void check_draft_size(int64_t num_tokens, int64_t num_branches) {
  if (num_tokens < 0 || num_tokens > kMaxDraftTokens) {
    throw std::invalid_argument("num_tokens must be in [0, " + std::to_string(kMaxDraftTokens) +
                                "], got " + std::to_string(num_tokens));
  }
  if (const auto problem = cpu::find_invalid_branches(num_branches)) {
    throw std::invalid_argument(*problem);
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
  if (const auto problem = cpu::find_invalid_ngram(min_ngram, max_ngram)) {
    throw std::invalid_argument(*problem);
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

cpu::TokenTrie NgramIndex::propose(int64_t num_tokens, int64_t num_branches) const {
  check_draft_size(num_tokens, num_branches);
  if (tokens_.empty()) return cpu::TokenTrie(0);
  OccurrenceScan occurrences(tokens_, tables_);
  return cpu::merge_continuations(tokens_, size(), num_tokens, num_branches,
                                  [&] { return occurrences.next(); });
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
