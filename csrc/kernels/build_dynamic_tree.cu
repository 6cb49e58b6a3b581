// build_dynamic_tree: the best candidates of a dynamic draft as a tree. The rule and the meaning of
// the arguments: specdec/build_dynamic_tree.h.
//
// In:  scores, tokens, parents [batch, candidates], root_tokens [batch]
// Out: tree_tokens, tree_parents, selected [batch, nodes]
//
// One block per row, kItems neighbouring candidates per thread, no sort:
//   1. keys and parents to shared memory; a thread walks up from each of its candidates for the
//      lowest key on the path, its effective key (a draft of depth d: d steps);
//   2. select: the key of the worst selected candidate, bit by bit from the top: a bit is set if
//      still at least nodes - 1 keys reach the value. Ends early once exactly that many do, which
//      for distinct scores is after about half of the 32 rounds;
//   3. number: one prefix sum over the candidates in index order counts the keys above that key and
//      those equal to it; the first of the equal ones fill up the selection. The count of selected
//      candidates before a candidate is its place in the tree;
//   4. the nodes are written; a parent's number is read from shared memory.
//
// Example: 3 nodes, scores [-1, -2, -1, -3] of children of the root. The worst selected key is that
// of -1; none is above it, candidates 0 and 2 are equal to it, both fit: nodes 1 and 2.
//
// Bytes: 20 per candidate read, 24 per node written: 16 KB at 710 candidates (top 10, depth 8) and
// 60 nodes; bound by latency: about 100 cycles of a round of step 2. No floats but keys.
#include <algorithm>

#include "specdec/build_dynamic_tree.h"
#include "specdec/cuda.cuh"
#include "specdec/launchers.h"

