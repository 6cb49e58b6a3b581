// Operations in which the lanes of a warp take part together.
#pragma once

#include "grid.h"
#include "vector_types.h"

namespace specdec::emulation {

void warp_barrier(uint32_t lanes, Location where);
// The `bits` of lane `lane`.
uint64_t shuffle(const char* what, uint64_t bits, int lane, uint32_t lanes, Location where);
// The lanes whose predicate is true.
uint32_t vote(const char* what, bool predicate, uint32_t lanes, Location where);
// The operands of all lanes, combined from the first to the last.
uint32_t reduce(const char* what, uint32_t value, uint32_t (*combine)(uint32_t, uint32_t),
                uint32_t lanes, Location where);
void ldmatrix(const char* what, uint32_t (&r)[4], const void* row, bool transposed, Location where);
// A 16-bit type: how a register holds two of its numbers, and the smallest normal exponent.
struct PairFormat {
  float2 (*unpack)(uint32_t);
  int min_exponent;
};
// It adds as `tensor_core` says (numerics/tensor_core.h).
void mma(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], const PairFormat& format,
         Location where);
// On float32, with the layout in specdec/device/cuda.cuh.
void fma_m16n8k16(float (&c)[4], const float (&a_low)[4], const float (&a_high)[4],
                  const float (&b)[4], Location where);

}  // namespace specdec::emulation
