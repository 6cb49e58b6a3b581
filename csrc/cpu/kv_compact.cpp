// CPU op kv_compact: one task per (cache, row). A task computes its moves once, then loads all of
// them into a buffer of its thread and stores them, head by head, so sources and targets may
// overlap in any way. Slots that stay where they are cost nothing; usually these are the first
// nodes of a path.
#include "specdec/kv_compact.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace specdec::cpu {
namespace {

constexpr int64_t kGrainBytes = 1 << 16;  // below this, waking a thread costs more than it saves

// Offsets in bytes from the first slot of the cache.
struct Move {
  int64_t source;
  int64_t target;
};

// Memory of a thread, kept between calls.
struct Scratch {
  std::vector<Move> moves;
  std::vector<std::byte> slots;
};

int64_t source_slot(const KvMoves& moves, int64_t row, int64_t depth) {
  return moves.source_starts[row] + moves.path(row, depth);
}

void list_moves(const CacheLayout& layout, const KvMoves& moves, int64_t row,
                std::vector<Move>& list) {
  list.clear();
  for (int64_t depth = 0; depth <= moves.num_accepted[row]; ++depth) {
    const int64_t source = source_slot(moves, row, depth),
                  target = moves.target_starts[row] + depth;
    if (source == target) continue;
    list.push_back(
        {slot_offset(layout, moves, row, source), slot_offset(layout, moves, row, target)});
  }
}

void move_row(const CacheTensor& cache, const KvMoves& moves, int64_t row, Scratch& scratch) {
  const CacheLayout& layout = cache.layout;
  list_moves(layout, moves, row, scratch.moves);
  const size_t size = layout.slot_bytes;
  scratch.slots.resize(std::max(scratch.slots.size(), scratch.moves.size() * size));
  for (int32_t head = 0; head < layout.heads; ++head) {
    std::byte* data = cache.data + head * layout.head_stride;
    std::byte* buffer = scratch.slots.data();
    for (const Move& move : scratch.moves) {
      std::memcpy(buffer, data + move.source, size);
      buffer += size;
    }
    buffer = scratch.slots.data();
    for (const Move& move : scratch.moves) {
      std::memcpy(data + move.target, buffer, size);
      buffer += size;
    }
  }
}

int64_t num_moves(const KvMoves& moves) {
  int64_t count = 0;
  for (int64_t row = 0; row < moves.batch; ++row) {
    for (int64_t depth = 0; depth <= moves.num_accepted[row]; ++depth) {
      count += source_slot(moves, row, depth) != moves.target_starts[row] + depth;
    }
  }
  return count;
}

// Bounds that hold for every cache.
struct Bounds {
  int64_t slots;  // slots per row
  int64_t page_size;
  int64_t pages;
};

Bounds find_bounds(std::span<const CacheTensor> caches, const KvMoves& moves) {
  Bounds bounds{INT64_MAX, INT64_MAX, INT64_MAX};
  for (const auto& [data, layout] : caches) {
    bounds.slots = std::min(bounds.slots, moves.row_pages * layout.page_size);
    bounds.page_size = std::min(bounds.page_size, layout.page_size);
    bounds.pages = std::min(bounds.pages, layout.pages);
  }
  return bounds;
}

// The page of a slot below bounds.slots. Caches with page tables have one common page size.
std::optional<std::string> find_invalid_page(const KvMoves& moves, const Bounds& bounds,
                                             int64_t row, int64_t slot) {
  if (moves.page_table.data == nullptr) return std::nullopt;
  const int64_t index = slot / bounds.page_size, page = moves.page(row, index);
  if (page >= 0 && page < bounds.pages) return std::nullopt;
  return element("page_table", row, index, page) + " holds slot " + std::to_string(slot) +
         "; expected a page in [0, " + std::to_string(bounds.pages) + ")";
}

// A move of a node that exists.
std::optional<std::string> find_invalid_source(const KvMoves& moves, const Bounds& bounds,
                                               const MoveNames& names, int64_t row, int64_t depth) {
  const int64_t node = moves.path(row, depth), start = moves.source_starts[row];
  // Compared in this form, because start + node may overflow.
  if (start < -node || start >= bounds.slots - node) {
    return element(names.sources, row, start) + " with " + element("path", row, depth, node) +
           " is outside the smallest cache, slots 0 to " + std::to_string(bounds.slots - 1);
  }
  return find_invalid_page(moves, bounds, row, start + node);
}

std::optional<std::string> find_invalid_row(const KvMoves& moves, const Bounds& bounds,
                                            const MoveNames& names, int64_t row) {
  if (auto problem = find_invalid_path(moves, row)) return problem;
  const int64_t accepted = moves.num_accepted[row], target = moves.target_starts[row];
  for (int64_t depth = 0; depth <= accepted; ++depth) {
    if (auto problem = find_invalid_source(moves, bounds, names, row, depth)) return problem;
  }
  if (accepted >= 0 && (target < 0 || target >= bounds.slots - accepted)) {
    return element(names.targets, row, target) + " with " + std::to_string(accepted + 1) +
           " slots to move; the smallest cache has slots 0 to " + std::to_string(bounds.slots - 1);
  }
  for (int64_t depth = 0; depth <= accepted; ++depth) {
    if (auto problem = find_invalid_page(moves, bounds, row, target + depth)) return problem;
  }
  return std::nullopt;
}

}  // namespace

