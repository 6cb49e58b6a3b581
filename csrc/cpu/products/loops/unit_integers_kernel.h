// The loops of `linear` that multiply codes and inputs as integers on matrix units (linear.h). Tiles and
// F are those of matrix_units_kernel.h and integers_kernel.h; Tiles also has
//
//   split_integers(inputs, up, split)   the high and the low bytes of 64 inputs * up as words of four
//                                       inputs, and the sum of the integers
//   expand_blocks<less_eight>(blocks, bytes)
//                                       the codes of two blocks of 4 bits
//   add_integers<R>(sums, scales, units, totals)
//                                       totals[o][r] += (256 * sums[o][r] + sums[o][R + r]) *
//                                       (scales[o] * units[r]), for 16 outputs and R input rows
//   add_products<R>(scales, units, inputs, totals)
//                                       totals[o][r] += inputs[r] * (scales[o] * units[r])
//
// The integer of an input has 15 bits, 256 times a high byte and a low byte, both signed. The left
// factors of a tile's product are 64 codes of 16 weight rows; bytes are read where they are. The right
// ones have a column of high bytes for each of 8 input rows (or of a single one), then one of low bytes.
//
// Loops, outermost first: groups of 64 weight rows, up to kPassRows input rows, steps, blocks of input
// rows. The sums of a block are scaled while the next one is multiplied.
#pragma once

#include <vector>

#include "integers_kernel.h"
#include "unit_groups.h"

namespace specdec::cpu {

// 64 inputs of a row.
struct SplitIntegers {
  static constexpr int64_t kInputs = 64;
  alignas(kStepBytes) int8_t high[kInputs];
  alignas(kStepBytes) int8_t low[kInputs];
  float sum;
};

// The codes of a group of kGroupOuts weight rows as bytes: where they are, or a copy in which rows and
// steps are whole. Of codes with 4 bits, the copy has two chunks of steps, which stay in L1: while one is
// multiplied, the tiles of the next are expanded one by one.
template <class Tiles, CodeKind kCodes>
struct BytesGroup : UnitGroup {
  static constexpr int64_t kStepIns = SplitIntegers::kInputs;

  SPECDEC_LINEAR_TARGET BytesGroup(const LinearParams& own, int64_t first_out, int64_t end_out)
      : UnitGroup(own, kStepIns, first_out, end_out) {
    read_scales();
    later_.set(code_row(outs), code_row(std::min(end_out - out, outs + kGroupOuts)),
               kGroupOuts * params.weight_stride, steps);
    if constexpr (kCodes == CodeKind::kNibbles) {
      copy_ = make_copy<uint8_t>(2 * kChunkLines);
      set_tiles(copy_, kChunkSteps * kStepIns);
    } else if (params.in_features % kStepIns == 0 && outs % kTile == 0) {
      set_tiles(code_row(0), params.weight_stride);
    } else {
      copy_rows(code_row(0), params.weight_stride);
    }
  }

  SPECDEC_LINEAR_INLINE const std::byte* tile(int64_t i, int64_t step) const {
    if constexpr (kCodes == CodeKind::kBytes) return UnitGroup::tile(i, step);
    return UnitGroup::tile(i, step % kChunkSteps) + chunk_place(step);
  }

  // Prepares the first steps.
  SPECDEC_LINEAR_INLINE void begin() {
    if constexpr (kCodes == CodeKind::kNibbles) {
      for (int64_t tile = 0; tile < kGroupTiles; ++tile) expand_tile(tile, 0);
    }
  }

  SPECDEC_LINEAR_INLINE void prepare_next(int64_t step) {
    if constexpr (kCodes == CodeKind::kBytes) {
      later_.prefetch();
    } else {
      const int64_t tile = step % kChunkSteps, next = step - tile + kChunkSteps;
      if (next < steps) expand_tile(tile, next);
    }
  }

  const float* scales;  // [groups, kGroupOuts], and so are offsets, if there are any
  const float* offsets;

 private:
  static constexpr int64_t kChunkSteps = kGroupTiles;
  static constexpr int64_t kChunkLines = kGroupOuts * kChunkSteps;

  SPECDEC_LINEAR_INLINE const uint8_t* code_row(int64_t i) const {
    return static_cast<const uint8_t*>(params.weight) + (out + i) * params.weight_stride;
  }

  SPECDEC_LINEAR_INLINE int64_t chunk_place(int64_t step) const {
    return step / kChunkSteps % 2 * kChunkLines * kStepBytes;
  }

