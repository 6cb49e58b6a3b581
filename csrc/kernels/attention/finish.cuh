// Second kernel of tree_attention.cu: for one node of a (row, key-value head), attends from the
// last whole tile of the prefix to the node itself, then merges all splits.
//
//   1. All threads start to copy the queries and the first of the remaining tiles.
//   2. Meanwhile all threads merge the complete splits of the prefix into totals in shared memory,
//      kMergeSplits at a time. A warp takes one query row and each lane the statistics of one
//      split: a scan gives the maximum before and after each split, and so all factors at once.
//      Then a thread takes a few dimensions of a query row. The factors are known, so it loads the
//      values of many splits before it needs the first.
//   3. The first warp attends to the remaining tiles, with the heads of the group as query rows,
//      and adds every complete split to the totals.
//
// Merging is a fold in the order of the splits: one more split changes neither the factors nor the
// sums of those before it. So it does not matter whether step 2 or step 3 adds a split.
//
// Barriers: after the path is complete, between the factors and the values of a merge, around each
// tile (arrived, read), and before the output.
#pragma once

#include "layout.cuh"

namespace specdec {

constexpr int kFinishThreads = 128;
constexpr int kMergeSplits = kWarpSize;

struct FinishShared {
  SharedArray<int, kMaxCudaTreeNodes> path;  // the ancestor at each depth
  SharedArray<float, kTileRows> maximum;     // over the splits merged so far
  SharedArray<float, kTileRows> sum;
  // [group, kMergeSplits] what the earlier splits together and this split are multiplied by
  SharedArray<float2, kTileRows * kMergeSplits> factors;
};
static_assert(kMaxCudaGroup <= kTileRows);

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
  float2 factors;  // of the earlier and the later split
};

template <class Tile>
__device__ __forceinline__ float2 merge_factors(float earlier_maximum, float later_maximum,
                                                float maximum) {
  const float shift = finite_shift(maximum);
  return {softmax_weight<Tile>(earlier_maximum, shift), softmax_weight<Tile>(later_maximum, shift)};
}

// The merged sum, or the merged value of a dimension, of two splits.
__device__ __forceinline__ float merged(const float2& factors, float earlier, float later) {
  return exact_fma(later, factors.y, exact_mul(earlier, factors.x));
}

template <class Tile>
__device__ __forceinline__ Merge merge_stats(float earlier_maximum, float earlier_sum,
                                             float later_maximum, float later_sum) {
  Merge merge;
  merge.maximum = larger(later_maximum, earlier_maximum);
  merge.factors = merge_factors<Tile>(earlier_maximum, later_maximum, merge.maximum);
  merge.sum = merged(merge.factors, earlier_sum, later_sum);
  return merge;
}

// The query rows of a node, and the part of the splits that one merge takes.
struct MergeRange {
  int64_t row_and_head;
  int64_t first_row;
  int group;
  int64_t first_split;  // 0: the first that the prefix kernel has processed
  int num_splits;       // up to kMergeSplits
};

// Merges the statistics of the splits of a range and leaves the factors for merge_values.
template <class Tile>
__device__ __forceinline__ void merge_statistics(const Partials& partials, const MergeRange& range,
                                                 FinishShared& shared) {
  const int lane = threadIdx.x % kWarpSize;
  for (int query = threadIdx.x / kWarpSize; query < range.group;
       query += kFinishThreads / kWarpSize) {
    float earlier = -INFINITY, sum = 0;
    if (range.first_split > 0) {
      earlier = shared.maximum[query];
      sum = shared.sum[query];
    }
    float2 stats{-INFINITY, 0};
    if (lane < range.num_splits) {
      stats = partials.stats[partials.index(range.row_and_head, range.first_split + lane,
                                            range.first_row + query)];
    }
    float maximum = larger(stats.x, earlier);
#pragma unroll
    for (int distance = 1; distance < kWarpSize; distance *= 2) {
      maximum = larger(maximum, shuffle_up(maximum, distance));
    }
    const float before = shuffle_up(maximum, 1);
    const float2 factors = merge_factors<Tile>(lane == 0 ? earlier : before, stats.x, maximum);
    if (lane < range.num_splits) shared.factors[query * kMergeSplits + lane] = factors;
    for (int split = 0; split < range.num_splits; ++split) {
      const float2 both{shuffle(factors.x, split), shuffle(factors.y, split)};
      sum = merged(both, sum, shuffle(stats.y, split));
    }
    maximum = shuffle(maximum, kWarpSize - 1);
    warp_barrier();  // all lanes have read the statistics of the splits before
    if (lane == 0) {
      shared.maximum[query] = maximum;
      shared.sum[query] = sum;
    }
  }
}

