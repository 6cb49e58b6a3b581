// CPU op linear. Few rows: passes of up to 32 rows; a pass is one parallel loop over tiles of output
// columns. The inputs are copied into the order in which the kernels read them (linear_kernel.h);
// the weights are not copied. Many rows, transposed weights, and matrix units: many_rows.cpp.
//
// Bits: AVX2 and AVX-512 agree, with and without vdpbf16ps, unless a bfloat16 or a partial sum is
// subnormal, which vdpbf16ps treats as zero. Matrix units have an order of their own.
// SPECDEC_CPU_ISA=baseline|avx2|avx512 forces one, without matrix units.
#include "specdec/linear.h"

#include <cstring>
#include <vector>

#include "many_rows.h"
#include "products.h"

namespace specdec::cpu {
namespace {

struct alignas(kStepBytes) Step {
  std::byte bytes[kStepBytes];
};

// The type of packed inputs that keep their order.
FloatType packed_type(const LinearParams& params) {
  return product_kind(params) == ProductKind::kRows ? params.type : FloatType::kFloat32;
}

// Returns an input row in the type of packed inputs, in `converted` if it is not stored in it.
const std::byte* packed_row(const LinearParams& params, int64_t row,
                            std::vector<float>& converted) {
  const int64_t offset = input_offset(params, row);
  if (packed_type(params) == params.type) {
    return static_cast<const std::byte*>(params.input) + offset * element_size(params.type);
  }
  const BFloat16* input = static_cast<const BFloat16*>(params.input) + offset;
  converted.resize(params.in_features);
  for (int64_t i = 0; i < params.in_features; ++i) converted[i] = to_float(input[i]);
  return reinterpret_cast<const std::byte*>(converted.data());
}

// Copies inputs into the order that LinearPass describes.
void pack(const LinearParams& params, int64_t first_row, const RowBlocks& blocks, int64_t steps,
          Step* packed) {
  thread_local std::vector<float> converted;
  const int64_t row_bytes = params.in_features * element_size(packed_type(params));
  for_each_packed_row(blocks, [&](int64_t row, int64_t first, int64_t rows) {
    const std::byte* input = packed_row(params, first_row + row, converted);
    Step* target = packed + first * steps + row - first;
    for (int64_t step = 0; step < row_bytes / kStepBytes; ++step) {
      std::memcpy(target[step * rows].bytes, input + step * kStepBytes, kStepBytes);
    }
    for (int64_t step = row_bytes / kStepBytes; step < steps; ++step) {
      const int64_t left = std::max<int64_t>(row_bytes - step * kStepBytes, 0);
      Step& last = target[step * rows];
      std::memset(last.bytes, 0, kStepBytes);
      std::memcpy(last.bytes, input + step * kStepBytes, left);
    }
  });
}

// Whether inputs are packed as halves, if they can be. Then the loops need not split them, but take twice
// the bytes. Few rows gain only where L1 holds all inputs of a block.
bool are_halved(const LinearProducts& halved, const LinearParams& params) {
  constexpr int64_t kFew = 4, kMany = 12;
  const int64_t block_bytes = halved.max_rows * params.in_features * sizeof(float);
  return params.rows >= (block_bytes <= kInputBytes ? kFew : kMany);
}

// Calls compute(pass) for passes of up to kPassRows rows.
template <typename Compute>
void for_each_pass(const LinearParams& params, const LinearProducts& code, const Compute& compute) {
  thread_local std::vector<Step> packed;
  const int64_t steps = code.packing.num_steps(params.in_features);
  for (int64_t row = 0; row < params.rows; row += kPassRows) {
    const RowBlocks blocks(std::min(kPassRows, params.rows - row), code.max_rows);
    packed.resize(std::max<size_t>(packed.size(), blocks.rows * steps));
    if (code.packing.pack) {
      code.packing.pack(params, row, blocks, packed.data()->bytes);
    } else {
      pack(params, row, blocks, steps, packed.data());
    }
    compute(LinearPass{params, row, blocks, steps, packed.data()->bytes});
  }
}

void few_rows_linears(const Products& all, std::span<const LinearParams> products,
                      const ParallelFor& parallel_for) {
  const bool halved = all.halved.run && are_halved(all.halved, products[0]);
  const LinearProducts& code = halved ? all.halved : all.linear;
  const int64_t tiles = num_parts(products, kTileOuts);
  for_each_pass(products[0], code, [&](const LinearPass& pass) {
    parallel_for(tiles, product_grain(kTileOuts, pass.params.in_features, pass.blocks.rows),
                 [&](int64_t begin, int64_t end) {
                   for_each_part(
                       products, kTileOuts, begin, end,
                       [&](const LinearParams& params, int64_t first, int64_t last) {
                         code.run({params, pass.first_row, pass.blocks, pass.steps, pass.inputs},
                                  first, last);
                       });
                 });
  });
}

}  // namespace

void linears(std::span<const LinearParams> products, const ParallelFor& parallel_for) {
  while (!products.empty()) {
    const ProductKind kind = product_kind(products[0]);
    size_t count = 1;
    while (count < products.size() && product_kind(products[count]) == kind) ++count;
    const auto run = products.first(count);
    const Products code = cpu::products(run[0].type, kind);
    const PassProducts& passes = run[0].many_rows ? code.many_rows : code.few_rows;
    if (passes.run) {
      many_rows_linears(passes, run, parallel_for);
    } else {
      few_rows_linears(code, run, parallel_for);
    }
    products = products.subspan(count);
  }
}

void linear(const LinearParams& params, const ParallelFor& parallel_for) {
  linears({&params, 1}, parallel_for);
}

}  // namespace specdec::cpu
