// decoder_layers: the layers of a decoder over the nodes of draft trees or over columns of prompts,
// and the final norm. With h the input, a layer computes
//
//   x = norm(h);  q, k, v = x Wq, x Wk, x Wv (+ biases);  q, k = norm(q), norm(k)
//   q, k = rotate(q), rotate(k);  k, v go to cache slots [start, start + nodes)
//   h = h + norm(attention(q, cache) Wo) * residual_scale;  x = norm(h)
//   h = h + norm((activation(x Wg) * x Wu) Wd) * residual_scale
//
// A layer may have several MLPs, the experts, of which each node chooses the top k by the
// probabilities p = softmax(x Wr), in float32:
//
//   mlp(x) = sum of w_e expert_e(x) over the chosen experts, + sigmoid(x Ws) shared(x)
//
// w_e is p_e, which may be divided by the sum of the chosen ones. The sum over experts is in float32
// in the order of the experts, and rounded once. Only matrices of chosen experts are read, each once.
//
// A layer does not have to have all norms, rotations and gates (Wg). In parallel layers, both parts
// read the input: h = (mlp(norm(h)) + attention(norm(h))) + h. Results are rounded to the type after
// every operation, as in a model that stores a tensor after each. Products follow linear.h (for few
// rows, in a prompt for many), attention follows tree_attention.h, so the bits of a node do not
// depend on the other nodes.
//
// Of a prompt, usually only the last output is needed. Then the last layer computes keys and values of
// all nodes, and the rest for the last `outputs` nodes of each row alone.
#pragma once

#include <span>

#include "specdec/core/float_types.h"
#include "specdec/decoder_form.h"
#include "specdec/linear.h"
#include "specdec/tree_attention.h"

namespace specdec {

struct DecoderMatrix {
  const void* weight;     // [outs, ins], last dimension contiguous; null: the layer has none
  int64_t weight_stride;  // elements; bytes for codes
  bool is_transposed;     // weight is [ins, outs]
  WeightCodes codes;      // linear.h
  const void* bias;       // [outs] contiguous, or null
  int64_t outs;
};

// Without a weight there is no norm.
struct DecoderNorm {
  const void* weight;
  const void* bias;
};

struct DecoderMlp {
  DecoderMatrix gate;  // without an up: the rows of gate and up; null: the activation of up
  DecoderMatrix up;
  DecoderMatrix down;  // null: there is no MLP
  int64_t inner;       // numbers of a node between the matrices
};

struct DecoderExperts {
  DecoderMatrix router;  // an output for each expert; null: there are no experts
  DecoderMlp first;      // the MLP of expert 0, with a joined gate and without biases
  int64_t gate_stride;   // elements from expert to expert
  int64_t down_stride;
  DecoderMatrix shared_gate;  // one output; null: there is no shared expert
};

struct DecoderLayer {
  DecoderNorm attention_norm;  // [hidden], like all norms of a layer except query_norm and key_norm
  DecoderMatrix query;         // without a key: the rows of queries, keys and values
  DecoderMatrix key;
  DecoderMatrix value;
  DecoderNorm query_norm;  // [head_dim], or [heads * head_dim] if head_norms_are_wide
  DecoderNorm key_norm;
  DecoderMatrix output;
  DecoderNorm attention_output_norm;
  DecoderNorm mlp_norm;
  DecoderMlp mlp;  // if there are experts, that of the shared one
  DecoderExperts experts;
  DecoderNorm mlp_output_norm;
  const void* cosines;  // [batch or 1, nodes, rotary] contiguous; null: no rotation
  const void* sines;
  KvTensor keys;    // [batch, kv_heads, slots, head_dim], written to
  KvTensor values;  // likewise
  int64_t window;   // 0: none
};

struct DecoderParams {
  FloatType type;           // float32 or bfloat16, for all tensors but cosines and sines
  FloatType rotation_type;  // `type` or float32
  const void* input;        // [batch, nodes, hidden] contiguous
  std::span<const DecoderLayer> layers;
  DecoderNorm final_norm;               // [hidden]
  const int64_t* ancestors;             // [batch, nodes, words] contiguous, or null: a prompt
  View1<const int64_t> prefix_starts;   // [batch] slot of position 0
  View1<const int64_t> prefix_lengths;  // [batch] committed tokens
  int64_t start;                        // the slot of node 0
  int64_t batch;
  int64_t nodes;
  int64_t outputs;  // the last nodes of each row, whose outputs are computed; all, if not a prompt
  int64_t hidden;
  int64_t heads;
  int64_t kv_heads;
  int64_t head_dim;
  int64_t inner;           // the largest of all MLPs
  int64_t experts;         // the largest number in a layer
  int64_t rotation_rows;   // of cosines and sines: batch or 1
  int64_t rotation_nodes;  // in each of these rows
  int64_t rotary;          // numbers of a head that are rotated; even
  NormKind norm;
  Activation activation;
  ModuleRouting routing;
  bool head_norms_are_wide;  // query_norm and key_norm are over all heads of a node
  bool interleaved;          // one matrix has the rows head by head: query, key, value of each
  bool parallel;             // both parts of a layer read its input; no norms of their outputs
  float eps;                 // of all norms
  float scale;               // of the dot products
  float softcap;             // of the scores, as in tree_attention; 0: none
  float residual_scale;      // of what a layer adds

  void* states;  // [layers, batch, nodes, hidden], the output of each layer; without the last one,
                 // if not all outputs are computed
  void* output;  // [batch, outputs, hidden], the last layer's output after the final norm

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
