// The choice of a layer's experts for a node.
#pragma once

#include <cstdint>

#include "specdec/decoder_form.h"

namespace specdec::cpu {

// Leaves the probabilities of the top k experts, normalised if the routing says so, and replaces the
// others by -1. NaN counts as the largest. Equal probabilities are ordered as torch.topk orders them.
void choose_experts(const ModuleRouting& routing, int64_t experts, float* probabilities);

}  // namespace specdec::cpu
