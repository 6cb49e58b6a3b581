// sample_filter: applies temperature, top-k, top-p and min-p to every row. Definition:
// specdec/sample_filter.h.
//
// In:  logits [rows, vocab] f32/bf16/f16; temperature, top_k, top_p, min_p [rows]
// Out: scores [rows, vocab] f32, -inf where removed
//
// One launch, one block per row, which reads the row several times from L2.
//   1. divide: writes the scores; finds the largest key of each thread and of the row, and NaN.
//   2. top-k: the k-th largest of the threads' largest keys is a lower bound of the k-th largest
//      key; a search by counts between this bound and the largest key finds it.
//   3. top-p: one pass adds up the mass that is left. nucleus_bound() is a lower bound of the end
//      of the nucleus, a search by masses finds the end, and a search by counts over token indices
//      decides which ties are kept.
//   4. min-p: a search without data, because weights never decrease with the score.
//   5. remove: writes -inf below the threshold.
// A search has a few levels. Each level makes a histogram of the keys in its range in shared
// memory; the bucket in which the sum from the top reaches the target becomes the next range.
// Tokens outside the range are skipped, and so are threads whose largest key is below it: after the
// bounds few tokens are left. Example: k = 2, scores 9 4 7 7 in four threads: bound 7, range [7,
// 9]; the count from the top reaches 2 at 7, so 9 7 7 are kept.
//
// Every thread takes part in every search and has the same range, so branches are uniform.
// Barriers: around each phase of a histogram (cleared, filled, read) and before the shared arrays
// are reused. Sums are integers, so the order of the atomics does not matter: results are bitwise
// repeatable and equal to the CPU op's. A 64-bit sum is two 32-bit atomics with a carry, because
// shared memory has no 64-bit adder.
//
// Lower bound: the logits are read once from memory, the scores are written once. Passes 2 to 5
// read the scores, 513 KB at 128k tokens, from L2: about 5 us each at 64 bytes per clock and SM; 2
// to 4 of them for top-k alone, 4 to 7 for top-p alone. Rows beyond the number of SMs wait.
#include "specdec/device/cuda.cuh"
#include "specdec/launchers.h"
#include "specdec/sampling/filter_search.h"

namespace specdec {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kGroup = 4;  // tokens of one load
constexpr int kBucketsPerWarp = KeyBuckets::kCount / kWarps;
static_assert(kWarps == kWarpSize, "a warp reduces what the warps have found");
static_assert(kBucketsPerWarp == 2 * kWarpSize, "two buckets per lane");

template <typename T>
struct alignas(kGroup * sizeof(T)) Group {
  T values[kGroup];
};

struct Shared {
  SharedArray<uint32_t, KeyBuckets::kCount> sums_low;
  SharedArray<uint32_t, KeyBuckets::kCount> sums_high;
  SharedArray<uint64_t, kWarps> warp_sums;
  SharedArray<int32_t, kWarps> warp_keys;
};

__device__ __forceinline__ int lane_id() { return static_cast<int>(threadIdx.x) % kWarpSize; }
__device__ __forceinline__ int warp_id() { return static_cast<int>(threadIdx.x) / kWarpSize; }

// Bisection (filter_search.h) with the lanes of a warp: a step divides the range by 32.
struct WarpSearch {
  template <typename Predicate>
  __device__ int32_t operator()(int32_t low, int32_t high, const Predicate& holds) const {
    while (low < high) {
      const uint32_t width = static_cast<uint32_t>(high) - static_cast<uint32_t>(low);
      const uint32_t step = width / kWarpSize + 1;
      const auto probe = [=](uint32_t lane) {
        const uint32_t offset = lane * step < width ? lane * step : width;
        return static_cast<int32_t>(static_cast<uint32_t>(low) + offset);
      };
      const int32_t mine = probe(lane_id());
      const int num_below = __popc(ballot(mine != high && !holds(mine)));
      const int32_t next_low = num_below > 0 ? probe(num_below - 1) + 1 : low;
      if (num_below < kWarpSize) high = probe(num_below);
      low = next_low;
    }
    return low;
  }
};

template <typename T, typename Combine>
__device__ T reduce_block(SharedArray<T, kWarps>& warp_values, T value, const Combine& combine) {
  value = combine(value);
  if (lane_id() == 0) warp_values[warp_id()] = value;
  block_barrier();  // all warps have stored their values
  value = combine(warp_values[lane_id()]);
  block_barrier();  // all warps have read them
  return value;
}

// The keys for a search. for_each(low, visit) calls visit(key) at least for the calling thread's
// keys that are not below `low`.
struct ThreadMaximum {
  int32_t largest_key;

