// What the fused draft_head does before its first phase: it finds the rows that have new elements
// and writes trees of their roots alone, which remain if nothing is drafted.
//
// Every block checks the numbers of all rows that address memory, and counts elements, for itself.
// A row with an illegal number reads nothing; its root gets the score NaN.
#pragma once

#include "kernels/draft_head/tree.cuh"
#include "specdec/math/pick.h"

namespace specdec {

// The number of new elements of a row, or -1 if one of its numbers is illegal: the rules of
// check_rows (csrc/ops/draft_head/draft_head.cpp). All lanes of a warp call it together.
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

// The place of each candidate of a static tree among the expanded candidates of its level; negative
// if it is not expanded. Expanded candidates have slots in their order, so the place is the slot
// minus the level's first. Choices that do not match the levels lose nodes, but no node gets a
// place without memory.
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
  warp_barrier();  // candidates with children are marked
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

// Writes the root alone.
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

// Replaces counts[1 + row] by the sum up to and including that row. One warp calls it.
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

// Fills shared.first_element. All threads of the block call it; ends with a barrier.
template <typename T>
__device__ __forceinline__ void count_elements(const DraftBlock<T>& block) {
  const DraftPlan& plan = block.params.plan;
  for (int row = block.warp(); row < plan.batch; row += kDraftWarps) {
    const int64_t count = count_new(block.params, row);
    const int64_t elements = count > 0 ? count + plan.kept_width() - 1 : 0;
    if (block.lane() == 0) block.shared.first_element[row + 1] = static_cast<int>(elements);
  }
  block.sync();  // the counts of all rows are stored
  if (block.warp() == 0) sum_up(block.shared.first_element, plan.batch);
  block.sync();  // their sums are stored
}

// Runs before the first phase. All threads of the block call it. It writes global memory for this
// block only, except for scratch.zeros, which any block may read after the next grid barrier.
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
  block.sync();  // the trees are stored
}

}  // namespace specdec
