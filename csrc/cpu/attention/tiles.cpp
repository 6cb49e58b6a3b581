// The loops of tiles.h for the processor's baseline, and the choice among the instruction sets.
#include "tiles_isa.h"

#define SPECDEC_TILES_TARGET

namespace specdec::cpu {
namespace {

constexpr int64_t kBlockRows = 2;

void transpose_block(const float* const* rows, int64_t dim, float* out) {
  for (int64_t row = 0; row < kBlock; ++row) {
    for (int64_t d = 0; d < kBlock; ++d) out[d * kTileKeys + row] = rows[row][dim + d];
  }
}

}  // namespace
}  // namespace specdec::cpu

#include "tiles_impl.h"

namespace specdec::cpu {

const AttentionTiles& attention_tiles() {
  return SPECDEC_FOR_ISA(cpu_isa(), kTiles, attention_tiles_avx2(), attention_tiles_avx512());
}

}  // namespace specdec::cpu