  template <typename Visit>
  __device__ void for_each(int32_t, const Visit& visit) const {
    visit(largest_key);
  }
};

// The scores of a row. A thread always has the same tokens.
struct Row {
  float* scores;
  int32_t vocab;
  bool aligned;                             // whether groups of scores are aligned
  int32_t thread_key = kMinusInfinityKey;   // largest key of the thread's tokens
  int32_t largest_key = kMinusInfinityKey;  // largest key of the row

  // Calls visit(token, key).
  template <typename Visit>
  __device__ void for_each_token(int32_t low, const Visit& visit) const {
    if (thread_key < low) return;
#pragma unroll 4
    for (int32_t first = threadIdx.x * kGroup; first < vocab; first += kThreads * kGroup) {
      if (aligned) {
        const Group<float> group = load_global<Group<float>>(scores + first);
#pragma unroll
        for (int i = 0; i < kGroup; ++i) visit(first + i, score_key(group.values[i]));
      } else {
        const int32_t end = min(first + kGroup, vocab);
        for (int32_t token = first; token < end; ++token) visit(token, score_key(scores[token]));
      }
    }
  }

  template <typename Visit>
  __device__ void for_each(int32_t low, const Visit& visit) const {
    for_each_token(low, [&](int32_t, int32_t key) { visit(key); });
  }
};

// The indices of the tokens with a given key.
struct TokensWithKey {
  const Row& row;
  int32_t key;

  template <typename Visit>
  __device__ void for_each(int32_t, const Visit& visit) const {
    row.for_each_token(key, [&](int32_t token, int32_t token_key) {
      if (token_key == key) visit(token);
    });
  }
};

// Finds the key in `range` at which the sum of weights, from the largest key down, reaches
// `target`. Such a key must exist.
struct Search {
  Shared& shared;
  KeyRange range;
  uint64_t target;
  uint64_t above = 0;   // the sum over keys above the range
  uint64_t inside = 0;  // the sum over keys in the range, after a level

  __device__ void add(uint32_t bucket, uint64_t weight) {
    const uint32_t low = static_cast<uint32_t>(weight);
    const uint32_t before = atomic_add(shared.sums_low.pointer(bucket), low);
    const uint32_t carry = before + low < low;
    const uint32_t high = static_cast<uint32_t>(weight >> 32) + carry;
    if (high != 0) atomic_add(shared.sums_high.pointer(bucket), high);
  }

  __device__ uint64_t sum(int bucket) {
    const uint32_t low = shared.sums_low[bucket], high = shared.sums_high[bucket];
    return uint64_t{high} << 32 | low;
  }

  // Adds `value` of each lane to `above`, in lane order, up to the lane in which the sum would
  // reach the target; `inside` becomes that lane's value. Returns the lane.
  __device__ int advance(uint64_t value) {
    uint64_t running = value;
    for (int distance = 1; distance < kWarpSize; distance *= 2) {
      const uint64_t other = shuffle_up(running, distance);
      if (lane_id() >= distance) running += other;
    }
    const int lane = kWarpSize - __popc(ballot(above + running >= target));
    above += shuffle(running - value, lane);
    inside = shuffle(value, lane);
    return lane;
  }

