// The loops of `linear` for a few input rows and transposed weights, compiled for each instruction
// set. A format of linear_kernel.h with float32 elements also has
//
//   widen(p)  the Vector of the numbers at p, which are float32 or bfloat16
//
// Loops, outermost first: tiles of outputs, blocks of in_features (linear.h), steps of a few columns,
// blocks of input rows, vectors of outputs. The sums of a tile's block are in L1, and the inputs of a
// step in registers. So columns are read in the order of memory: to keep the sums of a few outputs in
// registers and walk through all columns would touch another page of memory at each.
#pragma once

#include "linear_kernel.h"

namespace specdec::cpu {

// The inputs of a pass of up to kPassRows rows are as ManyRowsKernel packs them, in float32:
// [blocks of in_features][rows][kManyBlock]. `Stored` is the type of weights, biases and outputs.
template <class F, class Stored>
class ColumnsKernel {
 public:
  SPECDEC_LINEAR_TARGET static void run(const ManyRowsPass& pass, int64_t first_out,
                                        int64_t end_out) {
    alignas(64) float totals[kSums], block_sums[kSums];
    const int64_t ins = pass.params.in_features, tile_outs = kSums / pass.rows / kLanes * kLanes;
    for (int64_t out = first_out; out < end_out; out += tile_outs) {
      const int64_t outs = std::min(tile_outs, end_out - out);
      for (int64_t first = 0; first == 0 || first < ins; first += kManyBlock) {
        const int64_t count = std::min(kManyBlock, ins - first);
        const Tile tile{pass.params.weight_stride, outs, first == 0 ? totals : block_sums,
                        (outs + kLanes - 1) / kLanes * kLanes};
        std::fill_n(tile.sums, pass.rows * tile.stride, 0.0f);
        add_block(pass, tile, first, count, out);
        if (first != 0) add_sums(block_sums, pass.rows * tile.stride, totals);
      }
      finish(pass, out, outs, totals);
    }
  }

 private:
  using Vector = typename F::Vector;
  using Operand = typename F::Operand;
  static constexpr int64_t kVectorOuts = kLanes / F::kParts;
  static constexpr int64_t kSums = 4096;             // 16 KiB
  static constexpr int kMaxRows = F::kManyRows / 2;  // input rows of a register block
  static constexpr int64_t kLine = kStepBytes / sizeof(Stored);
  static_assert(kSums / kPassRows >= kLanes && kSums % kLanes == 0);

  static constexpr int num_steps(int rows) { return rows == 1 ? 8 : 4; }

  struct Tile {
    int64_t weight_stride;
    int64_t outs;
    float* sums;     // [rows, stride]
    int64_t stride;  // a whole number of vectors
  };

  using StepFunction = void (*)(const Tile& tile, const Stored* weights, const float* inputs,
                                float* sums);
  struct StepFunctions {
    int64_t columns;
    StepFunction whole;   // multiplies so many columns
    StepFunction single;  // multiplies one
  };

  template <size_t... kIndex>
  static constexpr auto functions_by_rows(std::index_sequence<kIndex...>) {
    return std::array<StepFunctions, sizeof...(kIndex)>{StepFunctions{
        num_steps(kIndex + 1), step<kIndex + 1, num_steps(kIndex + 1)>, step<kIndex + 1, 1>}...};
  }

  // Adds the products of `count` in_features from `first` on.
  SPECDEC_LINEAR_TARGET static void add_block(const ManyRowsPass& pass, const Tile& tile,
                                              int64_t first, int64_t count, int64_t out) {
    static constexpr auto kFunctions = functions_by_rows(std::make_index_sequence<kMaxRows>());
    const Stored* weights =
        static_cast<const Stored*>(pass.params.weight) + first * tile.weight_stride + out;
    const float* inputs = pass.inputs + first * pass.rows;
    const int64_t block_rows = even_part(pass.rows, kMaxRows);
    const int64_t columns = kFunctions[block_rows - 1].columns;
    for (int64_t in = 0; in < count; in += columns) {
      const Stored* step_weights = weights + in * tile.weight_stride;
      prefetch(tile, step_weights + columns * tile.weight_stride, columns);
      for (int64_t row = 0; row < pass.rows; row += block_rows) {
        const StepFunctions& own = kFunctions[std::min(block_rows, pass.rows - row) - 1];
        const float* x = inputs + row * kManyBlock + in;
        float* sums = tile.sums + row * tile.stride;
        int64_t i = 0;
        const int64_t end = std::min(columns, count - in);
        for (; i + own.columns <= end; i += own.columns) {
          own.whole(tile, step_weights + i * tile.weight_stride, x + i, sums);
        }
        for (; i < end; ++i) own.single(tile, step_weights + i * tile.weight_stride, x + i, sums);
      }
    }
  }

