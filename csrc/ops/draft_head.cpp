// Glue of draft_head: reads the packed head (specdec_ext/ops/draft.py packs it in this order),
// checks everything that addresses memory, outputs. The op exists for CPU tensors only.
#include "specdec/draft_head.h"

#include <algorithm>
#include <tuple>
#include <utility>
#include <vector>

#include "glue.h"
#include "register.h"
#include "specdec/build_dynamic_tree.h"

#ifndef SPECDEC_EMULATED  // there is no kernel to emulate

namespace specdec::glue {
namespace {

constexpr const char* kOp = "draft_head";

[[noreturn]] void fail_argument(const std::string& argument, const std::string& problem) {
  fail("specdec::draft_head: argument " + argument + " " + problem);
}

std::string bounds(int64_t low, int64_t end) {
  return std::string("[") + std::to_string(low) + ", " + std::to_string(end) + ")";
}

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

void check_last_stride(const Argument& argument, const Tensor& tensor) {
  const int64_t last = tensor.dim() - 1;
  if (tensor.size(last) > 1 && tensor.stride(last) != 1) {
    fail(argument.prefix() + " must be contiguous in its last dimension, got stride " +
         std::to_string(tensor.stride(last)) + "; call .contiguous() on it");
  }
}

// The tensors of `weights`, in their order. One with no elements is absent.
class WeightReader {
 public:
  WeightReader(const std::vector<Tensor>& weights, int64_t expected, const Argument& features,
               int32_t dtype)
      : weights_(weights), features_(features), dtype_(dtype) {
    if (std::ssize(weights) != expected) {
      fail_argument("weights", "must have " + std::to_string(expected) +
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
  // A matrix and the bias that follows it.
  HeadMatrix biased(const char* name, int64_t outs, int64_t ins) {
    const void* weight = matrix(name, outs, ins);
    return {weight, optional_vector((std::string(name) + " bias").c_str(), outs), outs, ins};
  }
  HeadMatrix plain(const char* name, int64_t outs, int64_t ins) {
    return {matrix(name, outs, ins), nullptr, outs, ins};
  }
  const int64_t* optional_int64(const char* name, int64_t count) {
    const int32_t dtype = std::exchange(dtype_, aoti_torch_dtype_int64());
    const void* data = optional_vector(name, count);
    dtype_ = dtype;
    return static_cast<const int64_t*>(data);
  }
  void absent(const char* name, const char* where) {
    if (has_next()) {
      fail_argument(
          "weights[" + std::to_string(next_) + "] (" + name + ")",
          "must be empty " + std::string(where) + ", got shape " + describe_shape(weights_[next_]));
    }
    ++next_;
  }

 private:
  const void* read(const char* name, std::initializer_list<int64_t> shape, const char* spelt) {
    const std::string label = "weights[" + std::to_string(next_) + "] (" + name + ")";
    const Tensor& tensor = weights_[next_++];
    const Argument argument(kOp, label.c_str(), tensor);
    argument.has_dtype(dtype_).has_shape(shape, spelt).is_on_device_of(features_);
    check_contiguous(argument, tensor);
    return tensor.const_data_ptr();
  }

  const std::vector<Tensor>& weights_;
  const Argument& features_;
  int32_t dtype_;
  int64_t next_ = 0;
};

// Numbers of `layout`, each with its name and its least value.
class LayoutReader {
 public:
  explicit LayoutReader(const std::vector<int64_t>& layout) : layout_(layout) {}

  int64_t at_least(int64_t least, const char* name) {
    if (next_ == std::ssize(layout_)) {
      fail_argument("layout",
                    "ends before " + std::string(name) + "; make it with PackedHead.pack");
    }
    const int64_t value = layout_[next_++];
    if (value < least || value > kMaxSize) {
      fail_argument("layout", "gives " + std::string(name) + " = " + std::to_string(value) +
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

constexpr int64_t kHeadTensors = 10;
constexpr int64_t kLayerTensors = 10;

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
  if (reader.left() < 1) {
    fail_argument("layout", "must end with a sliding window (0: none) for each layer");
  }
  head.layers.resize(reader.left());
  for (HeadLayer& layer : head.layers) layer.window = reader.at_least(0, "sliding_window");
  if (head.heads % head.kv_heads != 0) {
    fail_argument("layout", "gives " + std::to_string(head.heads) +
                                " heads; expected a multiple of " + std::to_string(head.kv_heads) +
                                ", the key-value heads");
  }
  if (head.feature_width % head.num_features != 0) {
    fail_argument("layout", "gives feature_width " + std::to_string(head.feature_width) +
                                "; expected a multiple of num_features, " +
                                std::to_string(head.num_features));
  }
  if (scalars.size() != 2) {
    fail_argument("scalars", "must be [rms_norm_eps, logit_scale], got " +
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
  const HeadMatrix qkv = reader.biased("qkv_proj", queries + keys_values, attended);
  const auto rows_from = [&](const void* data, int64_t row, int64_t width) -> const void* {
    if (data == nullptr) return nullptr;
    return static_cast<const std::byte*>(data) + row * width * element_size(head.type);
  };
  layer->query = {qkv.weight, qkv.bias, queries, attended};
  layer->key_value = {rows_from(qkv.weight, queries, attended), rows_from(qkv.bias, queries, 1),
                      keys_values, attended};
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

int64_t rows_of_matrix(const Tensor& tensor, const char* name) {
  if (tensor.dim() != 2 || tensor.size(0) < 1) {
    fail_argument(name, "must be [tokens, hidden_size] with at least 1 token, got shape " +
                            describe_shape(tensor));
  }
  return tensor.size(0);
}

HeadWeights read_head(const std::vector<Tensor>& weights, const std::vector<int64_t>& layout,
                      const std::vector<double>& scalars, const Argument& features, int32_t dtype) {
  HeadWeights head = read_layout(layout, scalars);
  head.type = head_type(features, dtype);
  WeightReader reader(weights, kHeadTensors + kLayerTensors * std::ssize(head.layers), features,
                      dtype);
  head.vocab = rows_of_matrix(weights[0], "weights[0] (embed_tokens)");
  head.embedding = reader.matrix("embed_tokens", head.vocab, head.hidden);
  head.draft_vocab = rows_of_matrix(weights[1], "weights[1] (lm_head)");
  head.lm_head = reader.matrix("lm_head", head.draft_vocab, head.hidden);
  head.draft_to_target = reader.optional_int64("draft_to_target", head.draft_vocab);
  if (head.draft_to_target == nullptr && head.draft_vocab != head.vocab) {
    fail_argument("weights[2] (draft_to_target)",
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
    if (head.is_eagle1) fail_argument("weights[5] (fc)", "must be there: EAGLE-1 has fc");
    reader.absent("fc", "without fc");
    reader.absent("fc bias", "without fc");
  }
  if ((head.is_eagle1 || !has_fc) && head.feature_width != head.hidden) {
    fail_argument("layout", "gives feature_width " + std::to_string(head.feature_width) +
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
    fail_argument("layout", "gives mask_token_id = " + std::to_string(head.mask_token) +
                                "; expected a token in " + bounds(0, head.vocab) +
                                " where the head has mask_hidden, else -1");
  }
  for (size_t i = 0; i < head.layers.size(); ++i) {
    read_layer(reader, i == 0, head, &head.layers[i]);
  }
  return head;
}

// Level order: parents come before their children, and depths never decrease.
void check_choices(const DraftShape& shape) {
  std::vector<int64_t> depths(shape.num_choices + 1);
  for (int64_t i = 0; i < shape.num_choices; ++i) {
    const int64_t parent = shape.choices(i, 0), rank = shape.choices(i, 1);
    const auto expect = [&](bool holds, const std::string& expected) {
      if (holds) return;
      fail_argument("choices", "has the node (" + std::to_string(parent) + ", " +
                                   std::to_string(rank) + ") in row " + std::to_string(i) +
                                   "; expected " + expected);
    };
    expect(parent >= 0 && parent <= i, "an earlier node as parent, in " + bounds(0, i + 1));
    expect(rank >= 0 && rank < shape.top_k, "a rank in " + bounds(0, shape.top_k));
    depths[i + 1] = depths[parent] + 1;
    expect(depths[i + 1] >= depths[i], "level order");
  }
  if (depths.back() != shape.depth) {
    fail_argument("depth", "must be the depth of choices, " + std::to_string(depths.back()) +
                               ", got " + std::to_string(shape.depth));
  }
}

DraftShape read_shape(const Tensor& choices, int64_t depth, int64_t top_k, int64_t nodes,
                      const Argument& features) {
  const Argument argument(kOp, "choices", choices);
  argument.has_dtype(aoti_torch_dtype_int64()).has_shape({choices.size(0), 2}, "[choices, 2]");
  argument.is_on_device_of(features);
  const auto in_range = [](const char* name, int64_t given, int64_t low, int64_t high) {
    if (given >= low && given <= high) return;
    fail_argument(name, "must be " + std::to_string(low) + " to " + std::to_string(high) +
                            ", got " + std::to_string(given));
  };
  in_range("depth", depth, 1, kMaxCandidates);
  in_range("top_k", top_k, 1, kMaxCandidates);
  in_range("nodes", nodes, 1, kMaxNodes);
  const DraftShape shape{argument.view2<int64_t>(), choices.size(0), depth, top_k, nodes};
  if (!shape.is_dynamic()) {
    if (shape.num_choices >= nodes) {
      fail(argument.prefix() + " must be fewer than nodes, " + std::to_string(nodes) +
           ", got shape " + describe_shape(choices));
    }
    check_choices(shape);
  } else if (shape.num_candidates() > kMaxCandidates) {
    fail_argument("top_k", "= " + std::to_string(top_k) + " at depth " + std::to_string(depth) +
                               " makes " + std::to_string(shape.num_candidates()) +
                               " candidates; expected at most " + std::to_string(kMaxCandidates) +
                               ", so draft fewer levels or keep fewer per level");
  }
  return shape;
}

HeadCache read_cache(const char* name, const Tensor& cache, const HeadWeights& head, int64_t rows,
                     int64_t capacity, const Argument& features, int32_t dtype) {
  const Argument argument(kOp, name, cache);
  argument.has_dtype(dtype).has_shape(
      {std::ssize(head.layers), rows, head.kv_heads, capacity, head.head_dim},
      "[layers, rows, kv_heads, capacity, head_dim]");
  argument.is_on_device_of(features);
  check_last_stride(argument, cache);
  for (int dim = 0; dim < 4; ++dim) {
    if (cache.size(dim) > 1 && cache.stride(dim) == 0) {
      fail(argument.prefix() + " must not be an expanded tensor, got stride 0 in dimension " +
           std::to_string(dim) + "; it is written in place, so give it memory of its own");
    }
  }
  return {cache.mutable_data_ptr(), cache.stride(0), cache.stride(1), cache.stride(2),
          cache.stride(3)};
}

// Every number that addresses memory.
void check_rows(const DraftHeadParams& params, int64_t num_new, int64_t num_positions) {
  const int64_t slots = draft_slots(params.shape, params.head.is_parallel());
  for (int64_t row = 0; row < params.rows; ++row) {
    const auto in_range = [&](const char* name, int64_t given, int64_t end,
                              const std::string& reason = "") {
      if (given >= 0 && given < end) return;
      fail_argument(name, "has " + std::to_string(given) + " in row " + std::to_string(row) +
                              "; expected " + bounds(0, std::max<int64_t>(end, 0)) + reason);
    };
    const int64_t count = params.counts[row];
    in_range("counts", count, num_new + 1);
    in_range("roots", params.roots[row], params.head.vocab);
    if (count == 0) continue;
    in_range("lengths", params.lengths[row], params.capacity - count - slots + 1,
             ": a capacity of " + std::to_string(params.capacity) + " slots less " +
                 std::to_string(count) + " new elements and " + std::to_string(slots) +
                 " of the draft; grow keys and values");
    in_range("positions", params.positions[row], num_positions - count - params.shape.depth + 2,
             ": cosines and sines have " + std::to_string(num_positions) + " positions, for " +
                 std::to_string(count) + " new elements and " +
                 std::to_string(params.shape.depth - 1) + " levels; make longer tables");
    for (int64_t i = 0; i < count; ++i)
      in_range("tokens", params.tokens(row, i), params.head.vocab);
  }
}

using DraftHeadResult = std::tuple<Tensor, Tensor, Tensor>;

DraftHeadResult draft_head(const std::vector<Tensor>& weights, const std::vector<int64_t>& layout,
                           const std::vector<double>& scalars, const Tensor& cosines,
                           const Tensor& sines, const Tensor& keys, const Tensor& values,
                           const Tensor& tokens, const Tensor& features, const Tensor& counts,
                           const Tensor& lengths, const Tensor& positions, const Tensor& roots,
                           const Tensor& choices, int64_t depth, int64_t top_k, int64_t nodes) {
  const Argument features_arg(kOp, "features", features), tokens_arg(kOp, "tokens", tokens),
      keys_arg(kOp, "keys", keys), cosines_arg(kOp, "cosines", cosines),
      sines_arg(kOp, "sines", sines);
  if (!features.is_cpu()) {
    fail(features_arg.prefix() +
         " must be on the CPU; elsewhere use specdec_ext.reference.draft_head");
  }
  features_arg.has_dim(3, "[rows, new, feature_width]");
  const int32_t dtype = dtype_of(features), int64 = aoti_torch_dtype_int64();
  const HeadWeights head = read_head(weights, layout, scalars, features_arg, dtype);
  const int64_t rows = features.size(0), num_new = features.size(1);
  features_arg.has_shape({rows, num_new, head.feature_width}, "[rows, new, feature_width]");
  check_last_stride(features_arg, features);
  tokens_arg.has_dtype(int64).has_shape({rows, num_new}, "[rows, new]");
  tokens_arg.is_on_device_of(features_arg);
  keys_arg.has_dim(5, "[layers, rows, kv_heads, capacity, head_dim]");
  cosines_arg.has_dtype(aoti_torch_dtype_float32()).has_dim(2, "[positions, rotary / 2]");
  cosines_arg.is_on_device_of(features_arg);
  sines_arg.has_dtype(aoti_torch_dtype_float32());
  sines_arg.has_shape({cosines.size(0), cosines.size(1)}, "[positions, rotary / 2]");
  sines_arg.is_on_device_of(features_arg);
  check_last_stride(cosines_arg, cosines);
  check_last_stride(sines_arg, sines);
  if (2 * cosines.size(1) > head.head_dim) {
    fail(cosines_arg.prefix() + " must have at most head_dim / 2 = " +
         std::to_string(head.head_dim / 2) + " columns, got shape " + describe_shape(cosines));
  }
  const auto per_row = [&](const char* name, const Tensor& tensor) {
    const Argument argument(kOp, name, tensor);
    argument.has_dtype(int64).has_shape({rows}, "[rows]").is_on_device_of(features_arg);
    return argument.view1<int64_t>();
  };
  const int64_t capacity = keys.size(3);
  if (capacity > INT32_MAX) {
    fail(keys_arg.prefix() + " must have less than 2^31 slots, got shape " + describe_shape(keys));
  }
  const DraftShape shape = read_shape(choices, depth, top_k, nodes, features_arg);
  DraftHeadResult result{empty_int64(features, {rows, nodes}), empty_int64(features, {rows, nodes}),
                         empty_float(features, {rows, nodes})};
  const DraftHeadParams params{
      .head = head,
      .shape = shape,
      .cosines = cosines_arg.view2<float>(),
      .sines = sines_arg.view2<float>(),
      .rotary_half = cosines.size(1),
      .keys = read_cache("keys", keys, head, rows, capacity, features_arg, dtype),
      .values = read_cache("values", values, head, rows, capacity, features_arg, dtype),
      .capacity = capacity,
      .tokens = tokens_arg.view2<int64_t>(),
      .features = features.const_data_ptr(),
      .features_row_stride = features.stride(0),
      .features_item_stride = features.stride(1),
      .counts = per_row("counts", counts),
      .lengths = per_row("lengths", lengths),
      .positions = per_row("positions", positions),
      .roots = per_row("roots", roots),
      .rows = rows,
      .tree_tokens = int64_data(std::get<0>(result)),
      .tree_parents = int64_data(std::get<1>(result)),
      .tree_scores = static_cast<float*>(std::get<2>(result).mutable_data_ptr())};
  check_rows(params, num_new, cosines.size(0));
  if (const auto problem = cpu::draft_head(params, kTorchParallelFor)) {
    fail("specdec::draft_head: argument weights holds " + *problem);
  }
  return result;
}

}  // namespace

SPECDEC_REGISTER(draft_head)

}  // namespace specdec::glue

#endif
