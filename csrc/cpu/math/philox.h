// Philox in bulk: the noise bits of a run of tokens, for each instruction set.
//
// Compilers generate poor vector code for the 32 x 32 -> 64 bit products of Philox (they multiply
// 64 x 64 bits, or shuffle odd and even lanes apart and together), so the x86 code is written by
// hand. Measured per token on a Zen 4 core: 0.33 ns with AVX-512 (compiled loop 0.86), 0.64 ns with
// AVX2 (1.47).
#pragma once

#include "specdec/cpu/isa.h"
#include "specdec/sampling/rng.h"

namespace specdec::cpu {

constexpr int64_t kBulkGroups = 32;
constexpr int64_t kBulkTokens = 4 * kBulkGroups;

// Writes the bits of token 4 * first_group + i to bits[i], for kBulkTokens tokens.
using BulkBits = void (*)(const NoiseStream& noise, uint32_t first_group, uint32_t* bits);

BulkBits bulk_bits(CpuIsa isa);

}  // namespace specdec::cpu
