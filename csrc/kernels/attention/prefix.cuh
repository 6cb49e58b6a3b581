// First kernel of tree_attention.cu: all query rows of a (row, key-value head) attend to one split
// of the committed tokens, as far as these fill whole tiles.
//
// A block has kWarps warps of 16 or 32 query rows. Tiles of keys and values go through a ring of
// kStages in shared memory. One barrier per tile means both that the tile has arrived and that no
// thread still reads the tile whose stage is refilled next. Query rows are read from shared memory
// for every tile, because the registers hold 16 x head_dim sums per row tile.
//
// The grid is that of the longest prefix that the cache can hold, because the lengths are in device
// memory. A block beyond the prefix of its row, or without an active node, ends at once.
#pragma once

#include "layout.cuh"

namespace specdec {

template <class Tile>
struct PrefixShape {
  static constexpr int kWarps = Tile::kIsFloat ? 2 : 4;
  static constexpr int kThreads = kWarps * kWarpSize;
  static constexpr int kStages = Tile::kDim == 64                       ? 4
                                 : Tile::kDim == 128 && !Tile::kIsFloat ? 3
                                                                        : 2;

  static constexpr int rows(int row_tiles) { return kWarps * row_tiles * kTileRows; }
  static constexpr int64_t shared_bytes(int row_tiles) {
    return (rows(row_tiles) * Tile::kStride + kStages * 2 * Tile::kElements) *
           static_cast<int64_t>(sizeof(typename Tile::T));
  }
  // Two row tiles per warp share what it reads from shared memory, if there are enough registers.
  static constexpr int kMaxRowTiles = Tile::kIsFloat || Tile::kDim > 128 ? 1 : 2;
  // The limit of a block on sm_86, 89 and 120, including the starts of the windows.
  static_assert(shared_bytes(kMaxRowTiles) + rows(kMaxRowTiles) * 4 <= 99 * 1024);
};

template <class Tile>
__device__ __forceinline__ void store_partial(const TreeAttentionParams& params,
                                              const Partials& partials, int64_t row_and_head,
                                              int64_t split, int64_t first_row,
                                              const AttentionState<Tile>& state) {
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t query_row = first_row + lane / 4 + half * 8;
    if (query_row >= partials.query_rows) continue;
    const int64_t index = partials.index(row_and_head, split, query_row);
    if (lane % 4 == 0) partials.stats[index] = {state.maximum[half], state.sum[half]};
#pragma unroll
    for (int d = 0; d < Tile::kDimBlocks; ++d) {
      const int dim = d * 8 + lane % 4 * 2;
      if (dim < params.head_dim) {
        store_global(partials.values + index * params.head_dim + dim,
                     float2{state.values[d][2 * half], state.values[d][2 * half + 1]});
      }
    }
  }
}

// Whether a block has an active node among `count` query rows. All lanes of the warp call it.
__device__ __forceinline__ bool has_active_node(const TreeAttentionParams& params, int64_t row,
                                                int first_row, int count) {
  const int group = static_cast<int>(params.heads / params.kv_heads);
  const int nodes = static_cast<int>(params.nodes);
  const int end = min((first_row + count - 1) / group + 1, nodes);
  bool is_active = false;
  for (int node = first_row / group + static_cast<int>(threadIdx.x % kWarpSize); node < end;
       node += kWarpSize) {
    for (int64_t word = 0; word < params.words; ++word) {
      is_active |= params.ancestor_word(row, node, word) != 0;
    }
  }
  return warp_any(is_active);
}

