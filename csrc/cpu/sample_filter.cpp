// CPU op sample_filter: one task per row. The row's scores are first written to the output. Its
// survivors are found there while the row is in the cache, and everything else becomes -inf.
//
// The first pass stores the largest key of each block of kBlock tokens, which saves work:
//   top-k: the k-th largest of the blocks' largest keys is a lower bound of the k-th largest key;
//   top-p: nucleus_bound() is a lower bound of the end of the nucleus.
// Blocks below the bound are not read again, and few keys are above it. Among those, histograms of
// counts or masses find the end (KeyBuckets).
//
// Loops over blocks are plain, for compilers to vectorise. The code for a row is compiled for
// several instruction sets, of which one is chosen at run time. All give the same bits: float
// operations are elementwise with explicit rounding, sums are integers.
// SPECDEC_CPU_ISA=baseline|avx2|avx512 forces one.
#include "specdec/sample_filter.h"

#include <algorithm>
#include <vector>

#include "specdec/cpu/isa.h"
#include "specdec/sampling/filter_search.h"

namespace specdec::cpu {
namespace {

constexpr int64_t kBlock = 64;
constexpr int64_t kGrainTokens = 32768;  // below this, waking a thread costs more than it saves

// Memory of a thread, kept between calls.
struct Scratch {
  std::vector<int32_t> block_keys;  // largest key of each block
  std::vector<int32_t> keys;        // candidates, with room up to a whole block

  void reserve(int64_t blocks) {
    if (block_keys.size() >= static_cast<size_t>(blocks)) return;
    block_keys.resize(blocks);
    keys.resize((blocks + 1) * kBlock);
  }
};

// Finds the one of `count` keys in `range` at which the sum of weights, from the largest key down,
// reaches `target`. Such a key must exist.
struct Search {
  int32_t* keys;  // with room up to a whole block; are overwritten
  int64_t count;
  KeyRange range;
  uint64_t target;
  uint64_t above = 0;  // the sum over keys above the range

  template <typename Weight, typename Position>
  SPECDEC_HOST_DEVICE void refine(const Weight& weight, const Position& position) {
    const KeyBuckets buckets = KeyBuckets::make(range, position);
    uint64_t sums[KeyBuckets::kCount] = {};
    for (int64_t first = 0; first < count; first += kBlock) {
      uint32_t indices[kBlock];
      uint64_t weights[kBlock];
      for (int64_t i = 0; i < kBlock; ++i) {
        indices[i] = buckets.index(position(keys[first + i]));
        weights[i] = weight(keys[first + i]);
      }
      const int64_t size = std::min(kBlock, count - first);
      for (int64_t i = 0; i < size; ++i) sums[indices[i]] += weights[i];
    }
    uint32_t bucket = buckets.index(position(range.high));
    while (above + sums[bucket] < target) above += sums[bucket--];
    range = buckets.keys(bucket, range, position, Bisection{});
    int64_t kept = 0;
    for (int64_t i = 0; i < count; ++i) {
      const int32_t key = keys[i];
      keys[kept] = key;
      kept += key >= range.low && key <= range.high;
    }
    count = kept;
  }

  template <typename Weight>
  SPECDEC_HOST_DEVICE int32_t key(const Weight& weight) {
    while (range.low < range.high) refine(weight, KeyPosition{});
    return range.low;
  }
};

// The filters of one row.
class Row {
 public:
  SPECDEC_HOST_DEVICE Row(float* scores, int64_t vocab, Scratch& scratch)
      : scores_(scores),
        vocab_(vocab),
        blocks_((vocab + kBlock - 1) / kBlock),
        block_keys_(scratch.block_keys.data()),
        keys_(scratch.keys.data()) {}

