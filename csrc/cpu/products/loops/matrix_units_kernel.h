// The loops of `linear` for bfloat16 on matrix units, for any number of input rows. The including
// file defines SPECDEC_LINEAR_TARGET and Tiles, the registers of cpu/runtime/amx_tiles.h, which also
// have
//
//   transpose(rows, column, out, stride)   see many_rows_kernel.h
//   round_outputs(sums, bias, rows)        rows[r][o] = sums[o][r] + bias[o], for 16 of each
//
// The left factors are 32 elements of 16 weight rows, which are read where they are. The right ones
// are the same elements of up to 16 input rows, and packed as [blocks of 16 rows][steps of 32
// elements][16 pairs][rows of the block]. As many rows as fit in a tile take the time of one.
//
// Loops, outermost first: groups of kGroupOuts weight rows, blocks of input rows, steps. A tile waits
// for the sums of the step before, so four are summed at a time: 64 weight rows and a block of input
// rows, or 32 and two blocks.
#pragma once

#include <vector>

#include "codes_kernel.h"

namespace specdec::cpu {

// `F` is the format of float32, for codes.
template <class Tiles, class F, ProductKind kKind>
class MatrixUnitsKernel {
 public:
  static int64_t packed_size(int64_t rows, int64_t ins) {
    return num_blocks(rows) * block_words(rows, ins);
  }

  SPECDEC_LINEAR_TARGET static void pack_inputs(const LinearParams& params, int64_t first_row,
                                                int64_t rows, int64_t begin, int64_t end,
                                                float* packed) {
    const int64_t columns = num_columns(rows), ins = params.in_features;
    const int64_t count = std::min(columns, kPackedRows);  // at a time
    for (int64_t first = begin; first < end; first += count) {
      const float* inputs[kPackedRows];
      for (int64_t i = 0; i < count; ++i) {  // a column beyond the last row is a copy of it
        const int64_t row = first_row + std::min(first + i, rows - 1);
        inputs[i] = reinterpret_cast<const float*>(static_cast<const BFloat16*>(params.input) +
                                                   input_offset(params, row));
      }
      float* column = packed + first / kTile * block_words(rows, ins) + first % kTile;
      const int64_t words = ins / 2, whole = words / kPackedRows * kPackedRows;
      if (count == 1) {
        std::memcpy(column, inputs[0], whole * sizeof(float));
      } else {
        for (int64_t word = 0; word < whole; word += kPackedRows) {
          Tiles::transpose(inputs, word, column + word * columns, columns);
        }
      }
      for (int64_t i = 0; i < count; ++i) {
        float* rest = column + i;
        for (int64_t word = whole; word < num_steps(ins) * kTile; ++word) {
          BFloat16 pair[2] = {};
          std::memcpy(pair, inputs[i] + word,
                      std::clamp<int64_t>(ins - 2 * word, 0, 2) * sizeof(BFloat16));
          std::memcpy(rest + word * columns, pair, sizeof(pair));
        }
      }
    }
  }

  SPECDEC_LINEAR_TARGET static void run(const ManyRowsPass& pass, int64_t first_out,
                                        int64_t end_out) {
    Tiles tiles(num_columns(pass.rows));
    Tiles::begin(num_columns(pass.rows));
    for (int64_t out = first_out; out < end_out; out += kGroupOuts) {
      const Group group(pass.params, out, std::min(kGroupOuts, end_out - out));
      Prefetch prefetch(pass, out + kGroupOuts, end_out);
      for (int64_t row = 0; row < pass.rows; row += 2 * kTile) {
        run_rows(tiles, pass, group, row, std::min(2 * kTile, pass.rows - row), prefetch);
      }
    }
    Tiles::end();
  }

 private:
  static constexpr bool kHasCodes = kKind != ProductKind::kRows;
  static constexpr int64_t kTile = 16;  // rows, or words of a row
  static constexpr int64_t kStep = 2 * kTile;
  static constexpr int64_t kGroupTiles = 4;
  static constexpr int64_t kGroupOuts = kGroupTiles * kTile;

  // Whole packed rows, but one row is packed as it is.
  static int64_t num_columns(int64_t rows) {
    return rows == 1 ? 1 : rows <= kPackedRows ? kPackedRows : kTile;
  }
  static int64_t num_blocks(int64_t rows) { return (rows + kTile - 1) / kTile; }
  static int64_t num_steps(int64_t ins) { return (ins + kStep - 1) / kStep; }
  static int64_t block_words(int64_t rows, int64_t ins) {
    return num_steps(ins) * kTile * num_columns(rows);
  }

  static const BFloat16* weight_row(const LinearParams& params, int64_t out) {
    return static_cast<const BFloat16*>(params.weight) + out * params.weight_stride;
  }

