// Two phases of the fused draft_head in which each head or row of activations belongs to one warp
// (../block.cuh):
//
//   gather_features   norms of the target's features -> scratch.features
//   rotate_heads      norms and rotation of queries -> scratch.queries, and of keys -> the cache;
//                     values -> the cache; layer 0: the residual -> scratch.residual
//
// No warp reads what another warp writes in the same phase, so the grid barriers around the phases
// suffice. Unit i goes to block i % blocks, and then to a warp of it, so that few units are spread
// over all multiprocessors.
//
// Norms and rotation are float32 with one rounding to T at the end, as in the CPU op.
#pragma once

#include "kernels/draft_head/rows.cuh"

namespace specdec {

// Calls use(row of the pass, unit of the row) for this warp's share of num_rows * units.
template <typename T, typename Use>
__device__ __forceinline__ void for_units(const DraftBlock<T>& block, int num_rows, int units,
                                          const Use& use) {
  for (int i = block.warp() * block.count() + block.index(); i < num_rows * units;
       i += kDraftWarps * block.count()) {
    use(i / units, i % units);
  }
}

// out = x or, with `weights`, its RMS norm with `inverse`. out may be x. All lanes of a warp call
// it.
template <typename T>
__device__ __forceinline__ void norm_row(const T* x, const T* weight, float inverse, int width,
                                         T* out) {
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll 4
  for (int k = lane * kVectorElements<T>; k < width; k += kWarpSize * kVectorElements<T>) {
    Vector<T> vector = load_vector<T>(x, k, width);
    if (weight != nullptr) vector = normed(vector, load_vector<T>(weight, k, width), inverse);
    store_global(out + k, vector.bytes);
  }
}

// A unit is one of the num_features parts of a row. Each warp computes the mean square of the whole
// row itself.
template <typename T>
__device__ __forceinline__ void gather_features(const DraftBlock<T>& block, const DraftPass& pass) {
  const DraftKernelParams& params = block.params;
  const int width = params.feature_width, part = width / params.num_features;
  const T* input_norm = static_cast<const T*>(params.input_norm);
  const T* fc_norm = static_cast<const T*>(params.fc_norm);
  for_units(block, pass.num_rows, params.num_features, [&](int i, int feature) {
    const PassRow row = block.shared.rows[i];
    const T* x = static_cast<const T*>(row.hidden) + feature * part;
    T* out = block.row(params.scratch.features, i, width) + feature * part;
    if (input_norm != nullptr) {
      const float inverse = inverse_root_mean_square<T>(row.hidden, width, params.eps);
      norm_row(x, input_norm + feature * part, inverse, part, out);
      x = out;  // each lane reads what it wrote
    }
    if (fc_norm == nullptr) {
      if (x != out) norm_row<T>(x, nullptr, 1.0f, part, out);
      return;
    }
    const float inverse = inverse_root_mean_square<T>(x, part, params.eps);
    norm_row(x, fc_norm + feature * part, inverse, part, out);
  });
}

// out = the head x, normed if there are weights, and rotated: pairs (i, half + i). All lanes of a
// warp call it.
template <typename T>
__device__ __forceinline__ void rotate_head(const DraftKernelParams& params, const T* x,
                                            const T* weight, int64_t position, T* out) {
  const int half = params.rotary_half, lane = threadIdx.x % kWarpSize;
  const float inverse =
      weight == nullptr ? 1.0f : inverse_root_mean_square<T>(x, params.head_dim, params.eps);
  const auto load = [&](int i) {
    const float value = load_float(x + i);
    return weight == nullptr ? value : exact_mul(exact_mul(value, inverse), load_float(weight + i));
  };
  for (int i = lane; i < half; i += kWarpSize) {
    const float cosine = params.cosines(position, i), sine = params.sines(position, i);
    const float first = load(i), second = load(half + i);
    store_float(out + i, exact_add(exact_mul(first, cosine), -exact_mul(second, sine)));
    store_float(out + half + i, exact_add(exact_mul(second, cosine), exact_mul(first, sine)));
  }
  for (int i = 2 * half + lane; i < params.head_dim; i += kWarpSize) store_float(out + i, load(i));
}

// The address of a slot.
template <typename T>
__device__ __forceinline__ T* cached_head(const HeadCache& cache, int layer, int batch_row,
                                          int kv_head, int64_t slot) {
  return static_cast<T*>(cache.data) + layer * cache.layer_stride + batch_row * cache.row_stride +
         kv_head * cache.head_stride + slot * cache.slot_stride;
}

// Writes the key head and the value head of a row to its slot.
template <typename T>
__device__ __forceinline__ void append_head(const DraftBlock<T>& block, const PassRow& row,
                                            int layer, int kv_head) {
  const DraftKernelParams& params = block.params;
  const int dim = params.head_dim;
  const T* key = block.row(params.scratch.projected, row.memory, params.projection_outs()) +
                 params.query_outs() + kv_head * dim;
  rotate_head(params, key, static_cast<const T*>(params.layers[layer].key_norm), row.position,
              cached_head<T>(params.keys, layer, row.batch_row, kv_head, row.slot));
  norm_row<T>(key + params.kv_heads * dim, nullptr, 1.0f, dim,
              cached_head<T>(params.values, layer, row.batch_row, kv_head, row.slot));
}

// Writes the residual of layer 0, to which attention is added: h or its norm. With fc, h of a new
// element is already there.
template <typename T>
__device__ __forceinline__ void begin_residual(const DraftBlock<T>& block, const DraftPass& pass,
                                               const PassRow& row, int i) {
  const DraftKernelParams& params = block.params;
  const int hidden = params.hidden;
  T* residual = block.row(params.scratch.residual, row.memory, hidden);
  const T* h = static_cast<const T*>(layer_input(block, pass, i));
  if (params.norm_before_residual) {
    norm_row(h, static_cast<const T*>(params.hidden_norm),
             inverse_root_mean_square<T>(h, hidden, params.eps), hidden, residual);
  } else if (h != residual) {
    norm_row<T>(h, nullptr, 1.0f, hidden, residual);
  }
}

// The units of a row are its query heads, its key-value heads and, in layer 0, its residual. In the
// last layer, rows without a list need only key and value.
template <typename T>
__device__ __forceinline__ void rotate_heads(const DraftBlock<T>& block, const DraftPass& pass,
                                             int layer) {
  const DraftKernelParams& params = block.params;
  const int heads = params.heads, key_values_end = heads + params.kv_heads;
  const int units = key_values_end + (layer == 0 && !params.plan.feeds_fc ? 1 : 0);
  const bool is_last_layer = layer == params.plan.num_layers - 1;
  for_units(block, pass.num_rows, units, [&](int i, int unit) {
    const PassRow row = block.shared.rows[i];
    const bool goes_on = row.list >= 0 || !is_last_layer;
    if (unit >= heads && unit < key_values_end) {
      if (row.is_active) append_head(block, row, layer, unit - heads);
    } else if (unit >= key_values_end) {
      if (goes_on) begin_residual(block, pass, row, i);
    } else if (goes_on && row.is_active) {
      const int64_t at = unit * params.head_dim;
      rotate_head(params,
                  block.row(params.scratch.projected, row.memory, params.projection_outs()) + at,
                  static_cast<const T*>(params.layers[layer].query_norm), row.position,
                  block.row(params.scratch.queries, row.memory, params.query_outs()) + at);
    }
  });
}

}  // namespace specdec
