// First kernel of verify_sampled.cu: the statistics of target and draft distribution at every node,
// by segment.
//
// In:  logits and draft_probs [batch, nodes, vocab], parents [batch, nodes]
// Out: workspace.statistics [batch, nodes, segments] of active nodes; workspace.arrivals [batch],
//      zeros
//
// One warp per (row, node, segment of 1024 tokens). The logits stay in registers between the
// maximum and the sum, so they are read once. Inactive nodes are skipped, and so are the draft
// distributions of leaves. One barrier: the first warp finds out whether the block's node is active
// and a leaf, and all warps need to know. Bound by memory.
#pragma once

#include "sampled_distributions.cuh"

namespace specdec {

constexpr int kStatisticsThreads = 256;
constexpr int kStatisticsWarps = kStatisticsThreads / kWarpSize;

// Statistics of the tokens first .. first + 1023, by a warp; draft may be null.
template <typename T>
__device__ NodeStatistics segment_statistics(const T* logits, const float* draft, int64_t first,
                                             int64_t vocab, VectorAlignment aligned) {
  float values[kSegmentRows][kGroup];
  int32_t largest = kMinusInfinityKey;
  first += kGroup * (threadIdx.x % kWarpSize);
#pragma unroll
  for (int row = 0; row < kSegmentRows; ++row) {
    load_logits(logits, first + row * kSumLanes, vocab, aligned, values[row]);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) largest = max(largest, max_key(values[row][i]));
  }
  const float max_logit = key_value(warp_max(largest));
  const float reference = finite_reference(max_logit);
  float target_lanes[kGroup] = {}, draft_lanes[kGroup] = {};
#pragma unroll
  for (int row = 0; row < kSegmentRows; ++row) {
    float weights[kGroup] = {};
    if (draft != nullptr) load_draft(draft, first + row * kSumLanes, vocab, aligned, weights);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      target_lanes[i] = exact_add(target_lanes[i], target_weight(values[row][i], reference));
      draft_lanes[i] = exact_add(draft_lanes[i], weights[i]);
    }
  }
  const float target_mass = sum_lanes(target_lanes);
  return {max_logit, target_mass, sum_lanes(draft_lanes)};
}

__device__ inline bool is_active(const ParentsRow& parents, int64_t node) {
  for (; node > 0; node = parents[node]) {
    if (!parents.link_is_legal(node)) return false;
  }
  return parents.row_is_active();
}

struct StatisticsShared {
  SharedValue<bool> active;
  SharedValue<bool> has_child;
};

template <typename T>
__global__ void __launch_bounds__(kStatisticsThreads)
    statistics_kernel(const SPECDEC_GRID_CONSTANT VerifySampledParams params,
                      const SPECDEC_GRID_CONSTANT SampledWorkspace workspace,
                      VectorAlignment aligned) {
  SPECDEC_SHARED(StatisticsShared, shared);
  const int64_t blocks_per_node = (workspace.segments + kStatisticsWarps - 1) / kStatisticsWarps;
  const int64_t part = blockIdx.x % blocks_per_node;
  const int64_t node = blockIdx.x / blocks_per_node % params.nodes;
  const int64_t row = blockIdx.x / blocks_per_node / params.nodes;
  const int warp = threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;

  if (node == 0 && part == 0 && threadIdx.x == 0) workspace.arrivals[row] = 0;
  if (warp == 0) {
    bool child = false;
    for (int64_t later = node + 1 + lane; later < params.nodes; later += kWarpSize) {
      child |= params.parents(row, later) == node;
    }
    const bool has_child = warp_any(child);
    if (lane == 0) {
      shared.active = is_active({&params.parents(row, 0), params.parents.column_stride}, node);
      shared.has_child = has_child;
    }
  }
  block_barrier();  // all threads know the node
  const int64_t segment = part * kStatisticsWarps + warp;
  if (!shared.active || segment >= workspace.segments) return;

  const T* logits = static_cast<const T*>(params.logits) + row * params.logits_batch_stride +
                    node * params.logits_node_stride;
  const float* draft =
      params.draft_probs + row * params.draft_batch_stride + node * params.draft_node_stride;
  const NodeStatistics statistics = segment_statistics(logits, shared.has_child ? draft : nullptr,
                                                       segment * kSegment, params.vocab, aligned);
  if (lane == 0) {
    workspace.statistics[(row * params.nodes + node) * workspace.segments + segment] = statistics;
  }
}

// Merges the segments, by a warp: its lanes are the columns of the sums.
__device__ inline NodeStatistics merge_statistics(const NodeStatistics* statistics,
                                                  int64_t segments) {
  const int lane = threadIdx.x % kWarpSize;
  int32_t largest = kMinusInfinityKey;
  for (int64_t i = lane; i < segments; i += kWarpSize) {
    largest = max(largest, max_key(statistics[i].max));
  }
  const float max_logit = key_value(warp_max(largest));
  const float reference = finite_reference(max_logit);
  float target_mass = 0.0f, draft_mass = 0.0f;
  for (int64_t i = lane; i < segments; i += kWarpSize) {
    target_mass = exact_add(target_mass, rescaled_mass(statistics[i], reference));
    draft_mass = exact_add(draft_mass, statistics[i].draft_mass);
  }
  return {max_logit, warp_sum_by_halving(target_mass), warp_sum_by_halving(draft_mass)};
}

}  // namespace specdec