  // The weights of a group: where they are, or a copy that is padded with zeros to whole tiles. Codes
  // are expanded, and rounded to bfloat16.
  struct Group {
    SPECDEC_LINEAR_TARGET Group(const LinearParams& params, int64_t first_out, int64_t num_outs)
        : out(first_out), outs(num_outs), steps(num_steps(params.in_features)) {
      for (int64_t i = 0; params.bias && i < outs; ++i) {
        bias[i] = to_float(static_cast<const BFloat16*>(params.bias)[out + i]);
      }
      const bool is_copied = kHasCodes || params.in_features % kStep != 0 || outs % kTile != 0;
      const BFloat16* rows = is_copied ? copy(params) : weight_row(params, out);
      const int64_t row_stride = is_copied ? steps * kStep : params.weight_stride;
      stride = row_stride * static_cast<int64_t>(sizeof(BFloat16));
      for (int64_t i = 0; i < kGroupTiles; ++i) {
        // A tile that is not used is a copy of the first.
        tiles[i] = rows + (i * kTile < outs ? i * kTile : 0) * row_stride;
      }
    }

    SPECDEC_LINEAR_TARGET const BFloat16* copy(const LinearParams& params) const {
      thread_local std::vector<BFloat16> copied;
      const int64_t ins = params.in_features, width = steps * kStep;
      copied.resize(kGroupOuts * width);
      for (int64_t i = 0; i < outs; ++i) {
        BFloat16* row = copied.data() + i * width;
        if constexpr (kHasCodes) {
          expand(params, out + i, row);
        } else {
          std::memcpy(row, weight_row(params, out + i), ins * sizeof(BFloat16));
        }
        std::memset(row + ins, 0, (width - ins) * sizeof(BFloat16));
      }
      return copied.data();
    }

    SPECDEC_LINEAR_TARGET static void expand(const LinearParams& params, int64_t out,
                                             BFloat16* row) {
      alignas(kStepBytes) float weights[kManyBlock];
      for (int64_t in = 0; in < params.in_features; in += kManyBlock) {
        const int64_t count = std::min(kManyBlock, params.in_features - in);
        expand_codes<F>({params, out, 1, in, count, params.weight_stride}, weights, kManyBlock);
        for (int64_t i = 0; i < count; i += kStep) Tiles::round(weights + i, row + in + i);
      }
    }

    int64_t out;
    int64_t outs;
    int64_t steps;
    int64_t stride;  // of weight rows, bytes
    const BFloat16* tiles[kGroupTiles];
    alignas(kStepBytes) float bias[kGroupOuts] = {};
  };

  // Prefetches the next group of weights into L2, some lines in each step of two blocks of input rows.
  // With one block, all steps read new weights, so that enough of them are on their way. Codes are
  // prefetched where they are expanded.
  class Prefetch {
   public:
    Prefetch(const ManyRowsPass& pass, int64_t out, int64_t end_out) {
      const LinearParams& params = pass.params;
      if (kHasCodes || out >= end_out) return;
      next_ = weight_row(params, out);
      end_ = weight_row(params, std::min(end_out, out + kGroupOuts));
      const int64_t steps = pass.rows / kTile * num_steps(params.in_features);
      const int64_t lines = kGroupOuts * params.weight_stride / kLine;
      lines_per_step_ = lines / std::max<int64_t>(1, steps) + 1;
    }

    SPECDEC_LINEAR_INLINE void step() {
      for (int64_t i = 0; i < lines_per_step_ && next_ < end_; ++i, next_ += kLine) {
        __builtin_prefetch(next_, 0, 2);
      }
    }

   private:
    static constexpr int64_t kLine = kStepBytes / sizeof(BFloat16);
    const BFloat16* next_ = nullptr;
    const BFloat16* end_ = nullptr;
    int64_t lines_per_step_ = 0;
  };

  // The packed inputs of the input rows that are multiplied at a time.
  struct Inputs {
    const float* words;  // of the first block
    int64_t columns;
    int64_t block_words;
  };

  // Multiplies up to two blocks of input rows with the group.
  SPECDEC_LINEAR_TARGET static void run_rows(Tiles& tiles, const ManyRowsPass& pass,
                                             const Group& group, int64_t row, int64_t rows,
                                             Prefetch& prefetch) {
    const int64_t words = block_words(pass.rows, pass.params.in_features);
    const Inputs inputs{pass.inputs + row / kTile * words, num_columns(pass.rows), words};
    if (rows <= kTile) {
      add_steps<1>(tiles, group, 0, inputs, prefetch);
      store_sums<1>(tiles, pass, group, 0, row, rows);
    } else {
      for (int64_t i = 0; i * kTile < group.outs; i += kGroupTiles / 2) {
        add_steps<2>(tiles, group, i, inputs, prefetch);
        store_sums<2>(tiles, pass, group, i, row, rows);
      }
    }
  }

