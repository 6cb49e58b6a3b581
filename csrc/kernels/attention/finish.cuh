// Second kernel of tree_attention.cu: for one node of a (row, key-value head), attends from the
// last whole tile of the prefix to the node itself, then merges all splits.
//
// All threads merge the complete splits of the prefix into totals in shared memory and copy the
// remaining tiles. The first warp attends to these tiles, with the heads of the group as query
// rows, and adds every complete split to the totals. Barriers: around each tile (arrived, read),
// after the splits are merged and before the output.
#pragma once

#include "layout.cuh"

namespace specdec {

constexpr int kFinishThreads = 128;

struct FinishShared {
  SharedArray<int, kMaxCudaTreeNodes> path;  // the ancestor at each depth
  SharedArray<float, kTileRows> maximum;     // over the splits merged so far
  SharedArray<float, kTileRows> sum;
};

template <class Tile>
struct FinishShape {
  static constexpr int64_t kTotals = kTileRows * Tile::kDim;  // floats
  static constexpr int64_t kShared =
      kTotals * 4 + (kTileRows * Tile::kStride + 2 * Tile::kElements) *
                        static_cast<int64_t>(sizeof(typename Tile::T));
};

// The merged statistics of two splits, and the factors of their values.
struct Merge {
  float maximum;
  float sum;
  float earlier_factor;
  float later_factor;
};

template <class Tile>
__device__ __forceinline__ Merge merge_stats(float earlier_maximum, float earlier_sum,
                                             float later_maximum, float later_sum) {
  Merge merge;
  merge.maximum = larger(later_maximum, earlier_maximum);
  const float shift = finite_shift(merge.maximum);
  merge.earlier_factor = softmax_weight<Tile>(earlier_maximum, shift);
  merge.later_factor = softmax_weight<Tile>(later_maximum, shift);
  merge.sum =
      exact_fma(later_sum, merge.later_factor, exact_mul(earlier_sum, merge.earlier_factor));
  return merge;
}

// The merged values of two splits. A split without weight adds nothing, whatever its values are.
__device__ __forceinline__ float merge_value(const Merge& merge, float earlier, float later) {
  return exact_fma(later, merge.later_factor, exact_mul(earlier, merge.earlier_factor));
}

// Merges the first `count` splits of the query rows from `first_row` on into the totals, in order.
template <class Tile>
__device__ __forceinline__ void merge_partials(const TreeAttentionParams& params,
                                               const Partials& partials, const RowPlan& plan,
                                               int64_t row_and_head, int64_t first_row, int group,
                                               int64_t count, FinishShared& shared,
                                               const SharedSpan<float>& totals) {
  for (int i = threadIdx.x; i < group * Tile::kDim; i += blockDim.x) {
    const int query = i / Tile::kDim, dim = i % Tile::kDim;
    float maximum = -INFINITY, sum = 0, value = 0;
    for (int64_t split = 0; split < count; ++split) {
      const int64_t absolute = plan.first_split + split;
      if (plan.walk_begin(absolute, Tile::kKeys) >= plan.walk_end(absolute)) continue;
      const int64_t index = partials.index(row_and_head, split, first_row + query);
      const float2 stats = partials.stats[index];
      const Merge merge = merge_stats<Tile>(maximum, sum, stats.x, stats.y);
      const float later =
          dim < params.head_dim ? partials.values[index * params.head_dim + dim] : 0;
      maximum = merge.maximum;
      sum = merge.sum;
      value = merge_value(merge, value, later);
    }
    totals[i] = value;
    if (dim == 0) {
      shared.maximum[query] = maximum;
      shared.sum[query] = sum;
    }
  }
}

template <class Tile>
__device__ __forceinline__ void load_partial(const TreeAttentionParams& params,
                                             const Partials& partials, int64_t row_and_head,
                                             int64_t split, int64_t first_row, int group,
                                             AttentionState<Tile>& state) {
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int query = lane / 4 + half * 8;
    if (query >= group) continue;
    const int64_t index = partials.index(row_and_head, split, first_row + query);
    const float2 stats = partials.stats[index];
    state.maximum[half] = stats.x;
    state.sum[half] = stats.y;
#pragma unroll
    for (int d = 0; d < Tile::kDimBlocks; ++d) {
      const int dim = d * 8 + lane % 4 * 2;
      if (dim < params.head_dim) {
        const float2 pair = load_global<float2>(partials.values + index * params.head_dim + dim);
        state.values[d][2 * half] = pair.x;
        state.values[d][2 * half + 1] = pair.y;
      }
    }
  }
}

// Merges a complete split into the totals and begins the next one.
template <class Tile>
__device__ __forceinline__ void close_split(int group, FinishShared& shared,
                                            const SharedSpan<float>& totals,
                                            AttentionState<Tile>& state) {
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int query = lane / 4 + half * 8;
    Merge merge{};
    if (query < group) {
      merge = merge_stats<Tile>(shared.maximum[query], shared.sum[query], state.maximum[half],
                                state.sum[half]);
    }
    warp_barrier();  // all lanes of the row have read its statistics
    if (query >= group) continue;
    if (lane % 4 == 0) {
      shared.maximum[query] = merge.maximum;
      shared.sum[query] = merge.sum;
    }
#pragma unroll
    for (int i = 0; i < Tile::kDimBlocks * 2; ++i) {
      const int at = query * Tile::kDim + i / 2 * 8 + lane % 4 * 2 + i % 2;
      totals[at] = merge_value(merge, totals[at], state.values[i / 2][2 * half + i % 2]);
    }
  }
  warp_barrier();  // the statistics are written before the next split reads them
  state.clear();
}

