// The products of `linear` for many input rows, and for transposed weights.
#pragma once

#include <span>

#include "specdec/linear.h"

namespace specdec::cpu {

// As `linears`, for products with many_rows or transposed weights, all of the same kind.
void many_rows_linears(std::span<const LinearParams> products, const ParallelFor& parallel_for);

}  // namespace specdec::cpu
