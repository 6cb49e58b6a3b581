// The loops of `linear` that multiply codes as float32 numbers, compiled for each instruction set. A
// format of linear_kernel.h with float32 elements also has
//
//   kMaxCodeRows      largest number of input rows in a register block with codes
//   kSpreadCodeRows   largest number of input rows for which the codes of a block are far apart in memory
//   num_code_outs(r)  weight rows in a register block of r input rows
//
// and for a block of kCodeBlock inputs, in the layout of linear.h, the weights of its first or second
// half as kParts vectors:
//
//   decode_bytes<kHalf>(codes, scale, offset, weights)           codes of 8 bits
//   decode_nibbles<kHalf>(codes, scale, offset, weights)         codes of 4 bits
//   decode_levels<kHalf>(codes, levels, scale, offset, weights)  codes of 4 bits that stand for levels
//
// Weights exist in registers only. With several blocks of input rows, each block decodes them again:
// to store and load them takes as long.
#pragma once

#include <algorithm>
#include <cstring>

#include "linear_kernel.h"

namespace specdec::cpu {

// Whether a register block for kRows input rows prefetches the codes of the next one: it is not spread, or a
// single weight row.
template <class F, int kRows, int kOuts>
constexpr bool kPrefetchesCodes = kRows > F::kSpreadCodeRows || kOuts == 1;

enum class CodeKind { kBytes, kNibbles, kLevels };

// A block of codes: outputs [first_out, first_out + num_outs), inputs [first_in, first_in + num_ins).
struct CodeBlock {
  const LinearParams& params;
  int64_t first_out;
  int64_t num_outs;
  int64_t first_in;  // a multiple of kCodeBlock
  int64_t num_ins;
  int64_t next;  // bytes from an output's codes to those that are prefetched meanwhile
};

struct CodeScale {
  float scale, offset;
};

SPECDEC_LINEAR_INLINE CodeScale stored_scale(const WeightCodes& codes, int64_t group) {
  if (codes.has_offsets) {
    const float* pair = static_cast<const float*>(codes.scales) + 2 * group;
    return {pair[0], pair[1]};
  }
  const float scale = codes.scale_type == FloatType::kFloat32
                          ? static_cast<const float*>(codes.scales)[group]
                          : to_float(static_cast<const BFloat16*>(codes.scales)[group]);
  return {scale, 0.0f};
}

template <class F, CodeKind kKind>
class Codes {
 public:
  using Vector = typename F::Vector;
  static constexpr int64_t kBits = kKind == CodeKind::kBytes ? 8 : 4;
  static constexpr int64_t kLineIns = kStepBytes * 8 / kBits;

  SPECDEC_LINEAR_INLINE static const uint8_t* row(const LinearParams& params, int64_t out) {
    return static_cast<const uint8_t*>(params.weight) + out * params.weight_stride;
  }

  // The scale of a group, counted over outputs and their groups.
  SPECDEC_LINEAR_INLINE static CodeScale scale(const WeightCodes& codes, int64_t group) {
    const CodeScale stored = stored_scale(codes, group);
    if (kKind != CodeKind::kNibbles || codes.has_offsets) return stored;
    return {stored.scale, -8.0f * stored.scale};
  }

  // The codes of a block of which `count` inputs or more exist; they may be copied to `padded`.
  SPECDEC_LINEAR_INLINE static const uint8_t* whole(const uint8_t* block, int64_t count,
                                                    uint8_t (&padded)[kCodeBlock]) {
    if (kKind != CodeKind::kBytes || count >= kCodeBlock) return block;
    std::memset(padded, 0, kCodeBlock);
    std::memcpy(padded, block, count);
    return padded;
  }

  // The weights of half of a block.
  template <int kHalf>
  SPECDEC_LINEAR_INLINE static void decode(const WeightCodes& codes, const uint8_t* block,
                                           const CodeScale& scale, Vector (&weights)[F::kParts]) {
    if constexpr (kKind == CodeKind::kBytes) {
      F::template decode_bytes<kHalf>(block, scale.scale, scale.offset, weights);
    } else if constexpr (kKind == CodeKind::kNibbles) {
      F::template decode_nibbles<kHalf>(block, scale.scale, scale.offset, weights);
    } else {
      F::template decode_levels<kHalf>(block, codes.levels, scale.scale, scale.offset, weights);
    }
  }

