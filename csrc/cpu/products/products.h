// The matrix products of `linear` and of panels, as linear.cpp, many_rows.cpp and panels.cpp call
// them. Their loops, in loops/, are compiled for each instruction set.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <span>

#include "specdec/core/float_types.h"
#include "specdec/cpu/isa.h"
#include "specdec/linear.h"

namespace specdec::cpu {

constexpr int64_t kStepBytes = 64;  // of a row, multiplied at a time
constexpr int64_t kLanes = 16;
constexpr int64_t kTileOuts = 24;
constexpr int64_t kPassRows = 32;
constexpr int64_t kInputBytes = 24576;  // a block's chunk of inputs, which stay in L1

// How a matrix is stored and multiplied. Inputs of rows are packed in the type of the product. Codes
// and columns are float32 weights to the loops, with inputs in float32. But codes are integers to few
// rows of bfloat16, and bfloat16 weights to many (linear.h).
enum class ProductKind {
  kRows,  // a row has the weights of an output
  kFloatCodes,
  kIntegerCodes,
  kSharedCodes,  // the same, with scales that 64 inputs share
  kColumns,      // transposed: a row has the weights of an input
};

inline ProductKind product_kind(const LinearParams& params) {
  if (params.codes.bits == 0)
    return params.is_transposed ? ProductKind::kColumns : ProductKind::kRows;
  const bool are_floats = params.type == FloatType::kFloat32 || params.codes.levels;
  if (are_floats) return ProductKind::kFloatCodes;
  const bool are_shared = params.codes.groups == 1 || params.codes.group_size % 64 == 0;
  return are_shared ? ProductKind::kSharedCodes : ProductKind::kIntegerCodes;
}

inline bool are_integers(ProductKind kind) {
  return kind == ProductKind::kIntegerCodes || kind == ProductKind::kSharedCodes;
}

// 128 inputs of a row as integers of 16 bits (linear.h). Element [2 h + p][16 c + 8 b + j] of
// `numbers` is input 64 c + 32 b + 16 p + 2 j + h, so that vectors of the codes' even and odd bytes
// have the same order.
constexpr int64_t kIntegerInputs = 128;
struct alignas(kStepBytes) IntegerInputs {
  int16_t numbers[4][kIntegerInputs / 4];
  int32_t sums[kLanes];  // of a lane's numbers, times -8 for codes that are less 8
  float scales[kLanes];  // 2^(e - 15) of a lane's 64 inputs, or NaN
};

// How inputs that share an exponent become integers of so many bits and a sign, and back (linear.h).
struct SharedExponent {
  float up;    // 2^(bits - e); 0 if an input is not finite
  float down;  // 2^(e - bits), or NaN

  // `largest` is the largest magnitude of the inputs, as the bits of a float32.
  SharedExponent(int32_t largest, int32_t bits) {
    // float32 has exponents with a bias of 127; e is one more than that of the largest.
    const int32_t biased = std::max(largest >> 23, 15);
    const bool is_finite = biased < 255;
    up = bits_to_float((is_finite ? 253 + bits - biased : 0) << 23);
    down = is_finite ? bits_to_float((biased + 1 - bits) << 23) : NAN;
  }
};

// Up to 256 inputs of a row as integers for panels (panels.h), in the order of the loops.
struct alignas(kStepBytes) PanelIntegers {
  static constexpr int64_t kInputs = 256;
  static int64_t count(int64_t ins) { return (ins + kInputs - 1) / kInputs; }

  int16_t numbers[kInputs];
  float scale;  // 2^(e - 14) or NaN
};

// Rows in the smallest number of blocks of at most `most` rows. Blocks are as even as possible: each
// has `largest` rows or one less.
struct RowBlocks {
  int64_t rows;
  int64_t count;
  int64_t largest;

  RowBlocks(int64_t rows, int64_t most)
      : rows(rows), count((rows + most - 1) / most), largest((rows + count - 1) / count) {}

  // The first row of block i, or the end of the last block.
  int64_t begin(int64_t i) const { return i * rows / count; }
  int64_t size(int64_t i) const { return begin(i + 1) - begin(i); }
};

// Calls pack(row, first, rows) for each input row of blocks, with the first row of its block and the number
// of rows there.
template <typename Pack>
void for_each_packed_row(const RowBlocks& blocks, const Pack& pack) {
  for (int64_t i = 0; i < blocks.count; ++i) {
    const int64_t first = blocks.begin(i), rows = blocks.size(i);
    for (int64_t row = first; row < first + rows; ++row) pack(row, first, rows);
  }
}

// How the inputs of a row are packed, with zeros beyond in_features.
struct Packing {
  int64_t inputs;  // of a unit
  int64_t steps;   // that a unit takes
  // Packs the input rows of blocks that begin at `first_row`. Null: inputs keep their order.
  void (*pack)(const LinearParams& params, int64_t first_row, const RowBlocks& blocks,
               std::byte* packed);

