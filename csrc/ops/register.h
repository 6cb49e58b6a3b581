// Registration of the ops with torch: in the library `specdec` for CPU and CUDA tensors or, in the
// build that emulates the kernels on the host, in `specdec_emulated` for CPU tensors.
#pragma once

#include <torch/csrc/stable/library.h>

#ifdef SPECDEC_EMULATED

#define SPECDEC_SCHEMAS(m) STABLE_TORCH_LIBRARY(specdec_emulated, m)
#define SPECDEC_REGISTER(op) \
  STABLE_TORCH_LIBRARY_IMPL(specdec_emulated, CPU, m) { m.impl(#op, TORCH_BOX(&op)); }

#else

#define SPECDEC_SCHEMAS(m) STABLE_TORCH_LIBRARY(specdec, m)
#define SPECDEC_REGISTER(op)                                                  \
  STABLE_TORCH_LIBRARY_IMPL(specdec, CPU, m) { m.impl(#op, TORCH_BOX(&op)); } \
  STABLE_TORCH_LIBRARY_IMPL(specdec, CUDA, m) { m.impl(#op, TORCH_BOX(&op)); }

#endif
