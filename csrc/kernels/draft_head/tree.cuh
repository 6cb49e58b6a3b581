// The tree of a batch row in scratch memory while the fused draft_head drafts it. Only one block
// accesses it, block `batch row % blocks`: it writes the root before the first phase
// (phases/begin.cuh) and grows the tree (phases/grow.cuh).
#pragma once

#include "block.cuh"

namespace specdec {

struct DraftTreeRow {
  const DraftKernelParams& params;
  int64_t row;
  int64_t frontier_width;  // as in the plan

  __device__ __forceinline__ DraftTreeRow(const DraftKernelParams& all, int64_t batch_row)
      : params(all), row(batch_row), frontier_width(all.plan.frontier_width()) {}

  // The range of candidates of a level.
  __device__ __forceinline__ int level_begin(int level) const {
    return level == 0 ? 0 : params.level_ends[level - 1];
  }
  __device__ __forceinline__ int level_end(int level) const { return params.level_ends[level]; }
  __device__ __forceinline__ bool is_dynamic() const { return params.num_choices == 0; }
  // Static tree: the candidate whose child this one is. Choices come from the caller and are not
  // checked: the value may be kRootParent at any level, or no candidate at all.
  __device__ __forceinline__ int64_t choice_parent(int candidate) const {
    const int64_t node = params.choices(candidate, 0);
    return node > 0 ? node - 1 : kRootParent;
  }
  // The place of a candidate's parent among the expanded nodes of its level; negative if choices
  // name no such node.
  __device__ __forceinline__ int32_t parent_place(int candidate, int level) const {
    const int begin = level_begin(level);
    if (is_dynamic()) return (candidate - begin) / params.top_k;
    const int64_t parent = choice_parent(candidate);
    if (level == 0) return parent == kRootParent ? 0 : -1;
    return parent >= level_begin(level - 1) && parent < begin ? places()[parent] : -1;
  }
  // The rank of a candidate among its parent's children; -1 if choices name no legal one.
  __device__ __forceinline__ int32_t rank(int candidate, int level) const {
    if (is_dynamic()) return (candidate - level_begin(level)) % params.top_k;
    const int64_t rank = params.choices(candidate, 1);
    return rank >= 0 && rank < params.top_k ? static_cast<int32_t>(rank) : -1;
  }
  __device__ __forceinline__ float* scores() const { return of_row(params.scratch.scores); }
  __device__ __forceinline__ int64_t* tokens() const { return of_row(params.scratch.tokens); }
  __device__ __forceinline__ int64_t* parents() const { return of_row(params.scratch.parents); }
  __device__ __forceinline__ int32_t* places() const { return of_row(params.scratch.places); }

  // The expanded nodes of a level.
  __device__ __forceinline__ DraftNode* nodes(int level) const {
    return params.scratch.nodes + first_node(level);
  }
  __device__ __forceinline__ uint64_t* ancestors(int level) const {
    return params.scratch.ancestors + first_node(level) * params.words;
  }

  // The outputs.
  __device__ __forceinline__ int64_t* tree_tokens() const {
    return params.tree_tokens + row * params.nodes;
  }
  __device__ __forceinline__ int64_t* tree_parents() const {
    return params.tree_parents + row * params.nodes;
  }
  // Replaces the root's score 0 by NaN if there was an illegal number; then the root stays alone.
  __device__ __forceinline__ float* tree_scores() const {
    return params.tree_scores + row * params.nodes;
  }

 private:
  template <typename Value>
  __device__ __forceinline__ Value* of_row(Value* memory) const {
    return memory + row * params.num_candidates;
  }
  __device__ __forceinline__ int64_t first_node(int level) const {
    return (static_cast<int64_t>(level % 2) * params.plan.batch + row) * frontier_width;
  }
};

}  // namespace specdec
