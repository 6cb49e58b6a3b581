// The selection of a dynamic tree by some warps of one block, for build_dynamic_tree and for
// draft_head, whose other warps work at the same time. Rule and meaning of the arguments:
// specdec/tree/build_dynamic_tree.h.
//
// Each thread has contiguous candidates; there is no sort:
//   1. keys: keys and parents go to shared memory. A thread walks up from each of its candidates to
//      find the lowest key on the path, the effective key (d steps at depth d).
//   2. select: finds the key of the worst selected candidate, bit by bit from the top. A bit is set
//      if at least nodes - 1 keys still reach the value. Ends early once exactly that many do: for
//      distinct scores after about half of the 32 rounds.
//   3. number: one prefix sum over the candidates in index order counts the keys above that key and
//      those equal to it; the first of the equal ones complete the selection. The number of
//      selected candidates before a candidate is its place in the tree.
//   4. write: the nodes are written; a parent's number is read from shared memory.
//
// Example: 3 nodes, scores [-1, -2, -1, -3] of children of the root. The worst selected key is that
// of -1. No key is above it, candidates 0 and 2 have it and both fit: they are nodes 1 and 2.
//
// Uses floats only to make keys.
#pragma once

#include "specdec/device/cuda.cuh"
#include "specdec/tree/build_dynamic_tree.h"

namespace specdec {

// Shared memory, in words: keys, later reused for the numbers of selected candidates; the counts of
// the warps; parents.
constexpr int kTreeCounts = kMaxCandidates;
// Sums use buffers 0 and 1 in turn, because a warp may start the next count while others still
// read. The third buffer is for the prefix sum.
constexpr int kTreeParents = kTreeCounts + 3 * kWarpSize;
constexpr int kTreeWords = kTreeParents + kMaxCandidates / 2;

// Selects the tree of one row with threads 0 .. num_threads - 1, which are whole warps. sync() is a
// barrier among them that orders memory. Each thread has at most kItems candidates.
template <int kItems, typename Sync>
class DynamicTree {
 public:
  __device__ __forceinline__ DynamicTree(const BuildDynamicTreeParams& params, int64_t row,
                                         const SharedSpan<uint32_t>& memory, int num_threads,
                                         const Sync& sync)
      : params_(params),
        row_(row),
        keys_(memory.subspan(0, kMaxCandidates)),
        numbers_(keys_.template as<int16_t>()),
        counts_(memory.subspan(kTreeCounts, 3 * kWarpSize)),
        parents_(memory.subspan(kTreeParents, kMaxCandidates / 2).template as<int16_t>()),
        num_threads_(num_threads),
        sync_(sync) {}

  // Writes the row's outputs. Its shared memory is free after the next barrier.
  __device__ __forceinline__ void build() const {
    const int candidates = static_cast<int>(params_.candidates);
    const int items = (candidates + num_threads_ - 1) / num_threads_;
    const int first = static_cast<int>(threadIdx.x) * items;
    load_candidates();
    sync_();  // keys and parents are complete before any thread walks

    const bool row_is_active = params_.root_tokens[row_] >= 0;
    uint32_t keys[kItems];
#pragma unroll
    for (int item = 0; item < kItems; ++item) {
      const bool exists = row_is_active && item < items && first + item < candidates;
      keys[item] = exists ? effective_key(first + item) : 0;
    }
    int nodes[kItems];
    const int num_selected = number_nodes(keys, static_cast<int>(params_.nodes) - 1, nodes);
#pragma unroll
    for (int item = 0; item < kItems; ++item) {
      if (nodes[item] > 0) numbers_[first + item] = static_cast<int16_t>(nodes[item]);
    }
    sync_();  // all selected candidates have their numbers
#pragma unroll
    for (int item = 0; item < kItems; ++item) {
      if (nodes[item] > 0) write_node(nodes[item], first + item);
    }
    write_other_nodes(num_selected);
  }

 private:
  __device__ __forceinline__ void load_candidates() const {
    for (int i = threadIdx.x; i < params_.candidates; i += num_threads_) {
      const int64_t parent = params_.parents(row_, i);
      keys_[i] = candidate_key(params_.scores(row_, i), parent, i);
      // At an illegal link the key is 0, and no walk goes further up.
      parents_[i] = static_cast<int16_t>(parent);
    }
  }

  __device__ __forceinline__ uint32_t effective_key(int candidate) const {
    uint32_t key = keys_[candidate];
    int at = candidate;
    while (key > 0 && parents_[at] >= 0) {
      at = parents_[at];
      const uint32_t above = keys_[at];
      key = min(key, above);
    }
    return key;
  }

  // The count of a warp in a buffer.
  __device__ __forceinline__ uint32_t read_count(int buffer, int warp) const {
    return warp < num_threads_ / kWarpSize ? counts_[buffer * kWarpSize + warp] : 0u;
  }

