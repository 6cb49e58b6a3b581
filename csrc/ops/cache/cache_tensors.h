// The argument `caches` of the ops that move slots.
#pragma once

#include <vector>

#include "ops/common/glue.h"
#include "specdec/kv_compact.h"

namespace specdec::glue {

// Checks the caches and lists their data and layouts.
//   on_device_of: an argument on the device of the op
//   paged: whether they are pools of pages
std::vector<CacheTensor> cache_tensors(const char* op, const std::vector<Tensor>& caches,
                                       const Argument& on_device_of, int64_t batch, bool paged);

}  // namespace specdec::glue
