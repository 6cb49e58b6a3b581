// What the two kernels of verify_sampled.cu share: how a warp loads the target and draft
// distributions of a node, sums in the order of residual.h, and the workspace between the kernels.
//
// A segment of 1024 tokens is kSegmentRows rows of kSumLanes tokens. A thread owns kGroup
// contiguous tokens of each row, which are one lane of the sum each. Example: thread 3 has tokens
// 12 .. 15, 140 .. 143, and so on.
#pragma once

#include "specdec/device/cuda.cuh"
#include "specdec/sampling/sampled_walk.h"

namespace specdec {

constexpr int kGroup = 4;  // tokens of a thread in a row of a segment
constexpr int kSegmentRows = kSegment / kSumLanes;
static_assert(kSumLanes == kGroup * kWarpSize && kSumColumns == kWarpSize);

// Which vector loads are aligned.
struct VectorAlignment {
  bool logits;
  bool draft;
};

template <typename T>
VectorAlignment vector_alignment(const VerifySampledParams& params) {
  const auto aligned = [](const void* data, size_t size, int64_t stride0, int64_t stride1) {
    return reinterpret_cast<uintptr_t>(data) % (kGroup * size) == 0 && stride0 % kGroup == 0 &&
           stride1 % kGroup == 0;
  };
  return {aligned(params.logits, sizeof(T), params.logits_batch_stride, params.logits_node_stride),
          aligned(params.draft_probs, sizeof(float), params.draft_batch_stride,
                  params.draft_node_stride)};
}

struct SampledWorkspace {
  Pick* picks;                 // [batch, slices]
  NodeStatistics* statistics;  // [batch, nodes, segments]
  uint32_t* arrivals;          // [batch], zeroed by the first launch
  int64_t segments;
  int64_t slices;  // blocks per row in the second launch
};

template <typename T>
struct alignas(kGroup * sizeof(T)) AlignedGroup {
  T values[kGroup];
};

// values[i] = convert(data[first + i]), `missing` beyond the vocabulary.
template <typename T, typename F>
__device__ __forceinline__ void load_group(const T* data, int64_t first, int64_t vocab,
                                           bool aligned, float missing, float (&values)[kGroup],
                                           const F& convert) {
  if (aligned && first + kGroup <= vocab) {
    const auto group = load_global<AlignedGroup<T>>(data + first);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) values[i] = convert(group.values[i]);
  } else {
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      values[i] = first + i < vocab ? convert(data[first + i]) : missing;
    }
  }
}

template <typename T>
__device__ __forceinline__ void load_logits(const T* logits, int64_t first, int64_t vocab,
                                            VectorAlignment aligned, float (&values)[kGroup]) {
  load_group(logits, first, vocab, aligned.logits, bits_to_float(kMinusInfinityBits), values,
             [](T value) { return to_float(value); });
}

__device__ __forceinline__ void load_draft(const float* draft, int64_t first, int64_t vocab,
                                           VectorAlignment aligned, float (&values)[kGroup]) {
  load_group(draft, first, vocab, aligned.draft, 0.0f, values,
             [](float value) { return draft_weight(value); });
}

// Sums by halving, the order of residual.h, in all lanes.
__device__ __forceinline__ float warp_sum_by_halving(float value) {
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    value = exact_add(value, shuffle_xor(value, offset));
  }
  return value;
}

__device__ __forceinline__ float sum_lanes(float (&lanes)[kGroup]) {
#pragma unroll
  for (int i = 0; i < kGroup; ++i) lanes[i] = warp_sum_by_halving(lanes[i]);
  return exact_add(exact_add(lanes[0], lanes[2]), exact_add(lanes[1], lanes[3]));
}

// An integer that is ordered like the float, with NaN above everything.
__device__ __forceinline__ int32_t max_key(float value) {
  return value != value ? INT32_MAX : ordered_key(float_to_bits(value));
}

// The value that has the key; NaN for the key of NaN.
__device__ __forceinline__ float key_value(int32_t key) { return bits_to_float(ordered_key(key)); }

}  // namespace specdec
