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

#include "paired_tiles.h"
#include "tiles_impl.h"

namespace specdec::cpu {
namespace {

const AttentionTiles& unpaired_tiles() {
  return SPECDEC_FOR_ISA(cpu_isa(), kTiles, attention_tiles_avx2(), attention_tiles_avx512());
}

AttentionTiles with_pairs() {
  static constexpr PairedTiles kEmulated = PairedLoops<EmulatedTiles>::table();
  AttentionTiles tiles = unpaired_tiles();
  tiles.row_block = 16;
  tiles.paired = &kEmulated;
#ifdef SPECDEC_X86
  if (matrix_units() == MatrixUnits::kAmx) tiles.paired = &paired_tiles_amx();
#endif
  return tiles;
}

}  // namespace

const AttentionTiles& attention_tiles(FloatType type, int64_t head_dim) {
  static const AttentionTiles paired = with_pairs();
  const bool is_paired = matrix_units() != MatrixUnits::kNone && type == FloatType::kBFloat16 &&
                         head_dim % kTileKeys == 0 && head_dim <= kMaxPairedDim;
  return is_paired ? paired : unpaired_tiles();
}

}  // namespace specdec::cpu
