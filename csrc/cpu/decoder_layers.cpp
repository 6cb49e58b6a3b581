// CPU op decoder_layers: a layer has four loops of products (queries, keys and values in one; gate
// and up in one), attention, and row by row arithmetic between them. The weights are not copied.
#include "specdec/decoder_layers.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "cpu/attention/split.h"
#include "cpu/math/rows.h"

namespace specdec::cpu {
namespace {

constexpr int64_t kRowGrain = 1 << 15;  // elements; below it, waking a thread does not pay

// The memory that a calling thread keeps between calls.
struct Buffers {
  FloatBuffer normed;     // [count, hidden]
  FloatBuffer projected;  // [count, queries, keys and values side by side, or gates and ups]
  FloatBuffer rotated;    // [count, heads * head_dim] or [count, intermediate]
  FloatBuffer heads;      // [count, heads * head_dim]
  FloatBuffer added;      // [count, hidden]
};

class Layers {
 public:
  Layers(const DecoderParams& params, const ParallelFor& parallel_for, Buffers& buffers)
      : params_(params),
        parallel_for_(parallel_for),
        rows_(row_ops()),
        size_(element_size(params.type)),
        normed_(room(buffers.normed, params.hidden)),
        projected_(
            room(buffers.projected, std::max((params.heads + 2 * params.kv_heads) * params.head_dim,
                                             2 * params.intermediate))),
        rotated_(
            room(buffers.rotated, std::max(params.heads * params.head_dim, params.intermediate))),
        heads_(room(buffers.heads, params.heads * params.head_dim)),
        added_(room(buffers.added, params.hidden)) {}

  void run() {
    const void* input = params_.input;
    std::byte* state = static_cast<std::byte*>(params_.states);
    for (const DecoderLayer& layer : params_.layers) {
      std::memcpy(state, input, params_.count() * params_.hidden * size_);
      attend(layer, state);
      feed_forward(layer, state);
      input = state;
      state += params_.count() * params_.hidden * size_;
    }
    norm(params_.final_norm, input, params_.output);
  }

 private:
  std::byte* room(FloatBuffer& buffer, int64_t width) const {
    return reinterpret_cast<std::byte*>(
        buffer.at_least(params_.count() * width * size_ / static_cast<int64_t>(sizeof(float)) + 1));
  }

  // Calls body(i) for every element, which has `width` numbers.
  template <typename F>
  void for_each(int64_t width, const F& body) const {
    parallel_for_(params_.count(), kRowGrain / width + 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) body(i);
    });
  }

  void norm(const void* weight, const void* x, void* out) const {
    const int64_t bytes = params_.hidden * size_;
    for_each(params_.hidden, [&](int64_t i) {
      rows_.module_norm(params_.type, static_cast<const std::byte*>(x) + i * bytes,
                        {weight, params_.eps}, params_.hidden,
                        static_cast<std::byte*>(out) + i * bytes);
    });
  }

  LinearParams product(const DecoderMatrix& matrix, const void* input, int64_t ins,
                       std::byte* output) const {
    return {.type = params_.type,
            .input = input,
            .inner_rows = params_.count(),
            .outer_stride = 0,
            .inner_stride = ins,
            .weight = matrix.weight,
            .weight_stride = matrix.weight_stride,
            .codes = matrix.codes,
            .bias = matrix.bias,
            .rows = params_.count(),
            .in_features = ins,
            .out_features = matrix.outs,
            .output = output,
            .output_stride = matrix.outs,
            .many_rows = params_.ancestors == nullptr};
  }

  // state += input Wm
  void add_product(const DecoderMatrix& matrix, const void* input, int64_t ins, std::byte* state) {
    linear(product(matrix, input, ins, added_), parallel_for_);
    const int64_t bytes = params_.hidden * size_;
    for_each(params_.hidden, [&](int64_t i) {
      rows_.add(params_.type, added_ + i * bytes, params_.hidden, state + i * bytes);
    });
  }

