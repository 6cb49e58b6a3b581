// tree_attention: attention of draft tree nodes to the committed prefix and to their own ancestors.
// Meaning of the arguments: specdec/tree_attention.h.
//
// In:  query [batch, heads, nodes, head_dim] f32/bf16/f16; key, value [batch, kv_heads, slots,
//      head_dim] or pools of pages; ancestors [batch, nodes, words]; prefix_starts, prefix_lengths,
//      block_starts [batch]
// Out: output [batch, nodes, heads, head_dim]
//
// Positions are divided into tiles of 32 keys and splits of whole tiles, both anchored at position
// 0. A split has 128 positions, from position 2048 on 256, from 6144 on 512, and so on, doubling
// every 16 splits. Short prefixes have enough splits to fill the GPU (2048 tokens with 8 key-value
// heads: 128 blocks), and long ones few enough to merge (131072 tokens: 113 splits). There are two
// launches. Lengths are read from device memory, and the grids depend on the capacity of the cache
// instead, so that a CUDA graph can hold the launches:
//
//   prefix: a block takes one split of one (row, key-value head) and up to 128 query rows, which
//           are (node, head of the group) pairs. It processes the tiles that are full of committed
//           tokens. All nodes see those, so no mask is needed (except at the edge of a window).
//           Keys and values come through a ring of tiles in shared memory (cp.async); a warp owns
//           16 or 32 query rows and keeps their statistics and values in registers. Results go to
//           the workspace.
//   finish: a block takes one node of one (row, key-value head) and continues where the prefix
//           kernel stopped: at the positions from the last tile boundary P' <= P to the node's own.
//           The ancestor at depth j is position P + j; ancestors are gathered in this order. The
//           block merges the splits of the prefix in order, adds these positions and writes the
//           output.
//   Example: P = 600, a node at depth 2. Splits 0 .. 3 are positions 0 .. 511: four tiles of the
//   prefix kernel each. Split 4 begins at 512: the prefix kernel processes the tiles at 512 and
//   544, and the finish kernel resumes from that state and adds positions 576 .. 602: 24 committed
//   keys, then the root, the parent and the node itself.
//
// Invariance: every query row is processed with the same tiles and the same places of keys in them,
// for every tree, batch, number of nodes and layout. So a node has the same bits as in
// token-by-token decoding of its path: later steps find in the prefix what the finish kernel
// gathers. NaN in slots that no node sees, and in nodes that a node does not see, has no effect,
// because it is never loaded for that node. Limit: with a window, NaN in a value that some nodes of
// the row still see also reaches the nodes that no longer see it (0 * NaN in mma).
//
// Bytes: keys and values once per 128 query rows (after the first time from L2), partial results 8
// bytes per query row, dimension and split. With R = nodes * heads / kv_heads query rows the prefix
// kernel does 4 R operations per element of 4 bytes (key and value). At R = 16 it is bound by
// memory. At R = 256 (64 nodes, groups of 4), with 256 operations per byte, it is bound by the
// tensor cores: 8192 tokens are 8.6 GFLOP for 33.5 MB, 13 us at the 660 TFLOP/s that mma.sync
// reaches on an H200, against 8 us of copying. Registers limit occupancy: 128 threads of up to 255,
// 2 blocks per multiprocessor.
#include <algorithm>

#include "finish.cuh"
#include "prefix.cuh"
#include "specdec/launchers.h"

namespace specdec {
namespace {

// The largest number of splits that the visible part of a prefix touches. It lies in the cache and
// in the window and may begin inside a split. Splits do not get shorter, so a range of positions
// touches at most one split more than a range of this length that begins at 0.
int64_t max_splits(const TreeAttentionParams& params) {
  int64_t length = params.slots_per_row();
  if (params.window > 0) length = std::min(length, params.window);
  return split_of(length) + 2;
}

template <class Tile, int kRowTiles>
cudaError_t launch_prefix(const TreeAttentionParams& params, const Partials& partials,
                          cudaStream_t stream) {
  using Shape = PrefixShape<Tile>;
  const int64_t rows = Shape::rows(kRowTiles);
  const LaunchConfig config{
      .grid_x = params.batch * params.kv_heads * ((partials.query_rows + rows - 1) / rows),
      .grid_y = partials.splits,
      .block = Shape::kThreads,
      .stream = stream,
      .dynamic_shared_bytes = Shape::shared_bytes(kRowTiles)};
  return launch(prefix_kernel<Tile, kRowTiles>, config, params, partials);
}

template <class Tile>
cudaError_t launch_tile(const TreeAttentionParams& params, const Partials& partials,
                        cudaStream_t stream) {
  constexpr int kMaxRowTiles = PrefixShape<Tile>::kMaxRowTiles;
  const cudaError_t error = partials.query_rows > PrefixShape<Tile>::rows(1)
                                ? launch_prefix<Tile, kMaxRowTiles>(params, partials, stream)
                                : launch_prefix<Tile, 1>(params, partials, stream);
  if (error != cudaSuccess) return error;
  const LaunchConfig config{.grid_x = params.batch * params.kv_heads * params.nodes,
                            .grid_y = 1,
                            .block = kFinishThreads,
                            .stream = stream,
                            .dynamic_shared_bytes = FinishShape<Tile>::kShared};
  return launch(finish_kernel<Tile>, config, params, partials);
}

template <typename T>
cudaError_t launch_typed(const TreeAttentionParams& params, const Partials& partials,
                         cudaStream_t stream) {
  if (params.head_dim <= 64) return launch_tile<AttentionTile<T, 64>>(params, partials, stream);
  if (params.head_dim <= 128) return launch_tile<AttentionTile<T, 128>>(params, partials, stream);
  return launch_tile<AttentionTile<T, 256>>(params, partials, stream);
}

int64_t num_partials(const TreeAttentionParams& params) {
  return params.batch * params.heads * params.nodes * max_splits(params);
}

}  // namespace

int64_t tree_attention_workspace_bytes(const TreeAttentionParams& params) {
  return num_partials(params) * (params.head_dim + 2) * static_cast<int64_t>(sizeof(float));
}

cudaError_t launch_tree_attention(const TreeAttentionParams& params, void* workspace,
                                  cudaStream_t stream) {
  if (params.nodes < 1 || params.nodes > kMaxCudaTreeNodes || params.head_dim > kMaxCudaHeadDim ||
      params.heads / params.kv_heads > kMaxCudaGroup) {
    return cudaErrorInvalidValue;
  }
  float* values = static_cast<float*>(workspace);
  const Partials partials{
      .values = values,
      .stats = reinterpret_cast<float2*>(values + num_partials(params) * params.head_dim),
      .splits = max_splits(params),
      .query_rows = params.nodes * (params.heads / params.kv_heads)};
  switch (params.type) {
    case FloatType::kFloat32:
      return launch_typed<float>(params, partials, stream);
    case FloatType::kBFloat16:
      return launch_typed<__nv_bfloat16>(params, partials, stream);
    case FloatType::kFloat16:
      return launch_typed<__half>(params, partials, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace specdec
