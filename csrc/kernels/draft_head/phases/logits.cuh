// What the fused draft_head keeps of logits, which are never stored. For each list and block: the
// top_k best draft tokens and the sum of exponentials. It also writes the feedback, the hidden
// states that are inputs of drafted nodes.
//
//   begin_logits | add_logits for each panel of weights | finish_logits
//
// A block without weights has no panels, but begins and finishes like the others.
//
// Row r of a pass belongs to warp r % kDraftWarps in all three functions, so its place in shared
// memory needs no barrier of the block.
//
// A NaN counts as -inf and is never picked. A sum whose largest logit is +inf is NaN, which leaves
// the list without children. Sums are computed online, panel by panel, so their bits depend on the
// panels of a block and thereby on the number of blocks. No other result does.
#pragma once

#include "kernels/draft_head/block.cuh"
#include "picks.cuh"
#include "specdec/math/exp.h"
#include "specdec/sampling/coupling.h"

namespace specdec {

// Rescales a sum to a larger number, which is not -inf.
__device__ __forceinline__ float rescaled_sum(const ExpSum& part, float largest) {
  return exact_mul(part.sum, exp_nonpositive(exact_add(part.largest, -largest)));
}

template <typename T>
__device__ __forceinline__ void begin_logits(const DraftBlock<T>& block, const DraftPass& pass) {
  const int lane = block.lane();
  for (int row = block.warp(); row < pass.num_rows; row += kDraftWarps) {
    if (lane < block.params.top_k) block.shared.picks[row * kMaxDraftTopK + lane] = kNoPick;
    if (lane == 0) block.shared.logit_sums[row] = {bits_to_float(kMinusInfinityBits), 0.0f};
  }
  warp_barrier();
}

// Adds a panel's scores to the sum. None of them is NaN, and `largest` is their maximum.
__device__ __forceinline__ ExpSum add_exponentials(const ExpSum& sum, float largest, float first,
                                                   float second) {
  if (sum.largest > largest) largest = sum.largest;
  if (largest == bits_to_float(kMinusInfinityBits)) return sum;
  if (largest == bits_to_float(kInfinityBits)) return {largest, NAN};
  const float panel = warp_sum(exact_add(exp_nonpositive(exact_add(first, -largest)),
                                         exp_nonpositive(exact_add(second, -largest))));
  return {largest, exact_add(rescaled_sum(sum, largest), panel)};
}

// A logit of a row: scaled and, if the row has noise, coupled.
template <typename T>
__device__ __forceinline__ float logit_of(const DraftBlock<T>& block, const PassRow& element,
                                          float temperature, int64_t out, float value) {
  const DraftKernelParams& params = block.params;
  const float logit = exact_mul(value, params.logit_scale);
  if (temperature == 0.0f || out < 0) return logit;
  const int64_t token = params.draft_to_target ? params.draft_to_target[out] : out;
  const NoiseStream noise =
      params.noise.stream(element.batch_row, element.position + kPredictsAhead);
  return coupled_logit(logit, temperature, gumbel(noise.token_bits(static_cast<uint32_t>(token))));
}

// The row's warp calls it with its values of a panel, which are not scaled yet.
template <typename T>
__device__ __forceinline__ void add_logits(const DraftBlock<T>& block, int row,
                                           const PanelValues& values) {
  const int lane = block.lane(), place = row * kMaxDraftTopK + lane, top_k = block.params.top_k;
  Pick own = kNoPick;
  if (lane < top_k) own = block.shared.picks[place];
  WarpPicks best(top_k, own);
  const PassRow element = block.shared.rows[row];
  const float temperature = block.params.noise.temperature(element.batch_row);
  float scores[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float score = logit_of(block, element, temperature, values.out[i], values.value[i]);
    const bool exists = values.out[i] >= 0 && score == score;
    scores[i] = exists ? score : bits_to_float(kMinusInfinityBits);
    best.add(pick_of(scores[i], values.out[i]));
  }
  const float largest = warp_max(scores[0] > scores[1] ? scores[0] : scores[1]);
  const ExpSum before = block.shared.logit_sums[row];
  const ExpSum sum = add_exponentials(before, largest, scores[0], scores[1]);
  warp_barrier();  // all lanes have read the sum
  if (lane < top_k) block.shared.picks[place] = best.own();
  if (lane == 0) block.shared.logit_sums[row] = sum;
  warp_barrier();  // the sum is stored
}

// Writes the hidden states of nodes whose children are expanded; they are the feedback for the next
// level. The threads of all blocks share the vectors.
template <typename T>
__device__ __forceinline__ void write_feedback(const DraftBlock<T>& block, const DraftPass& pass) {
  const DraftKernelParams& params = block.params;
  if (params.plan.is_parallel || pass.level + 1 >= params.plan.depth) return;
  const int vectors = params.hidden / kVectorElements<T>;
  const int64_t first_list = static_cast<int64_t>(pass.level % 2) * params.lists();
  const bool is_normed = params.norm_output && params.norm != nullptr;
  for (int i = block.index() * kDraftThreads + static_cast<int>(threadIdx.x);
       i < pass.num_rows * vectors; i += block.count() * kDraftThreads) {
    const int row = i / vectors, k = i % vectors * kVectorElements<T>;
    const PassRow element = block.shared.rows[row];
    Vector<T> x = load_vector<T>(block.row(params.scratch.residual, element.memory, params.hidden),
                                 k, params.hidden);
    if (is_normed) {
      const float inverse = block.shared.inverses[row];
      x = normed(x, load_vector<T>(params.norm, k, params.hidden), inverse);
    }
    T* feedback = block.row(params.scratch.feedback, first_list + element.list, params.hidden);
    store_global(feedback + k, x.bytes);
  }
}

// Writes what this block has found. shared.inverses must still be those of lm_head's inputs.
template <typename T>
__device__ __forceinline__ void finish_logits(const DraftBlock<T>& block, const DraftPass& pass) {
  const DraftScratch& scratch = block.params.scratch;
  const int lane = block.lane(), top_k = block.params.top_k;
  for (int row = block.warp(); row < pass.num_rows; row += kDraftWarps) {
    const PassRow element = block.shared.rows[row];
    const int64_t at = static_cast<int64_t>(element.list) * block.count() + block.index();
    if (lane < top_k)
      scratch.picks[at * top_k + lane] = block.shared.picks[row * kMaxDraftTopK + lane];
    if (lane == 0) scratch.logit_sums[at] = block.shared.logit_sums[row];
  }
  write_feedback(block, pass);
}

}  // namespace specdec
