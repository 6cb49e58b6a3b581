#include "suffix_index.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace specdec {
namespace {

// An open document collects this many positions before they become a run.
constexpr int64_t kMinRun = 64;
// A larger ratio makes fewer runs to search, but more merging.
constexpr int32_t kMergeRatio = 4;

// The first i in [begin, end) for which the monotonic predicate `reached` is true. Searches near
// begin first, because most ranges are short.
template <typename Predicate>
int32_t find_boundary(int32_t begin, int32_t end, const Predicate& reached) {
  int32_t step = 1;
  while (end - begin > step && !reached(begin + step - 1)) {
    begin += step;
    step *= 2;
  }
  end = std::min(end, begin + step);
  while (begin < end) {
    const int32_t middle = begin + (end - begin) / 2;
    if (reached(middle)) {
      end = middle;
    } else {
      begin = middle + 1;
    }
  }
  return begin;
}

// Grows by a quarter instead of doubling, because memory limits the size of a history.
void reserve_more(std::vector<int32_t>& values, size_t count) {
  const size_t needed = values.size() + count;
  if (needed > values.capacity()) values.reserve(std::max(needed, values.size() / 4 * 5));
}

}  // namespace

void SuffixIndex::append(const TokenView& tokens) {
  check_tokens(tokens);
  if (tokens.count + 1 > kMaxSize - size()) {
    throw std::length_error("a suffix index holds at most " + std::to_string(kMaxSize) +
                            " tokens: it has " + std::to_string(size()) + " and was given " +
                            std::to_string(tokens.count) + " more; start a new index");
  }
  reserve_more(text_, tokens.count + 1);
  for (int64_t i = 0; i < tokens.count; ++i) text_.push_back(static_cast<int32_t>(tokens[i]));
  if (size() - kDepth - sorted_ >= kMinRun) sort_until(size() - kDepth);
}

void SuffixIndex::end_document() {
  reserve_more(text_, 1);
  text_.push_back(kEnd);
  sort_until(size());
}

void SuffixIndex::drop_front(int64_t count) {
  text_.erase(text_.begin(), text_.begin() + count);
  std::vector<int32_t> begins;
  size_t kept = 0;
  for (size_t index = 0; index < run_begins_.size(); ++index) {
    const Range range = run(index);
    const size_t begin = kept;
    for (int32_t i = range.begin; i < range.end; ++i) {
      if (order_[i] >= count) order_[kept++] = order_[i] - static_cast<int32_t>(count);
    }
    if (kept > begin) begins.push_back(static_cast<int32_t>(begin));
  }
  order_.resize(kept);
  run_begins_ = begins;
  sorted_ = std::max<int64_t>(0, sorted_ - count);
}

bool SuffixIndex::before(int32_t a, int32_t b) const {
  for (int32_t i = 0; i < kDepth; ++i) {
    const int32_t left = text_[a + i], right = text_[b + i];
    if (left != right) return left < right;
    if (left == kEnd) break;
  }
  return a < b;
}

void SuffixIndex::sort_until(int64_t end) {
  const size_t begin = order_.size();
  reserve_more(order_, end - sorted_);
  for (int64_t position = sorted_; position < end; ++position) {
    if (text_[position] != kEnd) order_.push_back(static_cast<int32_t>(position));
  }
  sorted_ = end;
  if (order_.size() == begin) return;
  std::sort(order_.begin() + begin, order_.end(),
            [this](int32_t a, int32_t b) { return before(a, b); });
  run_begins_.push_back(static_cast<int32_t>(begin));
  merge_runs();
}

void SuffixIndex::merge_runs() {
  while (run_begins_.size() > 1) {
    const Range last = run(run_begins_.size() - 1), previous = run(run_begins_.size() - 2);
    if (previous.end - previous.begin >= int64_t{kMergeRatio} * (last.end - last.begin)) return;
    std::inplace_merge(order_.begin() + previous.begin, order_.begin() + last.begin, order_.end(),
                       [this](int32_t a, int32_t b) { return before(a, b); });
    run_begins_.pop_back();
  }
}

Occurrences::Range SuffixIndex::run(size_t index) const {
  const bool last = index + 1 == run_begins_.size();
  return {run_begins_[index], last ? static_cast<int32_t>(order_.size()) : run_begins_[index + 1]};
}

Occurrences::Range SuffixIndex::find_string(Range run, const int32_t* string,
                                            int32_t length) const {
  // The sign of (text from the i-th position on) - string. An ended document is smaller than both.
  const auto compare = [&](int32_t i) {
    const int32_t* begins = text_.data() + order_[i];
    for (int32_t j = 0; j < length; ++j) {
      if (begins[j] != string[j]) return begins[j] < string[j] ? -1 : 1;
    }
    return 0;
  };
  int32_t begin = run.begin, end = run.end;
  while (begin < end) {
    const int32_t middle = begin + (end - begin) / 2;
    if (compare(middle) < 0) {
      begin = middle + 1;
    } else {
      end = middle;
    }
  }
  return {begin, find_boundary(begin, run.end, [&](int32_t i) { return compare(i) > 0; })};
}

