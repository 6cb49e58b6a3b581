// Finds the children of drafted nodes: the best draft tokens of a hidden state, with their
// log-probabilities, without storing the logits. In a row with noise, logits are coupled ones.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cpu/math/rows.h"
#include "layers.h"
#include "specdec/cpu/panels.h"
#include "tree.h"

namespace specdec::cpu {

// lm_head is multiplied by all hidden states block by block (specdec/cpu/panels.h). Each block
// keeps its largest logit and its sum of exponentials, which are merged in the order of the blocks.
// Each run of blocks keeps its best logits; the best of all do not depend on how the runs are cut.
// So the result depends neither on the other rows nor on the threads.
class DraftLogits {
 public:
  // Computes the children of `elements`, whose hidden states are `hidden` [rows, hidden],
  // contiguous. Returns what is wrong with draft_to_target, or nothing.
  std::optional<std::string> compute(const DraftHeadParams& params,
                                     std::span<const DraftElement> elements, const void* hidden,
                                     const ParallelFor& parallel_for);

  // The children of a row, best first; equal logits by draft token. NaN logits are skipped; if a
  // logit is +inf, there are no children.
  std::span<const DraftChild> children(int64_t row) const {
    return {children_.data() + row * top_k_, static_cast<size_t>(counts_[row])};
  }

 private:
  void reserve(int64_t rows, int64_t blocks);
  // Adds the noise of the children to a block of logits of consecutive elements.
  void couple(const DraftHeadParams& params, std::span<const DraftElement> elements,
              const PanelBlock& block) const;
  // Keeps the largest of a row's logits of a block, which are multiplied by `scale`.
  void visit(float scale, int64_t blocks, int64_t row, const PanelBlock& block, float* logits);
  std::optional<std::string> merge(const HeadWeights& head, int64_t blocks, int64_t row);

  int64_t top_k_;
  std::vector<LogitSum> sums_;      // [rows, blocks]
  std::vector<Pick> picks_;         // [rows, blocks, top_k], at the first block of each run
  std::vector<int64_t> num_picks_;  // [rows, blocks], at the first block of each run
  std::vector<Pick> best_;
  std::vector<DraftChild> children_;  // [rows, top_k]
  std::vector<int64_t> counts_;       // [rows]
};

}  // namespace specdec::cpu
