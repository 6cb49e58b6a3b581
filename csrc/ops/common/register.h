// Registers the ops with torch: in the library `specdec`, for CPU and CUDA tensors. The build that
// emulates the kernels on the host registers them in `specdec_emulated`, for CPU tensors.
#pragma once

#include <list>
#include <span>

#include "ops/torch_abi/library.h"

namespace specdec::glue {

#ifdef SPECDEC_EMULATED
inline constexpr const char* kLibrary = "specdec_emulated";
inline constexpr const char* kDispatchKeys[] = {"CPU"};
#else
inline constexpr const char* kLibrary = "specdec";
inline constexpr const char* kDispatchKeys[] = {"CPU", "CUDA"};
#endif
// The dispatch key of ops without tensors.
inline constexpr const char* kNoDevice[] = {"CompositeExplicitAutograd"};

// Registers the implementation of an op for the life of the object.
class Implementation {
 public:
  Implementation(const char* op, torch_abi::BoxedFunction function,
                 std::span<const char* const> keys = kDispatchKeys) {
    for (const char* key : keys) libraries_.emplace_back(kLibrary, key).impl(op, function);
  }

 private:
  std::list<torch_abi::Library> libraries_;
};

#define SPECDEC_REGISTER(op) \
  static const Implementation registered_##op(#op, torch_abi::boxed<&op>);
#define SPECDEC_REGISTER_WITHOUT_TENSORS(op) \
  static const Implementation registered_##op(#op, torch_abi::boxed<&op>, kNoDevice);

}  // namespace specdec::glue
