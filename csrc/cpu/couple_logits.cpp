// CPU op couple_logits: a task is a chunk of a row.
#include "specdec/couple_logits.h"

#include "cpu/math/rows.h"
#include "cpu/math/token_noise.h"

namespace specdec::cpu {
namespace {

constexpr int64_t kChunk = 2048;  // tokens
constexpr int64_t kGrain = 4;     // chunks; below this, waking a thread costs more than it saves

void couple_chunk(const CoupleLogitsParams& params, int64_t row, int64_t first, int64_t count) {
  float* scores = params.scores + row * params.vocab + first;
  with_float_type(params.logits_type, [&]<typename T>(T) {
    const T* logits = static_cast<const T*>(params.logits) + row * params.logits_row_stride + first;
    for (int64_t i = 0; i < count; ++i) scores[i] = to_float(logits[i]);
  });
  const float temperature = params.noise.temperature(row);
  if (temperature == 0.0f) return;
  float noise[kChunk];
  fill_noise(params.noise.stream(row, params.positions[row]), params.token_ids, first, count,
             noise);
  row_ops().couple_logits(1.0f, temperature, noise, count, scores);
}

}  // namespace

void couple_logits(const CoupleLogitsParams& params, const ParallelFor& parallel_for) {
  const int64_t chunks = (params.vocab + kChunk - 1) / kChunk;
  parallel_for(params.rows * chunks, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t first = task % chunks * kChunk;
      couple_chunk(params, task / chunks, first, std::min(kChunk, params.vocab - first));
    }
  });
}

}  // namespace specdec::cpu
