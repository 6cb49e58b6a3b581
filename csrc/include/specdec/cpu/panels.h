// Products with weights that were laid out for few input rows, in panels of kPanelOuts outputs:
//
//   [ceil(outs / kPanelOuts)][ceil(ins / unit)][kPanelOuts][unit], zeros where there is no weight
//
// with a unit of four bytes, one float32 or two bfloat16. A panel is one stream of memory, whatever
// the number of rows, and its outputs are the lanes of vectors: no sum over lanes follows.
//
// Every output is summed in one order, in float32, with fused multiply-add: over the units in
// order, in each of bfloat16 the second element before the first, as vdpbf16ps does. So a row of
// the result is the same bits whatever rows are computed with it. As for `linear`, a baseline
// without fused multiply-add has bits of its own.
#pragma once

#include "specdec/core/float_types.h"
#include "specdec/core/parallel.h"

namespace specdec::cpu {

constexpr int64_t kPanelOuts = 32;
constexpr int64_t kPanelUnitBytes = 4;

inline int64_t num_panels(int64_t outs) { return (outs + kPanelOuts - 1) / kPanelOuts; }

inline int64_t panel_bytes(int64_t outs, int64_t ins, int64_t element_bytes) {
  const int64_t units = (ins * element_bytes + kPanelUnitBytes - 1) / kPanelUnitBytes;
  return num_panels(outs) * units * kPanelOuts * kPanelUnitBytes;
}

struct PanelParams {
  FloatType type;     // float32 or bfloat16, of input and weights
  const void* input;  // [rows, ins] contiguous
  const void* panels;
  int64_t rows;
  int64_t ins;
  int64_t outs;
  int64_t block_outs;  // of a block, a multiple of kPanelOuts, at most kMaxBlockOuts
};

constexpr int64_t kMaxBlockOuts = 256;

// Products, before they are rounded to the type.
struct PanelBlock {
  int64_t first_row;  // of the input
  int64_t rows;
  int64_t first_out;
  int64_t outs;       // block_outs, or what is left
  int64_t first_run;  // first_out of the run of blocks that one thread visits one after the other
  float* values;      // [rows, block_outs], the visitor's to overwrite
};

// Called from several threads, once for each block; must not throw.
class PanelVisitor {
 public:
  template <typename F>
  PanelVisitor(const F& visit)  // NOLINT: a reference to a callable that outlives the call
      : visit_([](const PanelBlock& block, const void* context) {
          (*static_cast<const F*>(context))(block);
        }),
        context_(&visit) {}
  void operator()(const PanelBlock& block) const { visit_(block, context_); }

 private:
  void (*visit_)(const PanelBlock& block, const void* context);
  const void* context_;
};

void panel_products(const PanelParams& params, const PanelVisitor& visit,
                    const ParallelFor& parallel_for);

}  // namespace specdec::cpu