  SPECDEC_LINEAR_TARGET void read_scales() {
    thread_local std::vector<float> numbers;
    const WeightCodes& codes = params.codes;
    const int64_t first = out * codes.groups, count = outs * codes.groups;
    // Transposing reads and writes up to whole blocks of groups.
    const int64_t size = (codes.groups + kTransposed) * kGroupOuts;
    numbers.resize(std::max<size_t>(numbers.size(), 3 * size));
    float* stored = numbers.data() + 2 * size;
    scales = numbers.data();
    offsets = scales + size;
    if (codes.has_offsets) {
      const float* pairs = static_cast<const float*>(codes.scales) + 2 * first;
      for (int64_t i = 0; i < count; ++i) stored[i] = pairs[2 * i + 1];
      transpose(stored, numbers.data() + size);
      for (int64_t i = 0; i < count; ++i) stored[i] = pairs[2 * i];
    } else if (codes.scale_type == FloatType::kFloat32) {
      std::copy_n(static_cast<const float*>(codes.scales) + first, count, stored);
    } else {
      const BFloat16* own = static_cast<const BFloat16*>(codes.scales) + first;
      for (int64_t i = 0; i < count; ++i) stored[i] = to_float(own[i]);
    }
    transpose(stored, numbers.data());
  }

  // [outs, groups] -> [groups, kGroupOuts]
  SPECDEC_LINEAR_INLINE void transpose(const float* stored, float* transposed) const {
    const int64_t groups = params.codes.groups;
    if (groups == 1) {
      std::copy_n(stored, outs, transposed);
      return;
    }
    for (int64_t i = 0; i < outs; i += kTransposed) {
      const float* rows_of_groups[kTransposed];
      for (int64_t j = 0; j < kTransposed; ++j) {
        rows_of_groups[j] = stored + std::min(i + j, outs - 1) * groups;
      }
      for (int64_t g = 0; g < groups; g += kTransposed) {
        Tiles::transpose(rows_of_groups, g, transposed + g * kGroupOuts + i, kGroupOuts);
      }
    }
  }

  SPECDEC_LINEAR_INLINE void expand_tile(int64_t tile, int64_t begin) const {
    params.codes.has_offsets ? expand<false>(tile, begin) : expand<true>(tile, begin);
  }

  // Expands a tile of the chunk that begins with a step. Codes beyond in_features are any ones.
  template <bool kLessEight>
  SPECDEC_LINEAR_TARGET void expand(int64_t tile, int64_t begin) const {
    constexpr int64_t kStored = kStepIns / 2;  // bytes of a step
    const int64_t first = tile * kTile, last = std::min(outs, first + kTile);
    const int64_t ins = begin * kStepIns, left = params.in_features - ins;
    const int64_t next = kGroupOuts * params.weight_stride;
    uint8_t* bytes = copy_ + first * stride + chunk_place(begin);
    const uint8_t* row = code_row(first) + ins / 2;
    for (int64_t i = first; i < last; ++i, bytes += stride, row += params.weight_stride) {
      const auto expand_step = [&](int64_t step, const uint8_t* blocks) SPECDEC_LINEAR_TARGET {
        if (step * kStored % kStepBytes == 0) __builtin_prefetch(row + next + step * kStored, 0, 2);
        Tiles::template expand_blocks<kLessEight>(blocks, bytes + step * kStepIns);
      };
      if (left >= kChunkSteps * kStepIns) {
        SPECDEC_UNROLL for (int64_t step = 0; step < kChunkSteps; ++step) {
          expand_step(step, row + step * kStored);
        }
        continue;
      }
      for (int64_t step = 0; step < left / kStepIns; ++step) {
        expand_step(step, row + step * kStored);
      }
      if (left % kStepIns > 0) {
        const int64_t step = left / kStepIns;
        uint8_t padded[kStored] = {};
        const int64_t blocks = (left % kStepIns + kCodeBlock - 1) / kCodeBlock;
        std::memcpy(padded, row + step * kStored, blocks * (kCodeBlock / 2));
        expand_step(step, padded);
      }
    }
  }

  uint8_t* copy_ = nullptr;
  LaterLines later_;  // of codes of 8 bits; those of 4 bits are prefetched where they are expanded
};

template <class Tiles, class F>
class UnitIntegersKernel {
 public:
  static constexpr int64_t kPackedRows = kTransposed;

  static int64_t packed_size(const LinearParams& params, int64_t rows) {
    const int64_t own = rows == 1 ? 1 : kBlockRows;
    return num_blocks(rows, own) * block_size(params, own);
  }

  SPECDEC_LINEAR_TARGET static void pack_inputs(const LinearParams& params, int64_t first_row,
                                                int64_t rows, int64_t begin, int64_t end,
                                                float* packed) {
    if (rows == 1) return pack_block<1>(params, first_row, 1, packed);
    for (int64_t row = begin; row < end; row += kBlockRows) {
      pack_block<kBlockRows>(params, first_row + row, std::min(kBlockRows, rows - row),
                             packed + row / kBlockRows * block_size(params, kBlockRows));
    }
  }

