// The loops of `linear` that multiply codes as integers (linear.h), compiled for each instruction
// set. A format of linear_kernel.h with float32 elements also has
//
//   Words, Integers                   32 / kParts numbers of 16 bits, 16 / kParts of 32 bits
//   kMaxIntegerRows                   largest number of input rows in a register block
//   num_integer_outs(r)               weight rows in a register block of r input rows
//   largest_magnitude(p)              of 64 inputs, as the bits of a float32
//   pack_integers(p, up, half, unit)  writes p[0:64] * up as integers to half of unit.numbers, and
//                                     their sums
//   split_bytes(codes, split)         the codes of a part as Words[4] in the order of
//   split_nibbles(codes, split)       IntegerInputs
//   zero_integers(), load_words(p), load_integers(p)
//   add_products(sums, words, words)  adds two neighbouring products to each sum
//   to_floats(integers)               an Operand
//   spread(p)                         p[0] four times, p[1] four times, ...
//   multiply(vector, vector)
//
// A part is the codes of 128 / kParts inputs.
#pragma once

#include <vector>

#include "codes_kernel.h"

namespace specdec::cpu {

constexpr int64_t kUnitBlocks = kIntegerInputs / kCodeBlock;

// `Stored` is the type of inputs, biases and outputs.
template <class F, class Stored>
class IntegersKernel {
 public:
  static constexpr int64_t kMaxRows = F::kMaxIntegerRows;

  static constexpr Packing packing() {
    return {kIntegerInputs, sizeof(IntegerInputs) / kStepBytes, pack};
  }

  // Packs the input rows of blocks that begin at `first_row`.
  static void pack(const LinearParams& params, int64_t first_row, const RowBlocks& blocks,
                   std::byte* packed) {
    IntegerInputs* units = reinterpret_cast<IntegerInputs*>(packed);
    const int64_t count = packing().num_units(params.in_features);
    for_each_packed_row(blocks, [&](int64_t row, int64_t first, int64_t rows) {
      pack_row(params, first_row + row, units + first * count + row - first, rows);
    });
  }

  static void run(const LinearPass& pass, int64_t first_out, int64_t end_out) {
    constexpr auto kRows = std::make_index_sequence<F::kMaxIntegerRows>();
    const WeightCodes& codes = pass.params.codes;
    if (codes.bits == 8) {
      codes.has_offsets ? run_kind<CodeKind::kBytes, true>(pass, first_out, end_out, kRows)
                        : run_kind<CodeKind::kBytes, false>(pass, first_out, end_out, kRows);
    } else {
      codes.has_offsets ? run_kind<CodeKind::kNibbles, true>(pass, first_out, end_out, kRows)
                        : run_kind<CodeKind::kNibbles, false>(pass, first_out, end_out, kRows);
    }
  }

 private:
  using Integers = typename F::Integers;
  using Vector = typename F::Vector;
  static constexpr int kParts = F::kParts;
  static constexpr int64_t kShared = 64;  // inputs with one exponent
  static constexpr int64_t kFilled = 8;   // numbers of a table that are written at a time

  // Packs an input row as units that are `stride` apart.
  SPECDEC_LINEAR_TARGET static void pack_row(const LinearParams& params, int64_t row,
                                             IntegerInputs* units, int64_t stride) {
    const int64_t ins = params.in_features, count = packing().num_units(ins);
    const Stored* input = static_cast<const Stored*>(params.input) + input_offset(params, row);
    for (int64_t in = 0; in < count * kIntegerInputs; in += kShared) {
      Stored padded[kShared] = {};
      const Stored* own = input + in;
      if (in + kShared > ins) {
        std::memcpy(padded, own, std::max<int64_t>(ins - in, 0) * sizeof(Stored));
        own = padded;
      }
      const int64_t half = in / kShared % 2;
      pack_shared(own, half, units[in / kIntegerInputs * stride]);
    }
    if (params.codes.bits == 8 || params.codes.has_offsets) return;
    for (int64_t i = 0; i < count; ++i) {
      for (int32_t& sum : units[i * stride].sums) sum *= -8;
    }
  }

  // Packs 64 inputs as the first or second half of a unit.
  SPECDEC_LINEAR_INLINE static void pack_shared(const Stored* inputs, int64_t half,
                                                IntegerInputs& unit) {
    const SharedExponent shared(F::largest_magnitude(inputs), 15);
    std::fill_n(unit.scales + half * (kLanes / 2), kLanes / 2, shared.down);
    F::pack_integers(inputs, shared.up, half, unit);
  }

  // A number for each block of kCodeBlock inputs of a tile's weight rows: scales and offsets,
  // zeros in blocks that do not exist. Those of a weight row and the next are `stride` apart, whole units.
  struct Table {
    const float* scales;
    const float* offsets;
    int64_t stride;
  };

