// The limits of draft_head's CUDA kernel, in one place: the glue raises a refusal, and the op
// draft_head_refusal returns it beforehand.
#pragma once

#include <optional>
#include <string>

#include "specdec/draft_head.h"

namespace specdec::glue {

// Returns why the kernel can't draft with a head of these sizes, or nothing. `element` is the size
// of an activation in bytes.
std::optional<std::string> kernel_refusal(const HeadWeights& head, int64_t element,
                                          bool has_8_bit_weights, int64_t depth, int64_t top_k,
                                          int64_t rows);

}  // namespace specdec::glue
