// The step that attention of the fused draft_head (attention.cuh) repeats: a warp attends from 16
// query rows to 16 slots of a cache, for 64 dimensions of the values, with an online softmax.
// Everything is loaded from global memory into the registers of the products (../fragments.cuh). A
// lane holds
//
//   for rows lane / 4 and lane / 4 + 8: `largest`, its part of `sum`, and for the product d with
//   values and column n = 2 (lane % 4) + i % 2 the dimension panel + 8 n + d
//
// so the eight contiguous values of a slot that it loads are column lane / 4 of the eight products.
// The weights are their left factor, in the order in which the products with keys leave them: with
// t = lane % 4, a lane has slots 2 t, 2 t + 1, 8 + 2 t and 9 + 2 t.
//
// The result of a row depends on its own query and on the slots it sees, place by place. Slots that
// it does not see, and steps in which it sees none, change no bit. Slots from `end` on are not
// read.
#pragma once

#include "kernels/draft_head/fragments.cuh"
#include "specdec/math/exp.h"

namespace specdec {

constexpr int kStepSlots = 16;
constexpr int kPanelDims = 64;

// The inputs for one batch row and key-value head.
template <typename T>
struct AttentionInputs {
  const T* queries[2];  // of the lane's two rows; null: no row
  const T* keys;        // of slot 0
  const T* values;      // of slot 0, from the first dimension of the panel
  int64_t key_stride;
  int64_t value_stride;
  int end;
  int head_dim;
  int panel_dims;  // dimensions from the panel's first to head_dim
  float scale;
};

template <typename T>
struct PanelState {
  float largest[2];
  float sum[2];
  float values[kPanelDims / 8][4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      largest[i] = -INFINITY;
      sum[i] = 0;
    }
#pragma unroll
    for (int d = 0; d < kPanelDims / 8; ++d) {
#pragma unroll
      for (int i = 0; i < 4; ++i) values[d][i] = 0;
    }
  }
};

// exp(score - largest); 0 if both are -inf.
__device__ __forceinline__ float softmax_weight(float score, float largest) {
  return exp_nonpositive(exact_add(score, largest == -INFINITY ? 0.0f : -largest));
}

// Computes the dot products of the rows with 2 blocks of 8 slots.
template <typename T>
__device__ __forceinline__ void multiply_keys(const AttentionInputs<T>& inputs, int slot,
                                              float (&scores)[2][4]) {
  const int lane = threadIdx.x % kWarpSize;
  const int own = slot + lane / 4;
  const T* keys = inputs.keys + int64_t{own} * inputs.key_stride;
  const int low_width = inputs.queries[0] == nullptr ? 0 : inputs.head_dim;
  const int high_width = inputs.queries[1] == nullptr ? 0 : inputs.head_dim;
  const int even_width = own < inputs.end ? inputs.head_dim : 0;
  const int odd_width = own + 8 < inputs.end ? inputs.head_dim : 0;
#pragma unroll(sizeof(T) == 4 ? 1 : 2)  // saves registers
  for (int chunk = 0; chunk < inputs.head_dim; chunk += 4 * kVectorElements<T>) {
    const int k = chunk + lane % 4 * kVectorElements<T>;
    const Vector<T> low = load_vector<T>(inputs.queries[0], k, low_width);
    const Vector<T> high = load_vector<T>(inputs.queries[1], k, high_width);
    const Vector<T> even = load_vector<T>(keys, k, even_width);
    const Vector<T> odd = load_vector<T>(keys + 8 * inputs.key_stride, k, odd_width);
#pragma unroll
    for (int i = 0; i < kVectorQuads<T>; ++i) {
      multiply<T>(scores[0], low.quad(i), high.quad(i), even.quad(i));
      multiply<T>(scores[1], low.quad(i), high.quad(i), odd.quad(i));
    }
  }
}

// Turns dot products into scores, -inf for slots that the row does not see.
__device__ __forceinline__ void mask_scores(const uint32_t (&seen)[2], float scale,
                                            float (&scores)[2][4]) {
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t own = seen[half] >> lane % 4 * 2;
#pragma unroll
    for (int block = 0; block < 2; ++block) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float& score = scores[block][2 * half + i];
        score = (own >> (8 * block + i) & 1) != 0 ? exact_mul(score, scale) : -INFINITY;
      }
    }
  }
}

// Turns scores into weights and rescales the state to the new largest score.
template <typename T>
__device__ __forceinline__ void update_softmax(float (&scores)[2][4], PanelState<T>& state) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float largest = state.largest[half];
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      largest =
          max_or_nan(max_or_nan(scores[block][2 * half], scores[block][2 * half + 1]), largest);
    }
    largest = max_or_nan(largest, shuffle_xor(largest, 1));
    largest = max_or_nan(largest, shuffle_xor(largest, 2));
    const float factor = softmax_weight(state.largest[half], largest);
    state.largest[half] = largest;
    state.sum[half] = exact_mul(state.sum[half], factor);
