// Asynchronous 16-byte loads of a thread's tokens from rows of logits with any alignment.
//
// A thread owns kWindowTokens contiguous tokens of each row. It loads the aligned 16-byte vectors
// that hold them: 1 for a 16-bit type, 2 for float32, and one more if rows are not aligned
// (kAligned false); then reading shifts the tokens to the front. Example, bf16, a row that starts 6
// bytes after a multiple of 16: tokens 8 .. 15 are elements 3 .. 10 of the two vectors from token 5
// on.
//
// The vectors go through the slots of a ring in shared memory,
// SharedArray<uint4, kRingVectors * block size>. Each slot belongs to one thread, so no barrier
// protects it: a thread waits for its own copies (cp_async_wait) and refills a slot after it has
// read it.
#pragma once

#include "specdec/core/float_types.h"
#include "specdec/device/cuda.cuh"

namespace specdec {

constexpr int kWindowTokens = 8;
constexpr int kRingVectors = 6;  // vectors that a thread has in flight

template <typename T>
struct LogitsElement;

template <>
struct LogitsElement<float> {
  using Bits = uint32_t;
  static constexpr Bits kMinusInfinity = 0xFF800000;
};

template <>
struct LogitsElement<BFloat16> {
  using Bits = uint16_t;
  static constexpr Bits kMinusInfinity = 0xFF80;
};

template <>
struct LogitsElement<Float16> {
  using Bits = uint16_t;
  static constexpr Bits kMinusInfinity = 0xFC00;
};

template <typename T, bool kAligned>
struct LogitsWindow {
  static constexpr int kPerVector = sizeof(uint4) / sizeof(T);
  static constexpr int kVectors = kWindowTokens / kPerVector + (kAligned ? 0 : 1);
  static constexpr int kElements = kVectors * kPerVector;
  static constexpr int kInFlight = kRingVectors / kVectors;  // nodes

  // The number of elements between the begin of the vectors and the tokens, the same for a whole
  // row.
  __device__ __forceinline__ static int shift(const T* logits) {
    if (kAligned) return 0;
    return static_cast<int>(reinterpret_cast<uintptr_t>(logits) % sizeof(uint4) / sizeof(T));
  }

  // Starts the copy, with -inf for tokens outside the row of logits.
  template <typename Ring>
  __device__ __forceinline__ static void fetch(Ring& ring, int slot, const T* logits,
                                               int64_t first_token, int64_t vocab) {
    const int64_t begin = first_token - shift(logits);
    const bool inside = begin >= 0 && begin + kElements <= vocab;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      void* target = ring.pointer((slot * kVectors + i) * blockDim.x + threadIdx.x);
      if (inside) {
        cp_async_16(target, logits + begin + i * kPerVector, true);
      } else {
        store_shared(target, load_elements(logits, begin + i * kPerVector, vocab));
      }
    }
  }

  template <typename Ring>
  __device__ __forceinline__ static void read(Ring& ring, int slot, const T* logits,
                                              float (&scores)[kWindowTokens]) {
    uint32_t words[kVectors * 4];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const uint4 vector =
          load_shared<uint4>(ring.pointer((slot * kVectors + i) * blockDim.x + threadIdx.x));
      words[4 * i] = vector.x;
      words[4 * i + 1] = vector.y;
      words[4 * i + 2] = vector.z;
      words[4 * i + 3] = vector.w;
    }
    if (!kAligned) drop_front(words, shift(logits) * static_cast<int>(sizeof(T)));
#pragma unroll
    for (int i = 0; i < kWindowTokens; ++i) {
      if constexpr (sizeof(T) == sizeof(uint32_t)) {
        scores[i] = bits_to_float(static_cast<int32_t>(words[i]));
      } else {
        scores[i] = to_float(T{static_cast<uint16_t>(words[i / 2] >> (i % 2 * 16))});
      }
    }
  }

 private:
  __device__ __forceinline__ static uint4 load_elements(const T* logits, int64_t first,
                                                        int64_t vocab) {
    const auto* bits = reinterpret_cast<const typename LogitsElement<T>::Bits*>(logits);
    constexpr int kPerWord = sizeof(uint32_t) / sizeof(T);
    uint32_t words[4] = {};
#pragma unroll
    for (int i = 0; i < kPerVector; ++i) {
      const bool exists = first + i >= 0 && first + i < vocab;
      const uint32_t element = exists ? bits[first + i] : LogitsElement<T>::kMinusInfinity;
      words[i / kPerWord] |= element << (i % kPerWord * 16);
    }
    return {words[0], words[1], words[2], words[3]};
  }

  template <int kWords>
  __device__ __forceinline__ static void drop_front(uint32_t (&words)[kWords], int bytes) {
    if (bytes & 8) {
#pragma unroll
      for (int i = 0; i + 2 < kWords; ++i) words[i] = words[i + 2];
    }
    if (bytes & 4) {
#pragma unroll
      for (int i = 0; i + 1 < kWords; ++i) words[i] = words[i + 1];
    }
    if (bytes & 2) {
#pragma unroll
      for (int i = 0; i + 1 < kWords; ++i) words[i] = words[i] >> 16 | words[i + 1] << 16;
    }
  }
};

}  // namespace specdec
