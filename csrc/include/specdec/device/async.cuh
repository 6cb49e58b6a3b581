// Device side of cuda.cuh, continued: tensor cores and asynchronous copies in PTX. sm_80 has
// cp.async, mbarriers, ldmatrix and mma.sync. Mbarriers that count bytes and bulk copies need
// sm_90; on an older GPU they trap, so launchers ask has_bulk_copies.
#pragma once

namespace specdec {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void cp_async_16(void* shared, const void* global, bool valid) {
  // The hardware reads source_bytes and fills the rest with zeros.
  const int source_bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)),
               "l"(global), "r"(source_bytes)
               : "memory");
}

__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int kGroups>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
}

__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}

__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}

template <typename T>
__device__ __forceinline__ void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4],
                                             const uint32_t (&b)[2]) {
  static_assert(std::is_same_v<T, __nv_bfloat16> || std::is_same_v<T, __half>);
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
}

__device__ __forceinline__ void fma_m16n8k16(float (&c)[4], const float (&a_low)[4],
                                             const float (&a_high)[4], const float (&b)[4]) {
  const int lane = threadIdx.x % kWarpSize, quad = lane / 4 * 4, column = lane % 4 * 2;
#pragma unroll 1  // saves registers
  for (int source = 0; source < 4; ++source) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float low = shuffle(a_low[i], quad + source);
      const float high = shuffle(a_high[i], quad + source);
      const float even = shuffle(b[i], column * 4 + source);
      const float odd = shuffle(b[i], column * 4 + 4 + source);
      c[0] = __fmaf_rn(low, even, c[0]);
      c[1] = __fmaf_rn(low, odd, c[1]);
      c[2] = __fmaf_rn(high, even, c[2]);
      c[3] = __fmaf_rn(high, odd, c[3]);
    }
  }
}

// Rounds to nearest even. `low` goes to the low half of the register, as the fragments of mma need
// it.
template <typename T>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  static_assert(std::is_same_v<T, __nv_bfloat16> || std::is_same_v<T, __half>);
  uint32_t pair;
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  }
  return pair;
}

template <typename T>
__device__ __forceinline__ float2 unpack(uint32_t pair) {
  static_assert(std::is_same_v<T, __nv_bfloat16> || std::is_same_v<T, __half>);
  const uint16_t low = static_cast<uint16_t>(pair), high = static_cast<uint16_t>(pair >> 16);
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return {__bfloat162float(__ushort_as_bfloat16(low)),
            __bfloat162float(__ushort_as_bfloat16(high))};
  } else {
    return {__half2float(__ushort_as_half(low)), __half2float(__ushort_as_half(high))};
  }
}

struct alignas(8) Mbarrier {
  uint64_t state;
};

__device__ __forceinline__ void mbarrier_init(Mbarrier* barrier, int count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count)
               : "memory");
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // bulk copies see it initialised
#endif
}

__device__ __forceinline__ void mbarrier_arrive(Mbarrier* barrier) {
  asm volatile(
      "{\n"
      ".reg .b64 state;\n"
      "mbarrier.arrive.shared.b64 state, [%0];\n"
      "}" ::"r"(shared_address(barrier))
      : "memory");
}

// On sm_90 the instruction suspends the thread for a while before it returns.
__device__ __forceinline__ void mbarrier_wait(Mbarrier* barrier, int parity) {
  const Watchdog watchdog;
  uint32_t done;
  do {
    watchdog.check();
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
#if __CUDA_ARCH__ >= 900
        "mbarrier.try_wait.parity.shared.b64 done, [%1], %2;\n"
#else
        "mbarrier.test_wait.parity.shared.b64 done, [%1], %2;\n"
#endif
        "selp.u32 %0, 1, 0, done;\n"
        "}"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
  } while (!done);
}

// Code for sm_90 always copies in bulk and older code never does, on any GPU, so that a kernel
// holds only one of the two.
__device__ __forceinline__ constexpr bool copies_in_bulk(bool /*has_bulk_copies*/) {
#if __CUDA_ARCH__ >= 900
  return true;
#else
  return false;
#endif
}

__device__ __forceinline__ bool elect_lane() {
#if __CUDA_ARCH__ >= 900
  uint32_t is_elected;
  asm volatile(
      "{\n"
      ".reg .pred elected;\n"
      "elect.sync _|elected, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, elected;\n"
      "}"
      : "=r"(is_elected)
      :
      : "memory");
  return is_elected != 0;
#else
  return threadIdx.x % kWarpSize == 0;
#endif
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

__device__ __forceinline__ void mbarrier_arrive_expect(Mbarrier* barrier, int bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
}

__device__ __forceinline__ void bulk_copy(void* shared, const void* global, int bytes,
                                          Mbarrier* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}

#else

__device__ __forceinline__ void mbarrier_arrive_expect(Mbarrier*, int) { __trap(); }
__device__ __forceinline__ void bulk_copy(void*, const void*, int, Mbarrier*) { __trap(); }

#endif

inline cudaError_t has_cooperative_launch(bool* answer) {
  int device = 0, value = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&value, cudaDevAttrCooperativeLaunch, device);
  }
  *answer = value != 0;
  return error;
}

inline cudaError_t has_bulk_copies(bool* answer) {
  int device = 0, major = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  }
  *answer = major >= 9;
  return error;
}

}  // namespace specdec
