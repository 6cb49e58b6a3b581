// Replaces the header of the CUDA runtime: with this folder on the include path, .cu files compile
// as C++ and run on the host, without a GPU, in an emulator that checks them (../threads/grid.h).
// The other facilities that kernels use are in specdec/device/cuda.cuh.
#pragma once

#include <algorithm>
#include <cmath>

#include "cuda_runtime_api.h"
#include "testing/emulation/threads/emulation.h"
#include "vector_types.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __restrict__ __restrict
#define __launch_bounds__(...)

// Those of the running thread.
inline dim3 threadIdx, blockIdx, blockDim, gridDim;

using std::max;
using std::min;

inline int __popc(unsigned value) { return __builtin_popcount(value); }
inline int __popcll(unsigned long long value) { return __builtin_popcountll(value); }
inline int __clz(int value) {
  return value == 0 ? 32 : __builtin_clz(static_cast<unsigned>(value));
}
inline int __clzll(long long value) {
  return value == 0 ? 64 : __builtin_clzll(static_cast<unsigned long long>(value));
}
inline int __ffs(int value) { return __builtin_ffs(value); }
inline int __ffsll(long long value) { return __builtin_ffsll(value); }
