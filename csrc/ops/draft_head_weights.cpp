#include "draft_head_weights.h"

#include <initializer_list>
#include <utility>

#include "specdec/panels.h"

#ifndef SPECDEC_EMULATED  // there is no kernel to emulate

namespace specdec::glue {
namespace {

constexpr int64_t kHeadTensors = 10;
constexpr int64_t kLayerTensors = 12;

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

// The tensors of `weights`, in their order. One with no elements is absent.
class WeightReader {
 public:
  WeightReader(const std::vector<Tensor>& weights, int64_t expected, const Argument& features,
               int32_t dtype, FloatType type)
      : weights_(weights), features_(features), dtype_(dtype), type_(type) {
    if (std::ssize(weights) != expected) {
      fail_draft_head("weights", "must have " + std::to_string(expected) +
                                     " tensors for the layers of layout, got " +
                                     std::to_string(weights.size()));
    }
  }

  bool has_next() const { return weights_[next_].numel() > 0; }

  const void* vector(const char* name, int64_t count) { return read(name, {count}, "[count]"); }
  const void* optional_vector(const char* name, int64_t count) {
    if (has_next()) return vector(name, count);
    ++next_;
    return nullptr;
  }
  const void* matrix(const char* name, int64_t outs, int64_t ins) {
    return read(name, {outs, ins}, "[outs, ins]");
  }
  const void* panels(const char* name, int64_t outs, int64_t ins) {
    const int64_t unit = cpu::kPanelUnitBytes / element_size(type_);
    return read(name,
                {(outs + cpu::kPanelOuts - 1) / cpu::kPanelOuts, (ins + unit - 1) / unit,
                 cpu::kPanelOuts, unit},
                "[panels, units of an output, outputs of a panel, elements of a unit]");
  }
  // A matrix and the bias that follows it.
  HeadMatrix biased(const char* name, int64_t outs, int64_t ins) {
    const void* weight = panels(name, outs, ins);
    return {weight, optional_vector((std::string(name) + " bias").c_str(), outs), outs, ins};
  }
  HeadMatrix plain(const char* name, int64_t outs, int64_t ins) {
    return {panels(name, outs, ins), nullptr, outs, ins};
  }
  const int64_t* optional_int64(const char* name, int64_t count) {
    const int32_t dtype = std::exchange(dtype_, aoti_torch_dtype_int64());
    const void* data = optional_vector(name, count);
    dtype_ = dtype;
    return static_cast<const int64_t*>(data);
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
  const void* read(const char* name, std::initializer_list<int64_t> shape, const char* spelt) {
    const std::string label = "weights[" + std::to_string(next_) + "] (" + name + ")";
    const Tensor& tensor = weights_[next_++];
    const Argument argument("draft_head", label.c_str(), tensor);
    argument.has_dtype(dtype_).has_shape(shape, spelt).is_on_device_of(features_);
    check_contiguous(argument, tensor);
    return tensor.const_data_ptr();
  }

  const std::vector<Tensor>& weights_;
  const Argument& features_;
  int32_t dtype_;
  FloatType type_;
  int64_t next_ = 0;
};

// Numbers of `layout`, each with its name and its least value.
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
  // How many numbers follow.
  int64_t left() const { return std::ssize(layout_) - next_; }

 private:
  static constexpr int64_t kMaxSize = 1 << 28;  // products of two sizes stay far below 2^63

