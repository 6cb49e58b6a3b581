// Glue of decoder_layers: checks, outputs. The op exists for CPU tensors only.
#include "specdec/decoder_layers.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <optional>
#include <tuple>
#include <vector>

#include "ops/common/glue.h"
#include "ops/common/register.h"
#include "ops/common/weight_codes.h"

#ifndef SPECDEC_EMULATED  // there is no kernel to emulate

namespace specdec::glue {
namespace {

constexpr const char* kOp = "decoder_layers";

// The order of the weights of a layer. A weight that the layer does not have is an empty tensor.
enum LayerTensor {
  kAttentionNorm,
  kAttentionNormBias,
  kQuery,
  kQueryBias,
  kKey,
  kKeyBias,
  kValue,
  kValueBias,
  kQueryNorm,
  kKeyNorm,
  kOutput,
  kOutputBias,
  kAttentionOutputNorm,
  kMlpNorm,
  kMlpNormBias,
  kGate,
  kGateBias,
  kUp,
  kUpBias,
  kDown,
  kDownBias,
  kMlpOutputNorm,
  kRouter,
  kExpertsGate,
  kExpertsDown,
  kSharedGate,
  kSharedGateBias,
  kLayerTensors
};
constexpr size_t kFinalTensors = 2;  // the final norm and its bias

// The matrices of a layer, in the order of the scales.
constexpr LayerTensor kMatrices[] = {kQuery, kKey, kValue, kOutput, kGate, kUp, kDown, kSharedGate};

[[noreturn]] void fail_argument(const std::string& argument, const std::string& problem) {
  fail("specdec::decoder_layers: argument " + argument + " " + problem);
}

// The tensors of all layers. Functions count as if each layer had all kLayerTensors.
class Weights {
 public:
  // `names` are the LayerTensors that `tensors` has of each layer. `scales` is empty, or has a tensor
  // for each matrix, which is empty if that has no codes. `transposed` is about the other matrices.
  Weights(const std::vector<Tensor>& tensors, const std::vector<int64_t>& names, size_t layers,
          const std::vector<Tensor>& scales, const float* levels, bool transposed, int32_t dtype)
      : tensors_(tensors),
        layers_(layers),
        given_(names.size()),
        scales_(scales),
        levels_(levels),
        transposed_(transposed),
        dtype_(dtype) {
    std::fill(std::begin(places_), std::end(places_), -1);
    for (size_t i = 0; i < given_; ++i) {
      if (names[i] < 0 || names[i] >= kLayerTensors || places_[names[i]] >= 0) {
        fail_argument("tensors", "must be different numbers below " +
                                     std::to_string(kLayerTensors) + ", got " +
                                     describe_numbers(names));
      }
      places_[names[i]] = static_cast<int64_t>(i);
    }
  }

  bool has(size_t index) const {
    const Tensor* tensor = find(index);
    return tensor != nullptr && tensor->numel() != 0;
  }
  bool has(size_t layer, LayerTensor name) const { return has(layer * kLayerTensors + name); }

  int64_t numel(size_t index) const { return has(index) ? find(index)->numel() : 0; }

  // A contiguous vector [count]; null if it is empty and optional.
  const void* vector(size_t index, int64_t count, bool is_optional = true) const {
    if (is_optional && !has(index)) return nullptr;
    const Tensor& tensor = get(index);
    check(index, tensor.dim() == 1 && tensor.size(0) == count && tensor.stride(0) == 1,
          "contiguous [" + std::to_string(count) + "]");
    return tensor.const_data_ptr();
  }

  // A norm [count] and the bias that follows it, which only some kinds of norms may have.
  DecoderNorm norm(size_t index, int64_t count, NormKind kind, bool is_optional = true) const {
    if (kind != NormKind::kLayer) check_empty(index + 1, "an RMS norm has no bias");
    return {vector(index, count, is_optional), vector(index + 1, count)};
  }

