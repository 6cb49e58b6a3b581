#include "weights.h"

#include <initializer_list>
#include <utility>

#include "specdec/cpu/panels.h"
#include "specdec/draft_head/plan.h"

namespace specdec::glue {
namespace {

constexpr int64_t kHeadTensors = 11;
constexpr int64_t kLayerTensors = 10;
constexpr int64_t kHeadScales = 2;
constexpr int64_t kLayerScales = 4;

void check_contiguous(const Argument& argument, const Tensor& tensor) {
  int64_t stride = 1;
  for (int64_t dim = tensor.dim() - 1; dim >= 0; --dim) {
    if (tensor.size(dim) > 1 && tensor.stride(dim) != stride) {
      fail(argument.prefix() + " must be contiguous, got stride " +
           std::to_string(tensor.stride(dim)) + " in dimension " + std::to_string(dim) +
           "; PackedHead.pack makes it so");
    }
    stride *= tensor.size(dim);
  }
}

// Reads the tensors of `weights` in order. A tensor without elements is absent.
class WeightReader {
 public:
  // `matrix_dtype` is the type of the weight matrices, `dtype` of all other weights and
  // activations.
  WeightReader(const std::vector<Tensor>& weights, const Argument& features, bool for_kernel,
               int32_t dtype, int32_t matrix_dtype, int64_t matrix_element)
      : weights_(weights),
        features_(features),
        for_kernel_(for_kernel),
        dtype_(dtype),
        matrix_dtype_(matrix_dtype),
        element_size_(matrix_element) {}

  bool has_next() const { return weights_[next_].numel() > 0; }

  const void* vector(const char* name, int64_t count) {
    return read(name, dtype_, {count}, "[count]");
  }
  const void* optional_vector(const char* name, int64_t count) {
    if (has_next()) return vector(name, count);
    ++next_;
    return nullptr;
  }
  const void* embedding(const char* name, int64_t tokens, int64_t width) {
    return read(name, dtype_, {tokens, width}, "[tokens, hidden_size]");
  }
  // A matrix without bias: tiles or rows for the kernel, panels for the CPU.
  HeadMatrix plain(const char* name, int64_t outs, int64_t ins, bool is_paired = false) {
    if (!for_kernel_) return {panels(name, {outs}, ins), nullptr, outs, ins};
    if (weights_[next_].dim() != 4) {
      return {read(name, matrix_dtype_, {outs, ins}, "[outs, ins]"), nullptr, outs, ins};
    }
    const int64_t unit = kUnitBytes / element_size_, parts = is_paired ? 2 : 1;
    const void* tiles =
        read(name, matrix_dtype_,
             {parts * tiles_of(outs / parts), (ins + unit - 1) / unit, kTileOuts, unit},
             "[tiles, units of an output, outputs of a tile, elements of a unit]");
    return {tiles, nullptr, outs, ins, true};
  }
  // A matrix and the bias that follows it.
  HeadMatrix biased(const char* name, int64_t outs, int64_t ins) {
    HeadMatrix matrix = plain(name, outs, ins);
    matrix.bias = bias_of(name, outs);
    return matrix;
  }
  // A matrix for the CPU. Each of `parts` begins a new panel.
  const void* panels(const char* name, std::initializer_list<int64_t> parts, int64_t ins) {
    int64_t panels = 0;
    for (const int64_t part : parts) panels += cpu::num_panels(part);
    const int64_t unit = cpu::kPanelUnitBytes / element_size_;
    return read(name, matrix_dtype_, {panels, (ins + unit - 1) / unit, cpu::kPanelOuts, unit},
                "[panels, units of an output, outputs of a panel, elements of a unit]");
  }
  const void* bias_of(const char* name, int64_t outs) {
    return optional_vector((std::string(name) + " bias").c_str(), outs);
  }
  const int64_t* optional_int64(const char* name, int64_t count) {
    if (has_next()) {
      return static_cast<const int64_t*>(read(name, aoti_torch_dtype_int64(), {count}, "[count]"));
    }
    ++next_;
    return nullptr;
  }
  const float* float32(const char* name, int64_t count) {
    return static_cast<const float*>(read(name, aoti_torch_dtype_float32(), {count}, "[count]"));
  }
  void absent(const char* name, const char* where) {
    if (has_next()) {
      fail_draft_head(
          "weights[" + std::to_string(next_) + "] (" + name + ")",
          "must be empty " + std::string(where) + ", got shape " + describe_shape(weights_[next_]));
    }
    ++next_;
  }