  // Sums the products of kBlocks blocks of input rows with the weight tiles from `first` on. Tile i
  // of the sums is that of weight tile i / kBlocks and block i % kBlocks.
  template <int kBlocks>
  SPECDEC_LINEAR_TARGET static void add_steps(Tiles& tiles, const Group& group, int64_t first,
                                              const Inputs& inputs, Prefetch& prefetch) {
    tiles.template clear<0>();
    tiles.template clear<1>();
    tiles.template clear<2>();
    tiles.template clear<3>();
    for (int64_t step = 0; step < group.steps; ++step) {
      if constexpr (kBlocks == 2) prefetch.step();
      add_step<kBlocks>(tiles, group, first, inputs, step);
    }
  }

  template <int kBlocks>
  SPECDEC_LINEAR_INLINE static void add_step(Tiles& tiles, const Group& group, int64_t first,
                                             const Inputs& inputs, int64_t step) {
    const auto load_weights = [&]<int kRegister>(int i) SPECDEC_LINEAR_TARGET {
      tiles.template load<kRegister>(group.tiles[first + i] + step * kStep, group.stride);
    };
    const int64_t row_bytes = inputs.columns * sizeof(float);
    const float* words = inputs.words + step * kTile * inputs.columns;
    tiles.template load<6>(words, row_bytes);
    if constexpr (kBlocks == 1) {
      load_weights.template operator()<4>(0);
      tiles.template multiply_add<0, 4, 6>();
      load_weights.template operator()<5>(1);
      tiles.template multiply_add<1, 5, 6>();
      load_weights.template operator()<4>(2);
      tiles.template multiply_add<2, 4, 6>();
      load_weights.template operator()<5>(3);
      tiles.template multiply_add<3, 5, 6>();
    } else {
      tiles.template load<7>(words + inputs.block_words, row_bytes);
      load_weights.template operator()<4>(0);
      tiles.template multiply_add<0, 4, 6>();
      tiles.template multiply_add<1, 4, 7>();
      load_weights.template operator()<5>(1);
      tiles.template multiply_add<2, 5, 6>();
      tiles.template multiply_add<3, 5, 7>();
    }
  }

  // Writes the outputs of add_steps<kBlocks>, for `rows` input rows from `row` on.
  template <int kBlocks>
  SPECDEC_LINEAR_TARGET static void store_sums(Tiles& tiles, const ManyRowsPass& pass,
                                               const Group& group, int64_t first, int64_t row,
                                               int64_t rows) {
    alignas(kStepBytes) float sums[kGroupTiles][kTile][kTile];
    tiles.template store<0>(sums[0], kStepBytes);
    tiles.template store<1>(sums[1], kStepBytes);
    tiles.template store<2>(sums[2], kStepBytes);
    tiles.template store<3>(sums[3], kStepBytes);
    for (int64_t i = 0; i < kGroupTiles; ++i) {
      const int64_t out = (first + i / kBlocks) * kTile, skipped = i % kBlocks * kTile;
      const int64_t count = std::min(kTile, group.outs - out);
      if (count <= 0) break;
      alignas(kStepBytes) BFloat16 rounded[kTile][kTile];
      Tiles::round_outputs(sums[i], group.bias + out, rounded);
      BFloat16* output = static_cast<BFloat16*>(pass.params.output) +
                         (pass.first_row + row + skipped) * pass.params.output_stride + group.out +
                         out;
      for (int64_t r = 0; r < std::min(kTile, rows - skipped); ++r) {
        if (count == kTile) {  // a size that compilers know takes no call
          std::memcpy(output, rounded[r], sizeof(rounded[r]));
        } else {
          std::memcpy(output, rounded[r], count * sizeof(BFloat16));
        }
        output += pass.params.output_stride;
      }
    }
  }
};

// Replaces those of a format's products of bfloat16 that matrix units compute: all of weights, and those
// of many rows and codes. `F` is the format of float32.
template <class Tiles, class F>
void use_matrix_units(ProductKind kind, Products& products) {
  const auto use = [&]<class Kernel>() {
    products.packed_size = Kernel::packed_size;
    products.pack_inputs = Kernel::pack_inputs;
    products.many_rows = Kernel::run;
  };
  if (kind == ProductKind::kRows) {
    use.template operator()<MatrixUnitsKernel<Tiles, F, ProductKind::kRows>>();
    products.linear = nullptr;
  } else if (kind != ProductKind::kColumns) {
    use.template operator()<MatrixUnitsKernel<Tiles, F, ProductKind::kFloatCodes>>();
  }
}

}  // namespace specdec::cpu