  // Finds the bucket in which the sum reaches the target.
  __device__ uint32_t find_bucket() {
    const int first = warp_id() * kBucketsPerWarp + lane_id();
    const uint64_t warp_sum_of_buckets = warp_sum(sum(first) + sum(first + kWarpSize));
    if (lane_id() == 0) shared.warp_sums[warp_id()] = warp_sum_of_buckets;
    block_barrier();  // all warps have stored their values
    const int warp = kWarps - 1 - advance(shared.warp_sums[kWarps - 1 - lane_id()]);
    const int top = (warp + 1) * kBucketsPerWarp - 1;
    const uint64_t upper = sum(top - 2 * lane_id()), lower = sum(top - 2 * lane_id() - 1);
    const int pair = advance(upper + lower);
    const uint64_t pair_upper = shuffle(upper, pair);
    if (above + pair_upper >= target) {
      inside = pair_upper;
      return top - 2 * pair;
    }
    above += pair_upper;
    inside -= pair_upper;
    return top - 2 * pair - 1;
  }

  // Runs one level.
  template <typename Keys, typename Weight, typename Position>
  __device__ void refine(const Keys& keys, const Weight& weight, const Position& position) {
    const KeyBuckets buckets = KeyBuckets::make(range, position);
    for (int bucket = threadIdx.x; bucket < KeyBuckets::kCount; bucket += kThreads) {
      shared.sums_low[bucket] = 0;
      shared.sums_high[bucket] = 0;
    }
    block_barrier();  // the histogram is clear
    keys.for_each(range.low, [&](int32_t key) {
      if (key >= range.low && key <= range.high) add(buckets.index(position(key)), weight(key));
    });
    block_barrier();  // the histogram is complete
    range = buckets.keys(find_bucket(), range, position, WarpSearch{});
    block_barrier();  // all warps have read it
  }

  template <typename Keys, typename Weight>
  __device__ int32_t key(const Keys& keys, const Weight& weight) {
    while (range.low < range.high) refine(keys, weight, KeyPosition{});
    return range.low;
  }
};

// Writes the scores and finds the largest keys. Returns false if there is nothing to filter: a NaN,
// or all -inf.
template <typename T>
__device__ bool divide(Shared& shared, Row& row, const T* logits, float temperature) {
  int32_t largest_magnitude = 0;
  const auto note = [&](float score) {
    largest_magnitude = max(largest_magnitude, float_to_bits(score) & 0x7FFFFFFF);
    row.thread_key = max(row.thread_key, score_key(score));
    return score;
  };
#pragma unroll 4
  for (int32_t first = threadIdx.x * kGroup; first < row.vocab; first += kThreads * kGroup) {
    if (row.aligned) {
      const Group<T> group = load_global<Group<T>>(logits + first);
      Group<float> scores;
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        scores.values[i] = note(exact_div(to_float(group.values[i]), temperature));
      }
      store_global(row.scores + first, scores);
    } else {
      const int32_t end = min(first + kGroup, row.vocab);
      for (int32_t token = first; token < end; ++token) {
        row.scores[token] = note(exact_div(to_float(logits[token]), temperature));
      }
    }
  }
  const auto maximum = [](int32_t value) { return warp_max(value); };
  row.largest_key = reduce_block(shared.warp_keys, row.thread_key, maximum);
  largest_magnitude = reduce_block(shared.warp_keys, largest_magnitude, maximum);
  return largest_magnitude <= kInfinityBits && row.largest_key > kMinusInfinityKey;
}

__device__ int32_t top_k_threshold(Shared& shared, const Row& row, uint64_t k) {
  KeyRange range{kMinusInfinityKey, row.largest_key};
  if (k <= kThreads) {
    range.low = Search{shared, range, k}.key(ThreadMaximum{row.thread_key}, CountWeight{});
  }
  return Search{shared, range, k}.key(row, CountWeight{});
}

