// kv_compact: moves the accepted slots of a tree to the front of its block, in the keys and values
// of all layers.
//
// Caches are pools of pages: slot s of a row is slot s % page_size of the row's page s / page_size.
// Without a page table row b has one page, number b. An ordinary cache [batch, heads, slots,
// head_dim] is thus a pool with one page per row.
#pragma once

#include <optional>
#include <span>
#include <string>

#include "specdec/core/parallel.h"
#include "specdec/core/tree.h"

namespace specdec {

// The layout of a cache tensor [pages, heads, page_size, head_dim] with a contiguous last dimension.
// Strides count bytes. Most layers of a model share one.
struct CacheLayout {
  int64_t page_stride;
  int64_t head_stride;
  int64_t slot_stride;
  int64_t pages;
  int64_t page_size;
  int32_t heads;
  int32_t slot_bytes;  // head_dim * element size

  bool operator==(const CacheLayout&) const = default;
};

struct CacheTensor {
  std::byte* data;
  CacheLayout layout;
};

struct KvMoves {
  View2<const int64_t> path;           // [batch, nodes] accepted nodes in order
  View1<const int64_t> num_accepted;   // [batch]        -1: nothing moves in this row
  View1<const int64_t> source_starts;  // [batch]        slot of node 0
  View1<const int64_t> target_starts;  // [batch]        slot that node path[b, 0] moves to
  View2<const int64_t> page_table;     // [batch, row_pages] or null
  int64_t row_pages;                   // 1 without a page table
  int64_t batch;
  int64_t nodes;

  SPECDEC_HOST_DEVICE int64_t page(int64_t row, int64_t index) const {
    return page_table.data == nullptr ? row : page_table(row, index);
  }
};

// The offset in bytes of a row's slot from the first slot of a cache, or -1 if the row or the cache
// has no such slot.
SPECDEC_HOST_DEVICE int64_t slot_offset(const CacheLayout& cache, const KvMoves& moves, int64_t row,
                                        int64_t slot) {
  if (slot < 0 || slot >= moves.row_pages * cache.page_size) return -1;
  const int64_t index = slot / cache.page_size;
  const int64_t page = moves.page(row, index);
  if (page < 0 || page >= cache.pages) return -1;
  return page * cache.page_stride + (slot - index * cache.page_size) * cache.slot_stride;
}

namespace cpu {

// The arguments of an op that moves come from, for messages.
struct MoveNames {
  const char* sources = "source_starts";
  const char* targets = "target_starts";
};

// "name[row] = value" and "name[row, column] = value", for messages.
std::string element(const char* name, int64_t row, int64_t value);
std::string element(const char* name, int64_t row, int64_t column, int64_t value);

// Returns what is wrong with the path of a row, or nothing.
std::optional<std::string> find_invalid_path(const KvMoves& moves, int64_t row);

// Returns what is wrong with the moves, or nothing. Reads no cache.
std::optional<std::string> find_invalid_move(std::span<const CacheTensor> caches,
                                             const KvMoves& moves, const MoveNames& names = {});

// The moves must be valid.
void kv_compact(std::span<const CacheTensor> caches, const KvMoves& moves,
                const ParallelFor& parallel_for);

}  // namespace cpu

}  // namespace specdec
