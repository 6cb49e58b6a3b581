// The loops of PairedTiles for AMX.
#include "tiles_isa.h"

#ifdef SPECDEC_X86
#include "cpu/runtime/amx_tiles.h"

#define SPECDEC_TILES_TARGET SPECDEC_TARGET_AMX
#include "unit_tiles.h"

namespace specdec::cpu {

const PairedTiles& paired_tiles_amx() {
  static constexpr PairedTiles kTiles = UnitTiles<AmxTiles>::table();
  return kTiles;
}

}  // namespace specdec::cpu
#endif
