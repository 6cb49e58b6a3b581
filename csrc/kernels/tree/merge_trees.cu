// merge_trees: merges several draft trees of the same rows. Rule and meaning of the arguments:
// specdec/tree/merge_trees.h.
//
// In:  up to kMaxMergedTrees times tokens, parents [batch, nodes of the tree]
// Out: tokens, parents [batch, nodes]
//
// One launch, one warp per row. It loads 32 nodes of a tree at once and adds them in order: all
// lanes look for the child that a node shares, each at every 32nd node of the result.
//
// Cost: a node takes about 30 cycles and 20 more per 32 nodes of the result, so a tree of 60 nodes
// and a copy of 10 take about 3 us (an estimate). No floats.
#include "specdec/device/cuda.cuh"
#include "specdec/launchers.h"

namespace specdec {
namespace {

constexpr int kNone = -1;

struct Shared {
  SharedArray<int64_t, kMaxNodes> tokens;   // of the result
  SharedArray<int32_t, kMaxNodes> parents;  // of the result
  SharedArray<int32_t, kMaxNodes> places;   // of the nodes of a tree in the result, or kNone
};
static_assert(sizeof(Shared) <= 48 * 1024, "static shared memory");

// The child of `place` with this token among the first `num_nodes` nodes, or kNone, in all lanes.
__device__ int find_child(Shared& shared, int place, int64_t token, int num_nodes) {
  int child = kNone;
  for (int node = place + 1 + threadIdx.x; node < num_nodes; node += kWarpSize) {
    if (shared.parents[node] == place && shared.tokens[node] == token) child = node;
  }
  return warp_max(child);
}

// Adds a tree to `num_nodes` nodes; returns their new number.
__device__ int add_tree(Shared& shared, const MergedTree& tree, int64_t row, int num_nodes,
                        int max_nodes) {
  const int lane = threadIdx.x, tree_nodes = static_cast<int>(tree.nodes);
  const ParentsRow links = tree.links(row);
  if (lane == 0) shared.places[0] = 0;
  for (int first = 1; first < tree_nodes; first += kWarpSize) {
    const int own = first + lane;
    int own_parent = kNone;
    int64_t own_token = 0;
    if (own < tree_nodes && links.link_is_legal(own)) {
      own_parent = static_cast<int>(links[own]);
      own_token = tree.tokens(row, own);
    }
    const int count = min(kWarpSize, tree_nodes - first);
    for (int i = 0; i < count; ++i) {
      const int parent = shuffle(own_parent, i);
      const int64_t token = shuffle(own_token, i);
      warp_barrier();  // earlier nodes have their places
      const int place = parent == kNone ? kNone : static_cast<int>(shared.places[parent]);
      int child = place == kNone ? kNone : find_child(shared, place, token, num_nodes);
      const bool is_new = place != kNone && child == kNone && num_nodes < max_nodes;
      if (is_new) child = num_nodes++;
      if (lane == 0) {
        if (is_new) {
          shared.tokens[child] = token;
          shared.parents[child] = place;
        }
        shared.places[first + i] = child;
      }
    }
  }
  warp_barrier();  // all nodes are complete, and the places are free
  return num_nodes;
}

__global__ void __launch_bounds__(kWarpSize)
    merge_trees_kernel(const SPECDEC_GRID_CONSTANT MergeTreesParams params) {
  SPECDEC_SHARED(Shared, shared);
  const int64_t row = blockIdx.x;
  const int max_nodes = static_cast<int>(params.nodes);
  int num_nodes = 0;
  if (params.takes_part(0, row)) {
    if (threadIdx.x == 0) {
      shared.tokens[0] = params.trees[0].tokens(row, 0);
      shared.parents[0] = static_cast<int32_t>(kRootParent);
    }
    num_nodes = 1;
    for (int64_t i = 0; i < params.num_trees; ++i) {
      if (!params.takes_part(i, row)) continue;
      num_nodes = add_tree(shared, params.trees[i], row, num_nodes, max_nodes);
    }
  }
  for (int node = threadIdx.x; node < max_nodes; node += kWarpSize) {
    const bool is_active = node < num_nodes;
    params.tokens[row * max_nodes + node] = is_active ? int64_t{shared.tokens[node]} : 0;
    params.parents[row * max_nodes + node] =
        is_active ? int64_t{shared.parents[node]} : kInactiveParent;
  }
}

}  // namespace

cudaError_t launch_merge_trees(const MergeTreesParams& params, cudaStream_t stream) {
  if (params.nodes < 1 || params.nodes > kMaxNodes) return cudaErrorInvalidValue;
  return launch(merge_trees_kernel, {params.batch, 1, kWarpSize, stream}, params);
}

}  // namespace specdec
