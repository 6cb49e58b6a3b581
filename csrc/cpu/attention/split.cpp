#include "split.h"

namespace specdec::cpu {
namespace {

static_assert(kTileKeys == 32, "the ancestors among a tile of nodes are a uint32_t");

class SplitAttention {
 public:
  SplitAttention(const TreeAttentionParams& params, const AttentionSizes& sizes,
                 const AttentionTask& task, const AttentionPartial& out)
      : params_(params),
        sizes_(sizes),
        tiles_(sizes.tiles),
        task_(task),
        row_(params, task.row),
        split_{task.split * kSplitKeys, (task.split + 1) * kSplitKeys},
        prefix_(
            row_.seen(task.nodes).intersection({0, row_.num_prefix_slots()}).intersection(split_)),
        rows_((task.nodes.end - task.nodes.begin) * sizes.group),
        padded_rows_(round_up(rows_, tiles_.row_block)),
        out_(out) {
    thread_local std::vector<Range> seen;
    thread_local FloatBuffer tile, queries, scores, node_scores;
    seen_ = find_seen(seen);
    tile_ = tile.at_least(kTileKeys * sizes.padded_dim);
    queries_ = queries.at_least(sizes.padded_rows * sizes.query_dim);
    scores_ = scores.at_least(sizes.padded_rows * kSplitKeys);
    node_scores_ = node_scores.at_least(sizes.padded_rows * kTileKeys);
  }

  void run() {
    if (tiles_.paired) tiles_.paired->begin();
    load_queries();
    fetch(params_.key);
    for_each_prefix_tile([this](const Range& tile) { score_prefix(tile); });
    for_each_node_tile([this](int64_t tile, uint32_t nodes) { score_nodes(tile, nodes); });
    for (int64_t row = 0; row < rows_; ++row) {
      const Range seen = seen_[row / sizes_.group];
      out_.stats[row] = tiles_.softmax({params_.scale, params_.softcap}, seen.begin - split_.begin,
                                       seen.end - split_.begin, scores_ + row * kSplitKeys);
    }
    fetch(params_.value);
    std::fill_n(out_.values, padded_rows_ * sizes_.padded_dim, 0.0f);
    if (tiles_.paired) {
      add_paired_values();
      tiles_.paired->end();
      return;
    }
    for_each_prefix_tile([this](const Range& tile) { add_prefix_values(tile); });
    for_each_node_tile([this](int64_t tile, uint32_t nodes) { add_node_values(tile, nodes); });
  }

 private:
  const void* key_or_value(const KvTensor& tensor, int64_t slot) const {
    const int64_t offset = params_.offset(tensor, params_.place(task_.row, slot), task_.kv_head);
    return static_cast<const std::byte*>(tensor.data) + offset * element_size(params_.type);
  }

  // Finds the keys or values of the prefix, places_, and brings them into the cache: reads from each line, in
  // several streams, which the memory serves faster than one (linear_kernel.h). On AMD EPYC (Milan), attention
  // of 16 rows of 256 tokens in float32 takes 18 % less time so than with prefetches of the next tile.
  void fetch(const KvTensor& tensor) {
    constexpr int64_t kLineBytes = 64, kStreams = 4;
    const int64_t count = prefix_.end - prefix_.begin, stream = (count + kStreams - 1) / kStreams;
    const int64_t row_bytes = params_.head_dim * element_size(params_.type);
    find_places(tensor, count);
    for (int64_t first = 0; first < stream; ++first) {
      for (int64_t byte = 0; byte < row_bytes; byte += kLineBytes) {
        for (int64_t i = first; i < count; i += stream) {
          static_cast<void>(static_cast<const volatile std::byte*>(places_[i])[byte]);
        }
      }
    }
  }

  void find_places(const KvTensor& tensor, int64_t count) {
    if (params_.page_table.data != nullptr) {
      for (int64_t i = 0; i < count; ++i) {
        places_[i] = key_or_value(tensor, row_.prefix_slot(prefix_.begin + i));
      }
    } else if (count > 0) {  // one by one
      const int64_t stride = tensor.slot_stride * element_size(params_.type);
      const auto* first =
          static_cast<const std::byte*>(key_or_value(tensor, row_.prefix_slot(prefix_.begin)));
      for (int64_t i = 0; i < count; ++i) places_[i] = first + i * stride;
    }
  }

