// The loops of panels.h for codes, written once and compiled for each instruction set. They use the
// formats of integers_kernel.h, and from each also
//
//   split_units(p, split)                the codes of a Vector's outputs at p as words: in split[0] codes 0
//                                        and 2 of each lane's unit, in split[1] codes 1 and 3
//   add_pair_products(sums, words, p)    adds to each lane of integers the products of its two words with
//                                        the two at p
//   add_integers(a, b)
#pragma once

#include "integers_kernel.h"
#include "panel_kernel.h"

namespace specdec::cpu {

template <class F, class Stored>
class PanelCodesKernel {
 public:
  // Packs contiguous input rows, one after the other.
  SPECDEC_LINEAR_TARGET static void pack(const void* input, int64_t rows, int64_t ins,
                                         PanelIntegers* packed) {
    for (int64_t row = 0; row < rows; ++row) {
      const Stored* own = static_cast<const Stored*>(input) + row * ins;
      for (int64_t in = 0; in < ins; in += PanelIntegers::kInputs) {
        pack_inputs(own + in, std::min(PanelIntegers::kInputs, ins - in), *packed++);
      }
    }
  }

  SPECDEC_LINEAR_TARGET static void run(const void* panel, const void* packed, int64_t rows,
                                        int64_t ins, float* values, int64_t stride) {
    run_panel<PanelCodesKernel, F::kPanelRows>(panel, static_cast<const PanelIntegers*>(packed),
                                               rows, PanelIntegers::count(ins), ins, values,
                                               stride);
  }

  template <int kRows>
  SPECDEC_LINEAR_TARGET static void run_block(const void* panel, const PanelIntegers* inputs,
                                              int64_t ins, float* values, int64_t stride) {
    const int64_t count = PanelIntegers::count(ins);
    const int8_t* codes = static_cast<const int8_t*>(panel);
    Vector totals[kRows][kVectors];
    Sums::clear(totals);
    for (int64_t part = 0; part < count; ++part) {
      const int64_t left = ins - part * PanelIntegers::kInputs;
      const int64_t units = (std::min(PanelIntegers::kInputs, left) + kUnit - 1) / kUnit;
      add_part<kRows>(codes, inputs + part, count, units, totals);
      codes += units * kUnit * kPanelOuts;
    }
    Sums::store(totals, values, stride);
  }

 private:
  using Sums = PanelSums<F>;
  using Vector = typename F::Vector;
  using Integers = typename F::Integers;
  static constexpr int64_t kUnit = kPanelUnitBytes;
  static constexpr int64_t kVectorOuts = Sums::kVectorOuts;
  static constexpr int kVectors = Sums::kVectors;

  // Adds the products of PanelIntegers, which for consecutive rows are `distance` apart.
  template <int kRows>
  SPECDEC_LINEAR_INLINE static void add_part(const int8_t* codes, const PanelIntegers* inputs,
                                             int64_t distance, int64_t units,
                                             Vector (&totals)[kRows][kVectors]) {
    // With one row, both words of a split have sums of their own, so that they need not wait for each other.
    constexpr int kSums = kRows == 1 ? 2 : 1;
    Integers sums[kRows][kVectors][kSums];
    SPECDEC_UNROLL for (int i = 0; i < kRows * kVectors * kSums; ++i) {
      sums[i / kSums / kVectors][i / kSums % kVectors][i % kSums] = F::zero_integers();
    }
    for (int64_t unit = 0; unit < units; ++unit) {
      SPECDEC_UNROLL for (int v = 0; v < kVectors; ++v) {
        typename F::Words split[2];
        F::split_units(codes + (unit * kPanelOuts + v * kVectorOuts) * kUnit, split);
        SPECDEC_UNROLL for (int r = 0; r < kRows; ++r) {
          const int16_t* numbers = inputs[r * distance].numbers + unit * kUnit;
          F::add_pair_products(sums[r][v][0], split[0], numbers);
          F::add_pair_products(sums[r][v][kSums - 1], split[1], numbers + 2);
        }
      }
    }
    SPECDEC_UNROLL for (int r = 0; r < kRows; ++r) {
      const auto scale = F::broadcast(&inputs[r * distance].scale);
      SPECDEC_UNROLL for (int v = 0; v < kVectors; ++v) {
        auto sum = sums[r][v][0];
        if constexpr (kSums == 2) sum = F::add_integers(sum, sums[r][v][1]);
        F::multiply_add(totals[r][v], F::to_floats(sum), scale);
      }
    }
  }

  // Packs the next inputs, with zeros behind them.
  SPECDEC_LINEAR_INLINE static void pack_inputs(const Stored* inputs, int64_t count,
                                                PanelIntegers& packed) {
    float numbers[PanelIntegers::kInputs] = {};
    int32_t largest = 0;
    for (int64_t i = 0; i < count; ++i) {
      numbers[i] = to_float(inputs[i]);
      largest = std::max(largest, static_cast<int32_t>(float_to_bits(numbers[i]) & 0x7FFFFFFF));
    }
    const SharedExponent shared(largest, 14);
    packed.scale = shared.down;
    constexpr float kToInteger = 0x1.8p23f;  // a sum with it is rounded to an integer
    for (int64_t i = 0; i < PanelIntegers::kInputs; ++i) {
      const float shifted = exact_add(exact_mul(numbers[i], shared.up), kToInteger);
      // The order of split_units: 0, 2, 1, 3.
      const int64_t at = i / kUnit * kUnit + i % 2 * 2 + i % kUnit / 2;
      packed.numbers[at] = static_cast<int16_t>(float_to_bits(shifted) - float_to_bits(kToInteger));
    }
  }
};

}  // namespace specdec::cpu