 private:
  const void* read(const char* name, int32_t dtype, std::initializer_list<int64_t> shape,
                   const char* spelt) {
    const std::string label = "weights[" + std::to_string(next_) + "] (" + name + ")";
    const Tensor& tensor = weights_[next_++];
    const Argument argument("draft_head", label.c_str(), tensor);
    argument.has_dtype(dtype).has_shape(shape, spelt).is_on_device_of(features_);
    check_contiguous(argument, tensor);
    const void* data = tensor.const_data_ptr();
    if (for_kernel_ && reinterpret_cast<uintptr_t>(data) % 16 != 0) {
      fail(argument.prefix() +
           " must begin at a multiple of 16 bytes on CUDA; PackedHead.pack makes it so");
    }
    return data;
  }

  const std::vector<Tensor>& weights_;
  const Argument& features_;
  bool for_kernel_;
  int32_t dtype_;
  int32_t matrix_dtype_;
  int64_t element_size_;  // of matrix_dtype
  int64_t next_ = 0;
};

// Reads the numbers of `layout`, each with its name and smallest value.
class LayoutReader {
 public:
  explicit LayoutReader(const std::vector<int64_t>& layout) : layout_(layout) {}

  int64_t at_least(int64_t least, const char* name) {
    if (next_ == std::ssize(layout_)) {
      fail_draft_head("layout",
                      "ends before " + std::string(name) + "; make it with PackedHead.pack");
    }
    const int64_t value = layout_[next_++];
    if (value < least || value > kMaxSize) {
      fail_draft_head("layout", "gives " + std::string(name) + " = " + std::to_string(value) +
                                    "; expected " + std::to_string(least) + " to " +
                                    std::to_string(kMaxSize));
    }
    return value;
  }
  bool flag(const char* name) { return at_least(0, name) != 0; }
  // Number of remaining numbers.
  int64_t left() const { return std::ssize(layout_) - next_; }

 private:
  static constexpr int64_t kMaxSize = 1 << 28;  // products of two sizes stay far below 2^63

