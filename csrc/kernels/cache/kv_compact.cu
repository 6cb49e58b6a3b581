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
#include <algorithm>
#include <cstdint>

#include "specdec/device/cuda.cuh"
#include "specdec/launchers.h"

namespace specdec {
namespace {

constexpr int kThreads = 128;
constexpr int kStageBytes = 16 * 1024;
static_assert(kStageBytes >= kMaxNodes * 16, "one column of the widest unit for a full tree");

// The caches of a launch. All of it is copied at every launch, and layers share layouts, so a cache
// is a pointer and a byte.
struct CacheTable {
  CacheLayout layouts[kMaxLayoutsPerLaunch];
  std::byte* data[kMaxCachesPerLaunch];
  uint8_t layout_of[kMaxCachesPerLaunch];
};
static_assert(sizeof(CacheTable) + sizeof(KvMoves) + sizeof(int) <= 4096,
              "the parameters that every driver takes");

template <typename Unit>
struct Shared {
  SharedArray<Unit, kStageBytes / sizeof(Unit)> stage;
  SharedArray<int64_t, kMaxNodes> sources;  // -1: nothing to move
  SharedArray<int64_t, kMaxNodes> targets;
};

struct Move {
  int64_t source;  // offsets in the cache; -1: nothing to move
  int64_t target;
};

__device__ Move find_move(const KvMoves& moves, const CacheLayout& cache, int64_t row,
                          int64_t depth) {
  const int64_t node = moves.path(row, depth);
  if (node < 0 || node >= moves.nodes) return {-1, -1};
  // Unsigned, because starts may be any number: an overflow gives a negative number, which is no
  // slot.
  const auto plus = [](int64_t start, int64_t offset) {
    return static_cast<int64_t>(static_cast<uint64_t>(start) + static_cast<uint64_t>(offset));
  };
  const int64_t source = slot_offset(cache, moves, row, plus(moves.source_starts[row], node));
  const int64_t target = slot_offset(cache, moves, row, plus(moves.target_starts[row], depth));
  if (source < 0 || target < 0 || source == target) return {-1, -1};
  return {source, target};
}

template <typename Unit>
__global__ void __launch_bounds__(kThreads)
    kv_compact_kernel(const SPECDEC_GRID_CONSTANT CacheTable table,
                      const SPECDEC_GRID_CONSTANT KvMoves moves, int max_heads) {
  SPECDEC_SHARED(Shared<Unit>, shared);
  const CacheLayout& cache = table.layouts[table.layout_of[blockIdx.y]];
  const int64_t row = blockIdx.x / max_heads;
  const int head = blockIdx.x % max_heads;
  const int64_t accepted = moves.num_accepted[row];
  if (head >= cache.heads || accepted < 0 || accepted >= moves.nodes) return;

  const int count = static_cast<int>(accepted) + 1;
  for (int depth = threadIdx.x; depth < count; depth += blockDim.x) {
    const Move move = find_move(moves, cache, row, depth);
    shared.sources[depth] = move.source;
    shared.targets[depth] = move.target;
  }
  block_barrier();  // the offsets are complete

  const int columns = cache.slot_bytes / static_cast<int>(sizeof(Unit));
  const int staged_columns = min(columns, static_cast<int>(kStageBytes / sizeof(Unit)) / count);
  std::byte* data = table.data[blockIdx.y] + head * cache.head_stride;
  const auto unit_at = [&](int64_t offset, int column) {
    return reinterpret_cast<Unit*>(data + offset) + column;
  };
  for (int first = 0; first < columns; first += staged_columns) {
    const int width = min(staged_columns, columns - first);
    for (int i = threadIdx.x; i < count * width; i += blockDim.x) {
      const int64_t source = shared.sources[i / width];
      if (source >= 0) shared.stage[i] = *unit_at(source, first + i % width);
    }
    block_barrier();  // every load of these columns is done before the first store
    for (int i = threadIdx.x; i < count * width; i += blockDim.x) {
      const int64_t target = shared.targets[i / width];
      if (target >= 0) *unit_at(target, first + i % width) = shared.stage[i];
    }
  }
}

// A table and its number of caches.
struct CacheList {
  CacheTable table{};
  int64_t size = 0;
  int64_t num_layouts = 0;

  // Returns false if the table is full.
  bool add(const CacheTensor& cache) {
    CacheLayout* const end = table.layouts + num_layouts;
    CacheLayout* const layout = std::find(table.layouts, end, cache.layout);
    const bool is_new = layout == end;
    if (size == kMaxCachesPerLaunch || (is_new && num_layouts == kMaxLayoutsPerLaunch)) {
      return false;
    }
    if (is_new) table.layouts[num_layouts++] = cache.layout;
    table.data[size] = cache.data;
    table.layout_of[size] = static_cast<uint8_t>(layout - table.layouts);
    ++size;
    return true;
  }
};

// The low bits of everything that must be a multiple of the unit.
uint64_t alignment_bits(const CacheList& caches) {
  uint64_t bits = 0;
  for (int64_t i = 0; i < caches.size; ++i) {
    bits |= reinterpret_cast<uintptr_t>(caches.table.data[i]);
  }
  for (int64_t i = 0; i < caches.num_layouts; ++i) {
    const CacheLayout& layout = caches.table.layouts[i];
    bits |= static_cast<uint64_t>(layout.page_stride | layout.head_stride | layout.slot_stride |
                                  layout.slot_bytes);
  }
  return bits;
}

cudaError_t launch_list(const CacheList& caches, const KvMoves& moves, cudaStream_t stream) {
  int max_heads = 0;
  for (int64_t i = 0; i < caches.num_layouts; ++i) {
    max_heads = std::max(max_heads, caches.table.layouts[i].heads);
  }
  if (max_heads == 0) return cudaSuccess;
  const LaunchConfig config{moves.batch * max_heads, caches.size, kThreads, stream};
  const uint64_t bits = alignment_bits(caches);
  const auto with_unit = [&]<typename Unit>(Unit) {
    return launch(kv_compact_kernel<Unit>, config, caches.table, moves, max_heads);
  };
  if (bits % 16 == 0) return with_unit(uint4{});
  if (bits % 8 == 0) return with_unit(uint2{});
  if (bits % 4 == 0) return with_unit(uint32_t{});
  if (bits % 2 == 0) return with_unit(uint16_t{});
  return with_unit(uint8_t{});
}

}  // namespace

cudaError_t launch_kv_compact(std::span<const CacheTensor> caches, const KvMoves& moves,
                              cudaStream_t stream) {
  if (moves.nodes < 1 || moves.nodes > kMaxNodes) return cudaErrorInvalidValue;
  CacheList list;
  for (const CacheTensor& cache : caches) {
    if (list.add(cache)) continue;
    const cudaError_t error = launch_list(list, moves, stream);
    if (error != cudaSuccess) return error;
    list = {};
    list.add(cache);
  }
  return launch_list(list, moves, stream);
}

}  // namespace specdec
