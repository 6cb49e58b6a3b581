// The entry points of the fused draft_head for one pair of types. Each pair is compiled in one of
// draft_head_*.cu, because a compiler takes half a minute per pair.
#pragma once

#include "fragments.cuh"
#include "specdec/draft_head/kernel_params.h"

namespace specdec {

template <typename T, typename W>
struct DraftLaunch {
  static cudaError_t blocks(int64_t* num_blocks);
  static cudaError_t run(const DraftKernelParams& params, DraftLaunches launches,
                         cudaStream_t stream);
};

}  // namespace specdec
