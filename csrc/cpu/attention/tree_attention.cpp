// CPU op tree_attention: a task is a (row, key-value head, split of the positions), for all nodes
// and all query heads of the group at once, so each key and value is read and converted once. A
// prompt's nodes are divided into blocks with tasks of their own.
//
//   split    positions [256 s, 256 s + 256), for any length. Tiles of 32 keys of the prefix become
//            columns and are multiplied with all query rows (nodes x group). So are the keys of the
//            nodes; each query row then picks the products of its own ancestors, in order, as those
//            of positions P, P + 1, ...
//   softmax  of each query row over the split's positions; sums in lanes by position
//   values   in ascending position, one fused multiply-add each; in bfloat16, pairs of positions
//            (PairedTiles)
//   merge    the splits of a query row in ascending order, by maximum and sum
//
// So the operations of a query row depend only on its own list of (position, key, value). A node
// gets the same bits as in token-by-token decoding of its path, for every tree, batch, number of
// threads and layout of slots. Keys and values that a query row does not see never enter its sums,
// so NaN in them has no effect.
//
// Partial results are in a workspace of the calling thread. Its size is bounded: tasks run in
// waves, and an item, a (row, key-value head, block of nodes), that is incomplete at the end of a
// wave is carried into the next one.
#include "specdec/tree_attention.h"

#include <utility>

#include "split.h"

namespace specdec::cpu {
namespace {

constexpr int64_t kWaveFloats = 1 << 22;  // size of the partial results: 16 MiB
constexpr int64_t kGrainWork = 1 << 20;   // multiply-adds; below it, waking a thread does not pay

// Tasks [begin, end) of a wave, which are the splits of one (row, key-value head, block of nodes).
struct Item {
  int64_t row;
  int64_t kv_head;
  Range nodes;
  int64_t begin;
  int64_t end;
  bool is_continued;  // its merged earlier splits are in slot 0 of the workspace
  bool is_complete;   // no splits follow; otherwise it is the last item of its wave
};

// The memory that a calling thread keeps between calls.
struct Workspace {
  std::vector<AttentionTask> tasks;
  std::vector<Item> items;
  FloatBuffer partials;  // slot 0 is carried between waves, slot 1 + t belongs to task t
};

class Waves {
 public:
  Waves(const TreeAttentionParams& params, const ParallelFor& parallel_for, Workspace& workspace)
      : params_(params),
        parallel_for_(parallel_for),
        sizes_(params),
        tasks_(workspace.tasks),
        items_(workspace.items),
        partials_(workspace.partials),
        max_tasks_(std::max<int64_t>(1, kWaveFloats / sizes_.partial_floats())) {}

  void run() {
    for (int64_t row = 0; row < params_.batch; ++row) {
      for (int64_t first = 0; first < params_.nodes; first += sizes_.nodes) {
        const Range nodes{first, std::min(params_.nodes, first + sizes_.nodes)};
        const Range seen = TreeRow(params_, row).seen(nodes);
        const Range splits{seen.begin / kSplitKeys, (seen.end + kSplitKeys - 1) / kSplitKeys};
        for (int64_t kv_head = 0; kv_head < params_.kv_heads; ++kv_head) {
          add_item(row, kv_head, nodes, splits);
        }
      }
    }
    finish_wave();
  }

 private:
  AttentionPartial partial(int64_t slot) {
    const int64_t floats = sizes_.partial_floats();
    return {partials_.at_least((slot + 1) * floats) + slot * floats, sizes_};
  }

  void add_item(int64_t row, int64_t kv_head, const Range& nodes, Range splits) {
    bool is_continued = false;
    do {
      const int64_t begin = std::ssize(tasks_);
      const int64_t count = std::min(splits.end - splits.begin, max_tasks_ - begin);
      for (int64_t i = 0; i < count; ++i) {
        tasks_.push_back({row, kv_head, nodes, splits.begin + i});
      }
      splits.begin += count;
      items_.push_back(
          {row, kv_head, nodes, begin, begin + count, is_continued, splits.is_empty()});
      if (begin + count == max_tasks_) finish_wave();
      is_continued = true;
    } while (!splits.is_empty());
  }

