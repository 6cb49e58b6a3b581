// couple_logits: divides a drafter's logits by the draft's temperature and adds the noise of the
// match rule (specdec/sampling/coupling.h).
#pragma once

#include "specdec/core/float_types.h"
#include "specdec/core/parallel.h"
#include "specdec/sampling/coupling.h"

namespace specdec {

struct CoupleLogitsParams {
  const void* logits;  // [rows, vocab], last dimension contiguous
  FloatType logits_type;
  int64_t logits_row_stride;  // elements
  DraftNoise noise;
  View1<const int64_t> positions;  // [rows] of the drafted tokens
  View1<const int64_t> token_ids;  // [vocab] whose noise a token gets; null: its own
  int64_t rows;
  int64_t vocab;  // below 2^31

  float* scores;  // [rows, vocab]
};

namespace cpu {
void couple_logits(const CoupleLogitsParams& params, const ParallelFor& parallel_for);
}  // namespace cpu

}  // namespace specdec