  // Writes the scores. Returns false if nothing can be filtered: a NaN, or all -inf.
  template <typename T>
  SPECDEC_HOST_DEVICE bool divide(const T* logits, float temperature) {
    int32_t largest_magnitude = 0;
    largest_key_ = kMinusInfinityKey;
    for (int64_t block = 0; block < blocks_; ++block) {
      const int64_t first = block * kBlock, size = std::min(kBlock, vocab_ - first);
      float scores[kBlock];
      if (size == kBlock) {
        for (int64_t i = 0; i < kBlock; ++i) scores[i] = to_float(logits[first + i]);
      } else {
        std::fill_n(scores, kBlock, key_score(kMinusInfinityKey));
        for (int64_t i = 0; i < size; ++i) scores[i] = to_float(logits[first + i]);
      }
      int32_t largest_key = INT32_MIN;
      for (int64_t i = 0; i < kBlock; ++i) {
        scores[i] = exact_div(scores[i], temperature);
        largest_key = std::max(largest_key, score_key(scores[i]));
        largest_magnitude = std::max(largest_magnitude, float_to_bits(scores[i]) & 0x7FFFFFFF);
      }
      std::copy_n(scores, size, scores_ + first);
      block_keys_[block] = largest_key;
      largest_key_ = std::max(largest_key_, largest_key);
    }
    return largest_magnitude <= kInfinityBits && largest_key_ > kMinusInfinityKey;
  }

  SPECDEC_HOST_DEVICE int32_t top_k_threshold(int64_t k) {
    KeyRange range{kMinusInfinityKey, largest_key_};
    if (k <= blocks_) {
      std::copy_n(block_keys_, blocks_, keys_);
      range.low = Search{keys_, blocks_, range, static_cast<uint64_t>(k)}.key(CountWeight{});
    }
    const int64_t count = collect_keys(range.low);
    return Search{keys_, count, range, static_cast<uint64_t>(k)}.key(CountWeight{});
  }

  // The nucleus of the tokens with keys at or above `low`.
  SPECDEC_HOST_DEVICE KeptTokens nucleus(int32_t low, float top_p) {
    const MassWeight mass{RowWeights::make(largest_key_)};
    const uint64_t total = total_mass(low, mass), target = nucleus_mass(total, top_p);
    low = std::max(low,
                   nucleus_bound(mass.weights, largest_key_, total, target, vocab_, Bisection{}));
    Search search{keys_, collect_keys(low), {low, largest_key_}, target};
    search.refine(mass, WeightPosition{mass.weights});
    const int32_t key = search.key(mass);
    const uint64_t each = mass(key), missing = target - search.above;
    return {key, last_ties(key, (missing + each - 1) / each)};
  }

  SPECDEC_HOST_DEVICE int32_t min_p_threshold(float min_p) const {
    return specdec::min_p_threshold(RowWeights::make(largest_key_), largest_key_, min_p,
                                    Bisection{});
  }

  SPECDEC_HOST_DEVICE void remove_all_but(const KeptTokens& kept) {
    const float minus_infinity = key_score(kMinusInfinityKey);
    for (int64_t block = 0; block < blocks_; ++block) {
      float* scores = scores_ + block * kBlock;
      const int32_t size = static_cast<int32_t>(std::min(kBlock, vocab_ - block * kBlock));
      if (block_keys_[block] < kept.threshold) {
        std::fill_n(scores, size, minus_infinity);
        continue;
      }
      const int64_t tie = std::clamp<int64_t>(kept.first_tie - block * kBlock, 0, kBlock);
      for (int32_t i = 0; i < size; ++i) {
        const int32_t smallest = kept.threshold + (i < static_cast<int32_t>(tie));
        scores[i] = score_key(scores[i]) >= smallest ? scores[i] : minus_infinity;
      }
    }
  }

 private:
  // The keys of a block; -inf beyond the vocabulary.
  SPECDEC_HOST_DEVICE void load_keys(int64_t block, int32_t* keys) const {
    const float* scores = scores_ + block * kBlock;
    const int64_t size = std::min(kBlock, vocab_ - block * kBlock);
    if (size == kBlock) {
      for (int64_t i = 0; i < kBlock; ++i) keys[i] = score_key(scores[i]);
    } else {
      std::fill_n(keys, kBlock, kMinusInfinityKey);
      for (int64_t i = 0; i < size; ++i) keys[i] = score_key(scores[i]);
    }
  }

  // Collects the keys at or above `low` in keys_; returns their number.
  SPECDEC_HOST_DEVICE int64_t collect_keys(int32_t low) {
    int64_t count = 0;
    for (int64_t block = 0; block < blocks_; ++block) {
      if (block_keys_[block] < low) continue;
      int32_t keys[kBlock];
      load_keys(block, keys);
      for (int32_t key : keys) {
        keys_[count] = key;
        count += key >= low;
      }
    }
    return count;
  }

