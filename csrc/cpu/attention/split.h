// One task of the CPU op tree_attention: some nodes and all query heads of one key-value head, for
// one split of a row's positions.
#pragma once

#include <algorithm>
#include <bit>
#include <vector>

#include "specdec/tree_attention.h"
#include "tiles.h"

namespace specdec::cpu {

// A half-open range of positions.
struct Range {
  int64_t begin;
  int64_t end;

  bool is_empty() const { return begin >= end; }
  Range intersection(const Range& other) const {
    return {std::max(begin, other.begin), std::min(end, other.end)};
  }
};

// The positions that the nodes of a row see, and their slots.
class TreeRow {
 public:
  TreeRow(const TreeAttentionParams& params, int64_t row)
      : params_(params), row_(row), prefix_length_(params.prefix_lengths[row]) {}

  int64_t prefix_length() const { return prefix_length_; }
  // The number of positions that prefix_slot() finds. The nodes of a chain are among them.
  int64_t num_prefix_slots() const {
    return is_chain() ? std::max<int64_t>(0, prefix_length_ + params_.nodes) : prefix_length_;
  }
  int64_t prefix_slot(int64_t position) const { return params_.prefix_starts[row_] + position; }
  int64_t node_slot(int64_t node) const { return params_.block_starts[row_] + node; }

  // The ancestors of a node among the kTileKeys nodes of a tile, as bits.
  uint32_t ancestors(int64_t node, int64_t tile) const {
    return static_cast<uint32_t>(params_.ancestor_word(row_, node, tile / 2) >> tile % 2 * 32);
  }
  // The number of tiles of nodes that are not among the positions of the prefix.
  int64_t num_tiles() const { return is_chain() ? 0 : 2 * params_.words; }

  // The position of a node's first ancestor in a tile. With the number of tiles: one beyond the
  // node.
  int64_t position_of_tile(int64_t node, int64_t tile) const {
    int64_t position = prefix_length_;
    for (int64_t i = 0; i < tile; ++i) position += std::popcount(ancestors(node, i));
    return position;
  }

  // The positions that a node sees; empty for an inactive node.
  Range seen_by(int64_t node) const {
    const int64_t end =
        is_chain() ? prefix_length_ + node + 1 : position_of_tile(node, num_tiles());
    if (is_chain() ? end <= 0 : end == prefix_length_) return {0, 0};
    return {params_.window > 0 ? std::max<int64_t>(0, end - params_.window) : 0, end};
  }

  // The smallest range that contains all positions seen by any of these nodes.
  Range seen(const Range& nodes) const {
    Range all{INT64_MAX, 0};
    for (int64_t node = nodes.begin; node < nodes.end; ++node) {
      const Range range = seen_by(node);
      if (range.is_empty()) continue;
      all = {std::min(all.begin, range.begin), std::max(all.end, range.end)};
    }
    return all.is_empty() ? Range{0, 0} : all;
  }

 private:
  bool is_chain() const { return params_.ancestors == nullptr; }

  const TreeAttentionParams& params_;
  int64_t row_;
  int64_t prefix_length_;
};

// Sizes that all tasks share. A query row is a pair (node, head of the group), ordered by node.
struct AttentionSizes {
  explicit AttentionSizes(const TreeAttentionParams& params)
      : tiles(attention_tiles(params.type, params.head_dim)),
        group(params.heads / params.kv_heads),
        nodes(params.ancestors ? params.nodes : std::min(params.nodes, chain_nodes(group))),
        padded_rows(round_up(nodes * group, tiles.row_block)),
        key_type(has_words() ? FloatType::kFloat32 : params.type),
        key_dim(has_words() ? params.head_dim / 2 : params.head_dim),
        query_dim(round_up(key_dim, kDimBlock)),
        padded_dim(round_up(params.head_dim, kColumnBlock)) {}

  int64_t partial_floats() const { return padded_rows * (padded_dim + 2); }

  const AttentionTiles& tiles;
  int64_t group;
  int64_t nodes;        // of a task, at most
  int64_t padded_rows;  // query rows of a task, at most
  FloatType key_type;   // of queries and keys; words of pairs are moved as float32
  int64_t key_dim;      // numbers of this type
  int64_t query_dim;    // columns of queries and rows of keys, zeros beyond key_dim
  int64_t padded_dim;   // columns of values

 private:
  bool has_words() const { return tiles.paired && tiles.paired->takes_words; }

  // Scores and values of so many query rows stay in L2. The nodes of a tree are one task, so that
  // each key and value is converted once.
  static int64_t chain_nodes(int64_t group) { return std::max<int64_t>(1, 64 / group); }
};

// The result of a task: statistics and weighted sum of values of each query row.
struct AttentionPartial {
  AttentionPartial(float* memory, const AttentionSizes& sizes)
      : values(memory),
        stats(reinterpret_cast<SoftmaxStats*>(memory + sizes.padded_rows * sizes.padded_dim)) {}

  float* values;        // [padded_rows, padded_dim]
  SoftmaxStats* stats;  // [padded_rows]
};

struct AttentionTask {
  int64_t row;
  int64_t kv_head;
  Range nodes;
  int64_t split;
};

void attend_split(const TreeAttentionParams& params, const AttentionSizes& sizes,
                  const AttentionTask& task, const AttentionPartial& out);

// Memory that is kept at its largest size, aligned for the widest vectors.
class FloatBuffer {
 public:
  float* at_least(int64_t count) {
    const size_t lines = static_cast<size_t>(count + kLineFloats - 1) / kLineFloats;
    if (lines_.size() < lines) lines_.resize(lines);
    return lines_.front().values;
  }

 private:
  static constexpr int64_t kLineFloats = 16;
  struct alignas(64) Line {
    float values[kLineFloats];
  };
  std::vector<Line> lines_;
};

}  // namespace specdec::cpu
