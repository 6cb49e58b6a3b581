// The loops of tiles.h for AVX2 with FMA.
#include "tiles_isa.h"

#ifdef SPECDEC_X86
#include "cpu/products/loops/transpose.h"

#define SPECDEC_TILES_TARGET SPECDEC_TARGET_AVX2

namespace specdec::cpu {
namespace {

constexpr int64_t kBlockRows = 3;

SPECDEC_TARGET_AVX2 void transpose_block(const float* const* rows, int64_t dim, float* out) {
  for (int64_t row = 0; row < kBlock; row += 8) {
    for (int64_t d = 0; d < kBlock; d += 8) {
      Transposes::transpose(rows + row, dim + d, out + d * kTileKeys + row, kTileKeys);
    }
  }
}

}  // namespace
}  // namespace specdec::cpu

#include "tiles_impl.h"

namespace specdec::cpu {

const TilesOfIsa& attention_tiles_avx2() { return kTiles; }

}  // namespace specdec::cpu
#endif