  // The sum over all threads, returned to each of them.
  __device__ __forceinline__ uint32_t sum(uint32_t count, int buffer) const {
    const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
    count = warp_sum(count);
    if (lane == 0) counts_[buffer * kWarpSize + warp] = count;
    sync_();  // this buffer is complete, and no thread reads the other one any more
    return warp_sum(read_count(buffer, lane));
  }

  // The largest threshold that at least `wanted` keys reach; 0 if fewer are eligible.
  __device__ __forceinline__ uint32_t select_threshold(const uint32_t (&keys)[kItems],
                                                       uint32_t wanted) const {
    uint32_t threshold = 0;
    for (int bit = 31; bit >= 0; --bit) {
      const uint32_t higher = threshold | 1u << bit;
      uint32_t count = 0;
#pragma unroll
      for (int item = 0; item < kItems; ++item) count += keys[item] >= higher ? 1 : 0;
      count = sum(count, bit % 2);
      if (count >= wanted) threshold = higher;
      if (count == wanted) break;
    }
    return threshold;
  }

  struct Prefix {
    uint32_t before;  // the sum over earlier threads
    uint32_t total;
  };

  __device__ __forceinline__ Prefix prefix_sum(uint32_t value) const {
    constexpr int kBuffer = 2;
    const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
    uint32_t inclusive = value;
#pragma unroll
    for (int distance = 1; distance < kWarpSize; distance *= 2) {
      const uint32_t below = shuffle_up(inclusive, distance);
      if (lane >= distance) inclusive += below;
    }
    if (lane == kWarpSize - 1) counts_[kBuffer * kWarpSize + warp] = inclusive;
    sync_();  // the sums of the warps are complete
    const uint32_t count = read_count(kBuffer, lane);
    return {warp_sum(lane < warp ? count : 0u) + inclusive - value, warp_sum(count)};
  }

  // Numbers the selected candidates and returns their count. nodes[item] is 0 if it is not
  // selected.
  __device__ __forceinline__ int number_nodes(const uint32_t (&keys)[kItems], int wanted,
                                              int (&nodes)[kItems]) const {
    const uint32_t threshold = select_threshold(keys, static_cast<uint32_t>(wanted));
    const auto is_equal = [&](uint32_t key) { return key == threshold && key > 0; };
    // Keys above the threshold are counted in the upper half, keys equal to it in the lower half.
    uint32_t counts = 0;
#pragma unroll
    for (int item = 0; item < kItems; ++item) {
      counts += keys[item] > threshold ? 1u << 16 : is_equal(keys[item]) ? 1u : 0u;
    }
    const Prefix prefix = prefix_sum(counts);
    const int total_above = static_cast<int>(prefix.total >> 16);
    const int num_equal = min(static_cast<int>(prefix.total & 0xFFFF), wanted - total_above);

    int above = static_cast<int>(prefix.before >> 16);
    int equal = static_cast<int>(prefix.before & 0xFFFF);
#pragma unroll
    for (int item = 0; item < kItems; ++item) {
      const bool is_above = keys[item] > threshold;
      const bool is_selected = is_above || (is_equal(keys[item]) && equal < num_equal);
      nodes[item] = is_selected ? 1 + above + min(equal, num_equal) : 0;
      above += is_above ? 1 : 0;
      equal += is_equal(keys[item]) ? 1 : 0;
    }
    return total_above + num_equal;
  }

  __device__ __forceinline__ void write_node(int node, int candidate) const {
    const int16_t parent = parents_[candidate];
    int16_t parent_node = 0;
    if (parent >= 0) parent_node = numbers_[parent];
    const int64_t at = row_ * params_.nodes + node;
    params_.tree_tokens[at] = params_.tokens(row_, candidate);
    params_.tree_parents[at] = parent_node;
    params_.selected[at] = candidate;
  }

  // Writes node 0, and the nodes for which no candidate was left.
  __device__ __forceinline__ void write_other_nodes(int num_selected) const {
    const int64_t root_token = params_.root_tokens[row_];
    const bool row_is_active = root_token >= 0;
    for (int64_t node = threadIdx.x; node < params_.nodes; node += num_threads_) {
      if (node > 0 && node <= num_selected) continue;
      const bool is_root = node == 0 && row_is_active;
      const int64_t at = row_ * params_.nodes + node;
      params_.tree_tokens[at] = is_root ? root_token : 0;
      params_.tree_parents[at] = is_root ? kRootParent : kInactiveParent;
      params_.selected[at] = -1;
    }
  }

  const BuildDynamicTreeParams& params_;
  int64_t row_;
  SharedSpan<uint32_t> keys_;
  SharedSpan<int16_t> numbers_;  // nodes of selected candidates
  SharedSpan<uint32_t> counts_;
  SharedSpan<int16_t> parents_;
  int num_threads_;
  const Sync& sync_;
};

}  // namespace specdec