  // The key or value at a position of the prefix.
  const void* place(int64_t position) const { return places_[position - prefix_.begin]; }

  // Visits the parts of the tiles that some node sees. Tiles begin at multiples of kTileKeys.
  template <typename Visit>
  void for_each_prefix_tile(const Visit& visit) const {
    for (int64_t begin = prefix_.begin; begin < prefix_.end;) {
      const int64_t end = std::min(prefix_.end, begin / kTileKeys * kTileKeys + kTileKeys);
      visit(Range{begin, end});
      begin = end;
    }
  }

  // Visits the tiles of nodes that matter to this split, with a bit for each node that a row needs.
  // The tasks of a tree have all its nodes.
  template <typename Visit>
  void for_each_node_tile(const Visit& visit) const {
    if (split_.end <= row_.prefix_length()) return;
    for (int64_t tile = 0; tile < row_.num_tiles(); ++tile) {
      uint32_t nodes = 0;
      for (int64_t node = 0; node < params_.nodes; ++node) {
        const uint32_t ancestors = row_.ancestors(node, tile);
        const int64_t first = row_.position_of_tile(node, tile);
        const Range positions{first, first + std::popcount(ancestors)};
        if (!positions.intersection(seen_[node]).is_empty()) nodes |= ancestors;
      }
      if (nodes != 0) visit(tile, nodes);
    }
  }

  // Visits the ancestors of a node in a tile that it sees in this split, with positions, in order.
  template <typename Visit>
  void for_each_ancestor(int64_t node, int64_t tile, const Visit& visit) const {
    const Range seen = seen_[node];
    int64_t position = row_.position_of_tile(node, tile);
    for (uint32_t bits = row_.ancestors(node, tile); bits != 0; bits &= bits - 1, ++position) {
      if (position >= seen.begin && position < seen.end) visit(std::countr_zero(bits), position);
    }
  }

  // Computes what each node sees in this split, and which positions all nodes see.
  const Range* find_seen(std::vector<Range>& seen) {
    seen.clear();
    for (int64_t node = task_.nodes.begin; node < task_.nodes.end; ++node) {
      const Range range = row_.seen_by(node), in_split = range.intersection(split_);
      seen.push_back(in_split.is_empty() ? Range{split_.begin, split_.begin} : in_split);
      if (!range.is_empty()) all_see_ = all_see_.intersection(range);
    }
    return seen.data();
  }

  void load_queries() {
    std::fill_n(queries_, padded_rows_ * sizes_.query_dim, 0.0f);
    for (int64_t row = 0; row < rows_; ++row) {
      const int64_t head = task_.kv_head * sizes_.group + row % sizes_.group;
      const int64_t offset = task_.row * params_.query_batch_stride +
                             head * params_.query_head_stride +
                             (task_.nodes.begin + row / sizes_.group) * params_.query_node_stride;
      tiles_.load_row(
          sizes_.key_type,
          static_cast<const std::byte*>(params_.query) + offset * element_size(params_.type),
          sizes_.key_dim, queries_ + row * sizes_.query_dim);
    }
  }

  // Null keys are not needed; `any_key` replaces them.
  void multiply_queries(const void** keys, const void* any_key, float* out, int64_t out_stride) {
    std::replace(keys, keys + kTileKeys, static_cast<const void*>(nullptr), any_key);
    tiles_.load_columns(sizes_.key_type, keys, sizes_.key_dim, tile_);
    tiles_.dot_products(queries_, tile_, sizes_.query_dim, rows_, out, out_stride);
  }

  void score_prefix(const Range& tile) {
    const int64_t tile_begin = tile.begin / kTileKeys * kTileKeys;
    const void* keys[kTileKeys] = {};
    for (int64_t position = tile.begin; position < tile.end; ++position) {
      keys[position - tile_begin] = place(position);
    }
    multiply_queries(keys, keys[tile.begin - tile_begin], scores_ + (tile_begin - split_.begin),
                     kSplitKeys);
  }