  // A matrix [outs, ins] of a layer, or transposed, and the bias that follows it; without outs, both
  // must be empty.
  DecoderMatrix matrix(size_t layer, LayerTensor name, int64_t outs, int64_t ins) const {
    const size_t index = layer * kLayerTensors + name;
    if (outs == 0) {
      check_empty(index, "the first layer has no such matrix");
      check_empty(index + 1, "there is no matrix that it belongs to");
      return {};
    }
    const Tensor& tensor = get(index);
    DecoderMatrix matrix{.weight = tensor.const_data_ptr(),
                         .weight_stride = 0,
                         .is_transposed = false,
                         .codes = codes(layer, name, outs, ins),
                         .bias = vector(index + 1, outs),
                         .outs = outs};
    if (matrix.codes.bits != 0) {
      matrix.weight_stride = tensor.stride(0);
      return matrix;
    }
    const int64_t shape[] = {transposed_ ? ins : outs, transposed_ ? outs : ins};
    check_last_contiguous(index, shape);
    matrix.weight_stride = tensor.stride(0);
    matrix.is_transposed = transposed_;
    return matrix;
  }

  // The weights [outs, ins] of a router, or [experts, outs, ins], as the matrix of expert 0. They have
  // no codes and no bias, and are not transposed.
  DecoderMatrix plain(size_t layer, LayerTensor name, std::initializer_list<int64_t> shape) const {
    const size_t index = layer * kLayerTensors + name;
    const Tensor& tensor = get(index);
    check_last_contiguous(index, std::span(shape.begin(), shape.size()));
    const int64_t rows = tensor.dim() - 2;
    return {.weight = tensor.const_data_ptr(),
            .weight_stride = tensor.stride(rows),
            .is_transposed = false,
            .codes = {},
            .bias = nullptr,
            .outs = tensor.size(rows)};
  }

  // The elements from expert to expert.
  int64_t stride(size_t layer, LayerTensor name) const {
    return get(layer * kLayerTensors + name).stride(0);
  }

  // The number of outputs of a matrix.
  int64_t outs(size_t layer, LayerTensor name) const {
    const size_t index = layer * kLayerTensors + name;
    const Tensor& tensor = get(index);
    const bool is_transposed = transposed_ && !has_codes(layer, name);
    const int64_t outs = tensor.dim() == 2 ? tensor.size(is_transposed ? 1 : 0) : 0;
    if (outs == 0) {
      fail_argument(describe(index),
                    "must be " + std::string(is_transposed ? "[ins, outs]" : "[outs, ins]") +
                        ", got shape " + describe_shape(tensor));
    }
    return outs;
  }

  // The numbers between the matrices of an expert.
  int64_t inner(size_t layer) const {
    const size_t index = layer * kLayerTensors + kExpertsGate;
    const Tensor& tensor = get(index);
    if (tensor.dim() != 3 || tensor.size(1) == 0 || tensor.size(1) % 2 != 0) {
      fail_argument(describe(index),
                    "must be [experts, 2 * inner, hidden], got shape " + describe_shape(tensor));
    }
    return tensor.size(1) / 2;
  }

  // Checks that a layer does not have this tensor, for a reason.
  void check_absent(size_t layer, LayerTensor name, const std::string& reason) const {
    check_empty(layer * kLayerTensors + name, reason);
  }

 private:
  // Where a tensor is in `tensors`, -1 if it was not given.
  int64_t place(size_t index) const {
    const size_t layer = index / kLayerTensors, name = index % kLayerTensors;
    const int64_t first = static_cast<int64_t>(layer * given_);
    if (layer == layers_) return first + static_cast<int64_t>(name);  // of the final norm
    return places_[name] < 0 ? -1 : first + places_[name];
  }

  const Tensor* find(size_t index) const {
    const int64_t at = place(index);
    return at < 0 ? nullptr : &tensors_[at];
  }

  const Tensor& get(size_t index) const {
    if (const Tensor* tensor = find(index)) return *tensor;
    fail_argument("tensors", "must have number " + std::to_string(index % kLayerTensors) +
                                 ", which layer " + std::to_string(index / kLayerTensors) +
                                 " needs");
  }

  std::string describe(size_t index) const {
    return "weights[" + std::to_string(place(index)) + "]";
  }

  // Where the scales of a matrix are.
  static size_t scales_index(size_t layer, LayerTensor name) {
    return layer * std::size(kMatrices) +
           (std::find(std::begin(kMatrices), std::end(kMatrices), name) - kMatrices);
  }

