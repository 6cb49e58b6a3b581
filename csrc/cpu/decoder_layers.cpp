// CPU op decoder_layers: a layer has four loops of products (queries, keys and values in one; gate
// and up in one), attention, and row by row arithmetic between them. The weights are not copied.
// Matrices that a model has joined are multiplied at once, and the parts of each row are read where
// they are. Experts run one after the other, each on the nodes that have chosen it.
#include "specdec/decoder_layers.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "cpu/attention/split.h"
#include "cpu/math/rows.h"

namespace specdec::cpu {
namespace {

constexpr int64_t kRowGrain = 1 << 15;  // elements; below it, waking a thread does not pay

// The memory that a calling thread keeps between calls.
struct Buffers {
  FloatBuffer normed;     // [count, hidden]
  FloatBuffer projected;  // [count, queries, keys and values side by side, or gates and ups]
  FloatBuffer rotated;    // [count, heads * head_dim] or [count, inner]
  FloatBuffer heads;      // [count, heads * head_dim]
  FloatBuffer added;      // [count, hidden]
  FloatBuffer attended;   // [count, hidden], only if layers are parallel
  FloatBuffer last;       // [batch, outputs, hidden], only if not all outputs are computed
  // Only if there are experts:
  FloatBuffer gathered;         // [count, hidden], inputs and outputs of one expert
  FloatBuffer routes;           // [count, experts], weights in float32, -1 for an expert not chosen
  FloatBuffer sums;             // [count, hidden], in float32
  std::vector<int64_t> chosen;  // nodes of one expert
};

// Vectors of each node in a buffer; strides in bytes.
struct Parts {
  std::byte* data;
  int64_t node_stride;
  int64_t stride;

  std::byte* at(int64_t node, int64_t part) const {
    return data + node * node_stride + part * stride;
  }
};

struct Heads {
  Parts queries;
  Parts keys;
  Parts values;
};

class Layers {
 public:
  Layers(const DecoderParams& params, const ParallelFor& parallel_for, Buffers& buffers)
      : params_(params),
        parallel_for_(parallel_for),
        rows_(row_ops()),
        size_(element_size(params.type)),
        normed_(room(buffers.normed, params.hidden)),
        projected_(room(buffers.projected,
                        std::max({(params.heads + 2 * params.kv_heads) * params.head_dim,
                                  2 * params.inner, params.experts}))),
        rotated_(room(buffers.rotated, std::max(params.heads * params.head_dim, params.inner))),
        heads_(room(buffers.heads, params.heads * params.head_dim)),
        added_(room(buffers.added, params.hidden)),
        attended_(room(buffers.attended, params.parallel ? params.hidden : 0)),
        gathered_(room(buffers.gathered, params.experts > 0 ? params.hidden : 0)),
        routes_(buffers.routes.at_least(params.count() * params.experts + 1)),
        sums_(buffers.sums.at_least(params.experts > 0 ? params.count() * params.hidden : 1)),
        chosen_(buffers.chosen) {}

  // Runs all layers and the final norm.
  void run() {
    const std::byte* input = run_layers();
    for_each(params_.hidden, [&](int64_t i) {
      const int64_t row = i * params_.hidden * size_;
      norm(params_.final_norm, params_.hidden, input + row,
           static_cast<std::byte*>(params_.output) + row);
    });
  }

  // Returns the output of the last layer, or the input if there is no layer.
  const std::byte* run_layers() {
    const std::byte* input = static_cast<const std::byte*>(params_.input);
    std::byte* state = static_cast<std::byte*>(params_.states);
    for (const DecoderLayer& layer : params_.layers) {
      std::memcpy(state, input, params_.count() * params_.hidden * size_);
      if (params_.parallel) {
        attend(layer, state, attended_);
        feed_forward(layer, state, added_);
        add({}, attended_, added_);
        add({}, added_, state);
      } else {
        attend(layer, state, added_);
        add(layer.attention_output_norm, added_, state);
        feed_forward(layer, state, added_);
        add(layer.mlp_output_norm, added_, state);
      }
      input = state;
      state += params_.count() * params_.hidden * size_;
    }
    return input;
  }

