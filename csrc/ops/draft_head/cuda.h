// The way of draft_head to its CUDA kernel: limits, parameters, memory.
#pragma once

#include <optional>
#include <vector>

#include "specdec/draft_head/kernel_params.h"
#include "weights.h"

#ifdef SPECDEC_WITH_CUDA
#include <cuda_runtime_api.h>
#endif

namespace specdec::glue {

// Of a static tree, which the host has to know and can't read from choices on CUDA; a dynamic one
// has none.
struct DraftLevels {
  std::vector<int64_t> ends;    // [depth] choices up to the end of a level
  std::vector<int64_t> widths;  // [depth] nodes with children, above each level
};

#ifdef SPECDEC_WITH_CUDA
// Raises ValueError for what the kernel does not take, as far as it shows without device memory.
// `call` as checked for all devices, with views of device memory.
cudaError_t launch_packed(const PackedWeights& packed, const DraftHeadParams& call,
                          const DraftLevels& levels, int64_t num_new, int64_t num_positions,
                          const Tensor& features, const std::optional<Tensor>& sync,
                          bool phase_launches, cudaStream_t stream);
#endif

}  // namespace specdec::glue
