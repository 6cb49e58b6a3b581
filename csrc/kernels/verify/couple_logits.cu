// couple_logits: divides logits by the draft's temperature and adds the noise of the match rule.
// Meaning of the arguments: specdec/couple_logits.h.
//
// In:  logits [rows, vocab] f32/bf16/f16; temperatures, seeds, row_ids, positions [rows]; token_ids
//      [vocab] or null
// Out: scores [rows, vocab] f32
//
// One launch. A thread has one token of one row, with a Philox block of its own: about 60 integer
// and 40 float operations. Neighbours that share a block would need neighbouring ids, which draft
// vocabularies do not have. The scores are a drafter's, [rows, 32k]: 16 rows are 2 MB and 53
// million operations, about 2 us of an H100's integer units (64 per cycle and SM); an estimate.
#include "specdec/couple_logits.h"
#include "specdec/device/cuda.cuh"
#include "specdec/launchers.h"

namespace specdec {
namespace {

constexpr int kThreads = 256;

template <typename T>
__global__ void __launch_bounds__(kThreads)
    couple_kernel(const SPECDEC_GRID_CONSTANT CoupleLogitsParams params,
                  const SPECDEC_GRID_CONSTANT int64_t chunks) {
  const int64_t row = blockIdx.x / chunks;
  const int64_t token = blockIdx.x % chunks * kThreads + threadIdx.x;
  if (token >= params.vocab) return;
  const T* logits = static_cast<const T*>(params.logits) + row * params.logits_row_stride;
  float score = to_float(logits[token]);
  if (const float temperature = params.noise.temperature(row); temperature > 0.0f) {
    const int64_t id = params.token_ids.data == nullptr ? token : params.token_ids[token];
    const NoiseStream noise = params.noise.stream(row, params.positions[row]);
    score = coupled_logit(score, temperature, gumbel(noise.token_bits(static_cast<uint32_t>(id))));
  }
  params.scores[row * params.vocab + token] = score;
}

}  // namespace

cudaError_t launch_couple_logits(const CoupleLogitsParams& params, cudaStream_t stream) {
  const int64_t chunks = (params.vocab + kThreads - 1) / kThreads;
  return with_float_type(params.logits_type, [&]<typename T>(T) {
    return launch(couple_kernel<T>, {params.rows * chunks, 1, kThreads, stream}, params, chunks);
  });
}

}  // namespace specdec