  void score_nodes(int64_t tile, uint32_t nodes) {
    const void* keys[kTileKeys] = {};
    const int64_t first = std::countr_zero(nodes);
    for (; nodes != 0; nodes &= nodes - 1) {
      const int64_t bit = std::countr_zero(nodes);
      keys[bit] = key_or_value(params_.key, row_.node_slot(tile * kTileKeys + bit));
    }
    multiply_queries(keys, keys[first], node_scores_, kTileKeys);
    for (int64_t row = 0; row < rows_; ++row) {
      for_each_ancestor(row / sizes_.group, tile, [&](int64_t bit, int64_t position) {
        scores_[row * kSplitKeys + position - split_.begin] = node_scores_[row * kTileKeys + bit];
      });
    }
  }

  void add_prefix_values(const Range& tile) {
    const float* values[kTileKeys];
    const int64_t count = tile.end - tile.begin;
    for (int64_t i = 0; i < count; ++i) values[i] = value_floats(place(tile.begin + i), i);
    if (all_see_.begin <= tile.begin && tile.end <= all_see_.end) {
      tiles_.multiply_add(scores_ + (tile.begin - split_.begin), kSplitKeys, values, count,
                          sizes_.padded_dim, rows_, out_.values);
      return;
    }
    for (int64_t row = 0; row < rows_; row += kRowBlock) add_seen_values(row, tile, values);
  }

  // Adds to a block of query rows the values of the tile that each of them sees, in order: those
  // that all see together.
  void add_seen_values(int64_t first_row, const Range& tile, const float* const* values) {
    const int64_t end_row = std::min(rows_, first_row + kRowBlock);
    Range all = tile;
    for (int64_t row = first_row; row < end_row; ++row) {
      all = all.intersection(seen_[row / sizes_.group]);
    }
    if (all.is_empty()) all = {tile.end, tile.end};
    const auto add_alone = [&](const Range& positions) {
      for (int64_t row = first_row; row < end_row; ++row) {
        const Range seen = seen_[row / sizes_.group].intersection(positions);
        for (int64_t position = seen.begin; position < seen.end; ++position) {
          add_value(row, position, values[position - tile.begin]);
        }
      }
    };
    add_alone({tile.begin, all.begin});
    tiles_.multiply_add(scores_ + first_row * kSplitKeys + (all.begin - split_.begin), kSplitKeys,
                        values + (all.begin - tile.begin), all.end - all.begin, sizes_.padded_dim,
                        kRowBlock, out_.values + first_row * sizes_.padded_dim);
    add_alone({all.end, tile.end});
  }

  // A value as padded_dim float32: converted in place i of the tile, or where it is.
  const float* value_floats(const void* value, int64_t i) {
    if (params_.type == FloatType::kFloat32 && sizes_.padded_dim == params_.head_dim) {
      return static_cast<const float*>(value);
    }
    float* place = tile_ + i * sizes_.padded_dim;
    tiles_.load_row(params_.type, value, params_.head_dim, place);
    return place;
  }

  void add_node_values(int64_t tile, uint32_t nodes) {
    const float* values[kTileKeys];
    for (; nodes != 0; nodes &= nodes - 1) {
      const int64_t bit = std::countr_zero(nodes);
      values[bit] =
          value_floats(key_or_value(params_.value, row_.node_slot(tile * kTileKeys + bit)), bit);
    }
    for (int64_t row = 0; row < rows_; ++row) {
      for_each_ancestor(row / sizes_.group, tile, [&](int64_t bit, int64_t position) {
        add_value(row, position, values[bit]);
      });
    }
  }

  void add_value(int64_t row, int64_t position, const float* value) {
    tiles_.multiply_add_row(scores_[row * kSplitKeys + position - split_.begin], value,
                            out_.values + row * sizes_.padded_dim, sizes_.padded_dim);
  }

