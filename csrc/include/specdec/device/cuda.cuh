// The CUDA facilities that kernels use, each behind one name, so that a kernel file compiles twice:
// by nvcc (bodies in intrinsics.cuh and async.cuh: intrinsics and PTX) and as C++ for the host,
// where it is run and checked without a GPU (bodies in
// csrc/testing/emulation/toolkit/device_api.h). Beside these names kernels use threadIdx, blockIdx,
// blockDim, gridDim and the types of cuda_bf16.h and cuda_fp16.h.
//
//   launch(kernel, config, args...)       the only launch, see LaunchConfig
//   resident_blocks(kernel, block, dynamic_shared_bytes, &n)    most blocks of a cooperative launch
//   has_cooperative_launch(&answer)       whether the current device supports it
//   dynamic_shared_limit(kernel, &bytes)  the most that a block may have
//
//   Shared memory
//   SPECDEC_SHARED(Struct, name)          the block's static shared memory; members of Struct are
//                                         SharedArray<T, N>, SharedValue<T> and Mbarrier
//   SPECDEC_DYNAMIC_SHARED(T, name)       SharedSpan<T> over config.dynamic_shared_bytes, 128-byte
//                                         aligned; name.subspan(first, count), name.as<U>()
//   array[i], value                       read, assign, += and so on; for any other use copy the
//                                         element into a variable of its type (not auto)
//   array.pointer(i), value.pointer()     raw addresses, for the functions below
//   load_shared<Vec>(p), store_shared(p, vec)    aligned vectors: uint4, float4, uint2, ...
//
//   Threads of a block or warp; `lanes` are the lanes that take part, by default all 32
//   block_barrier()                       orders memory; threads that have ended count as arrived
//   named_barrier(id, num_threads)        the same for num_threads threads; id 1..15, whole warps
//   warp_barrier(lanes)                   the same for lanes of a warp
//   shuffle(v, lane, lanes), shuffle_xor, shuffle_up, shuffle_down      no memory order, as in CUDA
//   ballot(p, lanes), warp_any, warp_all, warp_max, warp_min, warp_sum  (butterfly: fixed order)
//
//   Memory, through any address
//   load_global<Vec>(p), store_global(p, vec)                           aligned vectors
//   atomic_add, atomic_or, atomic_exchange(p, v), atomic_compare_exchange(p, expected, desired)
//                                         relaxed, return the old value; 32- and 64-bit integers
//   fetch_add_acq_rel(p, v), load_acquire(p), store_release(p, v)       device scope
//   load_relaxed(p)                       for a spin; a thread_fence() follows before any barrier
//   thread_fence()                        device scope, orders relaxed atomics as in C++
//   spin_until(condition)                 the only way to spin; condition() reads with one of the
//                                         two loads
//   grid_barrier(barrier)                 all blocks of a cooperative launch
//
//   Asynchronous copies and tensor cores
//   cp_async_16(shared, global, valid)    16 bytes, zeros if not valid; cp_async_commit(),
//                                         cp_async_wait<N>(): all but the latest N groups landed
//   ldmatrix_x4(r, row), ldmatrix_x4_trans      row: this lane's 16-byte row of 8x8 16-bit matrices
//   mma_m16n8k16<T>(c, a, b)              c += a b, T = __nv_bfloat16 or __half, c in float32
//   fma_m16n8k16(c, a_low, a_high, b)     the same in float32, added to c in the order of k: a lane
//                                         holds four neighbours along k, from 4 (lane % 4) on, of
//                                         rows lane / 4 and lane / 4 + 8 of a, and of column
//                                         lane / 4 of b
//   pack<T>(low, high), unpack<T>(pair)   two 16-bit floats in one register
//   mbarrier_init(b, count), mbarrier_arrive(b), mbarrier_wait(b, parity)
//   mbarrier_arrive_expect(b, bytes), bulk_copy(shared, global, bytes, b)     sm_90; below, a trap
//   elect_lane()                          true in one lane of a whole warp, in which the compiler
//                                         issues bulk copies without a loop over lanes
//   has_bulk_copies(&answer)              host: whether the current device has these two
//   copies_in_bulk(answer)                device: whether the kernel copies in bulk
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace specdec {

constexpr int kWarpSize = 32;
constexpr uint32_t kFullWarp = 0xFFFFFFFF;

}  // namespace specdec

#ifdef __CUDACC__
#include "specdec/device/intrinsics.cuh"
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

// Adds in the same order in all lanes and launches.
template <typename T>
__device__ __forceinline__ T warp_sum(T value, Location where = Location::current()) {
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2)
    value += shuffle_xor(value, offset, kFullWarp, where);
  return value;
}

// Lives in device memory, zero before its first use and never reset. The top bit flips each time
// all blocks have arrived; the other bits are then zero again, because the numbers that blocks add
// sum to 2^31.
struct GridBarrier {
  alignas(128) uint32_t arrived;
};

// Waits for all blocks of a cooperative launch; what they wrote before is visible afterwards. All
// threads must call it. The barrier is a single word, because each access goes to the L2 cache.
// Polls are relaxed and one fence follows, because every acquire invalidates the L1 cache, which
// the other warps of the multiprocessor may still use.
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
    spin_until([=] { return (load_relaxed(&barrier->arrived) & kTurn) == turned; }, where);
    thread_fence();
  }
  block_barrier(where);
}

}  // namespace specdec
