// tree_mask: turns parents of draft trees into packed ancestor bits, depths, positions, child links
// and paths.
//
// In:  parents [batch, nodes], root_positions [batch]
// Out: ancestors [batch, nodes, words]; depths, positions, first_child, next_sibling
//      [batch, nodes]; paths [batch, nodes, nodes]
// Meaning: specdec/tree/tree_mask.h; example: specdec_ext/reference/tree_mask.py.
//
// One block per row, one thread per node (strided if nodes > kThreads):
//   1. Parents go to shared memory, with illegal links as inactive.
//   2. A walk up gives the depth; a walk that meets an inactive link makes the node inactive.
//   3. After a barrier, when all depths are known: scanning later nodes gives the child links, a
//      second walk up the bits and the path. It visits nodes in descending order, so the words of
//      the bits are written from the last to the first, each once.
//
// Example, row [-1, 0, 0, 1]: node 3 walks 3 -> 1 -> 0: depth 2, bits 1011, path [0, 1, 3, -1].
//
// Bytes: 8 * nodes * (nodes + words + 5) written per row, 33 KB at 64 nodes; latency bound. No
// floats.
#include <algorithm>

#include "specdec/device/cuda.cuh"
#include "specdec/launchers.h"

namespace specdec {
namespace {

constexpr int kThreads = 256;

struct Shared {
  SharedArray<int32_t, kMaxNodes> parents;
  SharedArray<int32_t, kMaxNodes> depths;
};
static_assert(sizeof(Shared) <= 48 * 1024, "static shared memory");

__device__ int walk_depth(Shared& shared, int node) {
  int depth = 0;
  int parent = shared.parents[node];
  while (parent >= 0) {
    ++depth;
    parent = shared.parents[parent];
  }
  return parent == kRootParent ? depth : -1;
}

__device__ void write_links(Shared& shared, const TreeMaskParams& params, int64_t row, int node) {
  int first_child = -1, next_sibling = -1;
  if (shared.depths[node] >= 0) {
    const int nodes = static_cast<int>(params.nodes);
    const int parent = shared.parents[node];
    for (int later = nodes - 1; later > node; --later) {
      // The root's parent, -1, has no other children. Inactive nodes have parent -2.
      if (shared.parents[later] == node) first_child = later;
      if (shared.parents[later] == parent) next_sibling = later;
    }
  }
  params.first_child[row * params.nodes + node] = first_child;
  params.next_sibling[row * params.nodes + node] = next_sibling;
}

__device__ void write_ancestry(Shared& shared, const TreeMaskParams& params, int64_t row,
                               int node) {
  int64_t* bits = params.ancestors + (row * params.nodes + node) * params.words;
  int64_t* path = params.paths + (row * params.nodes + node) * params.nodes;
  int depth = shared.depths[node];
  for (int64_t beyond = depth + 1; beyond < params.nodes; ++beyond) path[beyond] = -1;

  uint64_t word_bits = 0;
  int word = static_cast<int>(params.words) - 1;
  for (int ancestor = depth < 0 ? -1 : node; ancestor >= 0; ancestor = shared.parents[ancestor]) {
    for (; word > ancestor / 64; --word) {
      bits[word] = static_cast<int64_t>(word_bits);
      word_bits = 0;
    }
    word_bits |= uint64_t{1} << (ancestor % 64);
    path[depth--] = ancestor;
  }
  for (; word >= 0; --word) {
    bits[word] = static_cast<int64_t>(word_bits);
    word_bits = 0;
  }
}

__global__ void __launch_bounds__(kThreads) tree_mask_kernel(TreeMaskParams params) {
  SPECDEC_SHARED(Shared, shared);
  const int64_t row = blockIdx.x;
  const int nodes = static_cast<int>(params.nodes);

  const ParentsRow parents{&params.parents(row, 0), params.parents.column_stride};
  for (int node = threadIdx.x; node < nodes; node += blockDim.x) {
    const int64_t parent = parents.link_is_legal(node) ? parents[node] : kInactiveParent;
    shared.parents[node] = static_cast<int32_t>(parent);
  }
  block_barrier();  // parents are complete before any thread walks

  const int64_t root_position = params.root_positions[row];
  for (int node = threadIdx.x; node < nodes; node += blockDim.x) {
    const int depth = walk_depth(shared, node);
    shared.depths[node] = depth;
    params.depths[row * params.nodes + node] = depth;
    params.positions[row * params.nodes + node] = root_position + (depth < 0 ? 0 : depth);
  }
  for (int node = threadIdx.x; node < nodes; node += blockDim.x) {
    // No barrier is needed: a thread reads only depths that it wrote. A later node whose parent is
    // active is active too, so links need no other depth.
    write_links(shared, params, row, node);
    write_ancestry(shared, params, row, node);
  }
}

}  // namespace

cudaError_t launch_tree_mask(const TreeMaskParams& params, cudaStream_t stream) {
  if (params.nodes < 1 || params.nodes > kMaxNodes) return cudaErrorInvalidValue;
  const int64_t threads = std::min<int64_t>(kThreads, (params.nodes + 31) / 32 * 32);
  return launch(tree_mask_kernel, {params.batch, 1, static_cast<int>(threads), stream}, params);
}

}  // namespace specdec
