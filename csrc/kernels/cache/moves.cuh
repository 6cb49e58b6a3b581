// What the kernels that move slots share: the table of caches in a launch's parameters, and the
// moves of one block through shared memory.
#pragma once

#include <algorithm>
#include <cstdint>

#include "specdec/device/cuda.cuh"
#include "specdec/launchers.h"

namespace specdec::moves {

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

template <typename Unit>
struct Stage {
  SharedArray<Unit, kStageBytes / sizeof(Unit)> units;
  SharedArray<int64_t, kMaxNodes> sources;  // offsets in bytes; -1: nothing to move
  SharedArray<int64_t, kMaxNodes> targets;
};

struct Move {
  int64_t source;  // offsets in the cache; -1: nothing to move
  int64_t target;
};

__device__ inline Move find_move(const KvMoves& moves, const CacheLayout& cache, int64_t row,
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

// Copies `bytes` bytes at each of the first `count` offsets of the stage, from `source` to
// `target`. All loads of a column of units come before all its stores, so sources and targets may
// overlap.
template <typename Unit>
__device__ void copy_slots(Stage<Unit>& stage, const std::byte* source, std::byte* target,
                           int count, int bytes) {
  block_barrier();  // the offsets are complete
  const int columns = bytes / static_cast<int>(sizeof(Unit));
  const int staged_columns = min(columns, static_cast<int>(kStageBytes / sizeof(Unit)) / count);
  for (int first = 0; first < columns; first += staged_columns) {
    const int width = min(staged_columns, columns - first);
    for (int i = threadIdx.x; i < count * width; i += blockDim.x) {
      const int64_t from = stage.sources[i / width];
      if (from < 0) continue;
      stage.units[i] = reinterpret_cast<const Unit*>(source + from)[first + i % width];
    }
    block_barrier();  // every load of these columns is done before the first store
    for (int i = threadIdx.x; i < count * width; i += blockDim.x) {
      const int64_t to = stage.targets[i / width];
      if (to >= 0) reinterpret_cast<Unit*>(target + to)[first + i % width] = stage.units[i];
    }
  }
}

// Moves one head of the first `count` slots of a row's path in cache `index` of the table.
template <typename Unit>
__device__ void move_slots(Stage<Unit>& stage, const CacheTable& table, int index, int head,
                           const KvMoves& moves, int64_t row, int count) {
  const CacheLayout& cache = table.layouts[table.layout_of[index]];
  if (head >= cache.heads || count == 0) return;
  for (int depth = threadIdx.x; depth < count; depth += blockDim.x) {
    const Move move = find_move(moves, cache, row, depth);
    stage.sources[depth] = move.source;
    stage.targets[depth] = move.target;
  }
  std::byte* data = table.data[index] + head * cache.head_stride;
  copy_slots(stage, data, data, count, cache.slot_bytes);
}

// A table and its number of caches, on the host.
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

  int max_heads() const {
    int most = 0;
    for (int64_t i = 0; i < num_layouts; ++i) most = std::max(most, table.layouts[i].heads);
    return most;
  }

  // The low bits of everything that must be a multiple of the unit.
  uint64_t alignment_bits() const {
    uint64_t bits = 0;
    for (int64_t i = 0; i < size; ++i) bits |= reinterpret_cast<uintptr_t>(table.data[i]);
    for (int64_t i = 0; i < num_layouts; ++i) {
      const CacheLayout& layout = table.layouts[i];
      bits |= static_cast<uint64_t>(layout.page_stride | layout.head_stride | layout.slot_stride |
                                    layout.slot_bytes);
    }
    return bits;
  }
};

// Divides caches over as many launches as they need. Calls launch_list(list, is_last), the last time
// with a list that may be empty.
template <typename F>
cudaError_t for_each_list(std::span<const CacheTensor> caches, const F& launch_list) {
  CacheList list;
  for (const CacheTensor& cache : caches) {
    if (list.add(cache)) continue;
    const cudaError_t error = launch_list(list, false);
    if (error != cudaSuccess) return error;
    list = {};
    list.add(cache);
  }
  return launch_list(list, true);
}

// Calls launch_with(Unit{}) with the widest unit that these low bits allow.
template <typename F>
cudaError_t with_unit(uint64_t bits, const F& launch_with) {
  if (bits % 16 == 0) return launch_with(uint4{});
  if (bits % 8 == 0) return launch_with(uint2{});
  if (bits % 4 == 0) return launch_with(uint32_t{});
  if (bits % 2 == 0) return launch_with(uint16_t{});
  return launch_with(uint8_t{});
}

}  // namespace specdec::moves
