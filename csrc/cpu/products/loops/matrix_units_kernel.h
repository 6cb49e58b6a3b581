// The loops of `linear` for bfloat16 on matrix units, for any number of input rows. The including
// file defines SPECDEC_LINEAR_TARGET and Tiles, the registers of cpu/runtime/amx_tiles.h, which also
// have
//
//   transpose(rows, column, out, stride)   see many_rows_kernel.h
//   round_outputs(sums, bias, rows)        rows[r][o] = sums[o][r] + bias[o], for 16 of each
//   table(numbers)                         a Table of 16 numbers, rounded
//   look_up(table, block, numbers)         the numbers of a table for the codes of a block of 4 bits
//
// The left factors are 32 elements of 16 weight rows (unit_groups.h). The right ones are the same
// elements of up to 16 input rows, and packed as [blocks of 16 rows][steps of 32 elements][16 pairs][rows
// of the block]. As many rows as fit in a tile take the time of one.
//
// Loops, outermost first: groups of kGroupOuts weight rows, blocks of input rows, steps. A tile waits
// for the sums of the step before, so four are summed at a time: 64 weight rows and a block of input
// rows, or 32 and two blocks.
#pragma once

#include <vector>

#include "unit_integers_kernel.h"

namespace specdec::cpu {

template <class Tiles, class Group>
class MatrixUnitsKernel {
 public:
  static constexpr int64_t kPackedRows = kTransposed;

  static int64_t packed_size(const LinearParams& params, int64_t rows) {
    return num_blocks(rows) * block_words(rows, params.in_features);
  }

