#include "warp.h"

#include <cmath>
#include <cstring>

#include "block.h"
#include "testing/emulation/numerics/tensor_core.h"

namespace specdec::emulation {
namespace {

constexpr uint32_t kAllLanes = 0xFFFFFFFF;

void meet(const Meeting& meeting, void* operand) {
  Grid::current().self().block->meet(meeting, operand);
}

struct ShuffleOperand {
  uint64_t bits;
  int source;
  uint64_t result;
};

void complete_shuffle(const LaneOperands& operands) {
  for (void* operand : operands) {
    if (operand == nullptr) continue;
    ShuffleOperand& self = *static_cast<ShuffleOperand*>(operand);
    const void* source = operands[static_cast<size_t>(self.source)];
    if (source == nullptr) {
      Grid::current().fail("a shuffle reads lane " + std::to_string(self.source) +
                           ", which does not take part");
    }
    self.result = static_cast<const ShuffleOperand*>(source)->bits;
  }
}

struct VoteOperand {
  bool predicate;
  uint32_t result;
};

void complete_vote(const LaneOperands& operands) {
  uint32_t result = 0;
  for (size_t lane = 0; lane < operands.size(); ++lane) {
    const void* operand = operands[lane];
    if (operand != nullptr && static_cast<const VoteOperand*>(operand)->predicate) {
      result |= 1u << lane;
    }
  }
  for (void* operand : operands) {
    if (operand != nullptr) static_cast<VoteOperand*>(operand)->result = result;
  }
}

struct ReduceOperand {
  uint32_t value;
  uint32_t (*combine)(uint32_t, uint32_t);
};

void complete_reduce(const LaneOperands& operands) {
  const ReduceOperand* first = nullptr;
  uint32_t result = 0;
  for (const void* operand : operands) {
    if (operand == nullptr) continue;
    const auto& lane = *static_cast<const ReduceOperand*>(operand);
    result = first == nullptr ? lane.value : lane.combine(result, lane.value);
    first = &lane;
  }
  for (void* operand : operands) {
    if (operand != nullptr) static_cast<ReduceOperand*>(operand)->value = result;
  }
}

struct MatrixOperand {
  const void* row;
  uint32_t* r;
};

// Lane 8 m + i has the address of row i of matrix m. Without transposition lane l gets elements 2
// (l % 4) and the next one of row l / 4.
template <bool kTransposed>
void complete_ldmatrix(const LaneOperands& operands) {
  for (size_t matrix = 0; matrix < 4; ++matrix) {
    uint16_t elements[8][8];
    for (size_t i = 0; i < 8; ++i) {
      const auto& lane = *static_cast<const MatrixOperand*>(operands[matrix * 8 + i]);
      std::memcpy(elements[i], lane.row, sizeof(elements[i]));
    }
    for (size_t l = 0; l < 32; ++l) {
      const size_t i = l / 4, j = l % 4 * 2;
      const uint32_t low = kTransposed ? elements[j][i] : elements[i][j];
      const uint32_t high = kTransposed ? elements[j + 1][i] : elements[i][j + 1];
      static_cast<MatrixOperand*>(operands[l])->r[matrix] = low | high << 16;
    }
  }
}

struct MmaOperand {
  float* c;
  const uint32_t *a, *b;
  const PairFormat& format;
};

// Fragments of m16n8k16 with g = lane / 4, t = lane % 4. A register holds two neighbours along k:
//   a[0], a[1]: rows g, g + 8, columns 2 t and the next one; a[2], a[3]: the same, 8 columns on
//   b[0], b[1]: column g, rows 2 t and the next one; 8 rows on
//   c[0], c[1]: row g, columns 2 t and the next one; c[2], c[3]: row g + 8
void complete_mma(const LaneOperands& operands) {
  float a[16][16], b[8][16];  // rows of a, columns of b
  const PairFormat& format = static_cast<const MmaOperand*>(operands[0])->format;
  for (size_t l = 0; l < 32; ++l) {
    const auto& lane = *static_cast<const MmaOperand*>(operands[l]);
    const size_t g = l / 4, k = l % 4 * 2;
    for (size_t i = 0; i < 4; ++i) {
      const float2 pair = format.unpack(lane.a[i]);
      float* target = &a[g + i % 2 * 8][k + i / 2 * 8];
      target[0] = pair.x;
      target[1] = pair.y;
    }
    for (size_t i = 0; i < 2; ++i) {
      const float2 pair = format.unpack(lane.b[i]);
      b[g][k + i * 8] = pair.x;
      b[g][k + i * 8 + 1] = pair.y;
    }
  }
  for (size_t l = 0; l < 32; ++l) {
    float* c = static_cast<MmaOperand*>(operands[l])->c;
    for (size_t i = 0; i < 4; ++i) {
      const size_t row = l / 4 + i / 2 * 8, column = l % 4 * 2 + i % 2;
      c[i] = add_products(a[row], b[column], c[i], format.min_exponent);
    }
  }
}

struct FmaOperand {
  float* c;
  const float* a[2];  // rows lane / 4 and lane / 4 + 8
  const float* b;
};

void complete_fma(const LaneOperands& operands) {
  for (size_t l = 0; l < 32; ++l) {
    float* c = static_cast<FmaOperand*>(operands[l])->c;
    for (size_t i = 0; i < 4; ++i) {
      const size_t quad = l / 4 * 4, column = l % 4 * 2 + i % 2;
      for (size_t k = 0; k < 16; ++k) {
        const auto& left = *static_cast<const FmaOperand*>(operands[quad + k / 4]);
        const auto& right = *static_cast<const FmaOperand*>(operands[column * 4 + k / 4]);
        c[i] = std::fma(left.a[i / 2][k % 4], right.b[k % 4], c[i]);
      }
    }
  }
}

}  // namespace

void warp_barrier(uint32_t lanes, Location where) {
  meet({"warp_barrier", where, lanes, nullptr, false}, nullptr);
}

uint64_t shuffle(const char* what, uint64_t bits, int lane, uint32_t lanes, Location where) {
  ShuffleOperand operand{bits, lane, 0};
  meet({what, where, lanes, &complete_shuffle, true}, &operand);
  return operand.result;
}

uint32_t vote(const char* what, bool predicate, uint32_t lanes, Location where) {
  VoteOperand operand{predicate, 0};
  meet({what, where, lanes, &complete_vote, false}, &operand);
  return operand.result;
}

uint32_t reduce(const char* what, uint32_t value, uint32_t (*combine)(uint32_t, uint32_t),
                uint32_t lanes, Location where) {
  ReduceOperand operand{value, combine};
  meet({what, where, lanes, &complete_reduce, true}, &operand);
  return operand.value;
}

void ldmatrix(const char* what, uint32_t (&r)[4], const void* row, bool transposed,
              Location where) {
  Grid::current().self().block->shared().access(
      row, 16, AccessKind::kRead, where, 16,
      transposed ? "the row of ldmatrix_x4_trans" : "the row of ldmatrix_x4");
  MatrixOperand operand{row, r};
  meet({what, where, kAllLanes, transposed ? &complete_ldmatrix<true> : &complete_ldmatrix<false>,
        true},
       &operand);
}

void mma(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], const PairFormat& format,
         Location where) {
  MmaOperand operand{c, a, b, format};
  meet({"mma_m16n8k16", where, kAllLanes, &complete_mma, true}, &operand);
}

void fma_m16n8k16(float (&c)[4], const float (&a_low)[4], const float (&a_high)[4],
                  const float (&b)[4], Location where) {
  FmaOperand operand{c, {a_low, a_high}, b};
  meet({"fma_m16n8k16", where, kAllLanes, &complete_fma, true}, &operand);
}

}  // namespace specdec::emulation