  // The hardware prefetcher restarts with each column.
  SPECDEC_LINEAR_INLINE static void prefetch(const Tile& tile, const Stored* weights,
                                             int64_t columns) {
    for (int64_t i = 0; i < columns; ++i) {
      for (int64_t out = 0; out < tile.outs; out += kLine) {
        __builtin_prefetch(weights + i * tile.weight_stride + out, 0, 2);
      }
    }
  }

  // Multiplies kColumns in_features of kRows input rows, whose inputs are kManyBlock apart.
  template <int kRows, int kColumns>
  SPECDEC_LINEAR_TARGET static void step(const Tile& tile, const Stored* weights,
                                         const float* inputs, float* sums) {
    Operand x[kRows][kColumns];
    SPECDEC_UNROLL for (int i = 0; i < kRows * kColumns; ++i) {
      x[i / kColumns][i % kColumns] =
          F::broadcast(inputs + i / kColumns * kManyBlock + i % kColumns);
    }
    int64_t out = 0;
    for (; out + kVectorOuts <= tile.outs; out += kVectorOuts) {
      add<kRows, kColumns>(x, weights + out, tile.weight_stride, sums + out, tile.stride);
    }
    if (out < tile.outs) {
      Stored padded[kColumns][kVectorOuts] = {};
      for (int i = 0; i < kColumns; ++i) {
        std::memcpy(padded[i], weights + i * tile.weight_stride + out,
                    (tile.outs - out) * sizeof(Stored));
      }
      add<kRows, kColumns>(x, padded[0], kVectorOuts, sums + out, tile.stride);
    }
  }

  template <int kRows, int kColumns>
  SPECDEC_LINEAR_INLINE static void add(const Operand (&x)[kRows][kColumns], const Stored* weights,
                                        int64_t weight_stride, float* sums, int64_t stride) {
    Vector own[kRows];
    SPECDEC_UNROLL for (int r = 0; r < kRows; ++r) own[r] = F::load_lanes(sums + r * stride);
    SPECDEC_UNROLL for (int i = 0; i < kColumns; ++i) {
      const Vector w = F::widen(weights + i * weight_stride);
      SPECDEC_UNROLL for (int r = 0; r < kRows; ++r) F::multiply_add(own[r], w, x[r][i]);
    }
    SPECDEC_UNROLL for (int r = 0; r < kRows; ++r) F::store_lanes(own[r], sums + r * stride);
  }

  SPECDEC_LINEAR_TARGET static void add_sums(const float* block_sums, int64_t count,
                                             float* totals) {
    for (int64_t i = 0; i < count; i += kVectorOuts) {
      F::store_lanes(F::add(F::load_lanes(totals + i), F::load_lanes(block_sums + i)), totals + i);
    }
  }

  static void finish(const ManyRowsPass& pass, int64_t out, int64_t outs, const float* totals) {
    const LinearParams& params = pass.params;
    const Stored* bias = params.bias ? static_cast<const Stored*>(params.bias) + out : nullptr;
    const int64_t stride = (outs + kLanes - 1) / kLanes * kLanes;
    for (int64_t r = 0; r < pass.rows; ++r) {
      Stored* output =
          static_cast<Stored*>(params.output) + (pass.first_row + r) * params.output_stride + out;
      for (int64_t i = 0; i < outs; ++i) {
        const float own_bias = bias ? to_float(bias[i]) : 0.0f;
        from_float(totals[r * stride + i] + own_bias, output + i);
      }
    }
  }
};

}  // namespace specdec::cpu