  // Writes the keys and values of a layer to its cache, and the queries, if they are needed, to rotated_.
  void project(const DecoderLayer& layer, const std::byte* state, bool needs_queries) const {
    const Heads heads = products(layer, normed(layer.attention_norm, state), needs_queries);
    const int64_t head_bytes = params_.head_dim * size_;
    for_each((params_.heads + 2 * params_.kv_heads) * params_.head_dim, [&](int64_t i) {
      if (needs_queries) {
        rotate(i, layer, layer.query_norm, params_.heads, heads.queries,
               [&](int64_t head) { return rotated_ + (i * params_.heads + head) * head_bytes; });
      }
      rotate(i, layer, layer.key_norm, params_.kv_heads, heads.keys,
             [&](int64_t head) { return place(layer.keys, i, head); });
      for (int64_t head = 0; head < params_.kv_heads; ++head) {
        std::memcpy(place(layer.values, i, head), heads.values.at(i, head), head_bytes);
      }
    });
  }

 private:
  std::byte* room(FloatBuffer& buffer, int64_t width) const {
    return reinterpret_cast<std::byte*>(
        buffer.at_least(params_.count() * width * size_ / static_cast<int64_t>(sizeof(float)) + 1));
  }

  // Calls body(i) for `count` elements of `width` numbers.
  template <typename F>
  void for_each(int64_t count, int64_t width, const F& body) const {
    parallel_for_(count, kRowGrain / width + 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) body(i);
    });
  }

  // Of all nodes.
  template <typename F>
  void for_each(int64_t width, const F& body) const {
    for_each(params_.count(), width, body);
  }

  ModuleNorm module_norm(const DecoderNorm& norm) const {
    return {params_.norm, norm.weight, norm.bias, params_.eps};
  }

  void norm(const DecoderNorm& norm, int64_t count, const std::byte* x, std::byte* out) const {
    rows_.module_norm(params_.type, x, module_norm(norm), count, out);
  }

  // The input of the products that follow this norm.
  const std::byte* normed(const DecoderNorm& weights, const std::byte* state) const {
    if (weights.weight == nullptr) return state;
    for_each(params_.hidden, [&](int64_t i) {
      const int64_t row = i * params_.hidden * size_;
      norm(weights, params_.hidden, state + row, normed_ + row);
    });
    return normed_;
  }

  // state += norm(added) * residual_scale; norms `added` in place.
  void add(const DecoderNorm& weights, std::byte* added, std::byte* state) const {
    for_each(params_.hidden, [&](int64_t i) {
      const int64_t row = i * params_.hidden * size_;
      if (weights.weight != nullptr) norm(weights, params_.hidden, added + row, added + row);
      if (params_.residual_scale == 1.0f) {
        rows_.add(params_.type, added + row, params_.hidden, state + row);
      } else {
        rows_.module_add(params_.type, added + row, params_.residual_scale, params_.hidden,
                         state + row);
      }
    });
  }

  LinearParams product(const DecoderMatrix& matrix, const void* input, int64_t ins,
                       std::byte* output) const {
    return product(matrix, params_.count(), input, ins, output);
  }

  LinearParams product(const DecoderMatrix& matrix, int64_t rows, const void* input, int64_t ins,
                       std::byte* output) const {
    return {.type = params_.type,
            .input = input,
            .inner_rows = rows,
            .outer_stride = 0,
            .inner_stride = ins,
            .weight = matrix.weight,
            .weight_stride = matrix.weight_stride,
            .is_transposed = matrix.is_transposed,
            .codes = matrix.codes,
            .bias = matrix.bias,
            .rows = rows,
            .in_features = ins,
            .out_features = matrix.outs,
            .output = output,
            .output_stride = matrix.outs,
            .many_rows = params_.ancestors == nullptr};
  }

  // Multiplies by the matrices of queries, keys and values. Queries that have a matrix of their own are
  // left out if they are not needed.
  Heads products(const DecoderLayer& layer, const std::byte* input, bool needs_queries) const {
    const int64_t hidden = params_.hidden, head = params_.head_dim * size_;
    const int64_t queries = params_.heads * head, keys = params_.kv_heads * head;
    if (layer.key.weight == nullptr) {
      linear(product(layer.query, input, hidden, projected_), parallel_for_);
      const int64_t row = queries + 2 * keys, step = params_.interleaved ? 3 * head : head;
      const int64_t key = params_.interleaved ? head : queries;
      const int64_t value = params_.interleaved ? 2 * head : queries + keys;
      return {
          {projected_, row, step}, {projected_ + key, row, step}, {projected_ + value, row, step}};
    }
    std::byte* key = projected_ + params_.count() * queries;
    std::byte* value = key + params_.count() * keys;
    const std::array all{product(layer.query, input, hidden, projected_),
                         product(layer.key, input, hidden, key),
                         product(layer.value, input, hidden, value)};
    linears(std::span(all).subspan(needs_queries ? 0 : 1), parallel_for_);
    return {{projected_, queries, head}, {key, keys, head}, {value, keys, head}};
  }

