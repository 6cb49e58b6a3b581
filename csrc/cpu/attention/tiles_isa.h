// What the builds of tiles.h for the instruction sets share.
#pragma once

#include "specdec/cpu/isa.h"
#include "tiles.h"

#define SPECDEC_TILES_UNROLL _Pragma("GCC unroll 16")

namespace specdec::cpu {

constexpr int64_t kBlock = 16;  // keys and dimensions that are transposed at a time

// The loops of one build: those for all types, and those for pairs of bfloat16.
struct TilesOfIsa {
  AttentionTiles tiles;
  PairedTiles paired;
};

const TilesOfIsa& attention_tiles_avx2();
const TilesOfIsa& attention_tiles_avx512();
const PairedTiles& paired_tiles_avx512_bf16();
const PairedTiles& paired_tiles_amx();

}  // namespace specdec::cpu
