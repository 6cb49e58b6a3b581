// Registers the ops with torch: in the library `specdec`, for CPU and CUDA tensors. The build that
// emulates the kernels on the host registers them in `specdec_emulated`, for CPU tensors.
#pragma once

#include <list>

#include "ops/torch_abi/library.h"

namespace specdec::glue {

#ifdef SPECDEC_EMULATED
inline constexpr const char* kLibrary = "specdec_emulated";
inline constexpr const char* kDispatchKeys[] = {"CPU"};
#else
inline constexpr const char* kLibrary = "specdec";
inline constexpr const char* kDispatchKeys[] = {"CPU", "CUDA"};
#endif

// Registers the implementation of an op for the life of the object.
class Implementation {
 public:
  Implementation(const char* op, torch_abi::BoxedFunction function) {
    for (const char* key : kDispatchKeys) libraries_.emplace_back(kLibrary, key).impl(op, function);
  }

 private:
  std::list<torch_abi::Library> libraries_;
};

#define SPECDEC_REGISTER(op) \
  static const Implementation registered_##op(#op, torch_abi::boxed<&op>);

}  // namespace specdec::glue
