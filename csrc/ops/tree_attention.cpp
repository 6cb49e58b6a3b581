// Glue of tree_attention: checks, output, dispatch to the device of `query`.
#include "specdec/tree_attention.h"

#include <cmath>
#include <optional>

#include "ops/common/dispatch.h"

namespace specdec::glue {
namespace {

constexpr const char* kOp = "tree_attention";

[[noreturn]] void fail_argument(const char* argument, const std::string& problem) {
  fail("specdec::tree_attention: argument " + std::string(argument) + " " + problem);
}

KvTensor kv_tensor(const Tensor& tensor) {
  return {tensor.const_data_ptr(), tensor.stride(0), tensor.stride(1), tensor.stride(2)};
}

// Sets query, key and value, and all sizes that follow from their shapes.
void read_query(const Tensor& query, TreeAttentionParams* params) {
  const Argument argument(kOp, "query", query);
  argument.has_dim(4, "[batch, heads, nodes, head_dim]");
  params->type = check_float_type(argument, query);
  argument.has_contiguous_rows();
  check_num_nodes(argument, query.size(2));
  if (query.size(1) < 1 || query.size(3) < 1) {
    fail(argument.prefix() + " must have at least 1 head and 1 dimension, got shape " +
         describe_shape(query));
  }
  params->query = query.const_data_ptr();
  params->query_batch_stride = query.stride(0);
  params->query_head_stride = query.stride(1);
  params->query_node_stride = query.stride(2);
  params->batch = query.size(0);
  params->heads = query.size(1);
  params->nodes = query.size(2);
  params->head_dim = query.size(3);
}

void read_cache(const Tensor& query, const Tensor& key, const Tensor& value, bool is_paged,
                TreeAttentionParams* params) {
  const Argument query_arg(kOp, "query", query), key_arg(kOp, "key", key),
      value_arg(kOp, "value", value);
  const char* shape = is_paged ? "[num_pages, kv_heads, page_size, head_dim]"
                               : "[batch, kv_heads, slots, head_dim]";
  const int32_t dtype = dtype_of(query);
  key_arg.has_dim(4, shape).has_dtype(dtype).is_on_device_of(query_arg);
  const auto sizes = key.sizes();
  value_arg.has_dtype(dtype).has_shape({sizes[0], sizes[1], sizes[2], sizes[3]}, shape);
  value_arg.is_on_device_of(query_arg);
  key_arg.has_contiguous_rows();
  value_arg.has_contiguous_rows();
  if (!is_paged && sizes[0] != params->batch) {
    fail(key_arg.prefix() + " must have the batch of query, " + std::to_string(params->batch) +
         ", got shape " + describe_shape(key) + "; for pools of pages give page_table");
  }
  if (sizes[1] < 1 || params->heads % sizes[1] != 0) {
    fail(key_arg.prefix() + " must have a number of heads that divides the " +
         std::to_string(params->heads) + " heads of query, got shape " + describe_shape(key));
  }
  if (sizes[3] != params->head_dim) {
    fail(key_arg.prefix() + " must have the head_dim of query, " +
         std::to_string(params->head_dim) + ", got shape " + describe_shape(key));
  }
  params->key = kv_tensor(key);
  params->value = kv_tensor(value);
  params->kv_heads = sizes[1];
  params->num_pages = sizes[0];
  params->page_size = sizes[2];
}

void read_page_table(const Tensor& query, const std::optional<Tensor>& page_table,
                     TreeAttentionParams* params) {
  if (!page_table) {
    params->page_table = {nullptr, 0, 0};
    params->pages_per_row = 1;
    return;
  }
  const Argument argument(kOp, "page_table", *page_table);
  argument.has_dtype(aoti_torch_dtype_int64()).has_dim(2, "[batch, pages]");
  argument.is_on_device_of(Argument(kOp, "query", query));
  if (page_table->size(0) != params->batch) {
    fail(argument.prefix() + " must have the batch of query, " + std::to_string(params->batch) +
         ", got shape " + describe_shape(*page_table));
  }
  params->page_table = argument.view2<int64_t>();
  params->pages_per_row = page_table->size(1);
}

void read_tree(const Tensor& query, const Tensor& ancestors, const Tensor& prefix_starts,
               const Tensor& prefix_lengths, const Tensor& block_starts,
               TreeAttentionParams* params) {
  const Argument query_arg(kOp, "query", query), ancestors_arg(kOp, "ancestors", ancestors),
      starts_arg(kOp, "prefix_starts", prefix_starts),
      lengths_arg(kOp, "prefix_lengths", prefix_lengths),
      blocks_arg(kOp, "block_starts", block_starts);
  const int32_t int64 = aoti_torch_dtype_int64();
  params->words = (params->nodes + 63) / 64;
  ancestors_arg.has_dtype(int64).has_shape({params->batch, params->nodes, params->words},
                                           "[batch, nodes, words]");
  ancestors_arg.is_on_device_of(query_arg);
  params->ancestors = static_cast<const int64_t*>(ancestors.const_data_ptr());
  params->ancestors_batch_stride = ancestors.stride(0);
  params->ancestors_node_stride = ancestors.stride(1);
  params->ancestors_word_stride = ancestors.stride(2);
  for (const Argument* argument : {&starts_arg, &lengths_arg, &blocks_arg}) {
    argument->has_dtype(int64).has_shape({params->batch}, "[batch]").is_on_device_of(query_arg);
  }
  params->prefix_starts = starts_arg.view1<int64_t>();
  params->prefix_lengths = lengths_arg.view1<int64_t>();
  params->block_starts = blocks_arg.view1<int64_t>();
}

void read_scores(double scale, int64_t window, double softcap, TreeAttentionParams* params) {
  // Written so that NaN fails too.
  if (!(scale >= 0 && std::isfinite(scale))) {
    fail_argument("scale", "must be finite and 0 or more, got " + std::to_string(scale));
  }
  if (!(softcap >= 0 && std::isfinite(softcap))) {
    fail_argument("softcap",
                  "must be finite and 0 or more (0: none), got " + std::to_string(softcap));
  }
  if (window < 0) {
    fail_argument("window", "must be 0 (no window) or more, got " + std::to_string(window));
  }
  params->scale = static_cast<float>(scale);
  params->window = window;
  params->softcap = static_cast<float>(softcap);
}

// Returns why the CUDA kernels do not take a query of these sizes, or nothing. `element` is in
// bytes, `group` is heads / kv_heads.
std::optional<std::string> tree_attention_refusal(int64_t element, int64_t nodes, int64_t head_dim,
                                                  int64_t group) {
  struct Limit {
    const char* name;
    int64_t given;
    int64_t limit;
  };
  const auto refused = [](const Limit& size, const char* taken) {
    return "has " + std::to_string(size.given) + " " + size.name + "; the CUDA kernels take " +
           taken + " " + std::to_string(size.limit);
  };
  for (const Limit& size : {Limit{"nodes", nodes, kMaxCudaTreeNodes},
                            {"dimensions per head", head_dim, kMaxCudaHeadDim},
                            {"heads per key-value head", group, kMaxCudaGroup}}) {
    if (size.given > size.limit) return refused(size, "up to");
  }
  const int64_t unit = 16 / element;
  if (head_dim % unit != 0) return refused({"dimensions per head", head_dim, unit}, "multiples of");
  return std::nullopt;
}

void check_cuda_limits(const TreeAttentionParams& params) {
  const int64_t element = element_size(params.type);
  const auto refusal = tree_attention_refusal(element, params.nodes, params.head_dim,
                                              params.heads / params.kv_heads);
  if (refusal) fail_argument("query", *refusal);
  check_aligned(kOp, "query", params.query,
                {params.query_batch_stride, params.query_head_stride, params.query_node_stride},
                element);
  for (const auto& [name, tensor] : {std::pair{"key", params.key}, {"value", params.value}}) {
    check_aligned(kOp, name, tensor.data,
                  {tensor.page_stride, tensor.head_stride, tensor.slot_stride}, element);
  }
}

void run(const TreeAttentionParams& params, const Tensor& query) {
  dispatch(
      kOp, query,
      [&] {
        if (const auto problem = cpu::find_invalid_slot(params)) {
          fail("specdec::tree_attention: " + *problem);
        }
        cpu::tree_attention(params, kTorchParallelFor);
      },
      [&](auto stream) {
        check_cuda_limits(params);
        const Tensor workspace = empty_bytes(query, tree_attention_workspace_bytes(params));
        return launch_tree_attention(params, workspace.mutable_data_ptr(), stream);
      });
}

Tensor tree_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                      const Tensor& ancestors, const Tensor& prefix_starts,
                      const Tensor& prefix_lengths, const Tensor& block_starts,
                      const std::optional<Tensor>& page_table, double scale, int64_t window,
                      double softcap) {
  TreeAttentionParams params{};
  read_query(query, &params);
  read_cache(query, key, value, page_table.has_value(), &params);
  read_page_table(query, page_table, &params);
  read_tree(query, ancestors, prefix_starts, prefix_lengths, block_starts, &params);
  read_scores(scale, window, softcap, &params);
  const int64_t shape[] = {params.batch, params.nodes, params.heads, params.head_dim};
  const Tensor output = empty(query, shape, dtype_of(query));
  params.output = output.mutable_data_ptr();
  if (params.batch > 0) run(params, query);
  return output;
}

}  // namespace

SPECDEC_REGISTER(tree_attention)
SPECDEC_REGISTER_WITHOUT_TENSORS(tree_attention_refusal)

}  // namespace specdec::glue