std::string element(const char* name, int64_t row, int64_t column, int64_t value) {
  return std::string(name) + "[" + std::to_string(row) + ", " + std::to_string(column) +
         "] = " + std::to_string(value);
}

std::string element(const char* name, int64_t row, int64_t value) {
  return std::string(name) + "[" + std::to_string(row) + "] = " + std::to_string(value);
}

std::optional<std::string> find_invalid_path(const KvMoves& moves, int64_t row) {
  const int64_t accepted = moves.num_accepted[row];
  if (accepted < -1 || accepted >= moves.nodes) {
    return element("num_accepted", row, accepted) + "; expected -1 (inactive row) to " +
           std::to_string(moves.nodes - 1) + ", the last column of path";
  }
  for (int64_t depth = 0; depth <= accepted; ++depth) {
    const int64_t node = moves.path(row, depth);
    if (node >= 0 && node < moves.nodes) continue;
    return element("path", row, depth, node) + "; expected a node in [0, " +
           std::to_string(moves.nodes) + "), because " + element("num_accepted", row, accepted);
  }
  return std::nullopt;
}

std::optional<std::string> find_invalid_move(std::span<const CacheTensor> caches,
                                             const KvMoves& moves, const MoveNames& names) {
  if (caches.empty()) return std::nullopt;
  const Bounds bounds = find_bounds(caches, moves);
  for (int64_t row = 0; row < moves.batch; ++row) {
    if (auto problem = find_invalid_row(moves, bounds, names, row)) return problem;
  }
  return std::nullopt;
}

void kv_compact(std::span<const CacheTensor> caches, const KvMoves& moves,
                const ParallelFor& parallel_for) {
  const int64_t count = num_moves(moves), tasks = static_cast<int64_t>(caches.size()) * moves.batch;
  if (count == 0 || tasks == 0) return;
  int64_t bytes = 0;
  for (const auto& [data, layout] : caches) bytes += count * layout.heads * layout.slot_bytes;
  const int64_t grain = kGrainBytes / (bytes / tasks + 1) + 1;
  parallel_for(tasks, grain, [&](int64_t begin, int64_t end) {
    thread_local Scratch scratch;
    for (int64_t task = begin; task < end; ++task) {
      move_row(caches[task / moves.batch], moves, task % moves.batch, scratch);
    }
  });
}

}  // namespace specdec::cpu
