// Products of linear that are used up instead of stored: each block of output columns goes to a
// visitor while it is in the cache, as float32, with the bits that linear would round.
#pragma once

#include "specdec/linear.h"

namespace specdec::cpu {

constexpr int64_t kLinearBlockOuts = 384;

struct LinearBlock {
  int64_t first_row;  // of the input
  int64_t rows;
  int64_t index;  // the first column is index * kLinearBlockOuts
  int64_t outs;   // columns: kLinearBlockOuts, or what is left
  float* values;  // [rows, kLinearBlockOuts], the visitor's to overwrite
};

inline int64_t num_linear_blocks(int64_t out_features) {
  return (out_features + kLinearBlockOuts - 1) / kLinearBlockOuts;
}

// Called from several threads, once for each block; must not throw.
class LinearVisitor {
 public:
  template <typename F>
  LinearVisitor(const F& visit)  // NOLINT: a reference to a callable that outlives the call
      : visit_([](const LinearBlock& block, const void* context) {
          (*static_cast<const F*>(context))(block);
        }),
        context_(&visit) {}
  void operator()(const LinearBlock& block) const { visit_(block, context_); }

 private:
  void (*visit_)(const LinearBlock& block, const void* context);
  const void* context_;
};

// Without bias; params.output and what describes it are not used.
void linear_blocks(const LinearParams& params, const LinearVisitor& visit,
                   const ParallelFor& parallel_for);

}  // namespace specdec::cpu
