// decoder_layers: the layers of a Llama-like decoder over the nodes of draft trees or over columns of
// prompts, and the final norm. With h the input, a layer computes
//
//   x = norm(h);  q, k, v = x Wq, x Wk, x Wv (+ biases);  q, k = norm(q), norm(k) where the model
//   has such norms;  q, k = rotate(q), rotate(k);  k, v go to cache slots [start, start + nodes)
//   h = h + attention(q, cache) Wo;  x = norm(h);  h = h + (silu(x Wg) * x Wu) Wd
//
// where norm(x) is x / sqrt(mean(x^2) + eps) * weight. Results are rounded to the type after every
// operation, as in a model that stores a tensor after each. Products follow linear.h (for few rows,
// in a prompt for many), attention follows tree_attention.h, so the bits of a node do not depend on
// the other nodes.
#pragma once

#include <span>

#include "specdec/core/float_types.h"
#include "specdec/linear.h"
#include "specdec/tree_attention.h"

namespace specdec {

struct DecoderMatrix {
  const void* weight;     // [outs, ins], last dimension contiguous
  int64_t weight_stride;  // elements; bytes for codes
  WeightCodes codes;      // linear.h
  const void* bias;       // [outs] contiguous, or null
  int64_t outs;
};

struct DecoderLayer {
  const void* input_norm;  // [hidden], like all norms of a layer except query_norm and key_norm
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
  FloatType type;         // float32 or bfloat16, for all tensors
  const void* input;      // [batch, nodes, hidden] contiguous
  const void* cosines;    // [batch or 1, nodes, head_dim] contiguous
  const void* sines;      // likewise
  int64_t rotation_rows;  // batch or 1
  std::span<const DecoderLayer> layers;
  const void* final_norm;               // [hidden]
  const int64_t* ancestors;             // [batch, nodes, words] contiguous, or null: a prompt
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

  void* states;  // [layers, batch, nodes, hidden], the output of each layer
  void* output;  // [batch, nodes, hidden], the last layer's output after the final norm

  int64_t count() const { return batch * nodes; }
};

namespace cpu {

// The slots must be valid: check them with find_invalid_slot(decoder_attention(params, layer,
// ...)).
void decoder_layers(const DecoderParams& params, const ParallelFor& parallel_for);

// The attention of one layer; queries are [batch, nodes, heads, head_dim], contiguous.
TreeAttentionParams decoder_attention(const DecoderParams& params, const DecoderLayer& layer,
                                      const int64_t& start, const void* queries, void* output);

}  // namespace cpu

}  // namespace specdec