  template <CodeKind kKind, bool kHasOffsets, size_t... kIndex>
  static void run_kind(const LinearPass& pass, int64_t first_out, int64_t end_out,
                       std::index_sequence<kIndex...>) {
    using RowsFunction = void (*)(const LinearPass&, int64_t first_out, int64_t end_out);
    static constexpr RowsFunction kFunctions[] = {run_rows<kKind, kHasOffsets, kIndex + 1>...};
    kFunctions[pass.blocks.largest - 1](pass, first_out, end_out);
  }

  // Multiplies blocks of kRows input rows, or one less, with weight rows [first_out, end_out).
  template <CodeKind kKind, bool kHasOffsets, int kRows>
  static void run_rows(const LinearPass& pass, int64_t first_out, int64_t end_out) {
    for_each_tile<kRows <= F::kSpreadCodeRows, F::num_integer_outs(kRows)>(
        first_out, end_out, [&]<int kOuts>(const OutTile& tile) {
          run_tile<kKind, kHasOffsets, kRows, kOuts>(pass, tile);
        });
  }

  template <CodeKind kKind, bool kHasOffsets, int kRows, int kOuts>
  SPECDEC_LINEAR_TARGET static void run_tile(const LinearPass& pass, const OutTile& tile) {
    thread_local std::vector<float> numbers;
    const int64_t stride = packing().num_units(pass.params.in_features) * kUnitBlocks;
    numbers.resize(std::max<size_t>(numbers.size(), 2 * kTileOuts * stride + kFilled));
    const Table table{numbers.data(), numbers.data() + kTileOuts * stride, stride};
    spread_groups<kOuts>(pass.params, tile, stride, numbers.data());
    for_each_row_block<kRows>(pass.blocks, [&]<int kOwnRows>(int64_t row) {
      run_block<kKind, kHasOffsets, kOwnRows, kOuts>(pass, row, tile, table);
    });
  }

  // Multiplies a block of kRows input rows with a tile, in a function of its own (linear_kernel.h).
  template <CodeKind kKind, bool kHasOffsets, int kRows, int kOuts>
  __attribute__((noinline)) SPECDEC_LINEAR_TARGET static void run_block(const LinearPass& pass,
                                                                        int64_t row,
                                                                        const OutTile& tile,
                                                                        Table table) {
    for (int64_t i = 0; i < tile.count; ++i) {
      multiply<kKind, kHasOffsets, kRows, kOuts>(pass, row, tile.block(i), table);
      table.scales += kOuts * table.stride;
      table.offsets += kOuts * table.stride;
    }
  }

  // Fills the table of a tile.
  template <int kOuts>
  SPECDEC_LINEAR_INLINE static void spread_groups(const LinearParams& params, const OutTile& tile,
                                                  int64_t stride, float* numbers) {
    const WeightCodes& codes = params.codes;
    if (codes.has_offsets) {
      const float* pairs = static_cast<const float*>(codes.scales);
      spread<kOuts, 2>(params, tile, stride, pairs, numbers);
      spread<kOuts, 2>(params, tile, stride, pairs + 1, numbers + kTileOuts * stride);
    } else if (codes.scale_type == FloatType::kFloat32) {
      spread<kOuts, 1>(params, tile, stride, static_cast<const float*>(codes.scales), numbers);
    } else {
      spread<kOuts, 1>(params, tile, stride, static_cast<const BFloat16*>(codes.scales), numbers);
    }
  }

  // Writes stored[kStep g] for each block of group g, of all groups of a tile's weight rows, and zeros behind
  // the last block of each.
  template <int kOuts, int kStep, typename T>
  SPECDEC_LINEAR_INLINE static void spread(const LinearParams& params, const OutTile& tile,
                                           int64_t stride, const T* stored, float* numbers) {
    const int64_t groups = params.codes.groups;
    const int64_t blocks = (params.in_features + kCodeBlock - 1) / kCodeBlock;
    const int64_t each = groups == 1 ? blocks : params.codes.group_size / kCodeBlock;
    for (int64_t out = 0; out < tile.count * kOuts; ++out, numbers += stride) {
      const T* own = stored + tile.block(out / kOuts).at(out % kOuts) * groups * kStep;
      if (each == 1) {
        for (int64_t i = 0; i < groups; ++i) numbers[i] = to_float(own[i * kStep]);
      } else {
        for (int64_t i = 0; i < groups; ++i) {
          const float value = to_float(own[i * kStep]);
          const int64_t end = std::min(blocks, (i + 1) * each);
          // What is beyond the end is overwritten, or unused.
          for (int64_t b = i * each; b < end; b += kFilled) {
            std::fill_n(numbers + b, kFilled, value);
          }
        }
      }
      // Compilers make a call of std::fill, which takes as long as the rest.
      SPECDEC_UNROLL for (int64_t i = 1; i < kUnitBlocks; ++i) {
        if (blocks + i <= stride) numbers[stride - i] = 0.0f;
      }
    }
  }

