// decoder_layers: the layers of a decoder of the common kind over the nodes of draft trees, and the
// norm behind the last. Of each layer, with h the input,
//
//   x = norm(h);  q, k, v = x Wq, x Wk, x Wv (+ biases);  q, k = rotate(q), rotate(k), normed
//   before where there are norms;  k and v go to the cache's slots [start, start + nodes)
//   h = h + attention(q, cache) Wo;  x = norm(h);  h = h + (silu(x Wg) * x Wu) Wd
//
// norm is x / sqrt(mean(x^2) + eps) * weight. Results are rounded to the type after every
// operation, as a model does that makes a tensor of each; products are those of linear.h, attention
// is that of tree_attention.h. So a node has the same bits whatever runs with it.
#pragma once

#include <span>

#include "linear.h"
#include "specdec/core/float_types.h"
#include "tree_attention.h"

namespace specdec {

struct DecoderMatrix {
  const void* weight;     // [outs, ins], last dimension contiguous
  int64_t weight_stride;  // elements
  const void* bias;       // [outs] contiguous, or null
  int64_t outs;
};

struct DecoderLayer {
  const void* input_norm;  // [hidden], as all norms of the layer but those of heads
  DecoderMatrix query;
  DecoderMatrix key;
  DecoderMatrix value;
  const void* query_norm;  // [head_dim], or null
  const void* key_norm;    // [head_dim], or null
  DecoderMatrix output;
  const void* post_norm;
  DecoderMatrix gate;
  DecoderMatrix up;
  DecoderMatrix down;
  KvTensor keys;    // [batch, kv_heads, slots, head_dim], written to
  KvTensor values;  // likewise
  int64_t window;   // 0: none
};

struct DecoderParams {
  FloatType type;         // float32 or bfloat16, of all numbers
  const void* input;      // [batch, nodes, hidden] contiguous
  const void* cosines;    // [batch or 1, nodes, head_dim] contiguous
  const void* sines;      // likewise
  int64_t rotation_rows;  // batch or 1
  std::span<const DecoderLayer> layers;
  const void* final_norm;               // [hidden]
  const int64_t* ancestors;             // [batch, nodes, words] contiguous
  View1<const int64_t> prefix_starts;   // [batch] slot of position 0
  View1<const int64_t> prefix_lengths;  // [batch] committed tokens
  int64_t start;                        // the slot of node 0
  int64_t batch;
  int64_t nodes;
  int64_t hidden;
  int64_t heads;
  int64_t kv_heads;
  int64_t head_dim;  // even
  int64_t intermediate;
  float eps;
  float scale;  // of the dot products

  void* states;  // [layers, batch, nodes, hidden], what each layer hands on
  void* output;  // [batch, nodes, hidden], the last of them after the final norm

  int64_t count() const { return batch * nodes; }
};

namespace cpu {

// The slots must be valid: find_invalid_slot(decoder_attention(params, layer, ...)).
void decoder_layers(const DecoderParams& params, const ParallelFor& parallel_for);

// Attention of a layer, of queries [batch, nodes, heads, head_dim] contiguous.
TreeAttentionParams decoder_attention(const DecoderParams& params, const DecoderLayer& layer,
                                      const int64_t& start, const void* queries, void* output);

}  // namespace cpu

}  // namespace specdec
