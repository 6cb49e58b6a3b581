// The element type of logits.
#pragma once

#include "float_types.h"

namespace specdec {

using LogitsType = FloatType;

// function(T{}) with the element type T.
template <typename F>
auto with_logits_type(LogitsType type, const F& function) {
  return with_float_type(type, function);
}

}  // namespace specdec
