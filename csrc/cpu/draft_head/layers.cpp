#include "layers.h"

#include <cmath>
#include <cstring>

#include "specdec/cpu/panels.h"
#include "specdec/tree_attention.h"

namespace specdec::cpu {

void DraftLayers::begin(const DraftHeadParams& params, const ParallelFor& parallel_for) {
  params_ = &params;
  head_ = &params.head;
  parallel_for_ = &parallel_for;
  rows_ = &row_ops();
  size_ = element_size(head_->type);
}

const void* DraftLayers::normed() const { return normed_.data(); }

const std::byte* DraftLayers::feedback(int64_t i) const {
  return (head_->norm_output ? normed_ : kept_residual_).data() + i * head_->hidden * size_;
}

void DraftLayers::multiply(const HeadMatrix& matrix, const void* input, int64_t rows,
                           void* output) {
  const auto* bias = static_cast<const std::byte*>(matrix.bias);
  const auto visitor = [&](const PanelBlock& block) {
    for (int64_t r = 0; r < block.rows; ++r) {
      rows_->round(head_->type, block.values + r * kPanelOuts,
                   bias ? bias + block.first_out * size_ : nullptr, block.outs,
                   static_cast<std::byte*>(output) +
                       ((block.first_row + r) * matrix.outs + block.first_out) * size_);
    }
  };
  panel_products({.type = head_->type,
                  .input = input,
                  .panels = matrix.weight,
                  .scales = matrix.scale,
                  .rows = rows,
                  .ins = matrix.ins,
                  .outs = matrix.outs,
                  .block_outs = kPanelOuts},
                 visitor, *parallel_for_);
}

// Norms `rows` contiguous rows [width], or copies them if there is no weight; the rows of `out` are
// out_stride elements apart.
void DraftLayers::norm(const void* weight, const void* x, int64_t rows, int64_t width, void* out,
                       int64_t out_stride) const {
  for (int64_t r = 0; r < rows; ++r) {
    const auto* from = static_cast<const std::byte*>(x) + r * width * size_;
    auto* to = static_cast<std::byte*>(out) + r * out_stride * size_;
    if (weight == nullptr) {
      std::memcpy(to, from, width * size_);
    } else {
      rows_->norm(head_->type, from, {weight, head_->eps}, width, to);
    }
  }
}

void DraftLayers::read(std::span<const DraftElement> elements, bool are_drafted,
                       std::span<const DraftAttention> attention, std::span<const int64_t> keep_at,
                       int64_t num_kept) {
  const int64_t count = std::ssize(elements), hidden = head_->hidden;
  const int64_t last = std::ssize(head_->layers) - 1;
  Rows rows = first_rows(elements, are_drafted);
  for (int64_t layer = 0;; ++layer) {
    cache_keys_and_values(layer, elements, rows.attended);
    if (layer == last) break;
    run_layer(layer, elements, attention, rows);
    norm(head_->layers[layer + 1].input_norm, rows.residual, count, hidden, rows.attended, hidden);
  }
  const int64_t attended = head_->attended(last == 0);
  kept_attended_.at_least(num_kept * attended * size_);
  kept_residual_.at_least(num_kept * hidden * size_);
  for (int64_t i = 0; i < count; ++i) {
    if (keep_at[i] < 0) continue;
    std::memcpy(row(kept_attended_.data(), keep_at[i], attended), row(rows.attended, i, attended),
                attended * size_);
    std::memcpy(row(kept_residual_.data(), keep_at[i], hidden), row(rows.residual, i, hidden),
                hidden * size_);
  }
}

void DraftLayers::finish(std::span<const DraftElement> kept, const DraftAttention& attention) {
  const int64_t count = std::ssize(kept), hidden = head_->hidden;
  const Rows rows{kept_attended_.data(), kept_residual_.data()};
  run_layer(std::ssize(head_->layers) - 1, kept, {&attention, 1}, rows);
  norm(head_->norm, rows.residual, count, hidden, normed_.at_least(count * hidden * size_), hidden);
}

// Embeddings and features. If fc reads both, they are one after the other and normed.
DraftLayers::Inputs DraftLayers::gather(std::span<const DraftElement> elements, bool are_drafted) {
  const int64_t count = std::ssize(elements), hidden = head_->hidden;
  const int64_t features = are_drafted ? hidden : head_->feature_width;
  Inputs inputs;
  inputs.features_stride = features + (head_->feeds_fc ? hidden : 0);
  inputs.features = features_.at_least(count * inputs.features_stride * size_);
  inputs.embeddings = embeddings_.at_least(count * hidden * size_);
  for (int64_t i = 0; i < count; ++i) {
    const auto* embedding =
        static_cast<const std::byte*>(head_->embedding) + elements[i].token * hidden * size_;
    std::memcpy(row(inputs.embeddings, i, hidden), embedding, hidden * size_);
    std::byte* target = row(inputs.features, i, inputs.features_stride);
    if (head_->feeds_fc) {
      norm(head_->embedding_norm, embedding, 1, hidden, target, hidden);
      target += hidden * size_;
    }
    const bool is_normed = head_->feeds_fc && head_->hidden_norm != nullptr;
    std::byte* read = is_normed ? state_.at_least(features * size_) : target;
    if (!are_drafted) {
      copy_features(elements[i].features, read);
    } else if (elements[i].features == nullptr) {
      std::memset(read, 0, hidden * size_);
    } else {
      std::memcpy(read, elements[i].features, hidden * size_);
    }
    if (is_normed) norm(head_->hidden_norm, read, 1, hidden, target, hidden);
  }
  return inputs;
}

// The inputs of layer 0.
DraftLayers::Rows DraftLayers::first_rows(std::span<const DraftElement> elements,
                                          bool are_drafted) {
  const HeadWeights& head = *head_;
  const int64_t count = std::ssize(elements), hidden = head.hidden;
  const Inputs inputs = gather(elements, are_drafted);
  const Rows rows{attended_.at_least(count * head.attended(true) * size_),
                  residual_.at_least(count * hidden * size_)};
  if (head.fc.weight != nullptr && (head.feeds_fc || !are_drafted)) {
    multiply(head.fc, inputs.features, count, rows.residual);
  } else {
    std::memcpy(rows.residual, inputs.features, count * hidden * size_);
  }
  if (head.feeds_fc) {
    norm(head.layers[0].input_norm, rows.residual, count, hidden, rows.attended, hidden);
    return rows;
  }
  norm(head.layers[0].input_norm, inputs.embeddings, count, hidden, rows.attended, 2 * hidden);
  std::byte* second = rows.attended + hidden * size_;
  norm(head.hidden_norm, rows.residual, count, hidden, second, 2 * hidden);
  if (head.norm_before_residual) {
    for (int64_t i = 0; i < count; ++i) {
      std::memcpy(row(rows.residual, i, hidden), row(second, i, 2 * hidden), hidden * size_);
    }
  }
  return rows;
}

// Norms the target's features, the whole and then each feature, where the head has these norms.
void DraftLayers::copy_features(const void* features, std::byte* out) {
  const int64_t width = head_->feature_width, part = width / head_->num_features;
  if (head_->input_norm != nullptr) {
    std::byte* normed = projected_.at_least(width * size_);
    norm(head_->input_norm, features, 1, width, normed, width);
    features = normed;
  }
  if (head_->fc_norm == nullptr) {
    std::memcpy(out, features, width * size_);
    return;
  }
  for (int64_t offset = 0; offset < width * size_; offset += part * size_) {
    norm(static_cast<const std::byte*>(head_->fc_norm) + offset,
         static_cast<const std::byte*>(features) + offset, 1, part, out + offset, part);
  }
}

Rotation DraftLayers::rotation(int64_t position) const {
  return {&params_->cosines(position, 0), &params_->sines(position, 0), params_->rotary_half};
}

void DraftLayers::cache_keys_and_values(int64_t layer, std::span<const DraftElement> elements,
                                        const std::byte* attended) {
  const HeadLayer& weights = head_->layers[layer];
  const int64_t count = std::ssize(elements), dim = head_->head_dim;
  std::byte* projected = projected_.at_least(count * weights.key_value.outs * size_);
  multiply(weights.key_value, attended, count, projected);
  const auto place = [&](const HeadCache& cache, const DraftElement& element, int64_t kv_head) {
    const int64_t offset = layer * cache.layer_stride + element.row * cache.row_stride +
                           kv_head * cache.head_stride + element.slot * cache.slot_stride;
    return static_cast<std::byte*>(cache.data) + offset * size_;
  };
  for (int64_t i = 0; i < count; ++i) {
    const DraftElement& element = elements[i];
    const std::byte* key = row(projected, i, weights.key_value.outs);
    for (int64_t kv_head = 0; kv_head < head_->kv_heads; ++kv_head) {
      rows_->rotate(head_->type, key + kv_head * dim * size_, {weights.key_norm, head_->eps},
                    rotation(element.position), dim, place(params_->keys, element, kv_head));
      std::memcpy(place(params_->values, element, kv_head),
                  key + (head_->kv_heads + kv_head) * dim * size_, dim * size_);
    }
  }
}

// Computes attention and MLP; the output replaces the residual.
void DraftLayers::run_layer(int64_t layer, std::span<const DraftElement> elements,
                            std::span<const DraftAttention> attention, const Rows& rows) {
  const HeadLayer& weights = head_->layers[layer];
  const int64_t count = std::ssize(elements), hidden = head_->hidden, dim = head_->head_dim;
  const int64_t width = weights.query.outs;
  std::byte* projected = projected_.at_least(count * std::max(width, hidden) * size_);
  std::byte* queries = queries_.at_least(count * width * size_);
  std::byte* heads = heads_.at_least(count * width * size_);
  multiply(weights.query, rows.attended, count, projected);
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t offset = i * width; offset < (i + 1) * width; offset += dim) {
      rows_->rotate(head_->type, projected + offset * size_, {weights.query_norm, head_->eps},
                    rotation(elements[i].position), dim, queries + offset * size_);
    }
  }
  int64_t first = 0;
  for (const DraftAttention& part : attention) {
    attend(layer, part, row(queries, first, width), row(heads, first, width));
    first += part.elements();
  }
  multiply(weights.output, heads, count, projected);
  rows_->add(head_->type, projected, count * hidden, rows.residual);

  std::byte* gate_up = inner_.at_least(3 * count * head_->intermediate * size_);
  std::byte* inner = row(gate_up, count, 2 * head_->intermediate);
  norm(weights.post_norm, rows.residual, count, hidden, projected, hidden);
  multiply(weights.gate_up, projected, count, gate_up);
  for (int64_t i = 0; i < count; ++i) {
    rows_->gate(head_->type, row(gate_up, i, 2 * head_->intermediate), head_->intermediate,
                row(inner, i, head_->intermediate));
  }
  multiply(weights.down, inner, count, projected);
  rows_->add(head_->type, projected, count * hidden, rows.residual);
}