  int64_t num_units(int64_t ins) const { return std::max<int64_t>(1, (ins + inputs - 1) / inputs); }
  int64_t num_steps(int64_t ins) const { return num_units(ins) * steps; }
};

// Up to kPassRows rows of a product, with the inputs in the order in which a block reads them:
// [blocks][steps][rows of the block][kStepBytes]. Integers are [blocks][units][rows of the block] of
// IntegerInputs.
// Without this copy, rows whose stride is a multiple of 4 KiB would evict each other from L1.
struct LinearPass {
  const LinearParams& params;
  int64_t first_row;
  RowBlocks blocks;
  int64_t steps;
  const std::byte* inputs;
};

constexpr int64_t kManyPassRows = 512;
constexpr int64_t kManyOuts = 32;    // weight rows that a thread takes at least
constexpr int64_t kTransposed = 8;   // rows, and words of them, that formats transpose at a time
constexpr int64_t kManyBlock = 256;  // elements of in_features that have a sum of their own

// Up to kManyPassRows rows of a product for many rows, with the inputs as `pack_inputs` writes them.
struct ManyRowsPass {
  const LinearParams& params;
  int64_t first_row;
  int64_t rows;
  const float* inputs;
};

// Products that are computed in ManyRowsPasses.
struct PassProducts {
  int64_t packed_rows;  // that a thread packs at least
  // Number of float32 that the packed inputs of a pass take.
  int64_t (*packed_size)(const LinearParams& params, int64_t rows);
  // Packs rows [begin, end) of those from params.input's `first_row` on, of `rows` in the pass. `begin`
  // is a multiple of packed_rows.
  void (*pack_inputs)(const LinearParams& params, int64_t first_row, int64_t rows, int64_t begin,
                      int64_t end, float* packed);
  // Writes the pass's rows of output[:, first_out:end_out].
  void (*run)(const ManyRowsPass& pass, int64_t first_out, int64_t end_out);
};

template <class Kernel>
PassProducts pass_products() {
  return {Kernel::kPackedRows, Kernel::packed_size, Kernel::pack_inputs, Kernel::run};
}

// Products that are computed in LinearPasses.
struct LinearProducts {
  int64_t max_rows;  // of a block
  Packing packing;
  // Writes the pass's rows of output[:, first_out:end_out].
  void (*run)(const LinearPass& pass, int64_t first_out, int64_t end_out);
};

template <class Kernel>
LinearProducts linear_products() {
  return {Kernel::kMaxRows, Kernel::packing(), Kernel::run};
}

// The products of one element type and kind on one instruction set.
struct Products {
  LinearProducts linear;
  LinearProducts halved;  // the same with inputs as halves, for more rows; null: `linear`
  // Products of `rows` contiguous input rows, packed if there is pack_panel_inputs, with one panel. The
  // products of consecutive rows are `stride` apart.
  void (*panel)(const void* panel, const void* input, int64_t rows, int64_t ins, float* values,
                int64_t stride);
  PassProducts many_rows;
  PassProducts few_rows;  // null: `linear`
  void (*pack_panel_inputs)(const void* input, int64_t rows, int64_t ins,
                            PanelIntegers* packed) = nullptr;
};

// `type` is float32 or bfloat16. Columns have only the products of many rows, and panels no scales.
Products products_baseline(FloatType type, ProductKind kind);
Products products_avx2(FloatType type, ProductKind kind);
Products products_avx512(FloatType type, ProductKind kind);

// Replaces products of bfloat16 by those of emulated matrix units.
void use_emulated_units(ProductKind kind, Products& products);

inline Products products(FloatType type, ProductKind kind) {
  Products found =
      SPECDEC_FOR_ISA(cpu_isa(), products_baseline, products_avx2, products_avx512)(type, kind);
  if (type == FloatType::kBFloat16 && matrix_units() == MatrixUnits::kEmulated) {
    use_emulated_units(kind, found);
  }
  return found;
}

// The element at which an input row starts.
inline int64_t input_offset(const LinearParams& params, int64_t row) {
  return row / params.inner_rows * params.outer_stride +
         row % params.inner_rows * params.inner_stride;
}

// The number of parts for which a thread pays, if a part multiplies `rows` input rows with `outs`
// weight rows. Fewer than four input rows count as four, because they are no faster: the weights
// have to be read.
inline int64_t product_grain(int64_t outs, int64_t ins, int64_t rows) {
  constexpr int64_t kGrain = 1 << 18;  // multiply-adds; below it, waking a thread costs more
  return kGrain / (outs * (ins + 1) * std::max<int64_t>(rows, 4)) + 1;
}

// The number of parts of `part_outs` weight rows in all products; each product begins a new part.
inline int64_t num_parts(std::span<const LinearParams> products, int64_t part_outs) {
  int64_t parts = 0;
  for (const LinearParams& each : products) {
    parts += (each.out_features + part_outs - 1) / part_outs;
  }
  return parts;
}

// Calls run(product, first_out, end_out) for the products that have some of the parts [begin, end),
// numbered through the products.
template <typename Run>
void for_each_part(std::span<const LinearParams> products, int64_t part_outs, int64_t begin,
                   int64_t end, const Run& run) {
  int64_t first = 0;
  for (const LinearParams& params : products) {
    const int64_t last = first + num_parts({&params, 1}, part_outs);
    const int64_t from = std::max(begin, first), to = std::min(end, last);
    if (from < to) {
      run(params, (from - first) * part_outs,
          std::min((to - first) * part_outs, params.out_features));
    }
    first = last;
  }
}

// The size of the largest part when `total` is divided as evenly as possible into the smallest
// number of parts of at most `limit`.
inline int64_t even_part(int64_t total, int64_t limit) {
  const int64_t parts = (total + limit - 1) / limit;
  return (total + parts - 1) / parts;
}

}  // namespace specdec::cpu
