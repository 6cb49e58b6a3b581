// The products of `linear` in the order for many input rows.
#pragma once

#include <span>

#include "products.h"

namespace specdec::cpu {

// As `linears`, for products of the kind that `code` multiplies.
void many_rows_linears(const PassProducts& code, std::span<const LinearParams> products,
                       const ParallelFor& parallel_for);

}  // namespace specdec::cpu