#pragma unroll
    for (int block = 0; block < 2; ++block) {
#pragma unroll
      for (int i = 2 * half; i < 2 * half + 2; ++i) {
        scores[block][i] = softmax_weight(scores[block][i], largest);
        state.sum[half] = exact_add(state.sum[half], scores[block][i]);
      }
    }
#pragma unroll
    for (int d = 0; d < kPanelDims / 8; ++d) {
      state.values[d][2 * half] = exact_mul(state.values[d][2 * half], factor);
      state.values[d][2 * half + 1] = exact_mul(state.values[d][2 * half + 1], factor);
    }
  }
}

// Contiguous values of the lane's four slots: vector i of the eight elements.
template <typename T>
struct ValueVectors {
  static constexpr int kPieces = 8 / kVectorElements<T>;
  Vector<T> slots[4];

  __device__ __forceinline__ void load(const AttentionInputs<T>& inputs, int slot, int piece) {
    const int lane = threadIdx.x % kWarpSize;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = slot + lane % 4 * 2 + i / 2 * 8 + i % 2;
      slots[i] = load_vector<T>(inputs.values + int64_t{at} * inputs.value_stride,
                                lane / 4 * 8 + piece * kVectorElements<T>,
                                at < inputs.end ? inputs.panel_dims : 0);
    }
  }

  __device__ __forceinline__ uint32_t word(int slot, int i) const {
    const uint4& bytes = slots[slot].bytes;
    const uint32_t words[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
    return words[i];
  }

  // Element d of the four slots.
  __device__ __forceinline__ Quad<T> quad(int d) const {
    if constexpr (sizeof(T) == 4) {
      return {{word(0, d), word(1, d), word(2, d), word(3, d)}};
    } else {
      return {{pair(0, d), pair(2, d)}};
    }
  }
  // Element d of a slot and the next one.
  __device__ __forceinline__ uint32_t pair(int slot, int d) const {
    const uint32_t low = word(slot, d / 2), high = word(slot + 1, d / 2);
    return d % 2 == 0 ? (low & 0xFFFF) | high << 16 : low >> 16 | (high & 0xFFFF0000);
  }
};

// Weights rounded to T.
template <typename T>
__device__ __forceinline__ Quad<T> make_quad(float a, float b, float c, float d) {
  if constexpr (sizeof(T) == 4) {
    return {{static_cast<uint32_t>(float_to_bits(a)), static_cast<uint32_t>(float_to_bits(b)),
             static_cast<uint32_t>(float_to_bits(c)), static_cast<uint32_t>(float_to_bits(d))}};
  } else {
    return {{pack<T>(a, b), pack<T>(c, d)}};
  }
}

// Attends to slots [slot, slot + kStepSlots). Bit i of seen[0]: row lane / 4 sees slot + i; seen[1]
// is for row lane / 4 + 8. All lanes of the warp call it.
template <typename T>
__device__ __forceinline__ void attend_step(const AttentionInputs<T>& inputs,
                                            const uint32_t (&seen)[2], int slot,
                                            PanelState<T>& state) {
  float scores[2][4] = {};
  multiply_keys(inputs, slot, scores);
  ValueVectors<T> values;
  values.load(inputs, slot, 0);  // loads are in flight while scores become weights
  mask_scores(seen, inputs.scale, scores);
  update_softmax(scores, state);
  const Quad<T> low = make_quad<T>(scores[0][0], scores[0][1], scores[1][0], scores[1][1]);
  const Quad<T> high = make_quad<T>(scores[0][2], scores[0][3], scores[1][2], scores[1][3]);
#pragma unroll
  for (int piece = 0; piece < ValueVectors<T>::kPieces; ++piece) {
    if (piece > 0) values.load(inputs, slot, piece);
#pragma unroll
    for (int i = 0; i < kVectorElements<T>; ++i) {
      multiply<T>(state.values[piece * kVectorElements<T> + i], low, high, values.quad(i));
    }
  }
}

// The lanes of a row add up their parts of its sum, all in the same order.
template <typename T>
__device__ __forceinline__ void sum_lanes(PanelState<T>& state) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    state.sum[half] = exact_add(state.sum[half], shuffle_xor(state.sum[half], 1));
    state.sum[half] = exact_add(state.sum[half], shuffle_xor(state.sum[half], 2));
  }
}

}  // namespace specdec
