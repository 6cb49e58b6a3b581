// The element type of logits.
#pragma once

#include "specdec/core/float_types.h"

namespace specdec {

using LogitsType = FloatType;

// Calls function(T{}) with the element type T.
template <typename F>
auto with_logits_type(LogitsType type, const F& function) {
  return with_float_type(type, function);
}

}  // namespace specdec
