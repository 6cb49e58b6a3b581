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
#include "unit_tiles.h"

namespace specdec::cpu {
namespace {

const TilesOfIsa& tiles_of_isa() {
  return SPECDEC_FOR_ISA(cpu_isa(), kTiles, attention_tiles_avx2(), attention_tiles_avx512());
}

const PairedTiles& paired_tiles() {
  static constexpr PairedTiles kEmulated = UnitTiles<EmulatedTiles>::table();
  if (matrix_units() == MatrixUnits::kEmulated) return kEmulated;
#ifdef SPECDEC_X86
  if (matrix_units() == MatrixUnits::kAmx) return paired_tiles_amx();
  if (cpu_has_avx512_bf16()) return paired_tiles_avx512_bf16();
#endif
  return tiles_of_isa().paired;
}

AttentionTiles with_pairs() {
  AttentionTiles tiles = tiles_of_isa().tiles;
  tiles.paired = &paired_tiles();
  tiles.row_block = tiles.paired->row_block;
  tiles.dot_products = tiles.paired->dot_products;
  return tiles;
}

}  // namespace

const AttentionTiles& attention_tiles(FloatType type, int64_t head_dim) {
  static const AttentionTiles paired = with_pairs();
  const bool is_paired =
      type == FloatType::kBFloat16 && head_dim % kTileKeys == 0 && head_dim <= kMaxPairedDim;
  return is_paired ? paired : tiles_of_isa().tiles;
}

}  // namespace specdec::cpu
