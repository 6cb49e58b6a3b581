// build_dynamic_tree: selects the best candidates of a dynamic draft as a tree. Rule and meaning of
// the arguments: specdec/tree/build_dynamic_tree.h; algorithm: dynamic_tree.cuh.
//
// In:  scores, tokens, parents [batch, candidates], root_tokens [batch]
// Out: tree_tokens, tree_parents, selected [batch, nodes]
//
// One block per row, at most kItems contiguous candidates per thread.
//
// Bytes: 20 per candidate read, 24 per node written: 16 KB at 710 candidates (top 10, depth 8) and
// 60 nodes. Bound by latency: the selection has up to 32 rounds of about 100 cycles.
#include <algorithm>

#include "dynamic_tree.cuh"
#include "specdec/launchers.h"

namespace specdec {
namespace {

constexpr int kItems = 4;  // candidates per thread
constexpr int kMaxThreads = kMaxCandidates / kItems;
static_assert(kMaxThreads <= kWarpSize * kWarpSize, "one warp adds up what the warps have counted");

static_assert(kTreeWords * 4 <= 48 * 1024, "no opt-in to more shared memory");

__global__ void __launch_bounds__(kMaxThreads)
    build_dynamic_tree_kernel(BuildDynamicTreeParams params) {
  SPECDEC_DYNAMIC_SHARED(uint32_t, memory);
  const auto sync = [] { block_barrier(); };
  DynamicTree<kItems, decltype(sync)>(params, blockIdx.x, memory, static_cast<int>(blockDim.x),
                                      sync)
      .build();
}

}  // namespace

cudaError_t launch_build_dynamic_tree(const BuildDynamicTreeParams& params, cudaStream_t stream) {
  if (params.nodes < 1 || params.nodes > kMaxNodes || params.candidates > kMaxCandidates) {
    return cudaErrorInvalidValue;
  }
  const int64_t warps = (params.candidates + kItems * kWarpSize - 1) / (kItems * kWarpSize);
  const int threads = static_cast<int>(std::max<int64_t>(1, warps)) * kWarpSize;
  return launch(build_dynamic_tree_kernel,
                {params.batch, 1, threads, stream, kTreeWords * sizeof(uint32_t)}, params);
}

}  // namespace specdec