  void attend(const DecoderLayer& layer, std::byte* state) {
    const int64_t hidden = params_.hidden, count = params_.count();
    norm(layer.input_norm, state, normed_);
    std::byte* keys = projected_ + count * layer.query.outs * size_;
    std::byte* values = keys + count * layer.key.outs * size_;
    const std::array products{product(layer.query, normed_, hidden, projected_),
                              product(layer.key, normed_, hidden, keys),
                              product(layer.value, normed_, hidden, values)};
    linears(products, parallel_for_);
    for_each(layer.query.outs + 2 * layer.key.outs, [&](int64_t i) {
      rotate(i, layer.query_norm, params_.heads, projected_, [&](int64_t head) {
        return rotated_ + (i * params_.heads + head) * params_.head_dim * size_;
      });
      rotate(i, layer.key_norm, params_.kv_heads, keys,
             [&](int64_t head) { return place(layer.keys, i, head); });
      for (int64_t head = 0; head < params_.kv_heads; ++head) {
        std::memcpy(place(layer.values, i, head),
                    values + (i * params_.kv_heads + head) * params_.head_dim * size_,
                    params_.head_dim * size_);
      }
    });
    tree_attention(decoder_attention(params_, layer, params_.start, rotated_, heads_),
                   parallel_for_);
    add_product(layer.output, heads_, layer.query.outs, state);
  }

  // Rotates the heads of element i and writes each to place(head).
  template <typename F>
  void rotate(int64_t i, const void* weight, int64_t heads, std::byte* projected,
              const F& place) const {
    const int64_t bytes = params_.head_dim * size_;
    const int64_t turn = params_.rotation_rows == 1 ? i % params_.nodes : i;
    const auto* cosines = static_cast<const std::byte*>(params_.cosines) + turn * bytes;
    const auto* sines = static_cast<const std::byte*>(params_.sines) + turn * bytes;
    for (int64_t head = 0; head < heads; ++head) {
      rows_.module_rotate(params_.type, projected + (i * heads + head) * bytes,
                          {weight, params_.eps}, cosines, sines, params_.head_dim, place(head));
    }
  }

  std::byte* place(const KvTensor& cache, int64_t i, int64_t kv_head) const {
    const int64_t row = i / params_.nodes, slot = params_.start + i % params_.nodes;
    const int64_t offset =
        row * cache.page_stride + kv_head * cache.head_stride + slot * cache.slot_stride;
    return static_cast<std::byte*>(const_cast<void*>(cache.data)) + offset * size_;
  }

  void feed_forward(const DecoderLayer& layer, std::byte* state) {
    const int64_t inner = params_.intermediate;
    norm(layer.post_norm, state, normed_);
    std::byte* ups = projected_ + params_.count() * inner * size_;
    const std::array products{product(layer.gate, normed_, params_.hidden, projected_),
                              product(layer.up, normed_, params_.hidden, ups)};
    linears(products, parallel_for_);
    for_each(inner, [&](int64_t i) {
      const int64_t offset = i * inner * size_;
      rows_.module_gate(params_.type, projected_ + offset, ups + offset, inner, rotated_ + offset);
    });
    add_product(layer.down, rotated_, inner, state);
  }

  const DecoderParams& params_;
  const ParallelFor& parallel_for_;
  const RowOps& rows_;
  int64_t size_;
  std::byte* normed_;
  std::byte* projected_;
  std::byte* rotated_;
  std::byte* heads_;
  std::byte* added_;
};

}  // namespace

TreeAttentionParams decoder_attention(const DecoderParams& params, const DecoderLayer& layer,
                                      const int64_t& start, const void* queries, void* output) {
  const int64_t width = params.heads * params.head_dim, words = (params.nodes + 63) / 64;
  return {.query = queries,
          .type = params.type,
          .query_batch_stride = params.nodes * width,
          .query_head_stride = params.head_dim,
          .query_node_stride = width,
          .key = layer.keys,
          .value = layer.values,
          .page_table = {nullptr, 0, 0},
          .num_pages = params.batch,
          .page_size = params.start + params.nodes,
          .pages_per_row = 1,
          .ancestors = params.ancestors,
          .ancestors_batch_stride = params.nodes * words,
          .ancestors_node_stride = words,
          .ancestors_word_stride = 1,
          .prefix_starts = params.prefix_starts,
          .prefix_lengths = params.prefix_lengths,
          .block_starts = {&start, 0},
          .batch = params.batch,
          .heads = params.heads,
          .kv_heads = params.kv_heads,
          .nodes = params.nodes,
          .words = words,
          .head_dim = params.head_dim,
          .scale = params.scale,
          .window = layer.window,
          .softcap = 0.0f,
          .output = output};
}

void decoder_layers(const DecoderParams& params, const ParallelFor& parallel_for) {
  thread_local Buffers buffers;
  Layers(params, parallel_for, buffers).run();
}

}  // namespace specdec::cpu
