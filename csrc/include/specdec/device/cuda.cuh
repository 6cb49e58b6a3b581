// The CUDA facilities that kernels use, each behind one name, so that a kernel file compiles twice:
// by nvcc (bodies in cuda_device.cuh: intrinsics and PTX) and as C++ for the host, where it runs
// without a GPU and is checked (bodies in csrc/emulation/device_api.h). Beside these names kernels
// use threadIdx, blockIdx, blockDim, gridDim and the types of cuda_bf16.h and cuda_fp16.h.
//
//   launch(kernel, config, args...)       the only launch, see LaunchConfig
//   resident_blocks(kernel, block, dynamic_shared_bytes, &n)    most blocks of a cooperative launch
//   has_cooperative_launch(&answer)                             whether the current device has it
//   dynamic_shared_limit(kernel, &bytes)                        most that a block may have
//
//   Shared memory
//   SPECDEC_SHARED(Struct, name)          the block's static shared memory; the members of Struct
//   are
//                                         SharedArray<T, N>, SharedValue<T> and Mbarrier
//   SPECDEC_DYNAMIC_SHARED(T, name)       SharedSpan<T> over config.dynamic_shared_bytes, 128-byte
//                                         aligned; name.subspan(first, count), name.as<U>()
//   array[i], value                       read, assign, += and so on; copy an element into a
//   variable
//                                         of its type (not auto) to use it otherwise
//   array.pointer(i), value.pointer()     raw addresses, for the functions below
//   load_shared<Vec>(p), store_shared(p, vec)    aligned vectors: uint4, float4, uint2, ...
//
//   Threads of a block or warp; `lanes` names the lanes that take part and defaults to all 32
//   block_barrier()                       orders memory; threads that have ended count as arrived
//   named_barrier(id, num_threads)        the same for num_threads threads; id 1..15, whole warps
//   warp_barrier(lanes)                   the same for lanes of a warp
//   shuffle(v, lane, lanes), shuffle_xor, shuffle_up, shuffle_down      no memory order, as in CUDA
//   ballot(p, lanes), warp_any, warp_all, warp_max, warp_min, warp_sum  (butterfly: fixed order)
//
//   Memory, through any address
//   load_global<Vec>(p), store_global(p, vec)                           aligned vectors
//   atomic_add, atomic_max, atomic_exchange(p, v), atomic_compare_exchange(p, expected, desired)
//                                         relaxed, the old value; 32- and 64-bit integers
//   fetch_add_acq_rel(p, v), load_acquire(p), store_release(p, v)       device scope
//   thread_fence()                        device scope, orders relaxed atomics as in C++
//   spin_until(condition)                 the only way to spin; condition() reads with load_acquire
//   grid_barrier(barrier)                 all blocks of a cooperative launch
//
//   Asynchronous copies and tensor cores
//   cp_async_16(shared, global, valid)    16 bytes, zeros where not valid; cp_async_commit(),
//                                         cp_async_wait<N>(): all groups but the latest N are there
//   ldmatrix_x4(r, row), ldmatrix_x4_trans      row: this lane's 16-byte row of 8x8 16-bit matrices
//   mma_m16n8k16<T>(c, a, b)              c += a b, T = __nv_bfloat16 or __half, c in float32
//   fma_m16n8k16(c, a_low, a_high, b)     the same on float32: a lane has four neighbours along k,
//   at
//                                         4 (lane % 4), of rows lane / 4 and 8 below of a, and of
//                                         column lane / 4 of b; c is added to in the order of k
//   pack<T>(low, high), unpack<T>(pair)   two 16-bit floats in a register of these
//   mbarrier_init(b, count), mbarrier_arrive(b), mbarrier_wait(b, parity)
//   mbarrier_arrive_expect(b, bytes), bulk_copy(shared, global, bytes, b)     sm_90; below, a trap
//   elect_lane()                          true in one lane of a whole warp, in which the compiler
//                                         issues bulk copies without a loop over lanes
//   has_bulk_copies(&answer)              whether the current device has these two (host)
//   copies_in_bulk(answer)                what a kernel that was given the answer is to do
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace specdec {

constexpr int kWarpSize = 32;
constexpr uint32_t kFullWarp = 0xFFFFFFFF;

}  // namespace specdec

#ifdef __CUDACC__
#include "intrinsics.cuh"
#else
#include "device_api.h"
#endif

namespace specdec {

template <typename T>
__device__ __forceinline__ T warp_max(T value, Location where = Location::current()) {
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    const T other = shuffle_xor(value, offset, kFullWarp, where);
    value = other > value ? other : value;
  }
  return value;
}

template <typename T>
__device__ __forceinline__ T warp_min(T value, Location where = Location::current()) {
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    const T other = shuffle_xor(value, offset, kFullWarp, where);
    value = other < value ? other : value;
  }
  return value;
}

// The order of additions is the same in all lanes and launches.
template <typename T>
__device__ __forceinline__ T warp_sum(T value, Location where = Location::current()) {
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2)
    value += shuffle_xor(value, offset, kFullWarp, where);
  return value;
}

// In device memory, zero before its first use and never reset after. The top bit turns each time
// that all blocks have arrived, and the others are zero again then: what a block adds makes it so.
struct GridBarrier {
  alignas(128) uint32_t arrived;
};

// Waits for all blocks of a cooperative launch; what they wrote before is visible after. To be
// called by all threads. (One word and no more, because each access is a trip to the L2 cache.)
__device__ __forceinline__ void grid_barrier(GridBarrier* barrier,
                                             Location where = Location::current()) {
  constexpr uint32_t kTurn = 0x80000000u;
  require_cooperative("grid_barrier", where);
  block_barrier(where);
  if (threadIdx.x == 0) {
    const bool is_first = blockIdx.x == 0 && blockIdx.y == 0;
    const uint32_t own = is_first ? kTurn - (gridDim.x * gridDim.y - 1) : 1u;
    const uint32_t before = fetch_add_acq_rel(&barrier->arrived, own);
    const uint32_t turned = (before ^ kTurn) & kTurn;
    spin_until([=] { return (load_acquire(&barrier->arrived) & kTurn) == turned; }, where);
  }
  block_barrier(where);
}

}  // namespace specdec
