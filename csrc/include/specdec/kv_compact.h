// kv_compact: move the accepted slots of a tree to the front of its block, in K and V of all
// layers.
#pragma once

#include <optional>
#include <span>
#include <string>

#include "specdec/parallel.h"
#include "specdec/tree.h"

namespace specdec {

// One cache tensor [batch, heads, slots, head_dim] with a contiguous last dimension. Strides count
// bytes.
struct CacheTensor {
  std::byte* data;
  int64_t batch_stride;
  int64_t head_stride;
  int64_t slot_stride;
  int64_t slots;
  int32_t heads;
  int32_t slot_bytes;  // head_dim * element size
};

struct KvMoves {
  View2<const int64_t> path;           // [batch, nodes] accepted nodes in order
  View1<const int64_t> num_accepted;   // [batch]        -1: the row moves nothing
  View1<const int64_t> source_starts;  // [batch]        slot of node 0
  View1<const int64_t> target_starts;  // [batch]        slot that node path[b, 0] moves to
  int64_t batch;
  int64_t nodes;
};

namespace cpu {

// What is wrong with the moves of some row, or nothing. Reads no cache.
std::optional<std::string> find_invalid_move(std::span<const CacheTensor> caches,
                                             const KvMoves& moves);

// The moves must be valid.
void kv_compact(std::span<const CacheTensor> caches, const KvMoves& moves,
                const ParallelFor& parallel_for);

}  // namespace cpu

}  // namespace specdec
