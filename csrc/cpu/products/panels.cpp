#include "specdec/cpu/panels.h"

#include <vector>

#include "products.h"

namespace specdec::cpu {

void panel_products(const PanelParams& params, const PanelVisitor& visit,
                    const ParallelFor& parallel_for) {
  thread_local std::vector<PanelIntegers> packed;
  const bool are_codes = params.scales != nullptr;
  const Products code =
      products(params.type, are_codes ? ProductKind::kIntegerCodes : ProductKind::kRows);
  const int64_t size = element_size(params.type);
  // Distance of panels.
  const int64_t stride = panel_bytes(kPanelOuts, params.ins, are_codes ? 1 : size);
  const int64_t blocks = (params.outs + params.block_outs - 1) / params.block_outs;
  for (int64_t row = 0; row < params.rows; row += kPassRows) {
    const int64_t rows = std::min(kPassRows, params.rows - row);
    const void* input = static_cast<const std::byte*>(params.input) + row * params.ins * size;
    if (are_codes) {
      packed.resize(rows * PanelIntegers::count(params.ins));
      code.pack_panel_inputs(input, rows, params.ins, packed.data());
      input = packed.data();
    }
    const int64_t grain = product_grain(params.block_outs, params.ins, rows);
    parallel_for(blocks, grain, [&](int64_t begin, int64_t end) {
      alignas(64) float values[kPassRows * kMaxBlockOuts];
      for (int64_t block = begin; block < end; ++block) {
        const int64_t first = block * params.block_outs;
        const int64_t outs = std::min(params.block_outs, params.outs - first);
        for (int64_t out = 0; out < outs; out += kPanelOuts) {
          code.panel(
              static_cast<const std::byte*>(params.panels) + (first + out) / kPanelOuts * stride,
              input, rows, params.ins, values + out, params.block_outs);
        }
        for (int64_t r = 0; are_codes && r < rows; ++r) {
          float* sums = values + r * params.block_outs;
          for (int64_t out = 0; out < outs; ++out) sums[out] *= params.scales[first + out];
        }
        visit({row, rows, first, outs, begin * params.block_outs, values});
      }
    });
  }
}

}  // namespace specdec::cpu