template <class Tile, int kRowTiles>
__global__ void __launch_bounds__(PrefixShape<Tile>::kThreads, 2)
    prefix_kernel(const SPECDEC_GRID_CONSTANT TreeAttentionParams params,
                  const SPECDEC_GRID_CONSTANT Partials partials) {
  using T = typename Tile::T;
  using Shape = PrefixShape<Tile>;
  constexpr int kRows = Shape::rows(kRowTiles), kWarpRows = kRowTiles * kTileRows;
  // The begin of each query row's window, relative to the block's first position.
  using WindowBegins = SharedArray<int, kRows>;
  SPECDEC_SHARED(WindowBegins, window_begin);
  SPECDEC_DYNAMIC_SHARED(T, shared);
  const auto queries = shared.subspan(0, kRows * Tile::kStride);
  const auto keys = [&](int tile) {
    const int stage = tile % Shape::kStages;
    return shared.subspan(kRows * Tile::kStride + stage * 2 * Tile::kElements, Tile::kElements);
  };
  const auto values = [&](int tile) {
    const int stage = tile % Shape::kStages;
    return shared.subspan(kRows * Tile::kStride + (stage * 2 + 1) * Tile::kElements,
                          Tile::kElements);
  };

  // Blocks begin with the last splits, which may be the longest. Indices have 32 bits, because the
  // accumulators need the registers: a grid has fewer than 2^31 blocks.
  const unsigned row_blocks = static_cast<unsigned>((partials.query_rows + kRows - 1) / kRows);
  const unsigned kv_heads = static_cast<unsigned>(params.kv_heads);
  const unsigned row_and_head = blockIdx.x / row_blocks;
  const unsigned row = row_and_head / kv_heads, kv_head = row_and_head % kv_heads;
  const int first_row = static_cast<int>(blockIdx.x % row_blocks) * kRows;
  const unsigned split = gridDim.y - 1 - blockIdx.y;
  const RowPlan plan(params, row, Tile::kKeys);
  const int64_t begin = plan.walk_begin(plan.first_split + split, Tile::kKeys);
  const int num_tiles =
      static_cast<int>((plan.walk_end(plan.first_split + split) - begin) / Tile::kKeys);
  if (num_tiles <= 0 || !has_active_node(params, row, first_row, kRows)) return;

  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int64_t start = params.prefix_starts[row] + begin;
  const int first_seen = static_cast<int>(max(plan.first_seen - begin, int64_t{0}));
  const auto copy = [&](int tile) {
    if (tile < num_tiles) {
      copy_tile<Tile>(params, row, kv_head, keys(tile), values(tile), [&](int key) {
        const int place = tile * Tile::kKeys + key;
        return place < first_seen ? -1 : start + place;
      });
    }
    cp_async_commit();
  };
  copy_queries<Tile>(params, row, kv_head, first_row, partials.query_rows, kRows, queries);
  for (int tile = 0; tile < Shape::kStages - 1; ++tile) copy(tile);

  const int warp_row = first_row + warp * kWarpRows;
  for (int i = threadIdx.x; i < kRows; i += blockDim.x) {
    int64_t hidden = 0;
    if (params.window > 0 && first_row + i < partials.query_rows) {
      const int64_t node = (first_row + i) / (params.heads / params.kv_heads);
      hidden = plan.prefix_length + count_ancestors(params, row, node) - params.window - begin;
    }
    window_begin[i] =
        static_cast<int>(max(int64_t{0}, min(hidden, int64_t{num_tiles} * Tile::kKeys)));
  }

  AttentionState<Tile> states[kRowTiles];
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) states[i].clear();
  for (int tile = 0; tile < num_tiles; ++tile) {
    cp_async_wait<Shape::kStages - 2>();
    block_barrier();  // the tile has landed for all threads, and all have left the tile before
    copy(tile + Shape::kStages - 1);
    if (warp_row >= partials.query_rows) continue;
    SeenKeys seen[kRowTiles][2];
#pragma unroll
    for (int i = 0; i < kRowTiles * 2; ++i) {
      const int first = window_begin[warp * kWarpRows + i * 8 + lane / 4];
      seen[i / 2][i % 2] = {first - tile * Tile::kKeys, Tile::kKeys};
    }
    attend_tile<Tile, kRowTiles>(
        queries.subspan(warp * kWarpRows * Tile::kStride, kWarpRows * Tile::kStride), keys(tile),
        values(tile), params.scale, params.softcap, seen, states);
  }
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
    store_partial<Tile>(params, partials, row_and_head, split, warp_row + i * kTileRows, states[i]);
  }
}

}  // namespace specdec
