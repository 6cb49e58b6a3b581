// Reads the codes of a quantised matrix and what they stand for (specdec/linear.h).
#pragma once

#include <optional>

#include "ops/common/glue.h"
#include "specdec/linear.h"

#ifndef SPECDEC_EMULATED  // no kernel multiplies codes

namespace specdec::glue {

// Returns the levels [16] float32 of an argument `levels`, null if there are none.
const float* read_levels(const char* op, const std::optional<Tensor>& levels);

// Describes the codes `weight` of `outs` outputs and `ins` inputs. Levels are for codes of 4 bits.
WeightCodes read_codes(const Argument& weight_arg, const Tensor& weight, const Argument& scales_arg,
                       const Tensor& scales, const float* levels, int64_t outs, int64_t ins);

}  // namespace specdec::glue

#endif