  // out = attention(norm(state)) Wo
  void attend(const DecoderLayer& layer, const std::byte* state, std::byte* out) const {
    project(layer, state, true);
    tree_attention(decoder_attention(params_, layer, params_.start, rotated_, heads_),
                   parallel_for_);
    linear(product(layer.output, heads_, params_.heads * params_.head_dim, out), parallel_for_);
  }

  // Norms and rotates the heads of node i and writes each to place(head).
  template <typename F>
  void rotate(int64_t i, const DecoderLayer& layer, DecoderNorm weights, int64_t heads,
              const Parts& projected, const F& place) const {
    if (params_.head_norms_are_wide && weights.weight != nullptr) {
      norm(weights, heads * params_.head_dim, projected.at(i, 0), projected.at(i, 0));
      weights = {};
    }
    const int64_t row = params_.rotation_rows == 1 ? 0 : i / params_.nodes;
    const int64_t turn = row * params_.rotation_nodes + i % params_.nodes;
    const int64_t rotary = layer.cosines == nullptr ? 0 : params_.rotary;
    const int64_t offset = turn * rotary * element_size(params_.rotation_type);
    const ModuleRotation rotation{.type = params_.rotation_type,
                                  .cosines = static_cast<const std::byte*>(layer.cosines) + offset,
                                  .sines = static_cast<const std::byte*>(layer.sines) + offset,
                                  .rotary = rotary};
    for (int64_t head = 0; head < heads; ++head) {
      rows_.module_rotate(params_.type, projected.at(i, head), module_norm(weights), rotation,
                          params_.head_dim, place(head));
    }
  }

  std::byte* place(const KvTensor& cache, int64_t i, int64_t kv_head) const {
    const int64_t row = i / params_.nodes, slot = params_.start + i % params_.nodes;
    const int64_t offset =
        row * cache.page_stride + kv_head * cache.head_stride + slot * cache.slot_stride;
    return static_cast<std::byte*>(const_cast<void*>(cache.data)) + offset * size_;
  }

  // out = mlp(norm(state)), or of the experts
  void feed_forward(const DecoderLayer& layer, const std::byte* state, std::byte* out) const {
    const std::byte* input = normed(layer.mlp_norm, state);
    if (layer.experts.router.weight == nullptr) {
      return run_mlp(layer.mlp, params_.count(), input, out);
    }
    run_experts(layer.experts, input, out);
    const DecoderMatrix& gate = layer.experts.shared_gate;
    if (gate.weight == nullptr) return;
    run_mlp(layer.mlp, params_.count(), input, gathered_);
    linear(product(gate, input, params_.hidden, projected_), parallel_for_);
    for_each(params_.hidden, [&](int64_t i) {
      const int64_t row = i * params_.hidden * size_;
      rows_.module_add_gated(params_.type, gathered_ + row, projected_ + i * size_, params_.hidden,
                             out + row);
    });
  }

  // out = (activation(x Wg) * x Wu) Wd for `count` inputs x, which `out` may overwrite
  void run_mlp(const DecoderMlp& mlp, int64_t count, const std::byte* input, std::byte* out) const {
    const int64_t hidden = params_.hidden, bytes = mlp.inner * size_;
    int64_t stride = bytes;  // from node to node
    const std::byte* ups = nullptr;
    if (mlp.gate.weight == nullptr) {
      linear(product(mlp.up, count, input, hidden, projected_), parallel_for_);
    } else if (mlp.up.weight == nullptr) {
      linear(product(mlp.gate, count, input, hidden, projected_), parallel_for_);
      stride = 2 * bytes;
      ups = projected_ + bytes;
    } else {
      std::byte* up = projected_ + count * bytes;
      const std::array products{product(mlp.gate, count, input, hidden, projected_),
                                product(mlp.up, count, input, hidden, up)};
      ups = up;
      linears(products, parallel_for_);
    }
    for_each(count, mlp.inner, [&](int64_t i) {
      rows_.module_activate(params_.type, params_.activation, projected_ + i * stride,
                            ups == nullptr ? nullptr : ups + i * stride, mlp.inner,
                            rotated_ + i * bytes);
    });
    linear(product(mlp.down, count, rotated_, mlp.inner, out), parallel_for_);
  }

