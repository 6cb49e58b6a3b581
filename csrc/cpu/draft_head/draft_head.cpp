// CPU op draft_head, in phases:
//
//   1. read the new elements, kChunkElements at a time, for a parallel head also the mask elements
//      behind those of each row; the last new element and the mask elements are kept
//   2. for each level: finish the kept elements, find the best tokens of lm_head, make the next
//      frontier and drop what no longer matters; then, unless this was the last level or the head
//      is parallel, read the frontier
//
// Products and attention run in threads, one loop each. Everything between them handles few rows,
// in the calling thread. Memory is kept between calls, one workspace per calling thread.
#include "specdec/draft_head.h"

#include <algorithm>
#include <limits>

#include "layers.h"
#include "logits.h"
#include "tree.h"

namespace specdec::cpu {
namespace {

constexpr int64_t kChunkElements = 64;  // one word has the bits of what they see of each other

struct Workspace {
  DraftLayers layers;
  DraftLogits logits;
  DraftTrees trees;
  std::vector<int64_t> rows;            // rows with new elements
  std::vector<int64_t> prefix_lengths;  // of `rows`
  std::vector<int64_t> chains;          // ancestors of the kept elements of each row, a chain
  std::vector<DraftElement> elements;
  std::vector<int64_t> keep_at;
  std::vector<DraftElement> kept;
};

class DraftRun {
 public:
  DraftRun(const DraftHeadParams& params, const ParallelFor& parallel_for, Workspace& workspace)
      : params_(params), head_(params.head), parallel_for_(parallel_for), w_(workspace) {}

  std::optional<std::string> run() {
    clear_outputs();
    w_.rows.clear();
    for (int64_t row = 0; row < params_.rows; ++row) {
      if (params_.counts[row] > 0) w_.rows.push_back(row);
    }
    if (w_.rows.empty()) return std::nullopt;
    w_.layers.begin(params_, parallel_for_);
    w_.trees.begin(params_.shape, head_.is_parallel(), batch());
    DraftAttention attention = read_new();
    std::optional<std::string> problem = find_children(attention);
    while (!problem) {
      const int64_t lists = attention.nodes;
      w_.trees.grow([&](int64_t b, int64_t list) { return w_.logits.children(b * lists + list); });
      w_.trees.drop_hopeless();
      if (w_.trees.is_complete()) break;
      if (head_.is_parallel()) continue;  // all levels already have their children
      attention = read_frontier();
      problem = find_children(attention);
    }
    if (problem) return problem;
    for (int64_t b = 0; b < batch(); ++b) {
      const int64_t row = w_.rows[b], first = row * params_.shape.nodes;
      w_.trees.finish(b, params_.roots[row], params_.tree_tokens + first,
                      params_.tree_parents + first, params_.tree_scores + first);
    }
    return std::nullopt;
  }

 private:
  int64_t batch() const { return std::ssize(w_.rows); }

  // Writes trees of their roots alone.
  void clear_outputs() {
    const int64_t nodes = params_.shape.nodes;
    std::fill_n(params_.tree_tokens, params_.rows * nodes, 0);
    std::fill_n(params_.tree_parents, params_.rows * nodes, kInactiveParent);
    std::fill_n(params_.tree_scores, params_.rows * nodes, -std::numeric_limits<float>::infinity());
    for (int64_t row = 0; row < params_.rows; ++row) {
      params_.tree_tokens[row * nodes] = params_.roots[row];
      params_.tree_parents[row * nodes] = kRootParent;
      params_.tree_scores[row * nodes] = 0.0f;
    }
  }

  // Finds the children of the kept elements.
  std::optional<std::string> find_children(const DraftAttention& attention) {
    w_.layers.finish(w_.kept, attention);
    return w_.logits.compute(params_, w_.kept, w_.layers.normed(), parallel_for_);
  }

  DraftElement new_element(int64_t row, int64_t i) const {
    const int64_t slot = params_.lengths[row] + i, position = params_.positions[row] + i;
    if (i >= params_.counts[row]) {
      return {row, head_.mask_token, head_.mask_features, slot, position};
    }
    const int64_t offset = row * params_.features_row_stride + i * params_.features_item_stride;
    const auto* features = static_cast<const std::byte*>(params_.features);
    return {row, params_.tokens(row, i), features + offset * element_size(head_.type), slot,
            position};
  }

