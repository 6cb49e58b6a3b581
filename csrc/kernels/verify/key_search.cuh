// The search of sample_filter.cu for the key at which a sum over keys reaches a target, by one block.
//
// A search has a few levels. Each level makes a histogram of the keys in its range in shared
// memory; the bucket in which the sum from the top reaches the target becomes the next range.
// Example: k = 2, keys 9 4 7 7, range [7, 9]: the count from the top reaches 2 at 7.
//
// Every thread takes part in every search and has the same range, so branches are uniform.
// Barriers: around each phase of a histogram (cleared, filled, read) and before the shared arrays
// are reused. Sums are integers, so the order of the atomics does not matter: results are bitwise
// repeatable and equal to the CPU op's. A 64-bit sum is two 32-bit atomics with a carry, because
// shared memory has no 64-bit adder.
#pragma once

#include "specdec/device/cuda.cuh"
#include "specdec/sampling/filter_search.h"

namespace specdec {

constexpr int kSearchThreads = 1024;
constexpr int kSearchWarps = kSearchThreads / kWarpSize;
constexpr int kBucketsPerWarp = KeyBuckets::kCount / kSearchWarps;
static_assert(kSearchWarps == kWarpSize, "a warp reduces what the warps have found");
static_assert(kBucketsPerWarp == 2 * kWarpSize, "two buckets per lane");

struct SearchShared {
  SharedArray<uint32_t, KeyBuckets::kCount> sums_low;
  SharedArray<uint32_t, KeyBuckets::kCount> sums_high;
  SharedArray<uint64_t, kSearchWarps> warp_sums;
  SharedArray<int32_t, kSearchWarps> warp_keys;
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
__device__ T reduce_block(SharedArray<T, kSearchWarps>& warp_values, T value,
                          const Combine& combine) {
  value = combine(value);
  if (lane_id() == 0) warp_values[warp_id()] = value;
  block_barrier();  // all warps have stored their values
  value = combine(warp_values[lane_id()]);
  block_barrier();  // all warps have read them
  return value;
}

// The keys of a search have a function for_each(low, visit), which calls visit(key) at least for the
// keys that are not below `low`, each in one thread.

// Finds the key in `range` at which the sum of weights, from the largest key down, reaches
// `target`. Such a key must exist.
struct KeySearch {
  SearchShared& shared;
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
    const int warp = kSearchWarps - 1 - advance(shared.warp_sums[kSearchWarps - 1 - lane_id()]);
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
    for (int bucket = threadIdx.x; bucket < KeyBuckets::kCount; bucket += kSearchThreads) {
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

}  // namespace specdec