  // Writes the weights of half of a block.
  template <int kHalf>
  SPECDEC_LINEAR_INLINE static void store(const WeightCodes& codes, const uint8_t* block,
                                          const CodeScale& scale, float* weights) {
    Vector decoded[F::kParts];
    decode<kHalf>(codes, block, scale, decoded);
    SPECDEC_UNROLL for (int part = 0; part < F::kParts; ++part) {
      F::store_lanes(decoded[part], weights + part * (kLanes / F::kParts));
    }
  }

  // Writes the weights of each output to a row of `weights`, of which there is room for a multiple
  // of kCodeBlock; what follows the last weight is undefined. Rows are `stride` apart.
  SPECDEC_LINEAR_TARGET static void expand(const CodeBlock& block, float* weights, int64_t stride) {
    const WeightCodes& codes = block.params.codes;
    const int64_t first_group = block.first_in / codes.group_size;
    const int64_t first_end = (first_group + 1) * codes.group_size - block.first_in;
    for (int64_t i = 0; i < block.num_outs; ++i) {
      const int64_t out = block.first_out + i;
      const uint8_t* codes_of_out = row(block.params, out) + block.first_in * kBits / 8;
      int64_t group = out * codes.groups + first_group, group_end = first_end;
      for (int64_t in = 0; in < block.num_ins; ++group, group_end += codes.group_size) {
        const CodeScale own = scale(codes, group);
        for (const int64_t end = std::min(group_end, block.num_ins); in < end; in += kCodeBlock) {
          const uint8_t* from = codes_of_out + in * kBits / 8;
          // The hardware prefetcher restarts with each row.
          if (in % kLineIns == 0) __builtin_prefetch(from + block.next, 0, 2);
          uint8_t padded[kCodeBlock];
          from = whole(from, block.num_ins - in, padded);
          float* target = weights + i * stride + in;
          store<0>(codes, from, own, target);
          store<1>(codes, from, own, target + kLanes);
        }
      }
    }
  }
};

// Calls function.template operator()<kind>() with the kind of these codes.
template <typename Function>
auto with_code_kind(const WeightCodes& codes, const Function& function) {
  if (codes.bits == 8) return function.template operator()<CodeKind::kBytes>();
  if (codes.levels) return function.template operator()<CodeKind::kLevels>();
  return function.template operator()<CodeKind::kNibbles>();
}

template <class F>
void expand_codes(const CodeBlock& block, float* weights, int64_t stride) {
  with_code_kind(block.params.codes,
                 [&]<CodeKind kKind>() { Codes<F, kKind>::expand(block, weights, stride); });
}

// Inputs are packed as float32; `Stored` is the type of biases and outputs.
template <class F, class Stored>
class CodesKernel {
 public:
  static constexpr int64_t kMaxRows = F::kMaxCodeRows;

  static constexpr Packing packing() { return {kCodeBlock, kCodeBlock / kLanes, nullptr}; }

  static void run(const LinearPass& pass, int64_t first_out, int64_t end_out) {
    constexpr auto kRows = std::make_index_sequence<F::kMaxCodeRows>();
    if constexpr (std::is_same_v<Stored, BFloat16>) {  // others are multiplied as integers
      run_kind<CodeKind::kLevels>(pass, first_out, end_out, kRows);
    } else {
      with_code_kind(pass.params.codes,
                     [&]<CodeKind kKind>() { run_kind<kKind>(pass, first_out, end_out, kRows); });
    }
  }

 private:
  static constexpr int kParts = F::kParts;

  template <CodeKind kKind, size_t... kIndex>
  static void run_kind(const LinearPass& pass, int64_t first_out, int64_t end_out,
                       std::index_sequence<kIndex...>) {
    using RowsFunction = void (*)(const LinearPass&, int64_t first_out, int64_t end_out);
    static constexpr RowsFunction kFunctions[] = {run_rows<kKind, kIndex + 1>...};
    kFunctions[pass.blocks.largest - 1](pass, first_out, end_out);
  }

