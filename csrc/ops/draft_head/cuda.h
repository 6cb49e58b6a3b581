// Runs draft_head with its CUDA kernel: limits, parameters, memory.
#pragma once

#include <optional>
#include <vector>

#include "specdec/draft_head/kernel_params.h"
#include "weights.h"

#ifdef SPECDEC_WITH_CUDA
#include <cuda_runtime_api.h>
#endif

namespace specdec::glue {

// The levels of a static tree, which the host needs and can't read from choices in device memory. A
// dynamic tree has none.
struct DraftLevels {
  std::vector<int64_t> ends;    // [depth] number of choices up to the end of a level
  std::vector<int64_t> widths;  // [depth] number of nodes with children above each level
};

#ifdef SPECDEC_WITH_CUDA
// Raises ValueError for what the kernel does not support, as far as the host sees it. `call` has
// passed the checks for all devices; its views are of device memory.
cudaError_t launch_packed(const PackedWeights& packed, const DraftHeadParams& call,
                          const DraftLevels& levels, int64_t num_new, int64_t num_positions,
                          const Tensor& features, const std::optional<Tensor>& sync,
                          bool phase_launches, cudaStream_t stream);
#endif

}  // namespace specdec::glue
