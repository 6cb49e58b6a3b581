#include "dispatch.h"

#include <stdexcept>

#if defined(SPECDEC_WITH_CUDA) && !defined(SPECDEC_EMULATED)
#include <dlfcn.h>
#endif
#ifdef SPECDEC_NVTX
#include <nvtx3/nvToolsExt.h>
#endif

namespace specdec::glue {

#ifdef SPECDEC_NVTX

static nvtxDomainHandle_t nvtx_domain() {
  static const nvtxDomainHandle_t domain = nvtxDomainCreateA("specdec");
  return domain;
}

NvtxRange::NvtxRange(const char* name) {
  nvtxEventAttributes_t event{};
  event.version = NVTX_VERSION;
  event.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
  event.messageType = NVTX_MESSAGE_TYPE_ASCII;
  event.message.ascii = name;
  nvtxDomainRangePushEx(nvtx_domain(), &event);
}

NvtxRange::~NvtxRange() { nvtxDomainRangePop(nvtx_domain()); }

#endif

#ifdef SPECDEC_WITH_CUDA

void check_launch(const char* op, cudaError_t error) {
  if (error != cudaSuccess) {
    throw std::runtime_error("specdec::" + std::string(op) +
                             ": CUDA launch failed: " + cudaGetErrorString(error));
  }
}

#ifndef SPECDEC_EMULATED

namespace {

using CurrentStreamFunction = Error (*)(int32_t device_index, void** stream);

// Looked up at the first use, so that one library loads under torch with and without CUDA. A weak
// symbol would stay null in CUDA torch, which loads libtorch_cuda with RTLD_LOCAL.
CurrentStreamFunction current_stream_function() {
  static const auto function = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    void* symbol = library ? dlsym(library, "aoti_torch_get_current_cuda_stream") : nullptr;
    return reinterpret_cast<CurrentStreamFunction>(symbol);
  }();
  return function;
}

}  // namespace

cudaStream_t current_stream(int32_t device_index) {
  const CurrentStreamFunction function = current_stream_function();
  if (function == nullptr) {
    throw std::runtime_error(
        "specdec_ext: libtorch_cuda.so with aoti_torch_get_current_cuda_stream is not loaded; "
        "CUDA tensors need a CUDA build of torch >= 2.10");
  }
  void* stream = nullptr;
  check(function(device_index, &stream), "aoti_torch_get_current_cuda_stream");
  return static_cast<cudaStream_t>(stream);
}

#endif

#else

void fail_without_cuda(const char* op) {
  throw std::runtime_error(
      "specdec::" + std::string(op) +
      ": this build of specdec_ext has no CUDA kernels; reinstall it where nvcc "
      "is in PATH (SPECDEC_CUDA=1 pip install .)");
}

#endif

}  // namespace specdec::glue