  bool has_codes(size_t layer, LayerTensor name) const {
    return !scales_.empty() && scales_[scales_index(layer, name)].numel() != 0;
  }

  WeightCodes codes(size_t layer, LayerTensor name, int64_t outs, int64_t ins) const {
    if (!has_codes(layer, name)) return {};
    const size_t index = scales_index(layer, name);
    const Tensor& scales = scales_[index];
    const Tensor& tensor = get(layer * kLayerTensors + name);
    const std::string weight_name = describe(layer * kLayerTensors + name);
    const std::string scales_name = "scales[" + std::to_string(index) + "]";
    const Argument weight_arg(kOp, weight_name.c_str(), tensor);
    if (!tensor.is_cpu()) fail(weight_arg.prefix() + " must be on the CPU");
    return read_codes(weight_arg, tensor, Argument(kOp, scales_name.c_str(), scales), scales,
                      levels_, outs, ins);
  }

  void check_empty(size_t index, const std::string& reason) const {
    if (!has(index)) return;
    fail_argument(describe(index),
                  "must be empty (" + reason + "), got shape " + describe_shape(get(index)));
  }

  void check(size_t index, bool fits, const std::string& expected) const {
    const Tensor& tensor = get(index);
    if (fits && dtype_of(tensor) == dtype_ && tensor.is_cpu()) return;
    fail_argument(describe(index), "must be " + expected + " of " + dtype_name(dtype_) +
                                       " on the CPU, got " + dtype_name(dtype_of(tensor)) +
                                       " of shape " + describe_shape(tensor));
  }

  void check_last_contiguous(size_t index, std::span<const int64_t> shape) const {
    const Tensor& tensor = get(index);
    const auto last = static_cast<int64_t>(shape.size()) - 1;
    bool fits = tensor.dim() == last + 1 && (shape[last] == 1 || tensor.stride(last) == 1);
    for (int64_t i = 0; fits && i <= last; ++i) fits = tensor.size(i) == shape[i];
    check(index, fits, describe_numbers(shape) + " with a contiguous last dimension");
  }

