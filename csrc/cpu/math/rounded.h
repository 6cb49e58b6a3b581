#pragma once

#include "specdec/core/float_types.h"

namespace specdec::cpu {

// Converts to the type and back.
template <typename T>
SPECDEC_HOST_DEVICE float rounded(float value) {
  T stored;
  from_float(value, &stored);
  return to_float(stored);
}

}  // namespace specdec::cpu