  // Multiplies blocks of kRows input rows, or one less, with weight rows [first_out, end_out).
  template <CodeKind kKind, int kRows>
  static void run_rows(const LinearPass& pass, int64_t first_out, int64_t end_out) {
    for_each_tile<kRows <= F::kSpreadCodeRows, F::num_code_outs(kRows)>(
        first_out, end_out,
        [&]<int kOuts>(const OutTile& tile) { run_tile<kKind, kRows, kOuts>(pass, tile); });
  }

  template <CodeKind kKind, int kRows, int kOuts>
  SPECDEC_LINEAR_TARGET static void run_tile(const LinearPass& pass, const OutTile& tile) {
    for_each_row_block<kRows>(pass.blocks, [&]<int kOwnRows>(int64_t row) {
      run_block<kKind, kOwnRows, kOuts>(pass, row, tile);
    });
  }

  // Multiplies a block of kRows input rows with a tile, in a function of its own (linear_kernel.h).
  template <CodeKind kKind, int kRows, int kOuts>
  __attribute__((noinline)) SPECDEC_LINEAR_TARGET static void run_block(const LinearPass& pass,
                                                                        int64_t row,
                                                                        const OutTile& tile) {
    for (int64_t i = 0; i < tile.count; ++i) {
      multiply<kKind, kRows, kOuts>(pass, row, tile.block(i));
    }
  }

  template <CodeKind kKind, int kRows, int kOuts>
  SPECDEC_LINEAR_INLINE static void multiply(const LinearPass& pass, int64_t row,
                                             const OutBlock& outs) {
    using Own = Codes<F, kKind>;
    const LinearParams& params = pass.params;
    const WeightCodes& codes = params.codes;
    const int64_t ins = params.in_features, next = kOuts * params.weight_stride;
    const float* inputs = reinterpret_cast<const float*>(pass.inputs) + row * pass.steps * kLanes;
    const uint8_t* rows[kOuts];
    SPECDEC_UNROLL for (int i = 0; i < kOuts; ++i) rows[i] = Own::row(params, outs.at(i));
    BlockSums<F, kRows, kOuts> sums;
    clear_block<F, kRows, kOuts>(sums);
    int64_t in = 0;
    for (int64_t group = 0; in < ins; ++group) {
      CodeScale scales[kOuts];
      SPECDEC_UNROLL for (int i = 0; i < kOuts; ++i) {
        scales[i] = Own::scale(codes, outs.at(i) * codes.groups + group);
      }
      for (const int64_t end = std::min(in + codes.group_size, ins); in < end; in += kCodeBlock) {
        SPECDEC_UNROLL for (int i = 0; i < kOuts; ++i) {
          const uint8_t* block = rows[i] + in * Own::kBits / 8;
          if constexpr (kPrefetchesCodes<F, kRows, kOuts>) {
            if (in % Own::kLineIns == 0) __builtin_prefetch(block + next, 0, 2);
          }
          uint8_t padded[kCodeBlock];
          block = Own::whole(block, ins - in, padded);
          const float* step = inputs + in * kRows;
          add_half<kKind, kRows, 0>(codes, block, scales[i], step, sums, i);
          add_half<kKind, kRows, 1>(codes, block, scales[i], step + kLanes * kRows, sums, i);
        }
      }
    }
    finish_block<F, Stored, kRows, kOuts>(params, pass.first_row + row, outs, sums);
  }

  // Multiplies half of a block of weight row i; `step` is the inputs of all rows.
  template <CodeKind kKind, int kRows, int kHalf, class Sums>
  SPECDEC_LINEAR_INLINE static void add_half(const WeightCodes& codes, const uint8_t* block,
                                             const CodeScale& scale, const float* step, Sums& sums,
                                             int i) {
    typename F::Vector weights[kParts];
    Codes<F, kKind>::template decode<kHalf>(codes, block, scale, weights);
    SPECDEC_UNROLL for (int part = 0; part < kParts; ++part) {
      SPECDEC_UNROLL for (int r = 0; r < kRows; ++r) {
        const float* x = step + r * kLanes + part * (kLanes / kParts);
        F::multiply_add(sums[r][i][part], weights[part], F::load(x));
      }
    }
  }
};

}  // namespace specdec::cpu