void DraftLayers::attend(int64_t layer, const DraftAttention& attention, const void* queries,
                         void* out) {
  static constexpr int64_t kZero = 0;
  const int64_t width = head_->heads * head_->head_dim, first = attention.rows[0];
  // Rows of the cache that are not consecutive are addressed as pages that hold all slots.
  const bool are_pages = attention.rows[attention.batch - 1] - first != attention.batch - 1;
  const auto of_layer = [&](const HeadCache& cache) -> KvTensor {
    const int64_t offset = layer * cache.layer_stride + (are_pages ? 0 : first * cache.row_stride);
    return {static_cast<const std::byte*>(cache.data) + offset * size_, cache.row_stride,
            cache.head_stride, cache.slot_stride};
  };
  tree_attention({.query = queries,
                  .type = head_->type,
                  .query_batch_stride = attention.nodes * width,
                  .query_head_stride = head_->head_dim,
                  .query_node_stride = width,
                  .key = of_layer(params_->keys),
                  .value = of_layer(params_->values),
                  .page_table = {are_pages ? attention.rows : nullptr, 1, 0},
                  .num_pages = params_->rows,
                  .page_size = params_->capacity,
                  .pages_per_row = 1,
                  .ancestors = attention.ancestors,
                  .ancestors_batch_stride = attention.nodes * attention.words,
                  .ancestors_node_stride = attention.words,
                  .ancestors_word_stride = 1,
                  .prefix_starts = {&kZero, 0},
                  .prefix_lengths = {attention.prefix_lengths, 1},
                  .block_starts = {attention.prefix_lengths, 1},
                  .batch = attention.batch,
                  .heads = head_->heads,
                  .kv_heads = head_->kv_heads,
                  .nodes = attention.nodes,
                  .words = attention.words,
                  .head_dim = head_->head_dim,
                  .scale = 1.0f / std::sqrt(static_cast<float>(head_->head_dim)),
                  .window = head_->layers[layer].window,
                  .softcap = 0.0f,
                  .output = out},
                 *parallel_for_);
}

}  // namespace specdec::cpu