  // out = sum of the weighted MLPs of the experts that each node chooses
  void run_experts(const DecoderExperts& experts, const std::byte* input, std::byte* out) const {
    const int64_t hidden = params_.hidden, bytes = hidden * size_, count = experts.router.outs;
    linear(product(experts.router, input, hidden, projected_), parallel_for_);
    for_each(count, [&](int64_t i) {
      rows_.module_route(params_.type, projected_ + i * count * size_, params_.routing, count,
                         routes_ + i * count);
    });
    std::fill_n(sums_, params_.count() * hidden, 0.0f);
    for (int64_t expert = 0; expert < count; ++expert) {
      chosen_.clear();
      for (int64_t i = 0; i < params_.count(); ++i) {
        if (routes_[i * count + expert] != -1.0f) chosen_.push_back(i);
      }
      const auto rows = static_cast<int64_t>(chosen_.size());
      if (rows == 0) continue;
      for_each(rows, hidden, [&](int64_t row) {
        std::memcpy(gathered_ + row * bytes, input + chosen_[row] * bytes, bytes);
      });
      run_mlp(mlp_of(experts, expert), rows, gathered_, gathered_);
      for_each(rows, hidden, [&](int64_t row) {
        const int64_t i = chosen_[row];
        rows_.module_weigh(params_.type, gathered_ + row * bytes, routes_[i * count + expert],
                           params_.routing.is_wide, hidden, sums_ + i * hidden);
      });
    }
    for_each(hidden, [&](int64_t i) {
      rows_.round(params_.type, sums_ + i * hidden, nullptr, hidden, out + i * bytes);
    });
  }

  DecoderMlp mlp_of(const DecoderExperts& experts, int64_t expert) const {
    DecoderMlp mlp = experts.first;
    mlp.gate.weight = moved(mlp.gate.weight, expert * experts.gate_stride);
    mlp.down.weight = moved(mlp.down.weight, expert * experts.down_stride);
    return mlp;
  }

  const void* moved(const void* data, int64_t elements) const {
    return static_cast<const std::byte*>(data) + elements * size_;
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
  std::byte* attended_;
  std::byte* gathered_;
  float* routes_;
  float* sums_;
  std::vector<int64_t>& chosen_;
};

// Runs the last layer and the final norm for the last `outputs` nodes of each row. `input` is the input of
// the layer for all nodes, whose keys and values are in the cache.
void run_last(const DecoderParams& params, const std::byte* input, const ParallelFor& parallel_for,
              Buffers& buffers) {
  const int64_t before = params.nodes - params.outputs, size = element_size(params.type);
  const int64_t bytes = params.hidden * size, own = params.outputs * bytes;
  DecoderLayer layer = params.layers.back();
  if (layer.cosines != nullptr) {
    const int64_t offset = before * params.rotary * element_size(params.rotation_type);
    layer.cosines = static_cast<const std::byte*>(layer.cosines) + offset;
    layer.sines = static_cast<const std::byte*>(layer.sines) + offset;
  }
  std::vector<int64_t> lengths(params.batch);
  std::byte* own_input = static_cast<std::byte*>(params.output);  // which is written at the end
  for (int64_t row = 0; row < params.batch; ++row) {
    lengths[row] = params.prefix_lengths[row] + before;
    std::memcpy(own_input + row * own, input + (row * params.nodes + before) * bytes, own);
  }
  DecoderParams last = params;
  last.input = own_input;
  last.layers = {&layer, 1};
  last.prefix_lengths = {lengths.data(), 1};
  last.start += before;
  last.nodes = params.outputs;
  last.states = buffers.last.at_least(params.batch * own / sizeof(float) + 1);
  Layers(last, parallel_for, buffers).run();
}

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
          .softcap = params.softcap,
          .output = output};
}

void decoder_layers(const DecoderParams& params, const ParallelFor& parallel_for) {
  thread_local Buffers buffers;
  if (params.outputs == params.nodes) return Layers(params, parallel_for, buffers).run();
  DecoderParams before_last = params;
  before_last.layers = params.layers.first(params.layers.size() - 1);
  Layers layers(before_last, parallel_for, buffers);
  const std::byte* input = layers.run_layers();
  layers.project(params.layers.back(), input, false);
  run_last(params, input, parallel_for, buffers);
}

}  // namespace specdec::cpu
