#include "logits.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "cpu/math/token_noise.h"
#include "specdec/cpu/panels.h"
#include "specdec/math/exp.h"

namespace specdec::cpu {
namespace {

constexpr int64_t kBlockOuts = kMaxBlockOuts;

template <typename T>
void grow_to(std::vector<T>& vector, int64_t size) {
  if (std::ssize(vector) < size) vector.resize(size);
}

}  // namespace

void DraftLogits::reserve(int64_t rows, int64_t blocks) {
  grow_to(sums_, rows * blocks);
  grow_to(picks_, rows * blocks * top_k_);
  num_picks_.assign(rows * blocks, 0);
  grow_to(best_, blocks * top_k_);
  grow_to(children_, rows * top_k_);
  grow_to(counts_, rows);
}

std::optional<std::string> DraftLogits::compute(const DraftHeadParams& params,
                                                std::span<const DraftElement> elements,
                                                const void* hidden,
                                                const ParallelFor& parallel_for) {
  const HeadWeights& head = params.head;
  const int64_t rows = std::ssize(elements);
  top_k_ = std::min(params.shape.top_k, head.draft_vocab);
  const int64_t blocks = (head.draft_vocab + kBlockOuts - 1) / kBlockOuts;
  reserve(rows, blocks);
  const auto visitor = [&](const PanelBlock& block) {
    couple(params, elements.subspan(block.first_row, block.rows), block);
    for (int64_t r = 0; r < block.rows; ++r) {
      const int64_t row = block.first_row + r;
      const bool coupled = params.noise.temperature(elements[row].row) > 0.0f;
      visit(coupled ? 1.0f : head.logit_scale, blocks, row, block, block.values + r * kBlockOuts);
    }
  };
  panel_products({.type = head.type,
                  .input = hidden,
                  .panels = head.lm_head.weight,
                  .scales = head.lm_head.scale,
                  .rows = rows,
                  .ins = head.hidden,
                  .outs = head.draft_vocab,
                  .block_outs = kBlockOuts},
                 visitor, parallel_for);
  for (int64_t row = 0; row < rows; ++row) {
    if (auto problem = merge(head, blocks, row)) return problem;
  }
  return std::nullopt;
}

void DraftLogits::couple(const DraftHeadParams& params, std::span<const DraftElement> elements,
                         const PanelBlock& block) const {
  static const RowOps& rows = row_ops();
  alignas(64) float noise[kBlockOuts];
  const DraftElement* sharing = nullptr;  // the last element whose children have this noise
  for (int64_t r = 0; r < block.rows; ++r) {
    const DraftElement& element = elements[r];
    const float temperature = params.noise.temperature(element.row);
    if (temperature == 0.0f) continue;
    // The nodes of a level are consecutive, and their children share the noise.
    if (sharing == nullptr || sharing->row != element.row ||
        sharing->position != element.position) {
      fill_noise(params.noise.stream(element.row, element.position + kPredictsAhead),
                 {params.head.draft_to_target, 1}, block.first_out, block.outs, noise);
      sharing = &element;
    }
    rows.couple_logits(params.head.logit_scale, temperature, noise, block.outs,
                       block.values + r * kBlockOuts);
  }
}

void DraftLogits::visit(float scale, int64_t blocks, int64_t row, const PanelBlock& block,
                        float* logits) {
  static const RowOps& rows = row_ops();
  sums_[row * blocks + block.first_out / kBlockOuts] = rows.sum_logits(scale, block.outs, logits);
  const int64_t run = row * blocks + block.first_run / kBlockOuts;
  BestPicks best{picks_.data() + run * top_k_, top_k_, num_picks_[run]};
  rows.pick_logits(logits, block.outs, block.first_out, &best);
  num_picks_[run] = best.count;
}

std::optional<std::string> DraftLogits::merge(const HeadWeights& head, int64_t blocks,
                                              int64_t row) {
  counts_[row] = 0;
  const LogitSum* sums = sums_.data() + row * blocks;
  LogitSum total{-std::numeric_limits<float>::infinity(), 0.0f};
  int64_t count = 0;
  for (int64_t block = 0; block < blocks; ++block) {
    total.largest = std::max(total.largest, sums[block].largest);
    const Pick* picks = picks_.data() + (row * blocks + block) * top_k_;
    std::copy_n(picks, num_picks_[row * blocks + block], best_.data() + count);
    count += num_picks_[row * blocks + block];
  }
  if (count == 0) return std::nullopt;
  for (int64_t block = 0; block < blocks; ++block) {
    const float weight = exp_nonpositive(sums[block].largest - total.largest);
    total.sum += sums[block].sum * weight;
  }
  const float log_sum = std::log(total.sum);
  if (std::isnan(log_sum)) return std::nullopt;
  const int64_t kept = std::min(count, top_k_);
  std::partial_sort(best_.begin(), best_.begin() + kept, best_.begin() + count, std::greater<>());
  for (int64_t i = 0; i < kept; ++i) {
    const int64_t id = picked_token(best_[i]);
    const int64_t token = head.draft_to_target ? head.draft_to_target[id] : id;
    if (token < 0 || token >= head.vocab) {
      return "draft_to_target[" + std::to_string(id) + "] = " + std::to_string(token) +
             "; expected a token in [0, " + std::to_string(head.vocab) + ")";
    }
    children_[row * top_k_ + i] = {token, pick_score(best_[i]) - total.largest - log_sum};
  }
  counts_[row] = kept;
  return std::nullopt;
}

}  // namespace specdec::cpu
