// The loops of rows.h for every instruction set, and the choice among them.
#include "rows.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "rounded.h"
#include "routing.h"
#include "specdec/cpu/isa.h"
#include "specdec/math/exp.h"
#include "specdec/math/gelu.h"
#include "specdec/math/silu.h"
#include "specdec/sampling/coupling.h"

#define SPECDEC_ROWS_ISA baseline
#define SPECDEC_ROWS_TARGET
#include "rows_impl.h"

#ifdef SPECDEC_X86

#undef SPECDEC_ROWS_ISA
#undef SPECDEC_ROWS_TARGET
#define SPECDEC_ROWS_ISA avx2
#define SPECDEC_ROWS_TARGET SPECDEC_TARGET_AVX2
#include "rows_impl.h"

#undef SPECDEC_ROWS_ISA
#undef SPECDEC_ROWS_TARGET
#define SPECDEC_ROWS_ISA avx512
#define SPECDEC_ROWS_TARGET SPECDEC_TARGET_AVX512
#include "rows_impl.h"

#endif

namespace specdec::cpu {

const RowOps& row_ops() {
  return SPECDEC_FOR_ISA(cpu_isa(), baseline::kRows, avx2::kRows, avx512::kRows);
}

}  // namespace specdec::cpu