  SPECDEC_LINEAR_TARGET static void pack_inputs(const LinearParams& params, int64_t first_row,
                                                int64_t rows, int64_t begin, int64_t end,
                                                float* packed) {
    const int64_t columns = num_columns(rows), ins = params.in_features;
    const int64_t count = std::min(columns, kTransposed);  // at a time
    for (int64_t first = begin; first < end; first += count) {
      const float* inputs[kTransposed];
      for (int64_t i = 0; i < count; ++i) {  // a column beyond the last row is a copy of it
        const int64_t row = first_row + std::min(first + i, rows - 1);
        inputs[i] = reinterpret_cast<const float*>(static_cast<const BFloat16*>(params.input) +
                                                   input_offset(params, row));
      }
      float* column = packed + first / kTile * block_words(rows, ins) + first % kTile;
      const int64_t words = ins / 2, whole = words / kTransposed * kTransposed;
      if (count == 1) {
        std::memcpy(column, inputs[0], whole * sizeof(float));
      } else {
        for (int64_t word = 0; word < whole; word += kTransposed) {
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
    run_weights(tiles, pass, first_out, end_out);
    Tiles::end();
  }

 private:
  static constexpr int64_t kTile = Group::kTile;
  static constexpr int64_t kStep = Group::kStep;
  static constexpr int64_t kGroupTiles = Group::kGroupTiles;
  static constexpr int64_t kGroupOuts = Group::kGroupOuts;

  // Whole packed rows, but one row is packed as it is.
  static int64_t num_columns(int64_t rows) {
    return rows == 1 ? 1 : rows <= kTransposed ? kTransposed : kTile;
  }
  static int64_t num_blocks(int64_t rows) { return (rows + kTile - 1) / kTile; }
  static int64_t num_steps(int64_t ins) { return Group::num_steps(ins); }
  static int64_t block_words(int64_t rows, int64_t ins) {
    return num_steps(ins) * kTile * num_columns(rows);
  }

  // The packed inputs of the input rows that are multiplied at a time.
  struct Inputs {
    const float* words;  // of the first block
    int64_t columns;
    int64_t block_words;
  };

  static Inputs inputs_of(const ManyRowsPass& pass, int64_t row) {
    const int64_t words = block_words(pass.rows, pass.params.in_features);
    return {pass.inputs + row / kTile * words, num_columns(pass.rows), words};
  }

  SPECDEC_LINEAR_TARGET static void run_weights(Tiles& tiles, const ManyRowsPass& pass,
                                                int64_t first_out, int64_t end_out) {
    for (int64_t out = first_out; out < end_out; out += kGroupOuts) {
      Group group(pass, out, end_out);
      for (int64_t row = 0; row < pass.rows; row += 2 * kTile) {
        const Inputs inputs = inputs_of(pass, row);
        if (pass.rows - row <= kTile) {
          add_block(tiles, group, inputs);
          store_sums<1>(tiles, pass, group, 0, row);
          continue;
        }
        for (int64_t i = 0; i * kTile < group.outs; i += kGroupTiles / 2) {
          add_blocks(tiles, group, i, inputs);
          store_sums<2>(tiles, pass, group, i, row);
        }
      }
    }
  }

  // Sums the products of a block of input rows with one weight tile after the other: hardware
  // prefetchers can follow 16 weight rows. Register i has the sums of tile i.
  template <int kSums = 0>
  SPECDEC_LINEAR_TARGET static void add_block(Tiles& tiles, Group& group, const Inputs& inputs) {
    const int64_t row_bytes = inputs.columns * sizeof(float);
    tiles.template clear<kSums>();
    for (int64_t step = 0; step < group.steps; ++step) {
      tiles.template load<6>(inputs.words + step * kTile * inputs.columns, row_bytes);
      tiles.template load<4>(group.tile(kSums, step), group.stride);
      tiles.template multiply_add<kSums, 4, 6>();
      group.prepare_next(step);
    }
    if constexpr (kSums + 1 < kGroupTiles) {
      if ((kSums + 1) * kTile < group.outs) add_block<kSums + 1>(tiles, group, inputs);
    }
  }

  // Sums the products of two blocks of input rows with the weight tiles `first` and `first` + 1: those
  // of tile i / 2 and block i % 2 in register i.
  SPECDEC_LINEAR_TARGET static void add_blocks(Tiles& tiles, Group& group, int64_t first,
                                               const Inputs& inputs) {
    const int64_t row_bytes = inputs.columns * sizeof(float);
    clear_sums(tiles);
    for (int64_t step = 0; step < group.steps; ++step) {
      const float* words = inputs.words + step * kTile * inputs.columns;
      tiles.template load<6>(words, row_bytes);
      tiles.template load<7>(words + inputs.block_words, row_bytes);
      tiles.template load<4>(group.tile(first, step), group.stride);
      tiles.template multiply_add<0, 4, 6>();
      tiles.template multiply_add<1, 4, 7>();
      tiles.template load<5>(group.tile(first + 1, step), group.stride);
      tiles.template multiply_add<2, 5, 6>();
      tiles.template multiply_add<3, 5, 7>();
      group.prepare_next(step);
    }
  }

  // Writes the sums of kBlocks blocks of input rows, from `row` on.
  template <int kBlocks>
  SPECDEC_LINEAR_TARGET static void store_sums(Tiles& tiles, const ManyRowsPass& pass,
                                               const Group& group, int64_t first, int64_t row) {
    alignas(kStepBytes) float sums[kGroupTiles][kTile][kTile];
    store_tiles(tiles, sums, kStepBytes);
    for (int64_t i = 0; i < kGroupTiles; ++i) {
      const int64_t own_row = row + i % kBlocks * kTile;
      write_outputs<Tiles>(pass, group, sums[i], (first + i / kBlocks) * kTile, own_row,
                           std::min(kTile, pass.rows - own_row));
    }
  }
};

// Replaces those of a format's products of bfloat16 that matrix units compute: all but those of columns,
// and of few rows with some kinds of codes. `F` is the format of float32.
template <class Tiles, class F>
void use_matrix_units(ProductKind kind, Products& products) {
  if (kind == ProductKind::kRows) {
    products.many_rows = pass_products<MatrixUnitsKernel<Tiles, RowsGroup>>();
    products.few_rows = products.many_rows;
  } else if (kind != ProductKind::kColumns) {
    products.many_rows = pass_products<MatrixUnitsKernel<Tiles, RoundedGroup<Tiles, F>>>();
  }
  if (kind == ProductKind::kSharedCodes) {
    products.few_rows = pass_products<UnitIntegersKernel<Tiles, F>>();
  }
}

}  // namespace specdec::cpu