  SPECDEC_LINEAR_TARGET static void run(const ManyRowsPass& pass, int64_t first_out,
                                        int64_t end_out) {
    if (pass.params.codes.bits == 8) {
      run_codes<CodeKind::kBytes>(pass, first_out, end_out);
    } else {
      run_codes<CodeKind::kNibbles>(pass, first_out, end_out);
    }
  }

 private:
  static constexpr int64_t kTile = UnitGroup::kTile;
  static constexpr int64_t kBlockRows = kTransposed;
  static constexpr int64_t kStepIns = SplitIntegers::kInputs;
  static constexpr int64_t kWords = kStepIns / 4;  // of four inputs
  static constexpr int64_t kGroupTiles = UnitGroup::kGroupTiles;
  static constexpr int64_t kGroupOuts = UnitGroup::kGroupOuts;

  static int64_t num_blocks(int64_t rows, int64_t block_rows) {
    return (rows + block_rows - 1) / block_rows;
  }
  static int64_t num_steps(const LinearParams& params) {
    return (params.in_features + kStepIns - 1) / kStepIns;
  }
  static int64_t block_size(const LinearParams& params, int64_t rows) {
    return num_steps(params) * rows * (2 * kWords + 2);
  }

  // The packed inputs of a block of kRows rows.
  template <int64_t kRows, class Float>
  struct Inputs {
    Inputs(const LinearParams& params, Float* packed)
        : words(packed),
          units(words + num_steps(params) * 2 * kWords * kRows),
          sums(units + num_steps(params) * kRows) {}

    Float* words;  // [steps, words, high and low bytes, rows]
    Float* units;  // [steps, rows] 2^(e - 14), or NaN
    Float* sums;   // [steps, rows]
  };

  template <int64_t kRows>
  SPECDEC_LINEAR_TARGET static void pack_block(const LinearParams& params, int64_t first_row,
                                               int64_t rows, float* packed) {
    const Inputs<kRows, float> block(params, packed);
    for (int64_t step = 0; step < num_steps(params); ++step) {
      SplitIntegers split[kRows];
      const float* bytes[2 * kRows];
      for (int64_t r = 0; r < kRows; ++r) {  // a row beyond the last is a copy of it
        const BFloat16* input = static_cast<const BFloat16*>(params.input) +
                                input_offset(params, first_row + std::min(r, rows - 1)) +
                                step * kStepIns;
        BFloat16 padded[kStepIns] = {};
        const int64_t left = params.in_features - step * kStepIns;
        if (left < kStepIns) {
          std::memcpy(padded, input, left * sizeof(BFloat16));
          input = padded;
        }
        block.units[step * kRows + r] = split_row(input, split[r]);
        block.sums[step * kRows + r] = split[r].sum;
        bytes[r] = reinterpret_cast<const float*>(split[r].high);
        bytes[kRows + r] = reinterpret_cast<const float*>(split[r].low);
      }
      float* words = block.words + step * kWords * 2 * kRows;
      for (int64_t word = 0; word < kWords; word += kTransposed) {
        float* own = words + word * 2 * kRows;
        if constexpr (kRows == 1) {
          for (int64_t i = 0; i < kTransposed; ++i) {
            std::memcpy(own + 2 * i, bytes[0] + word + i, sizeof(float));
            std::memcpy(own + 2 * i + 1, bytes[1] + word + i, sizeof(float));
          }
        } else {
          static_assert(kRows == kTransposed);
          Tiles::transpose(bytes, word, own, 2 * kRows);
          Tiles::transpose(bytes + kRows, word, own + kRows, 2 * kRows);
        }
      }
    }
  }

  // Splits 64 inputs; returns their unit.
  SPECDEC_LINEAR_INLINE static float split_row(const BFloat16* inputs, SplitIntegers& split) {
    const SharedExponent shared(F::largest_magnitude(inputs), 14);
    if (shared.up == 0.0f) {
      std::memset(&split, 0, sizeof(split));
    } else {
      Tiles::split_integers(inputs, shared.up, split);
    }
    return shared.down;
  }

  template <CodeKind kCodes>
  SPECDEC_LINEAR_TARGET static void run_codes(const ManyRowsPass& pass, int64_t first_out,
                                              int64_t end_out) {
    const int64_t columns = 2 * (pass.rows == 1 ? 1 : kBlockRows);
    Tiles tiles(columns);
    Tiles::begin(columns);
    for (int64_t out = first_out; out < end_out; out += kGroupOuts) {
      BytesGroup<Tiles, kCodes> group(pass.params, out, end_out);
      if (pass.rows == 1) {
        multiply<1>(tiles, pass, group, 0, 1);
        continue;
      }
      for (int64_t row = 0; row < pass.rows; row += kPassRows) {
        multiply<kBlockRows>(tiles, pass, group, row, std::min(kPassRows, pass.rows - row));
      }
    }
    Tiles::end();
  }