namespace specdec {
namespace {

constexpr int kItems = 4;  // candidates of a thread
constexpr int kMaxThreads = kMaxCandidates / kItems;
constexpr int kMaxWarps = kMaxThreads / kWarpSize;
static_assert(kMaxWarps <= kWarpSize, "one warp adds up what the warps have counted");

struct Shared {
  SharedArray<uint32_t, kMaxCandidates> keys;
  SharedArray<int16_t, kMaxCandidates> parents;
  SharedArray<int16_t, kMaxCandidates> numbers;  // node of a selected candidate
  // Buffers 0 and 1 in turn for sums, because a warp may count again while others still read; the
  // last one for the prefix sum.
  SharedArray<uint32_t, 3 * kMaxWarps> warp_counts;
};
static_assert(sizeof(Shared) <= 48 * 1024, "static shared memory");

__device__ void load_candidates(Shared& shared, const BuildDynamicTreeParams& params, int64_t row) {
  for (int i = threadIdx.x; i < params.candidates; i += blockDim.x) {
    const int64_t parent = params.parents(row, i);
    shared.keys[i] = candidate_key(params.scores(row, i), parent, i);
    // Where the link is illegal the key is 0 and nobody goes further up.
    shared.parents[i] = static_cast<int16_t>(parent);
  }
}

__device__ uint32_t effective_key(Shared& shared, int candidate) {
  uint32_t key = shared.keys[candidate];
  int at = candidate;
  while (key > 0 && shared.parents[at] >= 0) {
    at = shared.parents[at];
    const uint32_t above = shared.keys[at];
    key = min(key, above);
  }
  return key;
}

// What the warps have stored in a buffer.
__device__ uint32_t read_count(Shared& shared, int buffer, int warp) {
  const int num_warps = static_cast<int>(blockDim.x) / kWarpSize;
  return warp < num_warps ? shared.warp_counts[buffer * kMaxWarps + warp] : 0;
}

// The sum over the block, in all threads.
__device__ uint32_t block_sum(Shared& shared, uint32_t count, int buffer) {
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  count = warp_sum(count);
  if (lane == 0) shared.warp_counts[buffer * kMaxWarps + warp] = count;
  block_barrier();  // this buffer is complete, and nobody reads the other one any more
  return warp_sum(read_count(shared, buffer, lane));
}

// The largest threshold that at least `wanted` keys reach; 0 if not so many are eligible.
__device__ uint32_t select_threshold(Shared& shared, const uint32_t (&keys)[kItems],
                                     uint32_t wanted) {
  uint32_t threshold = 0;
  for (int bit = 31; bit >= 0; --bit) {
    const uint32_t higher = threshold | 1u << bit;
    uint32_t count = 0;
#pragma unroll
    for (int item = 0; item < kItems; ++item) count += keys[item] >= higher ? 1 : 0;
    count = block_sum(shared, count, bit % 2);
    if (count >= wanted) threshold = higher;
    if (count == wanted) break;
  }
  return threshold;
}

struct Prefix {
  uint32_t before;  // the sum over the threads before this one
  uint32_t total;
};

__device__ Prefix block_prefix(Shared& shared, uint32_t value) {
  constexpr int kBuffer = 2;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  uint32_t inclusive = value;
#pragma unroll
  for (int distance = 1; distance < kWarpSize; distance *= 2) {
    const uint32_t below = shuffle_up(inclusive, distance);
    if (lane >= distance) inclusive += below;
  }
  if (lane == kWarpSize - 1) shared.warp_counts[kBuffer * kMaxWarps + warp] = inclusive;
  block_barrier();  // the sums of the warps are complete
  const uint32_t count = read_count(shared, kBuffer, lane);
  return {warp_sum(lane < warp ? count : 0u) + inclusive - value, warp_sum(count)};
}

// Numbers the selected candidates; returns how many there are. nodes[item]: 0 where not selected.
__device__ int number_nodes(Shared& shared, const uint32_t (&keys)[kItems], int wanted,
                            int (&nodes)[kItems]) {
  const uint32_t threshold = select_threshold(shared, keys, static_cast<uint32_t>(wanted));
  const auto is_equal = [&](uint32_t key) { return key == threshold && key > 0; };
  // Keys above the threshold are counted in the upper half, equal ones in the lower half.
  uint32_t counts = 0;
#pragma unroll
  for (int item = 0; item < kItems; ++item) {
    counts += keys[item] > threshold ? 1u << 16 : is_equal(keys[item]) ? 1u : 0u;
  }
  const Prefix prefix = block_prefix(shared, counts);
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

// Node 0, and the nodes that no candidate was left for.
__device__ void write_other_nodes(const BuildDynamicTreeParams& params, int64_t row,
                                  int num_selected) {
  const int64_t root_token = params.root_tokens[row];
  const bool row_is_active = root_token >= 0;
  for (int64_t node = threadIdx.x; node < params.nodes; node += blockDim.x) {
    if (node > 0 && node <= num_selected) continue;
    const bool is_root = node == 0 && row_is_active;
    const int64_t at = row * params.nodes + node;
    params.tree_tokens[at] = is_root ? root_token : 0;
    params.tree_parents[at] = is_root ? kRootParent : kInactiveParent;
    params.selected[at] = -1;
  }
}

__global__ void __launch_bounds__(kMaxThreads)
    build_dynamic_tree_kernel(BuildDynamicTreeParams params) {
  SPECDEC_SHARED(Shared, shared);
  const int64_t row = blockIdx.x;
  const int first = threadIdx.x * kItems;
  load_candidates(shared, params, row);
  block_barrier();  // keys and parents are complete before anyone walks

  const bool row_is_active = params.root_tokens[row] >= 0;
  uint32_t keys[kItems];
#pragma unroll
  for (int item = 0; item < kItems; ++item) {
    const bool exists = row_is_active && first + item < params.candidates;
    keys[item] = exists ? effective_key(shared, first + item) : 0;
  }
  int nodes[kItems];
  const int num_selected = number_nodes(shared, keys, static_cast<int>(params.nodes) - 1, nodes);
#pragma unroll
  for (int item = 0; item < kItems; ++item) {
    if (nodes[item] > 0) shared.numbers[first + item] = static_cast<int16_t>(nodes[item]);
  }
  block_barrier();  // all selected candidates have their numbers
#pragma unroll
  for (int item = 0; item < kItems; ++item) {
    if (nodes[item] == 0) continue;
    const int16_t parent = shared.parents[first + item];
    int16_t parent_node = 0;
    if (parent >= 0) parent_node = shared.numbers[parent];
    const int64_t at = row * params.nodes + nodes[item];
    params.tree_tokens[at] = params.tokens(row, first + item);
    params.tree_parents[at] = parent_node;
    params.selected[at] = first + item;
  }
  write_other_nodes(params, row, num_selected);
}

}  // namespace

cudaError_t launch_build_dynamic_tree(const BuildDynamicTreeParams& params, cudaStream_t stream) {
  if (params.nodes < 1 || params.nodes > kMaxNodes || params.candidates > kMaxCandidates) {
    return cudaErrorInvalidValue;
  }
  const int64_t warps = (params.candidates + kItems * kWarpSize - 1) / (kItems * kWarpSize);
  const int threads = static_cast<int>(std::max<int64_t>(1, warps)) * kWarpSize;
  return launch(build_dynamic_tree_kernel, {params.batch, 1, threads, stream}, params);
}

}  // namespace specdec
