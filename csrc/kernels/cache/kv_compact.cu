// kv_compact: moves the accepted slots of a tree to the front of its block, for the keys and values
// of all layers in one launch.
//
// In:  caches [pages, heads, page_size, head_dim] (any strides, any element type), path [batch,
//      nodes], num_accepted, source_starts, target_starts [batch], page_table [batch, row_pages] or
//      none: row b is page b
// Out: slot target_starts[b] + d <- slot source_starts[b] + path[b, d], d = 0 .. num_accepted[b]
//
// One block per (cache, row, head).
//   1. Addresses: one thread per accepted node turns its source and target slot into offsets,
//      through the page table. Slots that stay where they are, and slots that the row does not
//      have, are skipped: a kernel can't raise.
//   2. Moves, in columns of `Unit`s, the widest type that all pointers, strides and slot sizes of
//      the launch allow. As many columns as fit are staged in shared memory for all accepted slots,
//      then stored. All loads of a column come before all its stores, so sources and targets may
//      overlap, also across pages.
//
// Barriers: after the offsets are complete; between the loads and the stores of some columns.
// Staged elements are written and read by the same thread, and the next columns touch other bytes
// of the cache, so no third barrier is needed. Counts are read from device memory.
//
// Example: path [0, 2, 5], source = target = 100: slot 101 <- 102, slot 102 <- 105; slot 100 stays.
// With pages of 64 and the page table [7, 3] of the row, this is 37 <- 38 and 38 <- 41 within page
// 3.
//
// Bytes: 2 * slot bytes per head and moved slot; launch bound at usual sizes. A page that is
// written must be in the table of one row only.
#include "moves.cuh"

namespace specdec {
namespace {

using namespace moves;

static_assert(sizeof(CacheTable) + sizeof(KvMoves) + sizeof(int) <= 4096,
              "the parameters that every driver takes");

template <typename Unit>
__global__ void __launch_bounds__(kThreads)
    kv_compact_kernel(const SPECDEC_GRID_CONSTANT CacheTable table,
                      const SPECDEC_GRID_CONSTANT KvMoves moves, int max_heads) {
  SPECDEC_SHARED(Stage<Unit>, stage);
  const int64_t row = blockIdx.x / max_heads;
  const int64_t accepted = moves.num_accepted[row];
  if (accepted < 0 || accepted >= moves.nodes) return;
  move_slots(stage, table, blockIdx.y, blockIdx.x % max_heads, moves, row,
             static_cast<int>(accepted) + 1);
}

cudaError_t launch_list(const CacheList& caches, const KvMoves& moves, cudaStream_t stream) {
  const int max_heads = caches.max_heads();
  if (max_heads == 0) return cudaSuccess;
  const LaunchConfig config{moves.batch * max_heads, caches.size, kThreads, stream};
  return with_unit(caches.alignment_bits(), [&]<typename Unit>(Unit) {
    return launch(kv_compact_kernel<Unit>, config, caches.table, moves, max_heads);
  });
}

}  // namespace

cudaError_t launch_kv_compact(std::span<const CacheTensor> caches, const KvMoves& moves,
                              cudaStream_t stream) {
  if (moves.nodes < 1 || moves.nodes > kMaxNodes) return cudaErrorInvalidValue;
  return for_each_list(
      caches, [&](const CacheList& list, bool) { return launch_list(list, moves, stream); });
}

}  // namespace specdec