template <int kCount>
struct alignas(kCount * sizeof(float)) Floats {
  float values[kCount];
};

// Merges the values of the splits of a range; a thread takes kDims dimensions of a query row.
template <class Tile, int kDims>
__device__ __forceinline__ void merge_values(const TreeAttentionParams& params,
                                             const Partials& partials, const MergeRange& range,
                                             FinishShared& shared,
                                             const SharedSpan<float>& totals) {
  constexpr int kThreadsPerRow = Tile::kDim / kDims;
  for (int i = threadIdx.x; i < range.group * kThreadsPerRow; i += kFinishThreads) {
    const int query = i / kThreadsPerRow, dim = i % kThreadsPerRow * kDims;
    float values[kDims] = {};
    if (range.first_split > 0) {
#pragma unroll
      for (int d = 0; d < kDims; ++d) values[d] = totals[i * kDims + d];
    }
    if (dim < params.head_dim) {
      const float* later = partials.values +
                           params.head_dim * partials.index(range.row_and_head, range.first_split,
                                                            range.first_row + query) +
                           dim;
      const int64_t stride = partials.query_rows * params.head_dim;
#pragma unroll 8
      for (int split = 0; split < range.num_splits; ++split) {
        const Floats<kDims> loaded = load_global<Floats<kDims>>(later + split * stride);
        const float2 factors = shared.factors[query * kMergeSplits + split];
#pragma unroll
        for (int d = 0; d < kDims; ++d) values[d] = merged(factors, values[d], loaded.values[d]);
      }
    }
#pragma unroll
    for (int d = 0; d < kDims; ++d) totals[i * kDims + d] = values[d];
  }
}

