// The host side of specdec/device/cuda.cuh, which explains every name: these bodies run kernels
// that are compiled as C++ in the emulator (../threads/grid.h).
#pragma once

#include <array>
#include <bit>
#include <cstring>
#include <limits>
#include <type_traits>

#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include "cuda_runtime.h"
#include "testing/emulation/memory/shared_access.h"
#include "testing/emulation/ptx/substitute.h"
#include "testing/emulation/threads/block.h"
#include "testing/emulation/threads/warp.h"

#define SPECDEC_GRID_CONSTANT

namespace specdec {

using emulation::Location;

struct LaunchConfig {
  int64_t grid_x;
  int64_t grid_y;
  int block;
  cudaStream_t stream;
  int64_t dynamic_shared_bytes = 0;
  bool cooperative = false;
  Location where = Location::current();  // the place of the braces
};

// More than two blocks and not a power of two, so that splits over blocks are uneven.
template <typename Kernel>
cudaError_t resident_blocks(Kernel*, int /*block*/, int64_t /*dynamic_shared_bytes*/,
                            int64_t* num_blocks) {
  *num_blocks = 5;
  return cudaSuccess;
}

// The limit of the smallest GPU, sm_89, minus some static memory.
template <typename Kernel>
cudaError_t dynamic_shared_limit(Kernel*, int64_t* bytes) {
  *bytes = 96 * 1024;
  return cudaSuccess;
}

inline cudaError_t has_cooperative_launch(bool* answer) {
  *answer = true;
  return cudaSuccess;
}
inline cudaError_t has_bulk_copies(bool* answer) {
  *answer = Emulation::has_bulk_copies;
  return cudaSuccess;
}

// Throws EmulationError if the kernel breaks a rule.
template <typename... Params, typename... Args>
cudaError_t launch(void (*kernel)(Params...), const LaunchConfig& config, const Args&... args) {
  const cudaError_t error = emulation::check_launch(
      config.grid_x, config.grid_y, config.block, config.dynamic_shared_bytes, config.cooperative);
  if (error != cudaSuccess) return error;
  const auto run = [&](const Params&... params) {
    const std::array<emulation::Argument, sizeof...(Params)> arguments = {
        emulation::Argument{&params, sizeof(params), alignof(Params)}...};
    emulation::Launch launch{.kernel = [&] { kernel(params...); },
                             .grid_x = static_cast<unsigned>(config.grid_x),
                             .grid_y = static_cast<unsigned>(config.grid_y),
                             .block = static_cast<unsigned>(config.block),
                             .dynamic_shared_bytes = config.dynamic_shared_bytes,
                             .cooperative = config.cooperative,
                             .where = config.where};
    emulation::substitute(reinterpret_cast<const void*>(kernel), arguments, launch);
    emulation::Grid::run(launch);
  };
  run(static_cast<Params>(args)...);
  return cudaSuccess;
}

inline void block_barrier(Location where = Location::current()) {
  emulation::block().barrier(where);
}
inline void named_barrier(int id, int num_threads, Location where = Location::current()) {
  emulation::block().named_barrier(id, num_threads, where);
}
inline void warp_barrier(uint32_t lanes = kFullWarp, Location where = Location::current()) {
  emulation::warp_barrier(lanes, where);
}
inline void thread_fence() {
  emulation::block().atomics().fence(emulation::Grid::current().self().index);
}

template <typename T>
T shuffle_from(const char* what, T value, int lane, uint32_t lanes, Location where) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= 8);
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  bits = emulation::shuffle(what, bits, lane, lanes, where);
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}
template <typename T>
T shuffle(T value, int lane, uint32_t lanes = kFullWarp, Location where = Location::current()) {
  return shuffle_from("shuffle", value, lane & 31, lanes, where);
}
template <typename T>
T shuffle_xor(T value, int mask, uint32_t lanes = kFullWarp, Location where = Location::current()) {
  const int self = threadIdx.x % kWarpSize, lane = self ^ mask;
  return shuffle_from("shuffle_xor", value, lane < kWarpSize ? lane : self, lanes, where);
}
template <typename T>
T shuffle_up(T value, int distance, uint32_t lanes = kFullWarp,
             Location where = Location::current()) {
  const int self = threadIdx.x % kWarpSize, lane = self - distance;
  return shuffle_from("shuffle_up", value, lane >= 0 ? lane : self, lanes, where);
}
template <typename T>
T shuffle_down(T value, int distance, uint32_t lanes = kFullWarp,
               Location where = Location::current()) {
  const int self = threadIdx.x % kWarpSize, lane = self + distance;
  return shuffle_from("shuffle_down", value, lane < kWarpSize ? lane : self, lanes, where);
}

