// dispatch: runs an op on the device of its tensors.
#pragma once

#include "glue.h"
#include "register.h"

#ifdef SPECDEC_WITH_CUDA
#include "specdec/launchers.h"
#if !defined(SPECDEC_EMULATED) && __has_include(<nvtx3/nvToolsExt.h>)
#define SPECDEC_NVTX
#endif
#endif

namespace specdec::glue {

#ifdef SPECDEC_WITH_CUDA
// torch's current stream on a device.
cudaStream_t current_stream(int32_t device_index);
// Raises RuntimeError if the launch failed.
void check_launch(const char* op, cudaError_t error);
#else
[[noreturn]] void fail_without_cuda(const char* op);
#endif

// A range of the domain "specdec" around an op, for Nsight. Without a profiler it costs about 2 ns.
// Small CUDA toolkits lack NVTX's headers; without them a build has no ranges.
class NvtxRange {
 public:
#ifdef SPECDEC_NVTX
  explicit NvtxRange(const char* name);
  ~NvtxRange();
#else
  explicit NvtxRange(const char*) {}
#endif
  NvtxRange(const NvtxRange&) = delete;
  NvtxRange& operator=(const NvtxRange&) = delete;
};

// Calls on_cpu() or on_cuda(stream), which returns a cudaError_t, for the device of `tensor`.
// `on_cuda` is a generic lambda, [&](auto stream) { return launch_op(params, stream); }. Without
// nvcc it is never instantiated, so it may name launchers that do not exist.
template <typename OnCpu, typename OnCuda>
void dispatch(const char* op, [[maybe_unused]] const Tensor& tensor,
              [[maybe_unused]] const OnCpu& on_cpu, [[maybe_unused]] const OnCuda& on_cuda) {
  [[maybe_unused]] const NvtxRange range(op);
#if defined(SPECDEC_EMULATED)
  check_launch(op, on_cuda(cudaStream_t{nullptr}));
#elif defined(SPECDEC_WITH_CUDA)
  if (tensor.is_cpu()) return on_cpu();
  const DeviceGuard guard(tensor.device_index());
  check_launch(op, on_cuda(current_stream(tensor.device_index())));
#else
  if (!tensor.is_cpu()) fail_without_cuda(op);
  on_cpu();
#endif
}

}  // namespace specdec::glue
