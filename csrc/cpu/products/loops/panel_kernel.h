// The loops of panels.h, written once and compiled for each instruction set. They use the formats
// of linear_kernel.h, and from each also
//
//   kPanelRows    number of input rows in a register block
//   broadcast(p)  the Operand that has the four bytes at p in every lane
#pragma once

#include "linear_kernel.h"
#include "specdec/cpu/panels.h"

namespace specdec::cpu {

// Multiplies input rows, which are `row_size` apart, in blocks of at most kMost: calls the kernel's
// run_block<r> for each block of r rows.
template <class Kernel, int kMost, class Input>
void run_panel(const void* panel, const Input* input, int64_t rows, int64_t row_size, int64_t ins,
               float* values, int64_t stride) {
  using BlockFunction = void (*)(const void*, const Input*, int64_t, float*, int64_t);
  static constexpr auto kFunctions = []<size_t... kIndex>(std::index_sequence<kIndex...>) {
    return std::array<BlockFunction, kMost>{Kernel::template run_block<kIndex + 1>...};
  }(std::make_index_sequence<kMost>());
  const int64_t block_rows = even_part(rows, kMost);
  for (int64_t row = 0; row < rows; row += block_rows) {
    kFunctions[std::min(block_rows, rows - row) - 1](panel, input + row * row_size, ins,
                                                     values + row * stride, stride);
  }
}

// The sums of a register block: for each input row those of a panel's outputs.
template <class F>
struct PanelSums {
  using Vector = typename F::Vector;
  static constexpr int64_t kVectorOuts = kLanes / F::kParts;
  static constexpr int kVectors = kPanelOuts / kVectorOuts;

  template <int kRows>
  SPECDEC_LINEAR_INLINE static void clear(Vector (&sums)[kRows][kVectors]) {
    SPECDEC_UNROLL for (int i = 0; i < kRows * kVectors; ++i) {
      sums[i / kVectors][i % kVectors] = F::zero();
    }
  }

  template <int kRows>
  SPECDEC_LINEAR_INLINE static void store(const Vector (&sums)[kRows][kVectors], float* values,
                                          int64_t stride) {
    SPECDEC_UNROLL for (int i = 0; i < kRows * kVectors; ++i) {
      F::store_lanes(sums[i / kVectors][i % kVectors],
                     values + i / kVectors * stride + i % kVectors * kVectorOuts);
    }
  }
};

template <class F>
class PanelKernel {
 public:
  SPECDEC_LINEAR_TARGET static void run(const void* panel, const void* input, int64_t rows,
                                        int64_t ins, float* values, int64_t stride) {
    run_panel<PanelKernel, F::kPanelRows>(panel, static_cast<const Element*>(input), rows, ins, ins,
                                          values, stride);
  }

  using Element = typename F::Element;

  template <int kRows>
  SPECDEC_LINEAR_TARGET static void run_block(const void* weights, const Element* input,
                                              int64_t ins, float* values, int64_t stride) {
    const Element* panel = static_cast<const Element*>(weights);
    Vector sums[kRows][kVectors];
    Sums::clear(sums);
    int64_t k = 0;
    for (; k + kUnit <= ins; k += kUnit) {
      // With few rows, loads already run far enough ahead of the arithmetic, and prefetching costs
      // a fifth of the last-level cache's bandwidth.
      if constexpr (kRows > 4) {
        const auto* next = reinterpret_cast<const std::byte*>(panel + k * kPanelOuts);
        __builtin_prefetch(next + kPrefetchBytes, 0, 2);
        __builtin_prefetch(next + kPrefetchBytes + kStepBytes, 0, 2);
      }
      add<kRows>(panel + k * kPanelOuts, input + k, ins, sums);
    }
    if (k < ins) {
      Element last[kRows][kUnit] = {};
      SPECDEC_UNROLL for (int r = 0; r < kRows; ++r) last[r][0] = input[r * ins + k];
      add<kRows>(panel + k * kPanelOuts, &last[0][0], kUnit, sums);
    }
    Sums::store(sums, values, stride);
  }

 private:
  using Sums = PanelSums<F>;
  using Vector = typename F::Vector;
  using Operand = typename F::Operand;
  static constexpr int64_t kUnit = kPanelUnitBytes / sizeof(Element);
  static constexpr int64_t kVectorOuts = Sums::kVectorOuts;
  static constexpr int kVectors = Sums::kVectors;
  static constexpr int64_t kPrefetchBytes = 8192;

  // Multiplies one unit of every row; units are `stride` elements apart. Registers keep the inputs or the
  // weights, of which there are fewer.
  template <int kRows>
  SPECDEC_LINEAR_INLINE static void add(const Element* weights, const Element* input,
                                        int64_t stride, Vector (&sums)[kRows][kVectors]) {
    if constexpr (kRows < kVectors) {
      Operand x[kRows];
      SPECDEC_UNROLL for (int r = 0; r < kRows; ++r) x[r] = F::broadcast(input + r * stride);
      SPECDEC_UNROLL for (int i = 0; i < kVectors; ++i) {
        Operand w = F::load(weights + i * kVectorOuts * kUnit);
        if constexpr (kRows > 1) F::keep(w);  // as in linear_kernel.h
        SPECDEC_UNROLL for (int r = 0; r < kRows; ++r) F::multiply_add(sums[r][i], w, x[r]);
      }
    } else {
      Operand w[kVectors];
      SPECDEC_UNROLL for (int i = 0; i < kVectors; ++i) {
        w[i] = F::load(weights + i * kVectorOuts * kUnit);
      }
      SPECDEC_UNROLL for (int r = 0; r < kRows; ++r) {
        const Operand x = F::broadcast(input + r * stride);
        SPECDEC_UNROLL for (int i = 0; i < kVectors; ++i) F::multiply_add(sums[r][i], w[i], x);
      }
    }
  }
};

}  // namespace specdec::cpu
