// Device side of cuda.cuh, which explains every name: CUDA intrinsics and PTX.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

namespace specdec {

struct LaunchConfig {
  int64_t grid_x;
  int64_t grid_y;
  int block;
  cudaStream_t stream;
  int64_t dynamic_shared_bytes = 0;
  bool cooperative = false;  // all blocks resident at once, as grid_barrier needs
};

// More than 48 KB of dynamic shared memory must be requested.
template <typename Kernel>
cudaError_t allow_shared_bytes(Kernel* kernel, int64_t dynamic_shared_bytes) {
  if (dynamic_shared_bytes <= 48 * 1024) return cudaSuccess;
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              static_cast<int>(dynamic_shared_bytes));
}

template <typename Kernel>
cudaError_t resident_blocks(Kernel* kernel, int block, int64_t dynamic_shared_bytes,
                            int64_t* num_blocks) {
  int device = 0, multiprocessors = 0, per_multiprocessor = 0;
  cudaError_t error = allow_shared_bytes(kernel, dynamic_shared_bytes);
  if (error == cudaSuccess) error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  }
  if (error == cudaSuccess) {
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(
        &per_multiprocessor, kernel, block, static_cast<size_t>(dynamic_shared_bytes));
  }
  *num_blocks = int64_t{multiprocessors} * per_multiprocessor;
  return error;
}

template <typename Kernel>
cudaError_t dynamic_shared_limit(Kernel* kernel, int64_t* bytes) {
  int device = 0, limit = 0;
  cudaFuncAttributes attributes{};
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  }
  if (error == cudaSuccess) {
    error = cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel));
  }
  *bytes = limit - static_cast<int64_t>(attributes.sharedSizeBytes);
  return error;
}

// Returns errors of the configuration. A later call returns errors of the kernel, as usual in CUDA.
template <typename... Params, typename... Args>
cudaError_t launch(void (*kernel)(Params...), const LaunchConfig& config, const Args&... args) {
  if (config.grid_x > INT32_MAX || config.grid_y > 65535) {
    return cudaErrorInvalidConfiguration;
  }
  const cudaError_t error = allow_shared_bytes(kernel, config.dynamic_shared_bytes);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute cooperative{};
  cooperative.id = cudaLaunchAttributeCooperative;
  cooperative.val.cooperative = 1;
  cudaLaunchConfig_t launch_config{};
  launch_config.gridDim =
      dim3(static_cast<unsigned>(config.grid_x), static_cast<unsigned>(config.grid_y));
  launch_config.blockDim = dim3(config.block);
  launch_config.dynamicSmemBytes = static_cast<size_t>(config.dynamic_shared_bytes);
  launch_config.stream = config.stream;
  launch_config.attrs = &cooperative;
  launch_config.numAttrs = config.cooperative ? 1 : 0;
  return cudaLaunchKernelEx(&launch_config, kernel, static_cast<Params>(args)...);
}

// A by-value kernel parameter that can be indexed at run time without a copy in local memory.
#define SPECDEC_GRID_CONSTANT __grid_constant__

#define SPECDEC_SHARED(Type, name) __shared__ Type name
#define SPECDEC_DYNAMIC_SHARED(T, name)                             \
  extern __shared__ __align__(128) unsigned char dynamic_shared_[]; \
  const ::specdec::SharedSpan<T> name(reinterpret_cast<T*>(dynamic_shared_))

template <typename T, int kSize>
struct SharedArray {
  T elements[kSize];

  __device__ __forceinline__ T& operator[](int i) { return elements[i]; }
  __device__ __forceinline__ T* pointer(int i) { return elements + i; }
};

template <typename T>
struct SharedValue {
  T element;

  __device__ __forceinline__ operator T() const { return element; }
  __device__ __forceinline__ T operator=(T value) { return element = value; }
  __device__ __forceinline__ T* pointer() { return &element; }
};

template <typename T>
class SharedSpan {
 public:
  __device__ __forceinline__ explicit SharedSpan(T* data) : data_(data) {}

  __device__ __forceinline__ T& operator[](int i) const { return data_[i]; }
  __device__ __forceinline__ T* pointer(int i) const { return data_ + i; }
  __device__ __forceinline__ SharedSpan subspan(int first, int /*count*/) const {
    return SharedSpan(data_ + first);
  }
  template <typename U>
  __device__ __forceinline__ SharedSpan<U> as() const {
    return SharedSpan<U>(reinterpret_cast<U*>(data_));
  }