// Merges the first `count` splits of the query rows from `first_row` on into the totals, in order.
template <class Tile>
__device__ __forceinline__ void merge_splits(const TreeAttentionParams& params,
                                             const Partials& partials, int64_t row_and_head,
                                             int64_t first_row, int group, int64_t count,
                                             FinishShared& shared,
                                             const SharedSpan<float>& totals) {
  int64_t first = 0;
  do {  // once even if count is 0: it initialises the totals
    const int size = static_cast<int>(min(count - first, int64_t{kMergeSplits}));
    const MergeRange range{row_and_head, first_row, group, first, size};
    merge_statistics<Tile>(partials, range, shared);
    block_barrier();  // the factors are complete

    const bool is_small = group * Tile::kDim < kFinishThreads * 4;  // not four for every thread
    if (is_small) {
      merge_values<Tile, 1>(params, partials, range, shared, totals);
    } else {
      merge_values<Tile, 4>(params, partials, range, shared, totals);
    }
    block_barrier();  // the factors have been read, and the totals are complete
    first += kMergeSplits;
  } while (first < count);
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
      totals[at] = merged(merge.factors, totals[at], state.values[i / 2][2 * half + i % 2]);
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

// Lists the ancestors of a node and the node itself by depth.
__device__ __forceinline__ void find_path(const TreeAttentionParams& params, int64_t row,
                                          int64_t node, FinishShared& shared) {
  for (int i = threadIdx.x; i < params.nodes; i += kFinishThreads) {
    int depth = 0;
    for (int word = 0; word < i / 64; ++word) {
      depth += __popcll(params.ancestor_word(row, node, word));
    }
    const uint64_t bits = params.ancestor_word(row, node, i / 64);
    const uint64_t bit = uint64_t{1} << i % 64;
    if (bits & bit) shared.path[depth + __popcll(bits & (bit - 1))] = i;
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

  // As in the prefix kernel, indices have 32 bits, and what is needed after the accumulators is
  // computed again.
  const unsigned nodes = static_cast<unsigned>(params.nodes);
  const unsigned kv_heads = static_cast<unsigned>(params.kv_heads);
  const unsigned node = blockIdx.x % nodes, row_and_head = blockIdx.x / nodes;
  const unsigned row = row_and_head / kv_heads, kv_head = row_and_head % kv_heads;
  const int group = static_cast<int>(params.heads / params.kv_heads);
  const int64_t first_row = int64_t{node} * group;
  const auto store = [&](int i, float low, float high) {  // pair i of the node's output
    const int64_t first = (int64_t{row} * params.nodes + node) * params.heads + kv_head * group;
    store_pair(static_cast<T*>(params.output) + first * params.head_dim + 2 * i, low, high);
  };
  const int pairs = static_cast<int>(params.head_dim) / 2;
  const int count = count_ancestors(params, row, node);
  if (count == 0) {
    for (int i = threadIdx.x; i < group * pairs; i += kFinishThreads) store(i, 0, 0);
    return;
  }

  find_path(params, row, node, shared);
  const RowPlan plan(params, row, Tile::kKeys);
  const int64_t end = plan.prefix_length + count;
  const int64_t first_seen = params.window > 0 ? max(int64_t{0}, end - params.window) : 0;
  // The remaining keys are counted from `base` on.
  const int64_t base = max(plan.prefix_end, first_seen / Tile::kKeys * Tile::kKeys);
  const int num_keys = static_cast<int>(end - base);
  const int first_key = static_cast<int>(max(first_seen - base, int64_t{0}));
  const int base_depth = static_cast<int>(base - plan.prefix_length);  // negative: in the prefix
  const auto copy = [&](int begin) {
    const int64_t root_slot = params.prefix_starts[row] + committed_length(params, row);
    copy_tile<Tile>(params, row, kv_head, keys, values, [&](int key) -> int64_t {
      const int depth = base_depth + begin + key;
      if (begin + key < first_key || begin + key >= num_keys) return -1;
      return depth < 0 ? root_slot + depth : params.block_starts[row] + shared.path[depth];
    });
    cp_async_commit();
  };
  block_barrier();  // the path is complete
  copy_queries<Tile>(params, row, kv_head, first_row, first_row + group, kTileRows, queries);
  copy(0);

  const int64_t split = min(split_of(plan.prefix_end) - plan.first_split, partials.splits);
  merge_splits<Tile>(params, partials, row_and_head, first_row, group, split, shared, totals);
  const int warp = threadIdx.x / kWarpSize;
  AttentionState<Tile> states[1];
  states[0].clear();
  if (warp == 0 && split < partials.splits &&
      plan.walk_begin(plan.first_split + split, Tile::kKeys) < plan.prefix_end) {
    load_partial<Tile>(params, partials, row_and_head, split, first_row, group, states[0]);
  }
  // The key at which the split of key `begin` ends; at most num_keys.
  const auto end_of_split = [&](int begin) {
    const int64_t first_position = committed_length(params, row) + base_depth;
    const int64_t next = split_begin(split_of(first_position + begin) + 1);
    return static_cast<int>(min(next - first_position, int64_t{num_keys}));
  };
  int split_end = end_of_split(0);
  for (int begin = 0;;) {
    cp_async_wait<0>();
    block_barrier();  // the tile has landed for all threads
    if (warp == 0) {
      if (begin >= split_end) {
        close_split<Tile>(group, shared, totals, states[0]);
        split_end = end_of_split(begin);
      }
      const SeenKeys range{first_key - begin, num_keys - begin};
      const SeenKeys seen[1][2] = {{range, range}};
      attend_tile<Tile, 1>(queries, keys, values, params.scale, params.softcap, seen, states);
    }
    begin += Tile::kKeys;
    if (begin >= num_keys) break;
    block_barrier();  // the tile has been read
    copy(begin);
  }
  if (warp == 0) close_split<Tile>(group, shared, totals, states[0]);
  block_barrier();  // the totals are complete
  for (int i = threadIdx.x; i < group * pairs; i += kFinishThreads) {
    const int query = i / pairs, dim = i % pairs * 2;
    const float sum = shared.sum[query];
    const float low = totals[query * Tile::kDim + dim], high = totals[query * Tile::kDim + dim + 1];
    store(i, low / sum, high / sum);
  }
}

}  // namespace specdec
