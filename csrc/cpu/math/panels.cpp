#include "specdec/cpu/panels.h"

#include "specdec/cpu/isa.h"

#define SPECDEC_LINEAR_TARGET
#include "panel_kernel.h"

namespace specdec::cpu {
namespace {

// Number of multiply-adds below which waking a thread costs more than it saves. Fewer than kMinRows
// rows count as kMinRows, because they are no faster: the weights have to be read.
constexpr int64_t kGrain = 1 << 18;
constexpr int64_t kMinRows = 4;

PanelCode code_for_isa(FloatType type) {
#ifdef SPECDEC_X86
  switch (cpu_isa()) {
    case CpuIsa::kAvx512:
      return panel_avx512(type);
    case CpuIsa::kAvx2:
      return panel_avx2(type);
    case CpuIsa::kBaseline:
      break;
  }
#endif
  return panel_baseline(type);
}

}  // namespace

void panel_products(const PanelParams& params, const PanelVisitor& visit,
                    const ParallelFor& parallel_for) {
  const PanelCode code = code_for_isa(params.type);
  const int64_t size = element_size(params.type);
  const int64_t stride = panel_bytes(kPanelOuts, params.ins, size);  // distance of panels
  const int64_t blocks = (params.outs + params.block_outs - 1) / params.block_outs;
  for (int64_t row = 0; row < params.rows; row += kPassRows) {
    const int64_t rows = std::min(kPassRows, params.rows - row);
    const auto* input = static_cast<const std::byte*>(params.input) + row * params.ins * size;
    const int64_t work = params.block_outs * params.ins * std::max(rows, kMinRows);
    parallel_for(blocks, kGrain / work + 1, [&](int64_t begin, int64_t end) {
      alignas(64) float values[kPassRows * kMaxBlockOuts];
      for (int64_t block = begin; block < end; ++block) {
        const int64_t first = block * params.block_outs;
        const int64_t outs = std::min(params.block_outs, params.outs - first);
        for (int64_t out = 0; out < outs; out += kPanelOuts) {
          code(static_cast<const std::byte*>(params.panels) + (first + out) / kPanelOuts * stride,
               input, rows, params.ins, values + out, params.block_outs);
        }
        visit({row, rows, first, outs, begin * params.block_outs, values});
      }
    });
  }
}

}  // namespace specdec::cpu