  void finish_wave() {
    if (items_.empty()) return;
    const int64_t rows = sizes_.nodes * sizes_.group;
    const int64_t num_tasks = std::ssize(tasks_), num_rows = std::ssize(items_) * rows;
    partial(num_tasks);  // allocates memory for all tasks before threads use it
    const int64_t task_work = 2 * rows * kSplitKeys * params_.head_dim;
    parallel_for_(num_tasks, kGrainWork / task_work + 1, [this](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        attend_split(params_, sizes_, tasks_[i], partial(i + 1));
      }
    });
    const int64_t row_work = params_.head_dim * (num_tasks / std::ssize(items_) + 1);
    parallel_for_(num_rows, kGrainWork / row_work + 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) merge(items_[i / rows], i % rows);
    });
    const Item last = items_.back();
    if (!last.is_complete && !last.is_continued) {
      std::copy_n(partial(last.begin + 1).values, sizes_.partial_floats(), partial(0).values);
    }
    tasks_.clear();
    items_.clear();
  }

  // Merges the splits of one query row, and stores the output if no splits follow.
  void merge(const Item& item, int64_t query_row) {
    const int64_t node = item.nodes.begin + query_row / sizes_.group;
    if (node >= item.nodes.end) return;  // the last block has fewer nodes
    const int64_t head = item.kv_head * sizes_.group + query_row % sizes_.group;
    const int64_t offset = ((item.row * params_.nodes + node) * params_.heads + head) *
                           params_.head_dim * element_size(params_.type);
    std::byte* out = static_cast<std::byte*>(params_.output) + offset;
    if (TreeRow(params_, item.row).seen_by(node).is_empty()) {
      std::fill_n(out, params_.head_dim * element_size(params_.type), std::byte{0});
      return;
    }
    const AttentionPartial total = partial(item.is_continued ? 0 : item.begin + 1);
    float* values = total.values + query_row * sizes_.padded_dim;
    for (int64_t task = item.is_continued ? item.begin : item.begin + 1; task < item.end; ++task) {
      const AttentionPartial later = partial(task + 1);
      sizes_.tiles.merge(later.stats[query_row], later.values + query_row * sizes_.padded_dim,
                         &total.stats[query_row], values, sizes_.padded_dim);
    }
    if (item.is_complete) {
      sizes_.tiles.store_quotients(params_.type, values, total.stats[query_row].sum,
                                   params_.head_dim, out);
    }
  }

  const TreeAttentionParams& params_;
  const ParallelFor& parallel_for_;
  AttentionSizes sizes_;
  std::vector<AttentionTask>& tasks_;
  std::vector<Item>& items_;
  FloatBuffer& partials_;
  int64_t max_tasks_;
};

// The range of slots of a row that would be read, [begin, end), or what is wrong with them.
std::optional<std::string> find_invalid_range(const TreeAttentionParams& params, int64_t row,
                                              const char* what, int64_t begin, int64_t end) {
  const int64_t slots = params.slots_per_row();
  const auto name = [&] { return std::string(what) + " of row " + std::to_string(row); };
  if (begin < 0 || end > slots) {
    return name() + " would read slots " + std::to_string(begin) + " to " +
           std::to_string(end - 1) + "; expected slots in [0, " + std::to_string(slots) + ")";
  }
  if (params.page_table.data == nullptr) return std::nullopt;
  for (int64_t column = begin / params.page_size; column * params.page_size < end; ++column) {
    const int64_t page = params.page_table(row, column);
    if (page < 0 || page >= params.num_pages) {
      return name() + " would read page_table[" + std::to_string(row) + ", " +
             std::to_string(column) + "] = " + std::to_string(page) + "; expected a page in [0, " +
             std::to_string(params.num_pages) + ")";
    }
  }
  return std::nullopt;
}

std::optional<std::string> find_invalid_row(const TreeAttentionParams& params, int64_t row) {
  const TreeRow view(params, row);
  const std::pair<const char*, int64_t> given[] = {{"prefix_lengths", view.prefix_length()},
                                                   {"prefix_starts", view.prefix_slot(0)},
                                                   {"block_starts", view.node_slot(0)}};
  for (const auto& [name, value] : given) {
    if (value >= -kMaxSlot && value <= kMaxSlot) continue;
    return std::string(name) + "[" + std::to_string(row) + "] = " + std::to_string(value) +
           "; expected -2^60 to 2^60";
  }
  if (view.prefix_length() < 0 && params.ancestors != nullptr) {
    return "prefix_lengths[" + std::to_string(row) + "] = " + std::to_string(view.prefix_length()) +
           "; expected 0 or more";
  }
  if (params.ancestors == nullptr) {
    const Range seen = view.seen({0, params.nodes});
    if (seen.is_empty()) return std::nullopt;
    return find_invalid_range(params, row, "the prompt", view.prefix_slot(seen.begin),
                              view.prefix_slot(seen.end));
  }
  int64_t last_node = -1;
  for (int64_t node = 0; node < params.nodes; ++node) {
    for (int64_t tile = 0; tile < view.num_tiles(); ++tile) {
      const uint32_t bits = view.ancestors(node, tile);
      if (bits != 0) last_node = std::max(last_node, tile * kTileKeys + std::bit_width(bits) - 1);
    }
  }
  if (last_node < 0) return std::nullopt;
  if (last_node >= params.nodes) {
    return "ancestors[" + std::to_string(row) + "] names node " + std::to_string(last_node) +
           "; expected nodes in [0, " + std::to_string(params.nodes) + ")";
  }
  const Range prefix = view.seen({0, params.nodes}).intersection({0, view.prefix_length()});
  if (!prefix.is_empty()) {
    if (auto problem = find_invalid_range(params, row, "the prefix", view.prefix_slot(prefix.begin),
                                          view.prefix_slot(prefix.end))) {
      return problem;
    }
  }
  return find_invalid_range(params, row, "the tree", view.node_slot(0),
                            view.node_slot(last_node + 1));
}

}  // namespace

std::optional<std::string> find_invalid_slot(const TreeAttentionParams& params) {
  for (int64_t row = 0; row < params.batch; ++row) {
    if (auto problem = find_invalid_row(params, row)) return problem;
  }
  return std::nullopt;
}

void tree_attention(const TreeAttentionParams& params, const ParallelFor& parallel_for) {
  thread_local Workspace workspace;
  Waves(params, parallel_for, workspace).run();
}

}  // namespace specdec::cpu
