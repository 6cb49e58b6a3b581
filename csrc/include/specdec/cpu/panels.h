// Products of few input rows with weights that are stored in panels of kPanelOuts outputs:
//
//   [ceil(outs / kPanelOuts)][ceil(ins / unit)][kPanelOuts][unit], zeros where there is no weight
//
// A unit has four bytes: one float32, two bfloat16 or four codes of 8 bits. A panel is read as one
// stream of memory for any number of rows. Its outputs are the lanes of vectors, so no sum over lanes
// is needed.
//
// Each output is summed in a fixed order, in float32, with fused multiply-add: over the units in
// order, and in a bfloat16 unit the second element before the first, as vdpbf16ps does. Codes are
// multiplied with integers: 256 inputs share an exponent, e is the least number from -111 on for which
// all of their magnitudes are below 2^e, and input x becomes the integer nearest to x * 2^(14 - e), ties
// to even. For each 256 inputs, one after the other, the float32 of the exact sum of code * integer
// is multiplied with 2^(e - 14) and added; at the end the sum is multiplied with the scale of the output.
// If an input is not finite, all outputs of its row are NaN.
//
// So the bits of a row of the result do not depend on the other rows. As in `linear`, a baseline without
// fused multiply-add gives other bits, but not with codes, whose products with 2^(e - 14) are exact.
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
  FloatType type;     // float32 or bfloat16, of the input, and of the weights if they are no codes
  const void* input;  // [rows, ins] contiguous
  const void* panels;
  const float* scales;  // [outs]: the panels have codes, int8, and these are their scales; or null
  int64_t rows;
  int64_t ins;
  int64_t outs;
  int64_t block_outs;  // outputs of a block, a multiple of kPanelOuts, at most kMaxBlockOuts
};

constexpr int64_t kMaxBlockOuts = 256;

// A block of products, before they are rounded to the type.
struct PanelBlock {
  int64_t first_row;  // row of the input
  int64_t rows;
  int64_t first_out;
  int64_t outs;       // block_outs, or fewer in the last block
  int64_t first_run;  // first_out of the run of blocks that one thread visits in order
  float* values;      // [rows, block_outs], may be overwritten by the visitor
};

// Called from several threads, once for each block; must not throw.
class PanelVisitor {
 public:
  template <typename F>
  PanelVisitor(const F& visit)  // NOLINT: refers to a callable that outlives the call
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
