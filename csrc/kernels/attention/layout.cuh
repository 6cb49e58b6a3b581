// What the two kernels of tree_attention.cu share: the splits of the positions, the layout of
// partial results, and how query rows, keys and values are copied to shared memory.
#pragma once

#include "tile.cuh"

namespace specdec {

constexpr int kSplitsPerLevel = 16;
constexpr int64_t kFirstSplit = 128;                 // positions
constexpr int64_t kMaxPositions = int64_t{1} << 40;  // longer prefixes are cut to it

// Level l has kSplitsPerLevel splits of kFirstSplit << l positions.
SPECDEC_HOST_DEVICE int64_t split_begin(int64_t split) {
  const int64_t length = kFirstSplit << (split / kSplitsPerLevel);
  return length * (kSplitsPerLevel + split % kSplitsPerLevel) - kSplitsPerLevel * kFirstSplit;
}

SPECDEC_HOST_DEVICE int64_t split_of(int64_t position) {
  int64_t level = 0;
  while (split_begin((level + 1) * kSplitsPerLevel) <= position) ++level;
  const int64_t first = split_begin(level * kSplitsPerLevel);
  return level * kSplitsPerLevel + (position - first) / (kFirstSplit << level);
}

// Partial results per (row, key-value head, split, query row): the weighted sum of values and the
// statistics of its softmax.
struct Partials {
  float* values;  // [batch, kv_heads, splits, query_rows, head_dim]
  float2* stats;  // [batch, kv_heads, splits, query_rows] maximum, sum
  int64_t splits;
  int64_t query_rows;

  SPECDEC_HOST_DEVICE int64_t index(int64_t row_and_head, int64_t split, int64_t query_row) const {
    return (row_and_head * splits + split) * query_rows + query_row;
  }
};

__device__ __forceinline__ int64_t committed_length(const TreeAttentionParams& params,
                                                    int64_t row) {
  return max(int64_t{0}, min(params.prefix_lengths[row], kMaxPositions));
}

// The positions of a row, for both kernels.
struct RowPlan {
  int64_t prefix_length;
  int64_t first_seen;  // no node sees an earlier position
  int64_t prefix_end;  // a multiple of the tile: where the prefix kernel stops
  int64_t first_split;

  __device__ RowPlan(const TreeAttentionParams& params, int64_t row, int tile_keys) {
    prefix_length = committed_length(params, row);
    first_seen =
        params.window > 0 && prefix_length >= params.window ? prefix_length - params.window + 1 : 0;
    prefix_end = prefix_length / tile_keys * tile_keys;
    first_split = split_of(first_seen);
  }

  // The part of a split that the prefix kernel processes; empty if begin >= end.
  __device__ int64_t walk_begin(int64_t split, int tile_keys) const {
    return max(split_begin(split), first_seen / tile_keys * tile_keys);
  }
  __device__ int64_t walk_end(int64_t split) const {
    return min(split_begin(split + 1), prefix_end);
  }
};

// The number of a node's ancestors including itself: its depth + 1, or 0 if it is inactive.
__device__ __forceinline__ int count_ancestors(const TreeAttentionParams& params, int64_t row,
                                               int64_t node) {
  int count = 0;
  for (int64_t word = 0; word < params.words; ++word) {
    count += __popcll(params.ancestor_word(row, node, word));
  }
  return count;
}

// Copies a tile of keys and values; slot_of(key) is the slot of the row, -1 for zeros.
template <class Tile, typename SlotOf>
__device__ __forceinline__ void copy_tile(const TreeAttentionParams& params, int64_t row,
                                          int64_t kv_head, const SharedSpan<typename Tile::T>& keys,
                                          const SharedSpan<typename Tile::T>& values,
                                          const SlotOf& slot_of) {
  using T = typename Tile::T;
  constexpr int kChunks = Tile::kDim / Tile::kChunk;
  const T* all_keys = static_cast<const T*>(params.key.data);
  const T* all_values = static_cast<const T*>(params.value.data);
#pragma unroll 1  // if unrolled, addresses take the registers that the accumulators need
  for (int i = threadIdx.x; i < Tile::kKeys * kChunks; i += blockDim.x) {
    const int key = i / kChunks, dim = i % kChunks * Tile::kChunk;
    const int64_t slot = slot_of(key);
    bool is_valid = dim < params.head_dim && slot >= 0 && slot < params.slots_per_row();
    int64_t key_offset = 0, value_offset = 0;
    if (is_valid) {
      const TreeAttentionParams::Place place = params.place(row, slot);
      is_valid = place.page >= 0 && place.page < params.num_pages;
      if (is_valid) {
        key_offset = params.offset(params.key, place, kv_head) + dim;
        value_offset = params.offset(params.value, place, kv_head) + dim;
      }
    }
    const int target = key * Tile::kStride + dim;
    cp_async_16(keys.pointer(target), all_keys + key_offset, is_valid);
    cp_async_16(values.pointer(target), all_values + value_offset, is_valid);
  }
}

// Copies query rows [first, first + count) of one (row, key-value head), with zeros beyond `end`.
template <class Tile>
__device__ __forceinline__ void copy_queries(const TreeAttentionParams& params, int64_t row,
                                             int64_t kv_head, int64_t first, int64_t end, int count,
                                             const SharedSpan<typename Tile::T>& queries) {
  using T = typename Tile::T;
  constexpr int kChunks = Tile::kDim / Tile::kChunk;
  const int64_t group = params.heads / params.kv_heads;
  const T* all = static_cast<const T*>(params.query) + row * params.query_batch_stride;
  for (int i = threadIdx.x; i < count * kChunks; i += blockDim.x) {
    const int64_t query_row = first + i / kChunks;
    const int dim = i % kChunks * Tile::kChunk;
    const bool is_valid = query_row < end && dim < params.head_dim;
    const int64_t head = kv_head * group + query_row % group;
    const int64_t offset =
        head * params.query_head_stride + query_row / group * params.query_node_stride + dim;
    cp_async_16(queries.pointer(i / kChunks * Tile::kStride + dim), all + (is_valid ? offset : 0),
                is_valid);
  }
}

}  // namespace specdec