  SPECDEC_HOST_DEVICE uint64_t total_mass(int32_t low, const MassWeight& mass) const {
    uint64_t total = 0;
    for (int64_t block = 0; block < blocks_; ++block) {
      if (block_keys_[block] < low) continue;
      int32_t keys[kBlock];
      load_keys(block, keys);
      for (int32_t key : keys) {
        const uint64_t each = mass(key);
        total += key >= low ? each : 0;
      }
    }
    return total;
  }

  // The index from which on there are `count` tokens with this key; 0 if there are fewer.
  SPECDEC_HOST_DEVICE int64_t last_ties(int32_t key, uint64_t count) const {
    for (int64_t block = blocks_ - 1; block >= 0; --block) {
      if (block_keys_[block] < key) continue;
      int32_t keys[kBlock];
      load_keys(block, keys);
      uint64_t ties = 0;
      for (int32_t each : keys) ties += each == key;
      if (ties < count) {
        count -= ties;
        continue;
      }
      int64_t i = kBlock - 1;
      while (keys[i] != key || --count > 0) --i;
      return block * kBlock + i;
    }
    return 0;
  }

  float* scores_;
  int64_t vocab_;
  int64_t blocks_;
  int32_t largest_key_ = kMinusInfinityKey;
  int32_t* block_keys_;
  int32_t* keys_;
};

template <typename T>
SPECDEC_HOST_DEVICE void filter_row(const SampleFilterParams& params, int64_t index,
                                    Scratch& scratch) {
  Row row(params.scores + index * params.vocab, params.vocab, scratch);
  const T* logits = static_cast<const T*>(params.logits) + index * params.logits_row_stride;
  if (!row.divide(logits, params.temperature[index])) return;
  KeptTokens kept{kMinusInfinityKey, 0};
  const int64_t top_k = params.top_k[index];
  if (top_k > 0 && top_k < params.vocab) kept.threshold = row.top_k_threshold(top_k);
  if (params.top_p[index] < 1.0f) kept = row.nucleus(kept.threshold, params.top_p[index]);
  if (params.min_p[index] > 0.0f) {
    const int32_t threshold = row.min_p_threshold(params.min_p[index]);
    if (threshold > kept.threshold) kept = {threshold, 0};
  }
  if (kept.threshold > kMinusInfinityKey) row.remove_all_but(kept);
}

std::string problem(const char* name, int64_t row, const std::string& value, const char* expected) {
  return std::string(name) + "[" + std::to_string(row) + "] = " + value + "; expected " + expected;
}

}  // namespace

std::optional<std::string> find_invalid_parameter(const SampleFilterParams& params) {
  for (int64_t row = 0; row < params.rows; ++row) {
    const float temperature = params.temperature[row];
    const float top_p = params.top_p[row], min_p = params.min_p[row];
    if (!(temperature > 0.0f)) {
      return problem("temperature", row, std::to_string(temperature),
                     "a positive number; greedy decoding needs no filter");
    }
    if (params.top_k[row] < 0) {
      return problem("top_k", row, std::to_string(params.top_k[row]), "0 (off) or more");
    }
    if (!(top_p >= 0.0f && top_p <= 1.0f)) {
      return problem("top_p", row, std::to_string(top_p), "a number in [0, 1], 1 is off");
    }
    if (!(min_p >= 0.0f && min_p <= 1.0f)) {
      return problem("min_p", row, std::to_string(min_p), "a number in [0, 1], 0 is off");
    }
  }
  return std::nullopt;
}

void sample_filter(const SampleFilterParams& params, const ParallelFor& parallel_for) {
  const auto filter = with_float_type(
      params.logits_type, []<typename T>(T) { return build_for<filter_row<T>>(cpu_isa()); });
  const int64_t blocks = (params.vocab + kBlock - 1) / kBlock;
  const int64_t grain = std::max<int64_t>(1, kGrainTokens / params.vocab);
  parallel_for(params.rows, grain, [&](int64_t begin, int64_t end) {
    thread_local Scratch scratch;
    scratch.reserve(blocks);
    for (int64_t row = begin; row < end; ++row) filter(params, row, scratch);
  });
}

}  // namespace specdec::cpu