Occurrences::Range SuffixIndex::find_token(Range range, int32_t offset, int32_t token) const {
  const int32_t begin = find_boundary(range.begin, range.end,
                                      [&](int32_t i) { return token_at(i, offset) >= token; });
  return {begin,
          find_boundary(begin, range.end, [&](int32_t i) { return token_at(i, offset) > token; })};
}

// Adds the occurrences in `range` that are followed by a token; returns whether there were any.
bool SuffixIndex::add_followed(Range range, Occurrences* string) const {
  // kEnd is the smallest token: occurrences that end a document come first.
  range.begin = find_boundary(range.begin, range.end,
                              [&](int32_t i) { return token_at(i, string->length) != kEnd; });
  if (range.begin == range.end) return false;
  string->sorted.push_back(range);
  string->count += range.end - range.begin;
  return true;
}

std::vector<Occurrences> SuffixIndex::find_suffixes(const int32_t* text, int64_t length,
                                                    int64_t max_length) const {
  std::vector<Occurrences> found;
  const auto longest = static_cast<int32_t>(std::min({length, max_length, int64_t{kDepth - 1}}));
  for (int32_t n = 1; n <= longest; ++n) {
    const int32_t* string = text + length - n;
    Occurrences occurrences{n, 0, {}, {}};
    for (size_t index = 0; index < run_begins_.size(); ++index) {
      add_followed(find_string(run(index), string, n), &occurrences);
    }
    for (int64_t start = sorted_; start + n < size(); ++start) {
      if (std::equal(string, string + n, text_.data() + start)) {
        occurrences.recent.push_back(static_cast<int32_t>(start));
        ++occurrences.count;
      }
    }
    if (occurrences.count == 0) break;
    found.push_back(std::move(occurrences));
  }
  return found;
}

Continuation SuffixIndex::count_continuation(const Occurrences& string, int32_t token) const {
  Continuation result{token, 0, 0};
  std::vector<Range> ranges;
  for (const Range range : string.sorted) {
    ranges.push_back(find_token(range, string.length, token));
    result.count += ranges.back().end - ranges.back().begin;
  }
  for (const int32_t start : string.recent) {
    if (text_[start + string.length] != token) continue;
    ++result.count;
    result.latest = start;
  }
  if (result.count > kMaxTied) {
    result.latest = 0;
    return result;
  }
  for (const Range range : ranges) {
    for (int32_t i = range.begin; i < range.end; ++i) {
      result.latest = std::max(result.latest, order_[i]);
    }
  }
  return result;
}

std::vector<Continuation> SuffixIndex::continuations(const Occurrences& string,
                                                     int64_t min_count) const {
  // A token that follows min_count of all occurrences follows at least the same share of one range,
  // where these occurrences are neighbours. So sampling every share-th occurrence finds it.
  std::vector<int32_t> tokens;
  for (const Range range : string.sorted) {
    const int64_t share =
        std::max<int64_t>(1, min_count * (range.end - range.begin) / string.count);
    for (int64_t i = range.begin + share - 1; i < range.end;) {
      const int32_t token = token_at(static_cast<int32_t>(i), string.length);
      tokens.push_back(token);
      i = share - 1 + find_boundary(static_cast<int32_t>(i), range.end, [&](int32_t j) {
            return token_at(j, string.length) > token;
          });
    }
  }
  for (const int32_t start : string.recent) tokens.push_back(text_[start + string.length]);
  std::sort(tokens.begin(), tokens.end());
  tokens.erase(std::unique(tokens.begin(), tokens.end()), tokens.end());

  std::vector<Continuation> found;
  for (const int32_t token : tokens) found.push_back(count_continuation(string, token));
  std::sort(found.begin(), found.end(), [](const Continuation& a, const Continuation& b) {
    if (a.count != b.count) return a.count > b.count;
    return a.latest != b.latest ? a.latest > b.latest : a.token < b.token;
  });
  return found;
}

Occurrences SuffixIndex::appended(const Occurrences& string, int32_t token) const {
  Occurrences result{string.length + 1, 0, {}, {}};
  for (const Range range : string.sorted) {
    add_followed(find_token(range, string.length, token), &result);
  }
  for (const int32_t start : string.recent) {
    if (text_[start + string.length] == token && start + result.length < size()) {
      result.recent.push_back(start);
      ++result.count;
    }
  }
  return result;
}

int64_t SuffixIndex::memory_bytes() const {
  const size_t entries = text_.capacity() + order_.capacity() + run_begins_.capacity();
  return static_cast<int64_t>(entries * sizeof(int32_t));
}

}  // namespace specdec