 private:
  T* data_;
};

// The place of a call, known on the host only, for the emulator's messages.
struct Location {
  __device__ static constexpr Location current() { return {}; }
};

__device__ __forceinline__ void block_barrier(Location = {}) { __syncthreads(); }

__device__ __forceinline__ void named_barrier(int id, int num_threads) {
  asm volatile("barrier.sync.aligned %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}

__device__ __forceinline__ void warp_barrier(uint32_t lanes = kFullWarp) { __syncwarp(lanes); }

// __threadfence() also orders its thread's earlier stores before its later loads, which takes
// longer.
__device__ __forceinline__ void thread_fence() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

template <typename T>
__device__ __forceinline__ T shuffle(T value, int lane, uint32_t lanes = kFullWarp, Location = {}) {
  return __shfl_sync(lanes, value, lane);
}
template <typename T>
__device__ __forceinline__ T shuffle_xor(T value, int mask, uint32_t lanes = kFullWarp,
                                         Location = {}) {
  return __shfl_xor_sync(lanes, value, mask);
}
template <typename T>
__device__ __forceinline__ T shuffle_up(T value, int distance, uint32_t lanes = kFullWarp,
                                        Location = {}) {
  return __shfl_up_sync(lanes, value, distance);
}
template <typename T>
__device__ __forceinline__ T shuffle_down(T value, int distance, uint32_t lanes = kFullWarp,
                                          Location = {}) {
  return __shfl_down_sync(lanes, value, distance);
}

__device__ __forceinline__ uint32_t ballot(bool predicate, uint32_t lanes = kFullWarp) {
  return __ballot_sync(lanes, predicate);
}
__device__ __forceinline__ bool warp_any(bool predicate, uint32_t lanes = kFullWarp) {
  return __any_sync(lanes, predicate);
}
__device__ __forceinline__ bool warp_all(bool predicate, uint32_t lanes = kFullWarp) {
  return __all_sync(lanes, predicate);
}

// 32-bit integers have an instruction (sm_80). Other types use the templates in cuda.cuh.
__device__ __forceinline__ int32_t warp_max(int32_t value) {
  return __reduce_max_sync(kFullWarp, value);
}
__device__ __forceinline__ uint32_t warp_max(uint32_t value) {
  return __reduce_max_sync(kFullWarp, value);
}
__device__ __forceinline__ int32_t warp_min(int32_t value) {
  return __reduce_min_sync(kFullWarp, value);
}
__device__ __forceinline__ uint32_t warp_min(uint32_t value) {
  return __reduce_min_sync(kFullWarp, value);
}
__device__ __forceinline__ int32_t warp_sum(int32_t value) {
  return __reduce_add_sync(kFullWarp, value);
}
__device__ __forceinline__ uint32_t warp_sum(uint32_t value) {
  return __reduce_add_sync(kFullWarp, value);
}

template <typename Vec>
__device__ __forceinline__ Vec load_global(const void* address) {
  return *static_cast<const Vec*>(address);
}
template <typename Vec>
__device__ __forceinline__ void store_global(void* address, Vec value) {
  *static_cast<Vec*>(address) = value;
}
template <typename Vec>
__device__ __forceinline__ Vec load_shared(const void* address) {
  return *static_cast<const Vec*>(address);
}
template <typename Vec>
__device__ __forceinline__ void store_shared(void* address, Vec value) {
  *static_cast<Vec*>(address) = value;
}

// CUDA declares its atomics for int, unsigned, long long and unsigned long long.
template <typename T>
using AtomicWord =
    std::conditional_t<sizeof(T) == 4, std::conditional_t<std::is_signed_v<T>, int, unsigned>,
                       std::conditional_t<std::is_signed_v<T>, long long, unsigned long long>>;

template <typename T>
__device__ __forceinline__ T atomic_add(T* address, std::type_identity_t<T> value) {
  static_assert(std::is_integral_v<T> && (sizeof(T) == 4 || sizeof(T) == 8));
  // In two's complement a sum of signed numbers has the bits of the unsigned sum.
  using Unsigned = AtomicWord<std::make_unsigned_t<T>>;
  return static_cast<T>(
      atomicAdd(reinterpret_cast<Unsigned*>(address), static_cast<Unsigned>(value)));
}
template <typename T>
__device__ __forceinline__ T atomic_or(T* address, std::type_identity_t<T> value) {
  using Unsigned = AtomicWord<std::make_unsigned_t<T>>;
  return static_cast<T>(
      atomicOr(reinterpret_cast<Unsigned*>(address), static_cast<Unsigned>(value)));
}
template <typename T>
__device__ __forceinline__ T atomic_exchange(T* address, std::type_identity_t<T> value) {
  using Unsigned = AtomicWord<std::make_unsigned_t<T>>;
  return static_cast<T>(
      atomicExch(reinterpret_cast<Unsigned*>(address), static_cast<Unsigned>(value)));
}
template <typename T>
__device__ __forceinline__ T atomic_compare_exchange(T* address, std::type_identity_t<T> expected,
                                                     std::type_identity_t<T> desired) {
  using Unsigned = AtomicWord<std::make_unsigned_t<T>>;
  return static_cast<T>(atomicCAS(reinterpret_cast<Unsigned*>(address),
                                  static_cast<Unsigned>(expected), static_cast<Unsigned>(desired)));
}

__device__ __forceinline__ uint32_t fetch_add_acq_rel(uint32_t* address, uint32_t value) {
  uint32_t old;
  asm volatile("atom.add.acq_rel.gpu.u32 %0, [%1], %2;"
               : "=r"(old)
               : "l"(address), "r"(value)
               : "memory");
  return old;
}

template <typename T>
__device__ __forceinline__ T load_acquire(const T* address) {
  static_assert(std::is_integral_v<T> && (sizeof(T) == 4 || sizeof(T) == 8));
  if constexpr (sizeof(T) == 4) {
    uint32_t bits;
    asm volatile("ld.acquire.gpu.b32 %0, [%1];" : "=r"(bits) : "l"(address) : "memory");
    return static_cast<T>(bits);
  } else {
    uint64_t bits;
    asm volatile("ld.acquire.gpu.b64 %0, [%1];" : "=l"(bits) : "l"(address) : "memory");
    return static_cast<T>(bits);
  }
}

template <typename T>
__device__ __forceinline__ T load_relaxed(const T* address) {
  static_assert(std::is_integral_v<T> && (sizeof(T) == 4 || sizeof(T) == 8));
  if constexpr (sizeof(T) == 4) {
    uint32_t bits;
    asm volatile("ld.relaxed.gpu.b32 %0, [%1];" : "=r"(bits) : "l"(address) : "memory");
    return static_cast<T>(bits);
  } else {
    uint64_t bits;
    asm volatile("ld.relaxed.gpu.b64 %0, [%1];" : "=l"(bits) : "l"(address) : "memory");
    return static_cast<T>(bits);
  }
}

template <typename T>
__device__ __forceinline__ void store_release(T* address, std::type_identity_t<T> value) {
  static_assert(std::is_integral_v<T> && (sizeof(T) == 4 || sizeof(T) == 8));
  if constexpr (sizeof(T) == 4) {
    asm volatile("st.release.gpu.b32 [%0], %1;" ::"l"(address), "r"(static_cast<uint32_t>(value))
                 : "memory");
  } else {
    asm volatile("st.release.gpu.b64 [%0], %1;" ::"l"(address), "l"(static_cast<uint64_t>(value))
                 : "memory");
  }
}

// In a build with SPECDEC_WATCHDOG a wait of more than ten seconds ends the launch with an error.
// Without it, blocks that wait for each other forever hang the GPU.
class Watchdog {
#ifdef SPECDEC_WATCHDOG
 public:
  __device__ __forceinline__ void check() const {
    if (nanoseconds() - begin_ > 10'000'000'000) __trap();
  }

 private:
  __device__ __forceinline__ static uint64_t nanoseconds() {
    uint64_t now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
  }
  uint64_t begin_ = nanoseconds();
#else
 public:
  __device__ __forceinline__ void check() const {}
#endif
};

template <typename Condition>
__device__ __forceinline__ void spin_until(const Condition& condition, Location = {}) {
  const Watchdog watchdog;
  while (!condition()) watchdog.check();
}

// Checked on the host only.
__device__ __forceinline__ void require_cooperative(const char* /*what*/, Location) {}

}  // namespace specdec

#include "specdec/device/async.cuh"