inline uint32_t ballot(bool predicate, uint32_t lanes = kFullWarp,
                       Location where = Location::current()) {
  return emulation::vote("ballot", predicate, lanes, where);
}
inline bool warp_any(bool predicate, uint32_t lanes = kFullWarp,
                     Location where = Location::current()) {
  return emulation::vote("warp_any", predicate, lanes, where) != 0;
}
inline bool warp_all(bool predicate, uint32_t lanes = kFullWarp,
                     Location where = Location::current()) {
  return emulation::vote("warp_all", !predicate, lanes, where) == 0;
}

template <typename Vec>
Vec load_global(const void* address, Location where = Location::current()) {
  emulation::check_aligned(address, alignof(Vec), "the address of load_global", where);
  return *static_cast<const Vec*>(address);
}
template <typename Vec>
void store_global(void* address, Vec value, Location where = Location::current()) {
  emulation::check_aligned(address, alignof(Vec), "the address of store_global", where);
  *static_cast<Vec*>(address) = value;
}
template <typename Vec>
Vec load_shared(const void* address, Location where = Location::current()) {
  emulation::shared_memory().access(address, sizeof(Vec), emulation::AccessKind::kRead, where,
                                    alignof(Vec), "the address of load_shared");
  Vec value;
  std::memcpy(&value, address, sizeof(Vec));
  return value;
}
template <typename Vec>
void store_shared(void* address, Vec value, Location where = Location::current()) {
  emulation::shared_memory().access(address, sizeof(Vec), emulation::AccessKind::kWrite, where,
                                    alignof(Vec), "the address of store_shared");
  std::memcpy(address, &value, sizeof(Vec));
}

// Only one thread runs at a time, so after its checks an atomic operation is an ordinary one.
template <typename T>
void check_atomic(const T* address, emulation::AccessKind kind, Location where) {
  static_assert(std::is_integral_v<T> && (sizeof(T) == 4 || sizeof(T) == 8));
  emulation::check_aligned(address, sizeof(T), "the address of an atomic", where);
  emulation::shared_memory().access(address, sizeof(T), kind, where);
}
template <typename T, typename Function>
T atomic_update(T* address, const Function& function, emulation::MemoryOrder order,
                Location where) {
  check_atomic(address, emulation::AccessKind::kAtomicUpdate, where);
  emulation::block().atomics().update(threadIdx.x, address, order);
  const T old = *address;
  *address = function(old);
  return old;
}

// Wraps around.
template <typename T>
T wrapping_sum(T a, T b) {
  using Unsigned = std::make_unsigned_t<T>;
  return static_cast<T>(static_cast<Unsigned>(a) + static_cast<Unsigned>(b));
}
template <typename T>
T atomic_add(T* address, std::type_identity_t<T> value, Location where = Location::current()) {
  const auto add = [&](T old) { return wrapping_sum(old, value); };
  return atomic_update(address, add, emulation::MemoryOrder::kRelaxed, where);
}
template <typename T>
T atomic_or(T* address, std::type_identity_t<T> value, Location where = Location::current()) {
  const auto merge = [&](T old) { return old | value; };
  return atomic_update(address, merge, emulation::MemoryOrder::kRelaxed, where);
}
template <typename T>
T atomic_exchange(T* address, std::type_identity_t<T> value, Location where = Location::current()) {
  const auto exchange = [&](T) { return value; };
  return atomic_update(address, exchange, emulation::MemoryOrder::kRelaxed, where);
}
template <typename T>
T atomic_compare_exchange(T* address, std::type_identity_t<T> expected,
                          std::type_identity_t<T> desired, Location where = Location::current()) {
  const auto exchange = [&](T old) { return old == expected ? desired : old; };
  return atomic_update(address, exchange, emulation::MemoryOrder::kRelaxed, where);
}
inline uint32_t fetch_add_acq_rel(uint32_t* address, uint32_t value,
                                  Location where = Location::current()) {
  const auto add = [&](uint32_t old) { return wrapping_sum(old, value); };
  return atomic_update(address, add, emulation::MemoryOrder::kAcquireRelease, where);
}
template <typename T>
T load_acquire(const T* address, Location where = Location::current()) {
  check_atomic(address, emulation::AccessKind::kAtomicRead, where);
  emulation::block().atomics().load_acquire(threadIdx.x, address);
  return *address;
}
template <typename T>
T load_relaxed(const T* address, Location where = Location::current()) {
  check_atomic(address, emulation::AccessKind::kAtomicRead, where);
  emulation::block().atomics().load_relaxed(threadIdx.x, address, where);
  return *address;
}
template <typename T>
void store_release(T* address, std::type_identity_t<T> value,
                   Location where = Location::current()) {
  check_atomic(address, emulation::AccessKind::kAtomicUpdate, where);
  emulation::block().atomics().store_release(threadIdx.x, address);
  *address = value;
}

