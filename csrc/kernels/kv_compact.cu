// kv_compact: move the accepted slots of a tree to the front of its block, K and V of all layers in
// one launch.
//
// In:  caches [batch, heads, slots, head_dim] (any strides, any element type), path [batch, nodes],
//      num_accepted, source_starts, target_starts [batch]
// Out: slot target_starts[b] + d <- slot source_starts[b] + path[b, d], d = 0 .. num_accepted[b]
//
// One block per (cache, row, head). Slots are moved as columns of `Unit`s, the widest type that all
// pointers, strides and slot sizes of the launch allow. As many columns as fit are staged in shared
// memory for all accepted slots, then stored: within a column all loads come before all stores, so
// sources and targets may overlap. One barrier does it: an element of the stage is written and read
// by the same thread, and the next columns touch other bytes of the cache. Counts are read from
// device memory; a count outside the tree or a slot outside the cache moves nothing, because a
// kernel can't raise.
//
// Example: path [0, 2, 5], source = target = 100: slot 101 <- 102, slot 102 <- 105; slot 100 stays.
//
// Bytes: 2 * (num_accepted + 1) * slot bytes per head; launch bound at usual sizes.
#include <algorithm>
#include <cstdint>

#include "specdec/cuda.cuh"
#include "specdec/launchers.h"

namespace specdec {
namespace {

constexpr int kThreads = 128;
constexpr int kStageBytes = 16 * 1024;
static_assert(kStageBytes >= kMaxNodes * 16, "one column of the widest unit for a full tree");

struct CacheTable {
  CacheTensor caches[kMaxCachesPerLaunch];
};
static_assert(sizeof(CacheTable) + sizeof(KvMoves) <= 32764, "kernel parameters");

template <typename Unit>
struct Shared {
  SharedArray<Unit, kStageBytes / sizeof(Unit)> stage;
};

// The slot that node path[row, depth] is in, or -1 if it is outside the cache.
__device__ int64_t source_slot(const KvMoves& moves, const CacheTensor& cache, int64_t row,
                               int64_t depth) {
  const int64_t node = moves.path(row, depth);
  if (node < 0 || node >= moves.nodes) return -1;
  const int64_t slot = moves.source_starts[row] + node;
  return slot >= 0 && slot < cache.slots ? slot : -1;
}

template <typename Unit>
__global__ void __launch_bounds__(kThreads)
    kv_compact_kernel(const SPECDEC_GRID_CONSTANT CacheTable table,
                      const SPECDEC_GRID_CONSTANT KvMoves moves, int max_heads) {
  SPECDEC_SHARED(Shared<Unit>, shared);
  const CacheTensor& cache = table.caches[blockIdx.y];
  const int64_t row = blockIdx.x / max_heads;
  const int head = blockIdx.x % max_heads;
  const int64_t accepted = moves.num_accepted[row];
  const int64_t target = moves.target_starts[row];
  if (head >= cache.heads || accepted < 0 || accepted >= moves.nodes) return;
  if (target < 0 || target >= cache.slots - accepted) return;

  const int count = static_cast<int>(accepted) + 1;
  const int columns = cache.slot_bytes / static_cast<int>(sizeof(Unit));
  const int staged_columns = min(columns, static_cast<int>(kStageBytes / sizeof(Unit)) / count);
  std::byte* slots = cache.data + row * cache.batch_stride + head * cache.head_stride;
  const auto unit_at = [&](int64_t slot, int column) {
    return reinterpret_cast<Unit*>(slots + slot * cache.slot_stride) + column;
  };

  for (int first = 0; first < columns; first += staged_columns) {
    const int width = min(staged_columns, columns - first);
    for (int i = threadIdx.x; i < count * width; i += blockDim.x) {
      const int64_t source = source_slot(moves, cache, row, i / width);
      if (source >= 0) shared.stage[i] = *unit_at(source, first + i % width);
    }
    block_barrier();  // every load of these columns is done before the first store
    for (int i = threadIdx.x; i < count * width; i += blockDim.x) {
      const int64_t source = source_slot(moves, cache, row, i / width);
      if (source >= 0) *unit_at(target + i / width, first + i % width) = shared.stage[i];
    }
  }
}

template <typename Unit>
cudaError_t launch_typed(const CacheTable& table, const KvMoves& moves, int64_t num_caches,
                         int max_heads, cudaStream_t stream) {
  const LaunchConfig config{moves.batch * max_heads, num_caches, kThreads, stream};
  return launch(kv_compact_kernel<Unit>, config, table, moves, max_heads);
}

// The low bits of everything that must be a multiple of the unit.
uint64_t alignment_bits(const CacheTensor& cache) {
  return reinterpret_cast<uintptr_t>(cache.data) | static_cast<uint64_t>(cache.batch_stride) |
         static_cast<uint64_t>(cache.head_stride) | static_cast<uint64_t>(cache.slot_stride) |
         static_cast<uint64_t>(cache.slot_bytes);
}

cudaError_t launch_table(std::span<const CacheTensor> caches, const KvMoves& moves,
                         cudaStream_t stream) {
  CacheTable table{};
  uint64_t bits = 0;
  int max_heads = 0;
  for (size_t i = 0; i < caches.size(); ++i) {
    table.caches[i] = caches[i];
    bits |= alignment_bits(caches[i]);
    max_heads = std::max(max_heads, caches[i].heads);
  }
  if (max_heads == 0) return cudaSuccess;
  const int64_t count = static_cast<int64_t>(caches.size());
  if (bits % 16 == 0) return launch_typed<uint4>(table, moves, count, max_heads, stream);
  if (bits % 8 == 0) return launch_typed<uint2>(table, moves, count, max_heads, stream);
  if (bits % 4 == 0) return launch_typed<uint32_t>(table, moves, count, max_heads, stream);
  if (bits % 2 == 0) return launch_typed<uint16_t>(table, moves, count, max_heads, stream);
  return launch_typed<uint8_t>(table, moves, count, max_heads, stream);
}

}  // namespace

cudaError_t launch_kv_compact(std::span<const CacheTensor> caches, const KvMoves& moves,
                              cudaStream_t stream) {
  if (moves.nodes < 1 || moves.nodes > kMaxNodes) return cudaErrorInvalidValue;
  for (size_t first = 0; first < caches.size(); first += kMaxCachesPerLaunch) {
    const size_t count = std::min<size_t>(kMaxCachesPerLaunch, caches.size() - first);
    const cudaError_t error = launch_table(caches.subspan(first, count), moves, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace specdec
