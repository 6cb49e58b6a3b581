// CPU op kv_compact: one task per (cache, row, head). A task loads all accepted slots into a buffer
// of its thread and then stores them, so sources and targets may overlap in any way.
#include "specdec/kv_compact.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace specdec::cpu {
namespace {

void move_head(const CacheTensor& cache, const KvMoves& moves, int64_t row, int64_t head) {
  const int64_t count = moves.num_accepted[row] + 1;
  std::byte* slots = cache.data + row * cache.batch_stride + head * cache.head_stride;
  std::byte* target = slots + moves.target_starts[row] * cache.slot_stride;

  thread_local std::vector<std::byte> buffer;
  if (buffer.size() < static_cast<size_t>(count * cache.slot_bytes)) {
    buffer.resize(count * cache.slot_bytes);
  }
  for (int64_t depth = 0; depth < count; ++depth) {
    const int64_t source = moves.source_starts[row] + moves.path(row, depth);
    std::memcpy(buffer.data() + depth * cache.slot_bytes, slots + source * cache.slot_stride,
                cache.slot_bytes);
  }
  for (int64_t depth = 0; depth < count; ++depth) {
    std::memcpy(target + depth * cache.slot_stride, buffer.data() + depth * cache.slot_bytes,
                cache.slot_bytes);
  }
}

bool moves_anything(const KvMoves& moves, int64_t row) {
  const int64_t shift = moves.source_starts[row] - moves.target_starts[row];
  for (int64_t depth = 0; depth <= moves.num_accepted[row]; ++depth) {
    if (shift + moves.path(row, depth) != depth) return true;
  }
  return false;
}

std::string describe(const char* name, int64_t row, int64_t depth, int64_t value) {
  return std::string(name) + "[" + std::to_string(row) + ", " + std::to_string(depth) +
         "] = " + std::to_string(value);
}

}  // namespace

std::optional<std::string> find_invalid_move(std::span<const CacheTensor> caches,
                                             const KvMoves& moves) {
  if (caches.empty()) return std::nullopt;
  const int64_t slots = std::min_element(caches.begin(), caches.end(), [](auto& a, auto& b) {
                          return a.slots < b.slots;
                        })->slots;
  for (int64_t row = 0; row < moves.batch; ++row) {
    const int64_t accepted = moves.num_accepted[row];
    if (accepted < -1 || accepted >= moves.nodes) {
      return "num_accepted[" + std::to_string(row) + "] = " + std::to_string(accepted) +
             "; expected -1 (inactive row) to " + std::to_string(moves.nodes - 1) +
             ", the last column of path";
    }
    if (accepted < 0) continue;
    for (int64_t depth = 0; depth <= accepted; ++depth) {
      const int64_t node = moves.path(row, depth);
      if (node < 0 || node >= moves.nodes) {
        return describe("path", row, depth, node) + "; expected a node in [0, " +
               std::to_string(moves.nodes) + "), because num_accepted[" + std::to_string(row) +
               "] = " + std::to_string(accepted);
      }
      // Compared in this form because start + node may overflow.
      const int64_t start = moves.source_starts[row];
      if (start < -node || start >= slots - node) {
        return "source_starts[" + std::to_string(row) + "] = " + std::to_string(start) + " with " +
               describe("path", row, depth, node) + " is outside the smallest cache, slots 0 to " +
               std::to_string(slots - 1);
      }
    }
    const int64_t target = moves.target_starts[row];
    if (target < 0 || target >= slots - accepted) {
      return "target_starts[" + std::to_string(row) + "] = " + std::to_string(target) + " with " +
             std::to_string(accepted + 1) + " slots to move; the smallest cache has slots 0 to " +
             std::to_string(slots - 1);
    }
  }
  return std::nullopt;
}

void kv_compact(std::span<const CacheTensor> caches, const KvMoves& moves,
                const ParallelFor& parallel_for) {
  struct RowOfCache {
    const CacheTensor* cache;
    int64_t row;
  };
  std::vector<RowOfCache> work;
  work.reserve(caches.size() * moves.batch);
  int64_t bytes = 0;
  for (int64_t row = 0; row < moves.batch; ++row) {
    if (!moves_anything(moves, row)) continue;
    for (const CacheTensor& cache : caches) {
      work.push_back({&cache, row});
      bytes += (moves.num_accepted[row] + 1) * cache.heads * cache.slot_bytes;
    }
  }
  if (work.empty()) return;
  constexpr int64_t kGrainBytes = 1 << 16;
  const int64_t count = static_cast<int64_t>(work.size());
  const int64_t grain = kGrainBytes / (bytes / count + 1) + 1;
  parallel_for(count, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      for (int64_t head = 0; head < work[i].cache->heads; ++head) {
        move_head(*work[i].cache, moves, work[i].row, head);
      }
    }
  });
}

}  // namespace specdec::cpu
