// The fused draft_head before its first phase: which rows have something to read, and trees of
// their roots alone, which stay that where nothing is drafted.
//
// Every block checks the numbers of all rows that address memory, and counts elements, for itself.
// A row with an illegal one reads nothing; its root has the score NaN.
#pragma once

#include "kernels/draft_head/tree.cuh"
#include "specdec/math/pick.h"

namespace specdec {

// Elements of a row that are read, or -1 where one of its numbers is illegal: the rules of
// check_rows (csrc/ops/draft_head.cpp). By all lanes of a warp together.
__device__ __forceinline__ int64_t count_new(const DraftKernelParams& params, int row) {
  const auto is_below = [](int64_t number, int64_t end) { return number >= 0 && number < end; };
  const int64_t count = params.counts[row];
  if (!is_below(count, int64_t{params.num_new} + 1)) return -1;
  if (!is_below(params.roots[row], params.vocab)) return -1;
  if (count == 0) return 0;
  const int last = params.plan.depth - 1;
  const int64_t slots = params.plan.is_parallel || last == 0
                            ? last
                            : params.first_slots[last] + params.plan.widths[last];
  bool are_legal = is_below(params.lengths[row], params.capacity - count - slots + 1) &&
                   is_below(params.positions[row], params.num_positions - count - last + 1);
  for (int64_t i = threadIdx.x % kWarpSize; i < count; i += kWarpSize) {
    are_legal = are_legal && is_below(params.tokens(row, i), params.vocab);
  }
  return warp_all(are_legal) ? count : -1;
}

// Of each candidate of a static tree its place among those of its level that are expanded, else a
// negative number. Slots are given to these in their order, so the place is their number less the
// level's first. Choices that do not match the levels lose nodes, but get none that have no memory.
__device__ __forceinline__ void place_candidates(const DraftTreeRow& tree) {
  const DraftKernelParams& params = tree.params;
  const int lane = threadIdx.x % kWarpSize;
  int32_t* places = tree.places();
  for (int i = lane; i < params.num_choices; i += kWarpSize) places[i] = -1;
  warp_barrier();
  const int end = tree.level_begin(params.plan.depth - 1);  // the last level has no children
  for (int i = lane; i < params.num_choices; i += kWarpSize) {
    const int64_t parent = tree.choice_parent(i);
    if (parent >= 0 && parent < end) places[parent] = 0;
  }
  warp_barrier();  // those with children are marked
  int level = 0, num_before = 0;
  for (int first = 0; first < params.num_choices; first += kWarpSize) {
    const int i = first + lane;
    const bool is_expanded = i < params.num_choices && places[i] == 0;
    const uint32_t expanded = ballot(is_expanded);
    if (is_expanded) {
      while (i >= tree.level_end(level)) ++level;
      const int slot = num_before + __popc(expanded & ((1u << lane) - 1));
      const int place = slot - params.first_slots[level + 1];
      places[i] = place < params.plan.widths[level + 1] ? place : -1;
    }
    num_before += __popc(expanded);
  }
}

// The root alone.
__device__ __forceinline__ void begin_tree(const DraftTreeRow& tree, bool is_legal) {
  const DraftKernelParams& params = tree.params;
  const int lane = threadIdx.x % kWarpSize;
  const int64_t root = params.roots[tree.row];
  for (int node = lane; node < params.nodes; node += kWarpSize) {
    tree.tree_tokens()[node] = node == 0 ? root : 0;
    tree.tree_parents()[node] = node == 0 ? kRootParent : kInactiveParent;
    tree.tree_scores()[node] = node > 0 ? bits_to_float(kMinusInfinityBits) : is_legal ? 0 : NAN;
  }
  if (lane == 0) {
    *tree.nodes(0) = {.token = root,
                      .candidate = static_cast<int32_t>(kRootParent),
                      .parent = 0,
                      .score = 0,
                      .is_alive = 1};
  }
  if (!params.plan.is_parallel) {
    for (int word = lane; word < params.words; word += kWarpSize) tree.ancestors(0)[word] = 0;
  }
  place_candidates(tree);
}

// Turns counts[1 + row] into their sum up to and with that row. One warp.
template <typename Counts>
__device__ __forceinline__ void sum_up(Counts& counts, int batch) {
  const int lane = threadIdx.x % kWarpSize;
  int before = 0;
  for (int first = 0; first < batch; first += kWarpSize) {
    const int row = first + lane;
    int sum = 0;
    if (row < batch) sum = counts[row + 1];
#pragma unroll
    for (int distance = 1; distance < kWarpSize; distance *= 2) {
      const int below = shuffle_up(sum, distance);
      if (lane >= distance) sum += below;
    }
    sum += before;
    if (row < batch) counts[row + 1] = sum;
    before = shuffle(sum, kWarpSize - 1);
  }
  if (lane == 0) counts[0] = 0;
}

// shared.first_element. By all threads of the block; ends with a barrier.
template <typename T>
__device__ __forceinline__ void count_elements(const DraftBlock<T>& block) {
  const DraftPlan& plan = block.params.plan;
  for (int row = block.warp(); row < plan.batch; row += kDraftWarps) {
    const int64_t count = count_new(block.params, row);
    const int64_t elements = count > 0 ? count + plan.kept_width() - 1 : 0;
    if (block.lane() == 0) block.shared.first_element[row + 1] = static_cast<int>(elements);
  }
  block.sync();  // the counts of all rows are there
  if (block.warp() == 0) sum_up(block.shared.first_element, plan.batch);
  block.sync();  // their sums are
}

// Before the first phase. By all threads of the block; what is written to global memory is for this
// block, but for zeros, which everybody may read behind the next barrier of the grid.
template <typename T>
__device__ __forceinline__ void begin_draft(const DraftBlock<T>& block) {
  const DraftKernelParams& params = block.params;
  for (int row = block.index() + block.warp() * block.count(); row < params.plan.batch;
       row += kDraftWarps * block.count()) {
    begin_tree({params, row}, count_new(params, row) >= 0);
  }
  const int width = max(params.hidden, params.feature_width);
  const int first = block.index() * kDraftThreads + static_cast<int>(threadIdx.x);
  for (int i = first; i < width / kVectorElements<T>; i += block.count() * kDraftThreads) {
    store_global(static_cast<uint4*>(params.scratch.zeros) + i, make_uint4(0, 0, 0, 0));
  }
  block.sync();  // the trees are there
}

}  // namespace specdec