  const std::vector<Tensor>& tensors_;
  size_t layers_;
  size_t given_;                   // tensors per layer
  int64_t places_[kLayerTensors];  // of each LayerTensor among those, or -1
  const std::vector<Tensor>& scales_;
  const float* levels_;
  bool transposed_;
  int32_t dtype_;
};

bool has_mlp(const Weights& read, size_t layer) {
  return read.has(layer, kGate) || read.has(layer, kUp) || read.has(layer, kDown);
}

// The MLP of a layer: its only one, or that of the shared expert, if there is one.
DecoderMlp read_mlp(const Weights& read, size_t layer, int64_t hidden) {
  if (read.has(layer, kRouter) && !has_mlp(read, layer)) {
    for (const LayerTensor name : {kGateBias, kUpBias, kDownBias}) {
      read.check_absent(layer, name, "there is no matrix that it belongs to");
    }
    return {};
  }
  const bool joins = read.has(layer, kGate) && !read.has(layer, kUp);
  const int64_t joined = joins ? read.outs(layer, kGate) : 0;
  const int64_t inner = joins ? joined / 2 : read.outs(layer, kUp);
  if (joined % 2 != 0) {
    fail_argument("weights", "must give gates and ups of the same size, got a joined matrix of " +
                                 std::to_string(joined));
  }
  const int64_t gates = joins ? joined : read.has(layer, kGate) ? inner : 0;
  return {.gate = read.matrix(layer, kGate, gates, hidden),
          .up = read.matrix(layer, kUp, joins ? 0 : inner, hidden),
          .down = read.matrix(layer, kDown, hidden, inner),
          .inner = inner};
}

DecoderExperts read_experts(const Weights& read, size_t layer, int64_t hidden, int64_t top_k) {
  if (!read.has(layer, kRouter)) {
    for (const LayerTensor name : {kExpertsGate, kExpertsDown, kSharedGate, kSharedGateBias}) {
      read.check_absent(layer, name, "the layer has no router");
    }
    return {};
  }
  const int64_t count = read.outs(layer, kRouter), inner = read.inner(layer);
  if (top_k < 1 || top_k > count) {
    fail_argument("top_k", "must be 1 to the number of experts, " + std::to_string(count) +
                               ", got " + std::to_string(top_k));
  }
  const bool has_shared = has_mlp(read, layer);
  if (!has_shared) read.check_absent(layer, kSharedGate, "there is no shared expert");
  return {.router = read.plain(layer, kRouter, {count, hidden}),
          .first = {.gate = read.plain(layer, kExpertsGate, {count, 2 * inner, hidden}),
                    .up = {},
                    .down = read.plain(layer, kExpertsDown, {count, hidden, inner}),
                    .inner = inner},
          .gate_stride = read.stride(layer, kExpertsGate),
          .down_stride = read.stride(layer, kExpertsDown),
          .shared_gate = read.matrix(layer, kSharedGate, has_shared ? 1 : 0, hidden)};
}

void check_contiguous(const char* name, const Tensor& tensor) {
  if (!tensor.is_contiguous()) {
    fail_argument(name, "must be contiguous; call .contiguous() on it");
  }
}

KvTensor read_cache(const std::vector<Tensor>& caches, size_t index, const DecoderParams& params,
                    int32_t dtype) {
  const Tensor& cache = caches[index];
  const int64_t slots = params.start + params.nodes;
  bool fits = cache.dim() == 4 && dtype_of(cache) == dtype && cache.is_cpu();
  fits = fits && cache.size(0) == params.batch && cache.size(1) == params.kv_heads &&
         cache.size(2) >= slots && cache.size(3) == params.head_dim && cache.stride(3) == 1;
  for (int dim = 0; fits && dim < 3; ++dim) fits = cache.size(dim) == 1 || cache.stride(dim) > 0;
  if (!fits) {
    fail_argument("caches[" + std::to_string(index) + "]",
                  "must be [" + std::to_string(params.batch) + ", " +
                      std::to_string(params.kv_heads) + ", " + std::to_string(slots) +
                      " slots or more, " + std::to_string(params.head_dim) + "] of " +
                      dtype_name(dtype) +
                      " on the CPU, with memory of its own and a contiguous last dimension; got " +
                      dtype_name(dtype_of(cache)) + " of shape " + describe_shape(cache));
  }
  return {cache.mutable_data_ptr(), cache.stride(0), cache.stride(1), cache.stride(2)};
}

// The tokens of a prompt are contiguous: those in the cache end where the new ones begin.
void check_prompt_starts(const DecoderParams& params) {
  for (int64_t row = 0; row < params.batch; ++row) {
    const int64_t first = params.prefix_starts[row], length = params.prefix_lengths[row];
    if (first >= 0 && first <= kMaxSlot && length == params.start - first) continue;
    fail_argument("prefix_lengths", "must be start - prefix_starts without ancestors, got " +
                                        std::to_string(length) + " in row " + std::to_string(row) +
                                        " for start " + std::to_string(params.start) +
                                        " and prefix_starts " + std::to_string(first));
  }
}

// Reads the cosines and sines of each layer from its table; none if that is -1.
void read_rotations(const Argument& input, const std::vector<Tensor>& cosines,
                    const std::vector<Tensor>& sines, const std::vector<int64_t>& tables,
                    int32_t dtype, DecoderParams& params, std::vector<DecoderLayer>& layers) {
  if (cosines.size() != sines.size()) {
    fail_argument("sines", "must have as many tables as cosines, got " +
                               std::to_string(sines.size()) + " and " +
                               std::to_string(cosines.size()));
  }
  params.rotation_rows = params.batch;
  params.rotation_nodes = params.nodes;
  params.rotation_type = params.type;
  int32_t rotation_dtype = dtype;
  if (!cosines.empty()) {
    const Tensor& first = cosines[0];
    if (dtype_of(first) == aoti_torch_dtype_float32()) {
      rotation_dtype = dtype_of(first);
      params.rotation_type = FloatType::kFloat32;
    }
    const bool has_rows = first.dim() == 3;
    params.rotation_rows = has_rows && first.size(0) == 1 ? 1 : params.batch;
    params.rotary = has_rows ? first.size(2) : params.head_dim;
    if (params.rotary < 2 || params.rotary % 2 != 0 || params.rotary > params.head_dim) {
      fail_argument("cosines", "must have an even number of elements per position, 2 to " +
                                   std::to_string(params.head_dim) + ", got " +
                                   std::to_string(params.rotary));
    }
  }
  for (const auto& [name, given] : {std::pair{"cosines", &cosines}, std::pair{"sines", &sines}}) {
    for (const Tensor& table : *given) {
      Argument(kOp, name, table)
          .has_dtype(rotation_dtype)
          .has_shape({params.rotation_rows, params.nodes, params.rotary},
                     "[batch or 1, nodes, rotary]")
          .is_on_device_of(input);
      check_contiguous(name, table);
    }
  }
  const auto count = static_cast<int64_t>(cosines.size());
  if (!tables.empty() && tables.size() != layers.size()) {
    fail_argument("tables", "must be empty or have one number per layer, got " +
                                std::to_string(tables.size()) + " for " +
                                std::to_string(layers.size()) + " layers");
  }
  for (size_t layer = 0; layer < layers.size(); ++layer) {
    const int64_t table = tables.empty() ? 0 : tables[layer];
    if (table < -1 || table >= count) {
      fail_argument("tables", "must be -1 (none) to " + std::to_string(count - 1) + ", got " +
                                  std::to_string(table));
    }
    if (table < 0) continue;
    layers[layer].cosines = cosines[table].const_data_ptr();
    layers[layer].sines = sines[table].const_data_ptr();
  }
}

int64_t check_choice(const char* name, int64_t value, int choices) {
  if (value >= 0 && value < choices) return value;
  fail_argument(name,
                "must be 0 to " + std::to_string(choices - 1) + ", got " + std::to_string(value));
}

std::tuple<Tensor, Tensor> decoder_layers(
    const Tensor& input, const std::vector<Tensor>& cosines, const std::vector<Tensor>& sines,
    const std::vector<Tensor>& weights, const std::vector<Tensor>& caches,
    const std::vector<int64_t>& windows, const std::optional<Tensor>& ancestors,
    const Tensor& prefix_starts, const Tensor& prefix_lengths, int64_t start, int64_t head_dim,
    double eps, double scale, const std::vector<Tensor>& scales,
    const std::optional<Tensor>& levels, std::optional<int64_t> outputs,
    const std::vector<int64_t>& tensors, const std::vector<int64_t>& tables, int64_t norm,
    int64_t activation, bool interleaved, bool parallel, bool transposed, double softcap,
    double residual_scale, int64_t top_k, bool normalised, bool wide_experts) {
  const Argument input_arg(kOp, "input", input), starts_arg(kOp, "prefix_starts", prefix_starts),
      lengths_arg(kOp, "prefix_lengths", prefix_lengths);
  DecoderParams params{};
  input_arg.has_dim(3, "[batch, nodes, hidden]");
  params.type = check_float_type(input_arg, input, /*takes_float16=*/false);
  const int32_t dtype = dtype_of(input), int64 = aoti_torch_dtype_int64();
  if (!input.is_cpu()) fail(input_arg.prefix() + " must be on the CPU");
  params.batch = input.size(0);
  params.nodes = input.size(1);
  params.hidden = input.size(2);
  if (ancestors) check_num_nodes(input_arg, params.nodes);
  if (params.hidden < 1) fail_argument("input", "must have 1 or more numbers per node, got none");
  if (start < 0 || start > kMaxSlot) {
    fail_argument("start", "must be 0 to 2^60, got " + std::to_string(start));
  }
  params.outputs = outputs.value_or(params.nodes);
  if (outputs && ancestors) fail_argument("outputs", "is for prompts, without ancestors");
  if (outputs && (*outputs < 1 || *outputs > params.nodes)) {
    fail_argument("outputs", "must be 1 to the number of nodes, " + std::to_string(params.nodes) +
                                 ", got " + std::to_string(*outputs));
  }
  if (head_dim < 1) {
    fail_argument("head_dim", "must be 1 or more, got " + std::to_string(head_dim));
  }
  for (const auto& [name, factor] : {std::pair{"scale", scale}, std::pair{"softcap", softcap}}) {
    if (!(std::isfinite(factor) && factor >= 0)) {
      fail_argument(name, "must be finite and 0 or more, got " + std::to_string(factor));
    }
  }
  if (!std::isfinite(residual_scale)) {
    fail_argument("residual_scale", "must be finite, got " + std::to_string(residual_scale));
  }
  params.start = start;
  params.head_dim = head_dim;
  params.eps = static_cast<float>(eps);
  params.scale = static_cast<float>(scale);
  params.softcap = static_cast<float>(softcap);
  params.residual_scale = static_cast<float>(residual_scale);
  params.norm = static_cast<NormKind>(check_choice("norm", norm, kNormKinds));
  params.activation = static_cast<Activation>(check_choice("activation", activation, kActivations));
  params.interleaved = interleaved;
  params.parallel = parallel;
  params.routing = {.top_k = top_k, .is_normalised = normalised, .is_wide = wide_experts};
  if (ancestors) {
    const Argument ancestors_arg(kOp, "ancestors", *ancestors);
    ancestors_arg.has_dtype(int64).has_shape({params.batch, params.nodes, (params.nodes + 63) / 64},
                                             "[batch, nodes, words]");
    ancestors_arg.is_on_device_of(input_arg);
    check_contiguous("ancestors", *ancestors);
    params.ancestors = static_cast<const int64_t*>(ancestors->const_data_ptr());
  }
  for (const Argument* argument : {&starts_arg, &lengths_arg}) {
    argument->has_dtype(int64).has_shape({params.batch}, "[batch]").is_on_device_of(input_arg);
  }
  check_contiguous("input", input);
  const size_t num_layers = windows.size();
  if (num_layers == 0 || weights.size() != num_layers * tensors.size() + kFinalTensors) {
    fail_argument("weights",
                  "must be " + std::to_string(tensors.size()) +
                      " tensors for each of the layers in windows, at least one, and the "
                      "final norm with its bias; got " +
                      std::to_string(weights.size()) + " tensors for " +
                      std::to_string(num_layers) + " layers");
  }
  if (!scales.empty() && scales.size() != num_layers * std::size(kMatrices)) {
    fail_argument("scales", "must be empty, or " + std::to_string(std::size(kMatrices)) +
                                " tensors for each of " + std::to_string(num_layers) +
                                " layers, got " + std::to_string(scales.size()));
  }
  if (caches.size() != 2 * num_layers) {
    fail_argument("caches", "must be keys and values of each of " + std::to_string(num_layers) +
                                " layers, got " + std::to_string(caches.size()) + " tensors");
  }
  const Weights read(weights, tensors, num_layers, scales, read_levels(kOp, levels), transposed,
                     dtype);
  // Of matrices that are joined, the first layer has one and not the others.
  const bool joins_heads = !read.has(kKey);
  const int64_t cached = caches[0].dim() == 4 ? caches[0].size(1) * head_dim : 0;
  const int64_t keys = joins_heads ? cached : read.outs(0, kKey);
  const int64_t queries = read.outs(0, kQuery) - (joins_heads ? 2 * keys : 0);
  params.heads = queries / head_dim;
  params.kv_heads = keys / head_dim;
  if (queries < 1 || keys < 1 || queries % head_dim != 0 || keys % head_dim != 0 ||
      params.heads % params.kv_heads != 0) {
    fail_argument("weights", "must give queries and keys whole heads of " +
                                 std::to_string(head_dim) + ", as many or a divisor of them, got " +
                                 std::to_string(queries) + " and " + std::to_string(keys));
  }
  if (interleaved && (!joins_heads || queries != keys)) {
    fail_argument("interleaved", "needs one matrix of as many queries as keys and values; got " +
                                     std::to_string(queries) + " and " + std::to_string(keys) +
                                     (joins_heads ? " in one matrix" : " in several matrices"));
  }
  // A norm of the queries is over one head or over all.
  params.head_norms_are_wide = read.numel(kQueryNorm) == queries && queries != head_dim;
  if (params.head_norms_are_wide && interleaved) {
    fail_argument("weights", "must have norms of single heads, if interleaved");
  }
  const int64_t normed_queries = params.head_norms_are_wide ? queries : head_dim;
  const int64_t normed_keys = params.head_norms_are_wide ? keys : head_dim;
  std::vector<DecoderLayer> layers;
  layers.reserve(num_layers);
  for (size_t layer = 0; layer < num_layers; ++layer) {
    if (windows[layer] < 0) {
      fail_argument("windows", "must be 0 (none) or more, got " + std::to_string(windows[layer]));
    }
    const size_t at = layer * kLayerTensors;
    const int64_t hidden = params.hidden, separate = joins_heads ? 0 : keys;
    if (transposed && read.has(layer, kRouter)) {
      fail_argument("transposed", "does not go with a router");
    }
    const DecoderExperts experts = read_experts(read, layer, hidden, top_k);
    const DecoderMlp mlp = read_mlp(read, layer, hidden);
    params.inner = std::max({params.inner, mlp.inner, experts.first.inner});
    params.experts = std::max(params.experts, experts.router.outs);
    layers.push_back(
        {.attention_norm = read.norm(at + kAttentionNorm, hidden, params.norm),
         .query = read.matrix(layer, kQuery, queries + (joins_heads ? 2 * keys : 0), hidden),
         .key = read.matrix(layer, kKey, separate, hidden),
         .value = read.matrix(layer, kValue, separate, hidden),
         .query_norm = {read.vector(at + kQueryNorm, normed_queries), nullptr},
         .key_norm = {read.vector(at + kKeyNorm, normed_keys), nullptr},
         .output = read.matrix(layer, kOutput, hidden, queries),
         .attention_output_norm = {read.vector(at + kAttentionOutputNorm, hidden), nullptr},
         .mlp_norm = read.norm(at + kMlpNorm, hidden, params.norm),
         .mlp = mlp,
         .experts = experts,
         .mlp_output_norm = {read.vector(at + kMlpOutputNorm, hidden), nullptr},
         .cosines = nullptr,
         .sines = nullptr,
         .keys = read_cache(caches, 2 * layer, params, dtype),
         .values = read_cache(caches, 2 * layer + 1, params, dtype),
         .window = windows[layer]});
    const DecoderLayer& last = layers.back();
    if (parallel && (residual_scale != 1 || last.attention_output_norm.weight != nullptr ||
                     last.mlp_output_norm.weight != nullptr)) {
      fail_argument("parallel", "does not go with a residual_scale or norms of outputs");
    }
  }
  read_rotations(input_arg, cosines, sines, tables, dtype, params, layers);
  params.layers = layers;
  params.final_norm = read.norm(num_layers * kLayerTensors, params.hidden, params.norm,
                                /*is_optional=*/false);
  const int64_t with_states = static_cast<int64_t>(num_layers) - (params.outputs < params.nodes);
  const int64_t states_shape[] = {with_states, params.batch, params.nodes, params.hidden};
  const int64_t output_shape[] = {params.batch, params.outputs, params.hidden};
  const Tensor states = empty(input, states_shape, dtype),
               output = empty(input, output_shape, dtype);
  params.input = input.const_data_ptr();
  params.prefix_starts = starts_arg.view1<int64_t>();
  params.prefix_lengths = lengths_arg.view1<int64_t>();
  params.states = states.mutable_data_ptr();
  params.output = output.mutable_data_ptr();
  if (params.batch == 0 || params.nodes == 0) return {states, output};
  if (!ancestors) check_prompt_starts(params);
  for (const DecoderLayer& layer : layers) {
    const auto attention = cpu::decoder_attention(params, layer, params.start, nullptr, nullptr);
    if (const auto problem = cpu::find_invalid_slot(attention)) {
      fail("specdec::decoder_layers: " + *problem);
    }
  }
  with_team([&](const ParallelFor& parallel_for) { cpu::decoder_layers(params, parallel_for); });
  return {states, output};
}

}  // namespace

SPECDEC_REGISTER(decoder_layers)

}  // namespace specdec::glue

#endif
