// The elements of a pass, and the addresses of its products' inputs.
#pragma once

#include "tree.cuh"

namespace specdec {

// The address `elements` elements of T after data.
template <typename T>
__device__ __forceinline__ const void* offset_by(const void* data, int64_t elements) {
  return static_cast<const T*>(data) + elements;
}

template <typename T>
__device__ __forceinline__ bool is_active(const DraftBlock<T>& block, int batch_row) {
  const int first = block.shared.first_element[batch_row];
  const int end = block.shared.first_element[batch_row + 1];
  return end > first;
}

// Describes element `place` of a batch row: a new element or, after those, a mask element.
template <typename T>
__device__ __forceinline__ void fill_new(const DraftBlock<T>& block, int place, PassRow& row) {
  const DraftKernelParams& params = block.params;
  const int b = row.batch_row;
  const int64_t count = params.counts[b];
  row.place = place;
  row.slot = params.lengths[b] + place;
  row.position = params.positions[b] + place;
  if (place < count) {
    row.token = params.tokens(b, place);
    row.hidden = offset_by<T>(params.features,
                              b * params.features_row_stride + place * params.features_item_stride);
  } else {
    row.token = params.mask_token;
    row.hidden = params.mask_features;
  }
}

template <typename T>
__device__ __forceinline__ PassRow new_row(const DraftBlock<T>& block, int element, int index) {
  PassRow row;
  row.is_active = true;
  row.batch_row = 0;
  while (block.shared.first_element[row.batch_row + 1] <= element) ++row.batch_row;
  const int place = element - block.shared.first_element[row.batch_row];
  fill_new(block, place, row);
  const int kept = place - (static_cast<int>(block.params.counts[row.batch_row]) - 1);
  row.list = kept < 0 ? -1 : row.batch_row * block.params.plan.kept_width() + kept;
  row.memory = kept < 0 ? block.params.lists() + index : row.list;
  return row;
}

template <typename T>
__device__ __forceinline__ PassRow kept_row(const DraftBlock<T>& block, int list) {
  const int width = block.params.plan.kept_width();
  PassRow row{};
  row.batch_row = list / width;
  row.is_active = is_active(block, row.batch_row);
  row.list = row.memory = list;
  row.hidden = block.params.scratch.zeros;
  if (row.is_active) {
    fill_new(block, static_cast<int>(block.params.counts[row.batch_row]) - 1 + list % width, row);
  }
  return row;
}

template <typename T>
__device__ __forceinline__ PassRow frontier_row(const DraftBlock<T>& block, int level, int list) {
  const DraftKernelParams& params = block.params;
  const int width = params.plan.widths[level];
  PassRow row{};
  row.batch_row = list / width;
  row.place = list % width;
  row.is_active = is_active(block, row.batch_row);
  row.list = row.memory = list;
  row.hidden = params.scratch.zeros;
  if (!row.is_active) return row;
  const int b = row.batch_row;
  row.slot = params.lengths[b] + params.counts[b] + params.first_slots[level] + row.place;
  row.position = params.positions[b] + params.counts[b] + level - 1;
  const DraftNode node = DraftTreeRow(params, b).nodes(level)[row.place];
  if (!node.is_alive) return row;
  row.token = node.token;
  const int64_t parent = b * params.plan.widths[level - 1] + node.parent;
  row.hidden = offset_by<T>(params.scratch.feedback,
                            ((level - 1) % 2 * params.lists() + parent) * params.hidden);
  return row;
}

// Fills shared.rows. Ends with a barrier.
template <typename T>
__device__ __forceinline__ void load_pass_rows(const DraftBlock<T>& block, const DraftPass& pass) {
  const int i = static_cast<int>(threadIdx.x), at = pass.first_row + i;
  if (i < pass.num_rows) {
    block.shared.rows[i] = pass.kind == PassKind::kNew    ? new_row(block, at, i)
                           : pass.kind == PassKind::kKept ? kept_row(block, at)
                                                          : frontier_row(block, pass.level, at);
  }
  block.sync();
}

// Whether a pass of new elements has one with a list.
template <typename T>
__device__ __forceinline__ bool has_lists(const DraftBlock<T>& block, const DraftPass& pass) {
  const int width = block.params.plan.kept_width(), end = pass.first_row + pass.num_rows;
  for (int b = 0; b < block.params.plan.batch; ++b) {
    const int last = block.shared.first_element[b + 1];
    if (is_active(block, b) && last - width < end && last > pass.first_row) return true;
  }
  return false;
}

// A matrix of a phase, and the place of its outputs.
struct PhaseProduct {
  DraftMatrix matrix;
  bool is_paired = false;
  int first_out = 0;
};

// The product of a phase, both for filling the ring and for multiplying.
template <typename T, typename W>
__device__ __forceinline__ PhaseProduct phase_product(const DraftBlock<T>& block,
                                                      const DraftPass& pass, DraftOp op,
                                                      int layer) {
  const DraftKernelParams& params = block.params;
  const DraftLayer& weights = params.layers[layer];
  if (op == DraftOp::kFc) return {params.fc};
  if (op == DraftOp::kOutput) return {weights.output};
  if (op == DraftOp::kGateUp) return {weights.gate_up, true};
  if (op == DraftOp::kDown) return {weights.down};
  if (op == DraftOp::kLogits) return {params.lm_head};
  PhaseProduct product{weights.projections};
  const bool only_caches =
      pass.kind == PassKind::kNew && layer == params.plan.num_layers - 1 && !has_lists(block, pass);
  if (only_caches) {
    DraftMatrix& matrix = product.matrix;
    product.first_out = params.query_outs();
    // A multiple of kTileOuts outputs, because head_dim is one.
    matrix.weight = offset_by<unsigned char>(
        matrix.weight, int64_t{product.first_out} * matrix.row_bytes(sizeof(W)));
    if (matrix.scale) matrix.scale += product.first_out;
    if (matrix.bias) matrix.bias = offset_by<T>(matrix.bias, product.first_out);
    matrix.outs = params.key_value_outs();
  }
  return product;
}

// The input of fc for a row, besides its token; without fc, the input of layer 0.
template <typename T>
__device__ __forceinline__ const void* fc_input(const DraftBlock<T>& block, const DraftPass& pass,
                                                int i) {
  const DraftKernelParams& params = block.params;
  if (pass.kind != PassKind::kFrontier && params.plan.gathers) {
    return block.row(params.scratch.features, i, params.feature_width);
  }
  const PassRow row = block.shared.rows[i];
  return row.hidden;
}

// The input of a row to layer 0: the second input of attention, and its residual.
template <typename T>
__device__ __forceinline__ const void* layer_input(const DraftBlock<T>& block,
                                                   const DraftPass& pass, int i) {
  const DraftKernelParams& params = block.params;
  const bool went_through_fc =
      pass.kind == PassKind::kFrontier ? params.plan.feeds_fc : params.plan.has_fc;
  if (!went_through_fc) return fc_input(block, pass, i);
  const PassRow row = block.shared.rows[i];
  return block.row(params.scratch.residual, row.memory, params.hidden);
}

template <typename T>
__device__ __forceinline__ InputSegments product_segments(const DraftBlock<T>& block, DraftOp op,
                                                          int layer) {
  const DraftKernelParams& params = block.params;
  const DraftLayer& weights = params.layers[layer];
  switch (op) {
    case DraftOp::kFc:
      if (params.plan.feeds_fc) {
        return {2, params.hidden, {params.embedding_norm, params.hidden_norm}};
      }
      return {1, params.feature_width, {nullptr, nullptr}};
    case DraftOp::kProjections:
      if (layer > 0 || params.plan.feeds_fc) {
        return {1, params.hidden, {weights.input_norm, nullptr}};
      }
      return {2, params.hidden, {weights.input_norm, params.hidden_norm}};
    case DraftOp::kOutput:
      return {1, params.query_outs(), {nullptr, nullptr}};
    case DraftOp::kGateUp:
      return {1, params.hidden, {weights.post_norm, nullptr}};
    case DraftOp::kDown:
      return {1, params.intermediate, {nullptr, nullptr}};
    default:
      return {1, params.hidden, {params.norm, nullptr}};
  }
}

// Segment `segment` of row i of a product.
template <typename T>
__device__ __forceinline__ const void* input_row(const DraftBlock<T>& block, const DraftPass& pass,
                                                 DraftOp op, int layer, int segment, int i) {
  const DraftKernelParams& params = block.params;
  const PassRow row = block.shared.rows[i];
  const bool reads_text = op == DraftOp::kFc || (op == DraftOp::kProjections && layer == 0);
  if (op == DraftOp::kOutput) {
    return block.row(params.scratch.attended, row.memory, params.query_outs());
  }
  if (op == DraftOp::kDown) {
    return block.row(params.scratch.inner, row.memory, params.intermediate);
  }
  if (!reads_text || (params.plan.feeds_fc && op == DraftOp::kProjections)) {
    return block.row(params.scratch.residual, row.memory, params.hidden);
  }
  const bool is_token = segment == 0 && (op == DraftOp::kProjections || params.plan.feeds_fc);
  if (is_token) return offset_by<T>(params.embedding, row.token * params.hidden);
  return op == DraftOp::kProjections ? layer_input(block, pass, i) : fc_input(block, pass, i);
}

// Fills shared.inputs and shared.inverses for a product. Ends with a barrier.
template <typename T>
__device__ __forceinline__ InputSegments prepare_inputs(const DraftBlock<T>& block,
                                                        const DraftPass& pass, DraftOp op,
                                                        int layer) {
  const InputSegments segments = product_segments(block, op, layer);
  for (int at = block.warp(); at < segments.count * pass.num_rows; at += kDraftWarps) {
    const int segment = at / pass.num_rows, i = at % pass.num_rows;
    const void* data = input_row(block, pass, op, layer, segment, i);
    const void* norm = segment == 0 ? segments.norms[0] : segments.norms[1];
    float inverse = 1;
    if (norm) inverse = inverse_root_mean_square<T>(data, segments.width, block.params.eps);
    if (block.lane() == 0) {
      block.shared.inputs[segment * kPassRows + i] = data;
      block.shared.inverses[segment * kPassRows + i] = inverse;
    }
  }
  block.sync();  // all rows are described
  return segments;
}

}  // namespace specdec
