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
    const LinearParams& params = pass.params;
    const int64_t tile_outs = kSums / pass.rows / kLanes * kLanes;
    for (int64_t out = first_out; out < end_out; out += tile_outs) {
      const int64_t outs = std::min(tile_outs, end_out - out);
      const Tile tile{static_cast<const Stored*>(params.weight) + out, params.weight_stride, outs,
                      (outs + kLanes - 1) / kLanes * kLanes};
      for (int64_t first = 0; first == 0 || first < params.in_features; first += kManyBlock) {
        float* sums = first == 0 ? totals : block_sums;
        std::fill_n(sums, pass.rows * tile.stride, 0.0f);
        add_block(pass, tile, first, std::min(kManyBlock, params.in_features - first), sums);
        if (first != 0) add_sums(block_sums, pass.rows * tile.stride, totals);
      }
      finish(pass, out, tile, totals);
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

  // A step, and the columns that a register block takes of it at a time.
  static constexpr int kStepColumns = 8;
  static constexpr int num_columns(int rows) { return rows == 1 ? kStepColumns : 4; }

  struct Tile {
    const Stored* weights;  // of the first column
    int64_t weight_stride;
    int64_t outs;
    int64_t stride;  // of the sums of rows: outs, rounded up to whole vectors
  };

  using BlockFunction = void (*)(const Tile& tile, const Stored* weights, const float* inputs,
                                 float* sums);
  struct BlockFunctions {
    int64_t columns;
    BlockFunction several;  // multiplies so many columns
    BlockFunction single;   // multiplies one
  };

  template <size_t... kIndex>
  static constexpr auto functions_by_rows(std::index_sequence<kIndex...>) {
    return std::array<BlockFunctions, sizeof...(kIndex)>{
        BlockFunctions{num_columns(kIndex + 1), run_block<kIndex + 1, num_columns(kIndex + 1)>,
                       run_block<kIndex + 1, 1>}...};
  }

  // Adds the products of `count` in_features from `first` on to sums, [rows, stride].
  SPECDEC_LINEAR_TARGET static void add_block(const ManyRowsPass& pass, const Tile& tile,
                                              int64_t first, int64_t count, float* sums) {
    static constexpr auto kFunctions = functions_by_rows(std::make_index_sequence<kMaxRows>());
    const float* inputs = pass.inputs + first * pass.rows;
    const int64_t block_rows = even_part(pass.rows, kMaxRows);
    for (int64_t in = 0; in < count; in += kStepColumns) {
      const int64_t end = std::min<int64_t>(count, in + kStepColumns);
      prefetch(tile, first + in + kStepColumns);
      for (int64_t row = 0; row < pass.rows; row += block_rows) {
        const BlockFunctions& run = kFunctions[std::min(block_rows, pass.rows - row) - 1];
        for (int64_t i = in; i < end;) {
          const bool fits = i + run.columns <= end;
          (fits ? run.several : run.single)(tile, tile.weights + (first + i) * tile.weight_stride,
                                            inputs + row * kManyBlock + i,
                                            sums + row * tile.stride);
          i += fits ? run.columns : 1;
        }
      }
    }
  }

  // Prefetches a step. The hardware prefetcher restarts with each column.
  SPECDEC_LINEAR_INLINE static void prefetch(const Tile& tile, int64_t first) {
    for (int64_t i = 0; i < kStepColumns; ++i) {
      const Stored* weights = tile.weights + (first + i) * tile.weight_stride;
      for (int64_t out = 0; out < tile.outs; out += kLine) __builtin_prefetch(weights + out, 0, 2);
    }
  }

  // A register block: kColumns in_features x kRows input rows, which are kManyBlock apart.
  template <int kRows, int kColumns>
  SPECDEC_LINEAR_TARGET static void run_block(const Tile& tile, const Stored* weights,
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

  static void finish(const ManyRowsPass& pass, int64_t out, const Tile& tile, const float* totals) {
    const LinearParams& params = pass.params;
    const Stored* bias = params.bias ? static_cast<const Stored*>(params.bias) + out : nullptr;
    for (int64_t r = 0; r < pass.rows; ++r) {
      Stored* output =
          static_cast<Stored*>(params.output) + (pass.first_row + r) * params.output_stride + out;
      for (int64_t i = 0; i < tile.outs; ++i) {
        const float own_bias = bias ? to_float(bias[i]) : 0.0f;
        from_float(totals[r * tile.stride + i] + own_bias, output + i);
      }
    }
  }
};

}  // namespace specdec::cpu
