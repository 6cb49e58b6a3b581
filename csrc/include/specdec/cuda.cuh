// The few CUDA facilities that kernels use, each behind one name, so that kernel files can also be
// compiled for the host and run there without a GPU (csrc/emulation/cuda_runtime.h): launches,
// shared memory, barriers, warp reductions. Kernels use nothing else of the runtime but threadIdx,
// blockIdx, blockDim.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace specdec {

constexpr int kWarpSize = 32;
constexpr uint32_t kFullWarp = 0xFFFFFFFF;

struct LaunchConfig {
  int64_t grid_x;
  int64_t grid_y;
  int block;
  cudaStream_t stream;
};

// The only place that launches. Errors of the configuration come back here, errors of the kernel
// with a later call, as usual in CUDA.
template <typename... Params, typename... Args>
cudaError_t launch(void (*kernel)(Params...), const LaunchConfig& config, const Args&... args) {
  if (config.grid_x > INT32_MAX || config.grid_y > 65535) return cudaErrorInvalidConfiguration;
  const unsigned grid_x = static_cast<unsigned>(config.grid_x);
  const unsigned grid_y = static_cast<unsigned>(config.grid_y);
#ifdef __CUDACC__
  kernel<<<dim3(grid_x, grid_y), config.block, 0, config.stream>>>(args...);
  return cudaGetLastError();
#else
  Emulation::run_grid([&] { kernel(args...); }, grid_x, grid_y, config.block);
  return cudaSuccess;
#endif
}

// An array in shared memory.
template <typename T, int kSize>
struct SharedArray {
  T elements[kSize];

  __device__ T& operator[](int64_t i) { return elements[i]; }
};

// SPECDEC_SHARED: the block's shared memory, one struct per kernel. SPECDEC_GRID_CONSTANT: a
// by-value kernel parameter that may be indexed dynamically without a copy in local memory.
#ifdef __CUDACC__
#define SPECDEC_SHARED(Type, name) __shared__ Type name
#define SPECDEC_GRID_CONSTANT __grid_constant__
#else
#define SPECDEC_SHARED(Type, name) Type& name = Emulation::shared<Type>()
#define SPECDEC_GRID_CONSTANT
#endif

__device__ __forceinline__ void block_barrier() { __syncthreads(); }

template <typename T>
__device__ __forceinline__ T warp_max(T value) {
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    const T other = __shfl_xor_sync(kFullWarp, value, offset);
    value = other > value ? other : value;
  }
  return value;
}

template <typename T>
__device__ __forceinline__ T warp_min(T value) {
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    const T other = __shfl_xor_sync(kFullWarp, value, offset);
    value = other < value ? other : value;
  }
  return value;
}

}  // namespace specdec
