// The CUDA side of the glue: current device and stream, and errors of launches. Without nvcc the
// ops are registered for CUDA too, and say how to get the CUDA build.
#pragma once

#include "glue.h"

#ifdef SPECDEC_WITH_CUDA
#include <cuda_runtime_api.h>
#include <torch/csrc/stable/accelerator.h>
#endif

namespace specdec::glue {

#ifdef SPECDEC_WITH_CUDA

// Makes the device of a tensor current for a scope and knows torch's current stream on it.
class CudaScope {
 public:
  explicit CudaScope(const Tensor& tensor);
  cudaStream_t stream() const { return stream_; }

 private:
  torch::stable::accelerator::DeviceGuard guard_;
  cudaStream_t stream_;
};

// Raises RuntimeError unless the launch succeeded.
void check_launch(const char* op, cudaError_t error);

#else

[[noreturn]] void fail_without_cuda(const char* op);

#endif

}  // namespace specdec::glue