template <typename Condition>
void spin_until(const Condition& condition, Location where = Location::current()) {
  for (bool first = true; !condition(); first = false) {
    emulation::Grid::current().poll({.what = "spin_until", .where = where}, first);
  }
}

inline void require_cooperative(const char* what, Location where) {
  const emulation::Grid& grid = emulation::Grid::current();
  if (grid.launch().cooperative) return;
  grid.fail(what + emulation::at(where) + " in a launch that is not cooperative");
}

inline void cp_async_16(void* shared, const void* global, bool valid,
                        Location where = Location::current()) {
  emulation::block().copies().copy(shared, valid ? global : nullptr, where);
}
inline void cp_async_commit() { emulation::block().copies().commit(); }
template <int kGroups>
void cp_async_wait() {
  emulation::block().copies().wait_groups(kGroups);
}

inline void ldmatrix_x4(uint32_t (&r)[4], const void* row, Location where = Location::current()) {
  emulation::ldmatrix("ldmatrix_x4", r, row, false, where);
}
inline void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row,
                              Location where = Location::current()) {
  emulation::ldmatrix("ldmatrix_x4_trans", r, row, true, where);
}

template <typename T>
uint32_t pack(float low, float high) {
  static_assert(std::is_same_v<T, __nv_bfloat16> || std::is_same_v<T, __half>);
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __float2bfloat16(low).bits | uint32_t{__float2bfloat16(high).bits} << 16;
  } else {
    return __float2half(low).bits | uint32_t{__float2half(high).bits} << 16;
  }
}
template <typename T>
float2 unpack(uint32_t pair) {
  static_assert(std::is_same_v<T, __nv_bfloat16> || std::is_same_v<T, __half>);
  const T low{static_cast<uint16_t>(pair)}, high{static_cast<uint16_t>(pair >> 16)};
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return {__bfloat162float(low), __bfloat162float(high)};
  } else {
    return {__half2float(low), __half2float(high)};
  }
}

template <typename T>
void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                  Location where = Location::current()) {
  constexpr int kMinExponent = std::is_same_v<T, __nv_bfloat16> ? -126 : -14;
  emulation::mma(c, a, b, {&unpack<T>, kMinExponent}, where);
}

inline void fma_m16n8k16(float (&c)[4], const float (&a_low)[4], const float (&a_high)[4],
                         const float (&b)[4], Location where = Location::current()) {
  emulation::fma_m16n8k16(c, a_low, a_high, b, where);
}

struct alignas(8) Mbarrier {
  uint64_t state;
};

inline void mbarrier_init(Mbarrier* barrier, int count, Location where = Location::current()) {
  emulation::block().copies().init(barrier, count, where);
  emulation::block().copies().proxy_fence();
}
inline void mbarrier_arrive(Mbarrier* barrier, Location where = Location::current()) {
  emulation::block().copies().arrive(barrier, 0, where);
}
inline void mbarrier_arrive_expect(Mbarrier* barrier, int bytes,
                                   Location where = Location::current()) {
  emulation::block().copies().arrive(barrier, bytes, where);
}
inline bool copies_in_bulk(bool has_bulk_copies) { return has_bulk_copies; }
inline bool elect_lane() { return threadIdx.x % kWarpSize == 0; }
inline void mbarrier_wait(Mbarrier* barrier, int parity, Location where = Location::current()) {
  emulation::block().copies().wait(barrier, parity, where);
}
inline void bulk_copy(void* shared, const void* global, int bytes, Mbarrier* barrier,
                      Location where = Location::current()) {
  emulation::block().copies().bulk_copy(shared, global, bytes, barrier, where);
}

}  // namespace specdec