  const std::vector<int64_t>& layout_;
  int64_t next_ = 0;
};

void read_scalars(const std::vector<double>& scalars, HeadWeights* head) {
  if (scalars.size() != 2) {
    fail_draft_head("scalars", "must be [rms_norm_eps, logit_scale], got " +
                                   std::to_string(scalars.size()) + " numbers");
  }
  head->eps = static_cast<float>(scalars[0]);
  head->logit_scale = static_cast<float>(scalars[1]);
}

// Reads queries, keys and values, which are one tensor: for the kernel one matrix, for the CPU two.
void read_projections(WeightReader& reader, const HeadWeights& head, bool for_kernel,
                      int64_t attended, int64_t matrix_element, HeadLayer* layer) {
  const int64_t queries = head.heads * head.head_dim;
  const int64_t keys_values = 2 * head.kv_heads * head.head_dim;
  if (for_kernel) {
    layer->query = reader.biased("qkv_proj", queries + keys_values, attended);
    return;
  }
  const void* weight = reader.panels("qkv_proj", {queries, keys_values}, attended);
  const void* bias = reader.bias_of("qkv_proj", queries + keys_values);
  const auto behind = [](const void* data, int64_t bytes) -> const void* {
    return data == nullptr ? nullptr : static_cast<const std::byte*>(data) + bytes;
  };
  layer->query = {weight, bias, queries, attended};
  layer->key_value = {behind(weight, cpu::panel_bytes(queries, attended, matrix_element)),
                      behind(bias, queries * element_size(head.type)), keys_values, attended};
}

void read_layer(WeightReader& reader, bool is_first, const HeadWeights& head, bool for_kernel,
                int64_t matrix_element, HeadLayer* layer) {
  const int64_t attended = head.attended(is_first), dim = head.head_dim;
  layer->input_norm = is_first && head.feeds_fc
                          ? reader.optional_vector("input_layernorm", head.hidden)
                          : reader.vector("input_layernorm", head.hidden);
  read_projections(reader, head, for_kernel, attended, matrix_element, layer);
  layer->query_norm = reader.optional_vector("q_norm", dim);
  layer->key_norm = reader.optional_vector("k_norm", dim);
  layer->output = reader.biased("o_proj", head.hidden, head.heads * dim);
  layer->post_norm = reader.vector("post_attention_layernorm", head.hidden);
  layer->gate_up = reader.plain("gate_up_proj", 2 * head.intermediate, head.hidden, true);
  layer->down = reader.plain("down_proj", head.hidden, head.intermediate);
}

FloatType head_type(const Argument& features, int32_t dtype, bool for_kernel) {
  if (dtype == aoti_torch_dtype_float32()) return FloatType::kFloat32;
  if (dtype == aoti_torch_dtype_bfloat16()) return FloatType::kBFloat16;
  if (for_kernel && dtype == aoti_torch_dtype_float16()) return FloatType::kFloat16;
  fail(features.prefix() +
       (for_kernel ? " must be torch.float32, torch.bfloat16 or torch.float16, got "
                   : " must be torch.float32 or torch.bfloat16 on the CPU, got ") +
       dtype_name(dtype) + "; convert the head with DraftHead.to and the features with it");
}

DraftWeightType weight_type(const Tensor& lm_head, bool for_kernel) {
  const int32_t dtype = dtype_of(lm_head);
  const bool is_int8 = dtype == aoti_torch_dtype_int8();
  if (!is_int8 && dtype != aoti_torch_dtype_float8_e4m3fn()) return DraftWeightType::kSame;
  if (!is_int8 && !for_kernel) {
    fail_draft_head("weights[1] (lm_head)",
                    "must have the dtype of features or torch.int8 on the CPU, got " +
                        std::string(dtype_name(dtype)) + "; pack the head with weights=\"int8\"");
  }
  return is_int8 ? DraftWeightType::kInt8 : DraftWeightType::kFloat8;
}

void check_count(const std::vector<Tensor>& weights, int64_t layers, DraftWeightType type) {
  int64_t expected = kHeadTensors + kLayerTensors * layers;
  if (type != DraftWeightType::kSame) expected += kHeadScales + kLayerScales * layers;
  if (std::ssize(weights) != expected) {
    fail_draft_head("weights", "must have " + std::to_string(expected) +
                                   " tensors for the layers of layout, got " +
                                   std::to_string(weights.size()));
  }
}

// Reads all weights outside the layers.
void read_ends(const std::vector<Tensor>& weights, WeightReader& reader, HeadWeights* out) {
  HeadWeights& head = *out;
  if (weights[0].dim() != 2 || weights[0].size(0) < 1) {
    fail_draft_head("weights[0] (embed_tokens)",
                    "must be [tokens, hidden_size] with at least 1 token, got shape " +
                        describe_shape(weights[0]));
  }
  head.vocab = weights[0].size(0);
  head.embedding = reader.embedding("embed_tokens", head.vocab, head.hidden);
  head.lm_head = reader.plain("lm_head", head.draft_vocab, head.hidden);
  head.draft_to_target = reader.optional_int64("draft_to_target", head.draft_vocab);
  if (head.draft_to_target == nullptr && head.draft_vocab != head.vocab) {
    fail_draft_head("weights[2] (draft_to_target)",
                    "must be there where lm_head has " + std::to_string(head.draft_vocab) +
                        " tokens and the embedding " + std::to_string(head.vocab));
  }
  head.input_norm = reader.optional_vector("input_norm", head.feature_width);
  head.fc_norm = reader.optional_vector("fc_norm", head.feature_width);
  const int64_t fc_ins = head.feature_width + (head.feeds_fc ? head.hidden : 0);
  const bool has_fc = reader.has_next();
  if (has_fc) {
    head.fc = reader.biased("fc", head.hidden, fc_ins);
  } else {
    if (head.feeds_fc) fail_draft_head("weights[5] (fc)", "must be there with feeds_fc");
    reader.absent("fc", "without fc");
    reader.absent("fc bias", "without fc");
  }
  if ((head.feeds_fc || !has_fc) && head.feature_width != head.hidden) {
    fail_draft_head("layout", "gives feature_width " + std::to_string(head.feature_width) +
                                  "; expected hidden_size, " + std::to_string(head.hidden) +
                                  ", with feeds_fc and without fc");
  }
  if (head.feeds_fc) {
    head.embedding_norm = reader.optional_vector("embedding_norm", head.hidden);
    head.hidden_norm = reader.optional_vector("hidden_norm", head.hidden);
    head.norm = reader.optional_vector("norm", head.hidden);
  } else {
    reader.absent("embedding_norm", "without feeds_fc");
    head.hidden_norm = reader.vector("hidden_norm", head.hidden);
    head.norm = reader.vector("norm", head.hidden);
  }
  head.mask_features = reader.optional_vector("mask_hidden", head.feature_width);
  if ((head.mask_features != nullptr) != head.is_parallel() || head.mask_token >= head.vocab) {
    fail_draft_head("layout", "gives mask_token_id = " + std::to_string(head.mask_token) +
                                  "; expected a token in " + half_open(0, head.vocab) +
                                  " where the head has mask_hidden, else -1");
  }
}

void read_scales(WeightReader& reader, HeadWeights* head) {
  head->lm_head.scale = reader.float32("lm_head scale", head->draft_vocab);
  if (head->fc.weight == nullptr) {
    reader.absent("fc scale", "without fc");
  } else {
    head->fc.scale = reader.float32("fc scale", head->hidden);
  }
  for (HeadLayer& layer : head->layers) {
    const int64_t queries = layer.query.outs;
    layer.query.scale = reader.float32("qkv_proj scale", queries + layer.key_value.outs);
    layer.key_value.scale = layer.query.scale + queries;
    layer.output.scale = reader.float32("o_proj scale", layer.output.outs);
    layer.gate_up.scale = reader.float32("gate_up_proj scale", layer.gate_up.outs);
    layer.down.scale = reader.float32("down_proj scale", layer.down.outs);
  }
}

}  // namespace

HeadWeights read_layout(const std::vector<int64_t>& layout) {
  HeadWeights head{};
  LayoutReader reader(layout);
  head.feeds_fc = reader.flag("feeds_fc");
  head.norm_before_residual = reader.flag("norm_before_residual");
  head.norm_output = reader.flag("norm_output");
  head.hidden = reader.at_least(1, "hidden_size");
  head.intermediate = reader.at_least(1, "intermediate_size");
  head.heads = reader.at_least(1, "num_heads");
  head.kv_heads = reader.at_least(1, "num_kv_heads");
  head.head_dim = reader.at_least(1, "head_dim");
  head.num_features = reader.at_least(1, "num_features");
  head.feature_width = reader.at_least(1, "feature_width");
  head.mask_token = reader.at_least(-1, "mask_token_id");
  head.draft_vocab = reader.at_least(1, "draft_vocab_size");
  if (reader.left() < 1) {
    fail_draft_head("layout", "must end with a sliding window (0: none) for each layer");
  }
  head.layers.resize(reader.left());
  for (HeadLayer& layer : head.layers) layer.window = reader.at_least(0, "sliding_window");
  if (head.heads % head.kv_heads != 0) {
    fail_draft_head("layout", "gives " + std::to_string(head.heads) +
                                  " heads; expected a multiple of " +
                                  std::to_string(head.kv_heads) + ", the key-value heads");
  }
  if (head.feature_width % head.num_features != 0) {
    fail_draft_head("layout", "gives feature_width " + std::to_string(head.feature_width) +
                                  "; expected a multiple of num_features, " +
                                  std::to_string(head.num_features));
  }
  return head;
}

PackedWeights read_draft_head(const std::vector<Tensor>& weights,
                              const std::vector<int64_t>& layout,
                              const std::vector<double>& scalars, const Tensor& features) {
  const Argument features_arg("draft_head", "features", features);
  const bool for_kernel = runs_kernel(features);
  PackedWeights packed{read_layout(layout), DraftWeightType::kSame};
  HeadWeights& head = packed.head;
  read_scalars(scalars, &head);
  const int32_t dtype = dtype_of(features);
  head.type = head_type(features_arg, dtype, for_kernel);
  if (weights.size() > 1) packed.type = weight_type(weights[1], for_kernel);
  check_count(weights, std::ssize(head.layers), packed.type);
  const bool is_same = packed.type == DraftWeightType::kSame;
  const int64_t matrix_element = is_same ? element_size(head.type) : 1;
  WeightReader reader(weights, features_arg, for_kernel, dtype,
                      is_same ? dtype : dtype_of(weights[1]), matrix_element);
  read_ends(weights, reader, &head);
  for (size_t i = 0; i < head.layers.size(); ++i) {
    read_layer(reader, i == 0, head, for_kernel, matrix_element, &head.layers[i]);
  }
  if (!is_same) read_scales(reader, &head);
  return packed;
}

}  // namespace specdec::glue