  template <CodeKind kKind, bool kHasOffsets, int kRows, int kOuts>
  SPECDEC_LINEAR_INLINE static void multiply(const LinearPass& pass, int64_t row,
                                             const OutBlock& outs, const Table& table) {
    using Own = Codes<F, kKind>;
    constexpr int64_t kUnitBytes = kIntegerInputs * Own::kBits / 8;
    constexpr int64_t kPartIns = kIntegerInputs / kParts, kPartBytes = kUnitBytes / kParts;
    const LinearParams& params = pass.params;
    const int64_t ins = params.in_features, units = packing().num_units(ins);
    const IntegerInputs* inputs = reinterpret_cast<const IntegerInputs*>(pass.inputs) + row * units;
    const uint8_t* rows[kOuts];
    SPECDEC_UNROLL for (int i = 0; i < kOuts; ++i) rows[i] = Own::row(params, outs.at(i));
    const int64_t next = kOuts * params.weight_stride;
    // Codes behind those of a row are multiplied by zeros.
    const int64_t blocks = (ins + kCodeBlock - 1) / kCodeBlock;
    const uint8_t* end_of_codes = Own::row(params, params.out_features - 1) +
                                  (Own::kBits == 8 ? ins : blocks * kCodeBlock / 2);
    BlockSums<F, kRows, kOuts> sums;
    clear_block<F, kRows, kOuts>(sums);
    int64_t in = 0;
    for (; in + kIntegerInputs <= ins; in += kIntegerInputs) {
      const int64_t byte = in * Own::kBits / 8, block = in / kCodeBlock;
      SPECDEC_UNROLL for (int part = 0; part < kParts; ++part) {
        SPECDEC_UNROLL for (int i = 0; i < kOuts; ++i) {
          const uint8_t* codes = rows[i] + byte + part * kPartBytes;
          if constexpr (kPrefetchesCodes<F, kRows, kOuts>) {
            // The lines that begin in this part, which is a half, one or two of them.
            SPECDEC_UNROLL for (int64_t at = part * kPartBytes % kStepBytes; at < kPartBytes;
                                at += kStepBytes) {
              __builtin_prefetch(codes + at + next, 0, 2);
            }
          }
          add_part<kKind, kHasOffsets, kRows>(
              codes, table, i * table.stride + block + part * kPartIns / kCodeBlock,
              inputs + in / kIntegerInputs * kRows, part, i, sums);
        }
      }
    }
    SPECDEC_UNROLL for (int part = 0; part < kParts; ++part, in += kPartIns) {
      if (in >= ins) break;
      const int64_t byte = in * Own::kBits / 8, block = in / kCodeBlock;
      const IntegerInputs* last = inputs + in / kIntegerInputs * kRows;
      SPECDEC_UNROLL for (int i = 0; i < kOuts; ++i) {
        const uint8_t* codes = rows[i] + byte;
        uint8_t padded[kPartBytes] = {};
        if (codes + kPartBytes > end_of_codes) {
          std::memcpy(padded, codes, end_of_codes - codes);
          codes = padded;
        }
        add_part<kKind, kHasOffsets, kRows>(codes, table, i * table.stride + block, last, part, i,
                                            sums);
      }
    }
    finish_block<F, Stored, kRows, kOuts>(params, pass.first_row + row, outs, sums);
  }

  // Multiplies a part of weight row i with all input rows. Its first block has number `number` of the
  // table.
  template <CodeKind kKind, bool kHasOffsets, int kRows, class Sums>
  SPECDEC_LINEAR_INLINE static void add_part(const uint8_t* codes, const Table& table,
                                             int64_t number, const IntegerInputs* inputs, int part,
                                             int i, Sums& sums) {
    constexpr int64_t kPartLanes = kLanes / kParts;
    typename F::Words split[4];
    if constexpr (kKind == CodeKind::kBytes) {
      F::split_bytes(codes, split);
    } else {
      F::split_nibbles(codes, split);
    }
    const Vector scale = F::spread(table.scales + number);
    // Otherwise compilers keep many inputs in registers for the next weight row, and the sums in memory.
    if constexpr (kRows > 3) asm("" : "+r"(inputs));
    SPECDEC_UNROLL for (int r = 0; r < kRows; ++r) {
      const IntegerInputs& input = inputs[r];
      const Integers of_inputs = F::load_integers(input.sums + part * kPartLanes);
      Integers dots = kKind == CodeKind::kNibbles && !kHasOffsets ? of_inputs : F::zero_integers();
      SPECDEC_UNROLL for (int k = 0; k < 4; ++k) {
        F::add_products(dots, split[k], F::load_words(input.numbers[k] + part * 2 * kPartLanes));
      }
      const Vector shared = F::load_lanes(input.scales + part * kPartLanes);
      F::multiply_add(sums[r][i][part], F::multiply(scale, shared), F::to_floats(dots));
      if constexpr (kHasOffsets) {
        const Vector offset = F::spread(table.offsets + number);
        F::multiply_add(sums[r][i][part], F::multiply(offset, shared), F::to_floats(of_inputs));
      }
    }
  }
};

}  // namespace specdec::cpu
