// sample_filter: applies temperature, top-k, top-p and min-p to every row, in this order; each
// stage sees what the previous one left.
//
// Every stage keeps the larger scores, so the survivors of a row are the tokens at or above one
// threshold score. The ops search this threshold and never sort. One exception are ties at the end
// of the nucleus: top-p keeps as many of them as it needs, highest index first (as a stable
// ascending sort would).
//
//   score  = logit / temperature
//   top-k: keep scores >= the k-th largest
//   top-p: in descending order, keep a token while the mass before it is < top_p * total mass
//   min-p: keep weight >= min_p
//   weight = exp(score - largest score), mass = floor(weight * 2^40)
//
// The largest score survives every stage, so weights need no renormalisation. Masses are integers,
// so sums do not depend on the order of summation, the backend or the number of threads. Rounding
// makes a mass too low by less than 2^-40, and the relative error of its weight is 8.1e-8. The
// total is at least 1, so the share of a set of tokens in it is off by less than
// vocab * 2^-40 + 1.7e-7: 2.9e-7 at 128k tokens, about the error of float32 softmax and cumsum in
// transformers.
#pragma once

#include <optional>
#include <string>

#include "specdec/core/float_types.h"
#include "specdec/core/parallel.h"
#include "specdec/core/platform.h"

namespace specdec {

// Keeps the total mass of a row below 2^62.
constexpr int64_t kMaxFilterVocab = int64_t{1} << 22;

struct SampleFilterParams {
  const void* logits;  // [rows, vocab], last dimension contiguous
  FloatType logits_type;
  int64_t logits_row_stride;       // elements
  View1<const float> temperature;  // [rows] > 0
  View1<const int64_t> top_k;      // [rows] off unless in [1, vocab)
  View1<const float> top_p;        // [rows] off unless < 1
  View1<const float> min_p;        // [rows] off unless > 0
  int64_t rows;
  int64_t vocab;  // 1 .. kMaxFilterVocab

  float* scores;  // [rows, vocab]: logits / temperature, -inf where removed
};

// Bytes of device memory that launch_sample_filter needs. The memory need not be initialised.
int64_t sample_filter_workspace_bytes(const SampleFilterParams& params);

namespace cpu {

// Returns what is wrong with the parameters, or nothing.
std::optional<std::string> find_invalid_parameter(const SampleFilterParams& params);

// The parameters must be valid.
void sample_filter(const SampleFilterParams& params, const ParallelFor& parallel_for);

}  // namespace cpu

}  // namespace specdec