template <typename T>
__device__ __forceinline__ void store_pair(T* out, float low, float high) {
  if constexpr (sizeof(T) == 4) {
    store_global(out, float2{low, high});
  } else {
    store_global(out, pack<T>(low, high));
  }
}

template <class Tile>
__global__ void __launch_bounds__(kFinishThreads, 2)
    finish_kernel(const SPECDEC_GRID_CONSTANT TreeAttentionParams params,
                  const SPECDEC_GRID_CONSTANT Partials partials) {
  using T = typename Tile::T;
  using Shape = FinishShape<Tile>;
  SPECDEC_SHARED(FinishShared, shared);
  SPECDEC_DYNAMIC_SHARED(float, dynamic);
  const auto totals = dynamic.subspan(0, Shape::kTotals);
  const auto tiles =
      dynamic.subspan(Shape::kTotals, Shape::kShared / 4 - Shape::kTotals).template as<T>();
  const auto queries = tiles.subspan(0, kTileRows * Tile::kStride);
  const auto keys = tiles.subspan(kTileRows * Tile::kStride, Tile::kElements);
  const auto values = tiles.subspan(kTileRows * Tile::kStride + Tile::kElements, Tile::kElements);

  const int64_t node = blockIdx.x % params.nodes, row_and_head = blockIdx.x / params.nodes;
  const int64_t row = row_and_head / params.kv_heads, kv_head = row_and_head % params.kv_heads;
  const int group = static_cast<int>(params.heads / params.kv_heads);
  const int64_t first_row = node * group;
  T* out = static_cast<T*>(params.output) +
           ((row * params.nodes + node) * params.heads + kv_head * group) * params.head_dim;
  const int pairs = static_cast<int>(params.head_dim) / 2;
  const int count = count_ancestors(params, row, node);
  if (count == 0) {
    for (int i = threadIdx.x; i < group * pairs; i += blockDim.x) store_pair(out + 2 * i, 0, 0);
    return;
  }

  const RowPlan plan(params, row, Tile::kKeys);
  const int64_t end = plan.prefix_length + count;
  const int64_t first_seen = params.window > 0 ? max(int64_t{0}, end - params.window) : 0;
  int64_t split = min(split_of(plan.prefix_end) - plan.first_split, partials.splits);
  copy_queries<Tile>(params, row, kv_head, first_row, first_row + group, kTileRows, queries);
  cp_async_commit();
  for (int i = threadIdx.x; i < params.nodes; i += blockDim.x) {
    int depth = 0;
    for (int word = 0; word < i / 64; ++word) {
      depth += __popcll(params.ancestor_word(row, node, word));
    }
    const uint64_t bits = params.ancestor_word(row, node, i / 64);
    const uint64_t bit = uint64_t{1} << i % 64;
    if (bits & bit) shared.path[depth + __popcll(bits & (bit - 1))] = i;
  }
  merge_partials<Tile>(params, partials, plan, row_and_head, first_row, group, split, shared,
                       totals);
  block_barrier();  // totals and path are complete

  const int warp = threadIdx.x / kWarpSize;
  AttentionState<Tile> states[1];
  states[0].clear();
  if (warp == 0 && split < partials.splits &&
      plan.walk_begin(plan.first_split + split, Tile::kKeys) < plan.prefix_end) {
    load_partial<Tile>(params, partials, row_and_head, split, first_row, group, states[0]);
  }
  int64_t split_end = split_begin(plan.first_split + split + 1);
  for (int64_t begin = max(plan.prefix_end, first_seen / Tile::kKeys * Tile::kKeys); begin < end;
       begin += Tile::kKeys) {
    copy_tile<Tile>(params, row, kv_head, keys, values, [&](int key) -> int64_t {
      const int64_t position = begin + key;
      if (position < first_seen || position >= end) return -1;
      if (position < plan.prefix_length) return params.prefix_starts[row] + position;
      return params.block_starts[row] + shared.path[position - plan.prefix_length];
    });
    cp_async_commit();
    cp_async_wait<0>();
    block_barrier();  // the tile has landed for all threads
    if (warp == 0) {
      if (begin >= split_end) {
        close_split<Tile>(group, shared, totals, states[0]);
        split_end = split_begin(split_of(begin) + 1);
      }
      const int first = static_cast<int>(max(first_seen - begin, int64_t{0}));
      const int last = static_cast<int>(min(end - begin, int64_t{Tile::kKeys}));
      const SeenKeys seen[1][2] = {{{first, last}, {first, last}}};
      attend_tile<Tile, 1>(queries, keys, values, params.scale, params.softcap, seen, states);
    }
    block_barrier();  // the tile has been read
  }
  if (warp == 0) close_split<Tile>(group, shared, totals, states[0]);
  block_barrier();  // the totals are complete
  for (int i = threadIdx.x; i < group * pairs; i += blockDim.x) {
    const int query = i / pairs, dim = i % pairs * 2;
    const float sum = shared.sum[query];
    const float low = totals[query * Tile::kDim + dim], high = totals[query * Tile::kDim + dim + 1];
    store_pair(out + query * params.head_dim + dim, low / sum, high / sum);
  }
}

}  // namespace specdec