  // Adds the values of 32 positions at a time: those that are the same for all rows together, the others row
  // by row.
  void add_paired_values() {
    const Range seen = row_.seen(task_.nodes).intersection(split_);
    for (int64_t begin = seen.begin / kTileKeys * kTileKeys; begin < seen.end; begin += kTileKeys) {
      const Range tile{begin, begin + kTileKeys};
      Range alone{end_of_shared_values(tile), tile.end};
      const BFloat16* values[kTileKeys] = {};
      find_values(prefix_.intersection({begin, alone.begin}), begin, values);
      if (begin < alone.begin &&
          !tiles_.paired->multiply_add(scores_ + (begin - split_.begin), kSplitKeys, values,
                                       sizes_.padded_dim, rows_, out_.values)) {
        alone.begin = begin;
      }
      if (alone.is_empty()) continue;
      for (int64_t row = 0; row < rows_; ++row) add_paired_values_of(row, tile, alone);
    }
  }

  // The values of a tile before this position are the same for all rows: whole pairs of the prefix, or
  // nothing if there are nodes in the tile and the order of sums does not allow parts of it.
  int64_t end_of_shared_values(const Range& tile) const {
    if (row_.num_tiles() == 0 || tile.end <= row_.prefix_length()) return tile.end;
    const int64_t end = tiles_.paired->is_in_order ? row_.prefix_length() / 2 * 2 : tile.begin;
    return std::max(tile.begin, end);
  }

  // Adds to one row the values of positions of a tile that it sees, nodes among them.
  void add_paired_values_of(int64_t row, const Range& tile, const Range& positions) {
    const int64_t node = row / sizes_.group;
    const Range seen = seen_[node].intersection(positions);
    if (seen.is_empty()) return;
    const BFloat16* values[kTileKeys] = {};
    find_values(seen.intersection(prefix_), tile.begin, values);
    for (int64_t nodes = 0; nodes < row_.num_tiles(); ++nodes) {
      for_each_ancestor(node, nodes, [&](int64_t bit, int64_t position) {
        if (position < positions.begin || position >= positions.end) return;
        const int64_t slot = row_.node_slot(nodes * kTileKeys + bit);
        values[position - tile.begin] =
            static_cast<const BFloat16*>(key_or_value(params_.value, slot));
      });
    }
    tiles_.paired->multiply_add_row(scores_ + row * kSplitKeys + (tile.begin - split_.begin),
                                    values, sizes_.padded_dim,
                                    out_.values + row * sizes_.padded_dim);
  }

  // Finds the values at positions of the prefix; values[0] is that at position `first`.
  void find_values(const Range& positions, int64_t first, const BFloat16** values) const {
    for (int64_t position = positions.begin; position < positions.end; ++position) {
      values[position - first] = static_cast<const BFloat16*>(place(position));
    }
  }

  const TreeAttentionParams& params_;
  const AttentionSizes& sizes_;
  const AttentionTiles& tiles_;
  const AttentionTask& task_;
  TreeRow row_;
  Range split_;
  Range prefix_;                    // the part of this split's prefix that some node sees
  const void* places_[kSplitKeys];  // the keys at its positions, later the values
  const Range* seen_ = nullptr;     // [nodes] within this split, may be empty
  // All nodes see these positions. Inactive nodes don't count, because their sums are never read.
  Range all_see_{0, INT64_MAX};
  int64_t rows_;  // query rows of this task
  int64_t padded_rows_;
  AttentionPartial out_;
  float* tile_;     // keys as columns [head_dim, kTileKeys], then values [kTileKeys, padded_dim]
  float* queries_;  // [padded_rows, query_dim]
  float* scores_;   // [padded_rows, kSplitKeys] by position in the split, then weights
  float* node_scores_;  // [padded_rows, kTileKeys] for a tile of nodes
};

}  // namespace

void attend_split(const TreeAttentionParams& params, const AttentionSizes& sizes,
                  const AttentionTask& task, const AttentionPartial& out) {
  SplitAttention(params, sizes, task, out).run();
}

}  // namespace specdec::cpu