  // The sums of a step of the group.
  template <int64_t kRows>
  struct Sums {
    alignas(kStepBytes) int32_t tiles[kGroupTiles][kTile * 2 * kRows];
  };

  // The outputs of a group for a block of input rows, before rounding.
  template <int64_t kRows>
  struct Totals {
    alignas(kStepBytes) float tiles[kGroupTiles][kTile * kRows];
  };

  template <int64_t kRows, class Group>
  SPECDEC_LINEAR_TARGET static void multiply(Tiles& tiles, const ManyRowsPass& pass, Group& group,
                                             int64_t row, int64_t rows) {
    using Block = Inputs<kRows, const float>;
    const LinearParams& params = pass.params;
    const int64_t size = block_size(params, kRows), blocks = num_blocks(rows, kRows);
    const float* first = pass.inputs + row / kRows * size;
    Totals<kRows> totals[kRows == 1 ? 1 : kPassRows / kRows];
    std::memset(totals, 0, blocks * sizeof(totals[0]));
    Sums<kRows> sums[2];
    const int64_t count = group.steps * blocks;
    group.begin();
    // In each round, a block of a step is multiplied, and the one before is scaled.
    int64_t step = 0, block = 0, last_step = 0, last_block = 0;
    for (int64_t round = 0; round <= count; ++round) {
      if (round < count) {
        sum_step(tiles, group, Block(params, first + block * size), step, sums[round % 2]);
        if (block == 0) group.prepare_next(step);
      }
      if (round > 0) {
        add_step(group, Block(params, first + last_block * size), last_step, sums[(round + 1) % 2],
                 totals[last_block]);
      }
      last_step = step;
      last_block = block;
      if (++block == blocks) {
        block = 0;
        ++step;
      }
    }
    for (block = 0; block < blocks; ++block) {
      alignas(kStepBytes) float finished[kTile][kTile] = {};
      for (int64_t i = 0; i < kGroupTiles; ++i) {
        for (int64_t o = 0; o < kTile; ++o) {
          std::memcpy(finished[o], totals[block].tiles[i] + o * kRows, kRows * sizeof(float));
        }
        write_outputs<Tiles>(pass, group, finished, i * kTile, row + block * kRows,
                             std::min(kRows, rows - block * kRows));
      }
    }
  }

  template <int64_t kRows, class Group>
  SPECDEC_LINEAR_INLINE static void sum_step(Tiles& tiles, const Group& group,
                                             const Inputs<kRows, const float>& inputs, int64_t step,
                                             Sums<kRows>& sums) {
    constexpr int64_t kRowWords = 2 * kRows, kRowBytes = kRowWords * sizeof(float);
    clear_sums(tiles);
    tiles.template load<6>(inputs.words + step * kWords * kRowWords, kRowBytes);
    tiles.template load<4>(group.tile(0, step), group.stride);
    tiles.template add_bytes<0, 4, 6>();
    tiles.template load<5>(group.tile(1, step), group.stride);
    tiles.template add_bytes<1, 5, 6>();
    tiles.template load<4>(group.tile(2, step), group.stride);
    tiles.template add_bytes<2, 4, 6>();
    tiles.template load<5>(group.tile(3, step), group.stride);
    tiles.template add_bytes<3, 5, 6>();
    store_tiles(tiles, sums.tiles, kRowBytes);
  }

  // Adds the scaled sums of a step.
  template <int64_t kRows, class Group>
  SPECDEC_LINEAR_INLINE static void add_step(const Group& group,
                                             const Inputs<kRows, const float>& inputs, int64_t step,
                                             const Sums<kRows>& sums, Totals<kRows>& totals) {
    const WeightCodes& codes = group.params.codes;
    const float* units = inputs.units + step * kRows;
    const int64_t first = codes.groups == 1 ? 0 : step * kStepIns / codes.group_size * kGroupOuts;
    SPECDEC_UNROLL for (int64_t i = 0; i < kGroupTiles; ++i) {
      const int64_t own = first + i * kTile;
      Tiles::template add_integers<kRows>(sums.tiles[i], group.scales + own, units,
                                          totals.tiles[i]);
      if (codes.has_offsets) {
        Tiles::template add_products<kRows>(group.offsets + own, units, inputs.sums + step * kRows,
                                            totals.tiles[i]);
      }
    }
  }
};

}  // namespace specdec::cpu