  const std::vector<int64_t>& layout_;
  int64_t next_ = 0;
};

HeadWeights read_layout(const std::vector<int64_t>& layout, const std::vector<double>& scalars) {
  HeadWeights head{};
  LayoutReader reader(layout);
  head.is_eagle1 = reader.flag("is_eagle1");
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
  if (scalars.size() != 2) {
    fail_draft_head("scalars", "must be [rms_norm_eps, logit_scale], got " +
                                   std::to_string(scalars.size()) + " numbers");
  }
  head.eps = static_cast<float>(scalars[0]);
  head.logit_scale = static_cast<float>(scalars[1]);
  return head;
}

void read_layer(WeightReader& reader, bool is_first, const HeadWeights& head, HeadLayer* layer) {
  const int64_t attended = head.attended(is_first), dim = head.head_dim;
  const int64_t queries = head.heads * dim, keys_values = 2 * head.kv_heads * dim;
  if (is_first && head.is_eagle1) {
    reader.absent("input_layernorm", "in EAGLE-1's layer 0");
  } else {
    layer->input_norm = reader.vector("input_layernorm", head.hidden);
  }
  layer->query = reader.biased("q_proj", queries, attended);
  layer->key_value = reader.biased("kv_proj", keys_values, attended);
  layer->query_norm = reader.optional_vector("q_norm", dim);
  layer->key_norm = reader.optional_vector("k_norm", dim);
  layer->output = reader.biased("o_proj", head.hidden, queries);
  layer->post_norm = reader.vector("post_attention_layernorm", head.hidden);
  layer->gate_up = reader.plain("gate_up_proj", 2 * head.intermediate, head.hidden);
  layer->down = reader.plain("down_proj", head.hidden, head.intermediate);
}

FloatType head_type(const Argument& features, int32_t dtype) {
  if (dtype == aoti_torch_dtype_float32()) return FloatType::kFloat32;
  if (dtype == aoti_torch_dtype_bfloat16()) return FloatType::kBFloat16;
  fail(features.prefix() + " must be torch.float32 or torch.bfloat16, got " + dtype_name(dtype) +
       "; convert the head with DraftHead.to and the features with it");
}

}  // namespace

HeadWeights read_draft_head(const std::vector<Tensor>& weights, const std::vector<int64_t>& layout,
                            const std::vector<double>& scalars, const Argument& features,
                            int32_t dtype) {
  HeadWeights head = read_layout(layout, scalars);
  head.type = head_type(features, dtype);
  WeightReader reader(weights, kHeadTensors + kLayerTensors * std::ssize(head.layers), features,
                      dtype, head.type);
  if (weights[0].dim() != 2 || weights[0].size(0) < 1) {
    fail_draft_head("weights[0] (embed_tokens)",
                    "must be [tokens, hidden_size] with at least 1 token, got shape " +
                        describe_shape(weights[0]));
  }
  head.vocab = weights[0].size(0);
  head.embedding = reader.matrix("embed_tokens", head.vocab, head.hidden);
  head.lm_head = reader.panels("lm_head", head.draft_vocab, head.hidden);
  head.draft_to_target = reader.optional_int64("draft_to_target", head.draft_vocab);
  if (head.draft_to_target == nullptr && head.draft_vocab != head.vocab) {
    fail_draft_head("weights[2] (draft_to_target)",
                    "must be there where lm_head has " + std::to_string(head.draft_vocab) +
                        " tokens and the embedding " + std::to_string(head.vocab));
  }
  head.input_norm = reader.optional_vector("input_norm", head.feature_width);
  head.fc_norm = reader.optional_vector("fc_norm", head.feature_width);
  const int64_t fc_ins = head.feature_width + (head.is_eagle1 ? head.hidden : 0);
  const bool has_fc = reader.has_next();
  if (has_fc) {
    head.fc = reader.biased("fc", head.hidden, fc_ins);
  } else {
    if (head.is_eagle1) fail_draft_head("weights[5] (fc)", "must be there: EAGLE-1 has fc");
    reader.absent("fc", "without fc");
    reader.absent("fc bias", "without fc");
  }
  if ((head.is_eagle1 || !has_fc) && head.feature_width != head.hidden) {
    fail_draft_head("layout", "gives feature_width " + std::to_string(head.feature_width) +
                                  "; expected hidden_size, " + std::to_string(head.hidden) +
                                  ", for EAGLE-1 and without fc");
  }
  if (head.is_eagle1) {
    reader.absent("hidden_norm", "for EAGLE-1");
    reader.absent("norm", "for EAGLE-1");
  } else {
    head.hidden_norm = reader.vector("hidden_norm", head.hidden);
    head.norm = reader.vector("norm", head.hidden);
  }
  head.mask_features = reader.optional_vector("mask_hidden", head.feature_width);
  if ((head.mask_features != nullptr) != head.is_parallel() || head.mask_token >= head.vocab) {
    fail_draft_head("layout", "gives mask_token_id = " + std::to_string(head.mask_token) +
                                  "; expected a token in " + half_open(0, head.vocab) +
                                  " where the head has mask_hidden, else -1");
  }
  for (size_t i = 0; i < head.layers.size(); ++i) {
    read_layer(reader, i == 0, head, &head.layers[i]);
  }
  return head;
}

}  // namespace specdec::glue

#endif
