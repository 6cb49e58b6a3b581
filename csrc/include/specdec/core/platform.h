// The differences between host and device compilers: qualifiers, bit casts, and float32 operations
// with explicit rounding.
//
// rng.h promises the same bits on every backend, so a compiler must not decide about contraction
// (whether a * b + c is rounded once or twice). On the device the _rn intrinsics are never
// contracted. On the host the build passes -ffp-contract=off, and std::fma is exact with and
// without FMA hardware.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define SPECDEC_HOST_DEVICE __host__ __device__ __forceinline__
#else
// Small helpers are always inlined: the CPU ops compile their loops once per instruction set, and a
// helper that is not inlined would be compiled for the baseline only.
#define SPECDEC_HOST_DEVICE inline __attribute__((always_inline))
#endif

namespace specdec {

// a * b + c with one rounding.
SPECDEC_HOST_DEVICE float exact_fma(float a, float b, float c) {
#ifdef __CUDA_ARCH__
  return __fmaf_rn(a, b, c);
#else
  return __builtin_fmaf(a, b, c);
#endif
}

SPECDEC_HOST_DEVICE float exact_mul(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

SPECDEC_HOST_DEVICE float exact_add(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}

SPECDEC_HOST_DEVICE float exact_div(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}

SPECDEC_HOST_DEVICE int32_t float_to_bits(float value) {
#ifdef __CUDA_ARCH__
  return __float_as_int(value);
#else
  int32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
#endif
}

SPECDEC_HOST_DEVICE float bits_to_float(int32_t bits) {
#ifdef __CUDA_ARCH__
  return __int_as_float(bits);
#else
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
#endif
}

// The maximum; NaN if one of the two is NaN.
SPECDEC_HOST_DEVICE float max_or_nan(float a, float b) {
#ifdef __CUDA_ARCH__
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
  return larger;
#else
  if (a != a) return a;
  return b <= a ? a : b;
#endif
}

// A strided vector and a strided matrix that do not own their data. Strides count elements.
template <typename T>
struct View1 {
  T* data;
  int64_t stride;

  SPECDEC_HOST_DEVICE T& operator[](int64_t i) const { return data[i * stride]; }
};

template <typename T>
struct View2 {
  T* data;
  int64_t row_stride;
  int64_t column_stride;

  SPECDEC_HOST_DEVICE T& operator()(int64_t row, int64_t column) const {
    return data[row * row_stride + column * column_stride];
  }
};

}  // namespace specdec
