// sample_filter: temperature, top-k, top-p and min-p of every row, in this order, each stage seeing
// what the one before left.
//
// A row's survivors are the tokens at or above one score, because every stage keeps the larger
// scores; the ops find that score and never sort. One exception, ties at the end of the nucleus:
// top-p keeps as many of them as it needs, highest index first (what a stable ascending sort
// gives).
//
//   score  = logit / temperature
//   top-k: keep scores >= the k-th largest
//   top-p: going down the scores, keep a token while the mass before it is < top_p * total mass
//   min-p: keep weight >= min_p
//   weight = exp(score - largest score), mass = floor(weight * 2^40)
//
// The largest score survives every stage, so weights need no renormalisation. Masses are integers:
// sums have one value in whatever order they are taken, on every backend and number of threads. A
// mass is low by less than 2^-40, and the weight in it off by 8.1e-8 of itself, so the share of the
// total that a set of tokens has is off by less than vocab * 2^-40 + 1.7e-7 (total >= 1): 2.9e-7 at
// 128k tokens, about what float32 softmax and cumsum of transformers are off by.
#pragma once

#include <optional>
#include <string>

#include "specdec/core/logits.h"
#include "specdec/core/parallel.h"
#include "specdec/core/platform.h"

namespace specdec {

// The total mass of a row stays below 2^62.
constexpr int64_t kMaxFilterVocab = int64_t{1} << 22;

struct SampleFilterParams {
  const void* logits;  // [rows, vocab], last dimension contiguous
  LogitsType logits_type;
  int64_t logits_row_stride;       // elements
  View1<const float> temperature;  // [rows] > 0
  View1<const int64_t> top_k;      // [rows] off unless in [1, vocab)
  View1<const float> top_p;        // [rows] off unless < 1
  View1<const float> min_p;        // [rows] off unless > 0
  int64_t rows;
  int64_t vocab;  // 1 .. kMaxFilterVocab

  float* scores;  // [rows, vocab]: logits / temperature, -inf where removed
};

namespace cpu {

// What is wrong with the parameters of some row, or nothing.
std::optional<std::string> find_invalid_parameter(const SampleFilterParams& params);

// The parameters must be valid.
void sample_filter(const SampleFilterParams& params, const ParallelFor& parallel_for);

}  // namespace cpu

}  // namespace specdec