// The nucleus of the tokens with keys at or above `low`.
__device__ KeptTokens nucleus(Shared& shared, const Row& row, int32_t low, float top_p) {
  const MassWeight mass{RowWeights::make(row.largest_key)};
  uint64_t total = 0;
  row.for_each(low, [&](int32_t key) { total += key >= low ? mass(key) : 0; });
  total = reduce_block(shared.warp_sums, total, [](uint64_t value) { return warp_sum(value); });

  const uint64_t target = nucleus_mass(total, top_p);
  const int32_t bound =
      nucleus_bound(mass.weights, row.largest_key, total, target, row.vocab, WarpSearch{});
  Search search{shared, {max(low, bound), row.largest_key}, target};
  search.refine(row, mass, WeightPosition{mass.weights});
  const int32_t key = search.key(row, mass);
  const uint64_t each = mass(key), num_ties = search.inside / each;
  const uint64_t num_kept = (target - search.above + each - 1) / each;
  if (num_kept >= num_ties) return {key, 0};
  Search cut{shared, {0, row.vocab - 1}, num_kept};
  return {key, cut.key(TokensWithKey{row, key}, CountWeight{})};
}

__device__ void remove_all_but(const Row& row, const KeptTokens& kept) {
  const float minus_infinity = key_score(kMinusInfinityKey);
  const bool keeps_none = row.thread_key < kept.threshold;
  const auto filtered = [&](int32_t token, float score) {
    const int32_t smallest = kept.threshold + (token < kept.first_tie);
    return keeps_none || score_key(score) < smallest ? minus_infinity : score;
  };
#pragma unroll 4
  for (int32_t first = threadIdx.x * kGroup; first < row.vocab; first += kThreads * kGroup) {
    if (row.aligned) {
      Group<float> scores{};
      if (!keeps_none) scores = load_global<Group<float>>(row.scores + first);
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        scores.values[i] = filtered(first + i, scores.values[i]);
      }
      store_global(row.scores + first, scores);
    } else {
      const int32_t end = min(first + kGroup, row.vocab);
      for (int32_t token = first; token < end; ++token) {
        row.scores[token] = filtered(token, row.scores[token]);
      }
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 1)
    sample_filter_kernel(const SPECDEC_GRID_CONSTANT SampleFilterParams params, bool aligned) {
  SPECDEC_SHARED(Shared, shared);
  const int64_t index = blockIdx.x;
  const T* logits = static_cast<const T*>(params.logits) + index * params.logits_row_stride;
  Row row{params.scores + index * params.vocab, static_cast<int32_t>(params.vocab), aligned};
  if (!divide(shared, row, logits, params.temperature[index])) return;

  KeptTokens kept{kMinusInfinityKey, 0};
  const int64_t top_k = params.top_k[index];
  const float top_p = params.top_p[index], min_p = params.min_p[index];
  if (top_k > 0 && top_k < params.vocab) kept.threshold = top_k_threshold(shared, row, top_k);
  if (top_p < 1.0f) kept = nucleus(shared, row, kept.threshold, top_p);
  if (min_p > 0.0f) {
    const int32_t threshold =
        min_p_threshold(RowWeights::make(row.largest_key), row.largest_key, min_p, WarpSearch{});
    if (threshold > kept.threshold) kept = {threshold, 0};
  }
  remove_all_but(row, kept);
}

}  // namespace

cudaError_t launch_sample_filter(const SampleFilterParams& params, cudaStream_t stream) {
  if (params.vocab < 1 || params.vocab > kMaxFilterVocab) return cudaErrorInvalidValue;
  return with_float_type(params.logits_type, [&]<typename T>(T) {
    const bool aligned = reinterpret_cast<uintptr_t>(params.logits) % sizeof(Group<T>) == 0 &&
                         params.vocab % kGroup == 0 && params.logits_row_stride % kGroup == 0 &&
                         reinterpret_cast<uintptr_t>(params.scores) % sizeof(Group<float>) == 0;
    return launch(sample_filter_kernel<T>, {params.rows, 1, kThreads, stream}, params, aligned);
  });
}

}  // namespace specdec