  // Reads the new elements. A kept element sees its own row's slots up to itself.
  DraftAttention read_new() {
    const int64_t width = head_.is_parallel() ? params_.shape.depth : 1;
    w_.kept.resize(batch() * width);
    w_.prefix_lengths.resize(batch());
    w_.elements.clear();
    w_.keep_at.clear();
    for (int64_t b = 0; b < batch(); ++b) {
      const int64_t row = w_.rows[b], first_kept = params_.counts[row] - 1;
      w_.prefix_lengths[b] = params_.lengths[row] + first_kept;
      for (int64_t i = 0; i < first_kept + width; ++i) {
        const DraftElement element = new_element(row, i);
        const int64_t keep_at = i < first_kept ? -1 : b * width + i - first_kept;
        if (keep_at >= 0) w_.kept[keep_at] = element;
        w_.elements.push_back(element);
        w_.keep_at.push_back(keep_at);
        if (std::ssize(w_.elements) == kChunkElements) read_chunk();
      }
    }
    read_chunk();
    fill_chains(width);
    return {batch(),          width,           w_.rows.data(), w_.prefix_lengths.data(),
            w_.chains.data(), num_words(width)};
  }

  void read_chunk() {
    static const std::vector<int64_t> kChain = chain(kChunkElements);
    if (w_.elements.empty()) return;
    DraftAttention parts[kChunkElements];
    int64_t num_parts = 0, first = 0;
    for (int64_t i = 1; i <= std::ssize(w_.elements); ++i) {
      const DraftElement& element = w_.elements[first];
      if (i < std::ssize(w_.elements) && w_.elements[i].row == element.row) continue;
      parts[num_parts++] = {1, i - first, &element.row, &element.slot, kChain.data(), 1};
      first = i;
    }
    w_.layers.read(w_.elements, false, {parts, static_cast<size_t>(num_parts)}, w_.keep_at,
                   std::ssize(w_.kept));
    w_.elements.clear();
    w_.keep_at.clear();
  }

  // Reads the frontier. Expanded nodes see all committed elements and their ancestors.
  DraftAttention read_frontier() {
    const int64_t width = w_.trees.width(), lists = std::ssize(w_.kept) / batch();
    w_.elements.clear();
    w_.keep_at.clear();
    for (int64_t b = 0; b < batch(); ++b) {
      const int64_t row = w_.rows[b], committed = params_.lengths[row] + params_.counts[row];
      const int64_t position = params_.positions[row] + params_.counts[row];
      w_.prefix_lengths[b] = committed;
      for (int64_t i = 0; i < width; ++i) {
        const FrontierNode& node = w_.trees.node(b, i);
        w_.elements.push_back(
            {row, node.token, node.is_alive ? w_.layers.feedback(b * lists + node.parent) : nullptr,
             committed + w_.trees.first_slot() + i, position + w_.trees.level() - 1});
        w_.keep_at.push_back(b * width + i);
      }
    }
    w_.kept = w_.elements;
    const DraftAttention attention{batch(),
                                   width,
                                   w_.rows.data(),
                                   w_.prefix_lengths.data(),
                                   w_.trees.ancestors().data(),
                                   w_.trees.words()};
    w_.layers.read(w_.elements, true, {&attention, 1}, w_.keep_at, std::ssize(w_.kept));
    return attention;
  }

  static int64_t num_words(int64_t nodes) { return (nodes + 63) / 64; }

  // The bits [nodes, words] of a chain: each node sees itself and the nodes before it.
  static std::vector<int64_t> chain(int64_t nodes) {
    const int64_t words = num_words(nodes);
    std::vector<int64_t> bits(nodes * words);
    for (int64_t node = 0; node < nodes; ++node) {
      for (int64_t other = 0; other <= node; ++other) {
        bits[node * words + other / 64] |= static_cast<int64_t>(uint64_t{1} << other % 64);
      }
    }
    return bits;
  }

  void fill_chains(int64_t width) {
    const std::vector<int64_t> one = chain(width);
    w_.chains.clear();
    for (int64_t b = 0; b < batch(); ++b) {
      w_.chains.insert(w_.chains.end(), one.begin(), one.end());
    }
  }

  const DraftHeadParams& params_;
  const HeadWeights& head_;
  const ParallelFor& parallel_for_;
  Workspace& w_;
};

}  // namespace

std::optional<std::string> draft_head(const DraftHeadParams& params,
                                      const ParallelFor& parallel_for) {
  thread_local Workspace workspace;
  return DraftRun(params, parallel_for, workspace).run();
}

}  // namespace specdec::cpu
