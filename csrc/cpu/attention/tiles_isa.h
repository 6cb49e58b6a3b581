// What the builds of tiles.h for the instruction sets share.
#pragma once

#include "specdec/cpu/isa.h"
#include "tiles.h"

namespace specdec::cpu {

constexpr int64_t kBlock = 16;  // keys and dimensions that are transposed at a time

const AttentionTiles& attention_tiles_avx2();
const AttentionTiles& attention_tiles_avx512();
const PairedTiles& paired_tiles_amx();

}  // namespace specdec::cpu
