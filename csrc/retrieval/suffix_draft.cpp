#include "suffix_draft.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <mutex>
#include <queue>
#include <stdexcept>
#include <string>
#include <utility>

namespace specdec {
namespace {

// A token that may be drafted next.
struct Candidate {
  double probability;  // of the path that ends with it
  int64_t number;      // counts candidates in the order in which they are found
  int32_t token;
  int64_t parent;  // node

  bool operator<(const Candidate& other) const {
    if (probability != other.probability) return probability < other.probability;
    return number > other.number;
  }
};

// Grows one draft below the occurrences of one match.
class Growth {
 public:
  Growth(const SuffixIndex& index, const SuffixRule& rule) : index_(index), rule_(rule) {}

  SuffixDraft grow(const Occurrences& match, int64_t budget) {
    draft_.match_length = match.length;
    strings_.push_back(match);
    add_candidates(1.0);
    while (!candidates_.empty() && static_cast<int64_t>(draft_.tokens.size()) < budget) {
      const Candidate best = candidates_.top();
      candidates_.pop();
      draft_.tokens.push_back(best.token);
      draft_.parents.push_back(best.parent);
      draft_.score += best.probability;
      strings_.push_back(index_.appended(strings_[best.parent], best.token));
      add_candidates(best.probability);
    }
    return std::move(draft_);
  }

 private:
  // Candidates below the latest node.
  void add_candidates(double probability) {
    const Occurrences& string = strings_.back();
    if (string.count == 0 || string.length >= SuffixIndex::kDepth) return;
    const auto count = static_cast<double>(string.count);
    // Rounded down, with a margin for the rounding of the exact comparison below.
    const double needed = rule_.min_probability / probability * count * (1 - 1e-9);
    const int64_t min_count = std::max<int64_t>(1, static_cast<int64_t>(needed));
    for (const Continuation& next : index_.continuations(string, min_count)) {
      const double share = probability * (static_cast<double>(next.count) / count);
      if (share < rule_.min_probability) break;
      const auto node = static_cast<int64_t>(strings_.size()) - 1;
      candidates_.push({share, num_candidates_++, next.token, node});
      if (!rule_.tree) break;
    }
  }

  const SuffixIndex& index_;
  const SuffixRule& rule_;
  std::vector<Occurrences> strings_;  // [node], the string from the root to it
  std::priority_queue<Candidate> candidates_;
  int64_t num_candidates_ = 0;
  SuffixDraft draft_;
};

int64_t budget_of(const SuffixRule& rule, int64_t match_length) {
  const double wanted = std::floor(rule.factor * static_cast<double>(match_length) + rule.offset);
  return static_cast<int64_t>(std::clamp(wanted, 0.0, static_cast<double>(rule.num_draft_tokens)));
}

}  // namespace

void SuffixRule::check() const {
  const auto require = [](bool holds, const std::string& name, const std::string& expected,
                          double given) {
    if (!holds) {
      throw std::invalid_argument(name + " must be " + expected + ", got " + std::to_string(given));
    }
  };
  require(num_draft_tokens >= 1 && num_draft_tokens <= 4096, "num_draft_tokens", "in [1, 4096]",
          static_cast<double>(num_draft_tokens));
  const int64_t longest = SuffixIndex::kDepth - 1;
  require(max_match >= 1 && max_match <= longest, "max_match",
          "in [1, " + std::to_string(longest) + "]", static_cast<double>(max_match));
  require(factor >= 0 && std::isfinite(factor), "factor", "a number that is not negative", factor);
  require(std::isfinite(offset), "offset", "a number", offset);
  require(min_probability >= kMinProbability && min_probability <= 1, "min_probability",
          "in [0.01, 1] (each token may have 1 / min_probability continuations)", min_probability);
}

SuffixDraft draft_suffix(const SuffixIndex& index, const SuffixIndex& request,
                         const SuffixRule& rule, SuffixDraft best) {
  const std::vector<Occurrences> matches =
      index.find_suffixes(request.text().data(), request.size(), rule.max_match);
  int64_t longer_count = 0;
  for (auto match = matches.rbegin(); match != matches.rend(); ++match) {
    const int64_t budget = budget_of(rule, match->length);
    // A token adds at most 1 to the score, and shorter matches have smaller budgets.
    if (static_cast<double>(budget) <= best.score) break;
    // A longer match, which has a larger budget, has the same occurrences.
    if (match->count == longer_count) continue;
    longer_count = match->count;
    SuffixDraft draft = Growth(index, rule).grow(*match, budget);
    if (draft.score > best.score) best = std::move(draft);
  }
  return best;
}

SuffixHistory::SuffixHistory(int64_t max_tokens) : max_tokens_(max_tokens) {
  if (max_tokens < 2 || max_tokens > SuffixIndex::kMaxSize) {
    throw std::invalid_argument("max_tokens must be in [2, " +
                                std::to_string(SuffixIndex::kMaxSize) + "], got " +
                                std::to_string(max_tokens));
  }
}

void SuffixHistory::add(const TokenView& tokens, const std::vector<int64_t>& counts) {
  check_tokens(tokens);
  const std::unique_lock lock(mutex_);
  TokenView rest = tokens;
  for (const int64_t count : counts) {
    TokenView output{rest.data, count, rest.stride_bytes};
    rest.data += count * rest.stride_bytes;
    if (const int64_t surplus = count - (max_tokens_ - 1); surplus > 0) {
      output = {output.data + surplus * output.stride_bytes, count - surplus, output.stride_bytes};
    }
    if (output.count == 0) continue;
    make_room(output.count + 1);
    index_.append(output);
    index_.end_document();
    counts_.push_back(output.count);
    for (int64_t i = 0; i < output.count; ++i) {
      largest_token_ = std::max(largest_token_, output[i]);
    }
  }
}

// Forgetting moves everything that stays, so it makes room for an eighth of the history at once.
void SuffixHistory::make_room(int64_t size) {
  if (index_.size() + size <= max_tokens_) return;
  const int64_t allowed = std::max<int64_t>(0, max_tokens_ - std::max(size, max_tokens_ / 8));
  int64_t dropped = 0;
  while (index_.size() - dropped > allowed) {
    dropped += counts_.front() + 1;
    counts_.pop_front();
  }
  index_.drop_front(dropped);
}

void SuffixHistory::copy(std::vector<int64_t>* tokens, std::vector<int64_t>* counts) const {
  const std::shared_lock lock(mutex_);
  counts->assign(counts_.begin(), counts_.end());
  std::copy_if(index_.text().begin(), index_.text().end(), std::back_inserter(*tokens),
               [](int32_t token) { return token != SuffixIndex::kEnd; });
}

SuffixDraft SuffixHistory::draft(const SuffixIndex& request, const SuffixRule& rule,
                                 SuffixDraft best) const {
  const std::shared_lock lock(mutex_);
  return draft_suffix(index_, request, rule, std::move(best));
}

int64_t SuffixHistory::num_tokens() const {
  const std::shared_lock lock(mutex_);
  return index_.size() - static_cast<int64_t>(counts_.size());
}

int64_t SuffixHistory::num_outputs() const {
  const std::shared_lock lock(mutex_);
  return static_cast<int64_t>(counts_.size());
}

int64_t SuffixHistory::memory_bytes() const {
  const std::shared_lock lock(mutex_);
  return index_.memory_bytes() + static_cast<int64_t>(counts_.size() * sizeof(int64_t));
}

int64_t SuffixHistory::largest_token() const {
  const std::shared_lock lock(mutex_);
  return largest_token_;
}

}  // namespace specdec
