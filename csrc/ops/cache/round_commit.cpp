// Glue of round_commit: checks, dispatch to the device of `tokens`.
#include "specdec/round_commit.h"

#include <optional>
#include <vector>

#include "cache_tensors.h"
#include "ops/common/dispatch.h"

namespace specdec::glue {
namespace {

constexpr const char* kOp = "round_commit";

void run(const std::vector<CacheTensor>& caches, const std::vector<FeatureTensor>& features,
         const RoundCommitParams& params, const Tensor& tokens) {
  dispatch(
      kOp, tokens,
      [&] {
        // Every index is checked before the first byte is written.
        if (const auto problem = cpu::find_invalid_round(caches, params)) {
          fail("specdec::round_commit: " + *problem);
        }
        cpu::round_commit(caches, features, params, kTorchParallelFor);
      },
      [&](auto stream) { return launch_round_commit(caches, features, params, stream); });
}

// A matrix that the op writes.
template <typename T>
View2<T> written2(const Argument& argument, const Tensor& tensor) {
  argument.is_not_expanded(2);
  return {static_cast<T*>(tensor.mutable_data_ptr()), tensor.stride(0), tensor.stride(1)};
}

// Checks that a tensor has at least `least` elements in dimension `dim`.
void check_least(const Argument& argument, const Tensor& tensor, int64_t dim, int64_t least,
                 const std::string& why) {
  if (tensor.size(dim) >= least) return;
  fail(argument.prefix() + " must have at least " + std::to_string(least) +
       " elements in dimension " + std::to_string(dim) + ", " + why + ", got shape " +
       describe_shape(tensor));
}

// Checks the result of a verification, and sets its parts.
void read_verdict(const Argument& argument, const Tensor& verdict, RoundCommitParams* params) {
  const int64_t batch = params->batch, nodes = params->nodes;
  argument.has_dtype(aoti_torch_dtype_int64());
  argument.has_shape({batch * (nodes + 3)}, "[batch * (nodes + 3)]").has_contiguous_rows();
  params->path = static_cast<const int64_t*>(verdict.const_data_ptr());
  params->num_accepted = params->path + batch * nodes;
  params->next_token = params->num_accepted + batch;
  params->status = params->next_token + batch;
}

// Checks the features, and sets new_features. The columns of the tensors lie side by side there.
std::vector<FeatureTensor> read_features(const std::vector<Tensor>& features,
                                         const std::optional<Tensor>& new_features,
                                         const Argument& tokens, RoundCommitParams* params) {
  if (features.size() > static_cast<size_t>(kMaxFeatureTensors)) {
    fail("specdec::round_commit: argument features must have at most " +
         std::to_string(kMaxFeatureTensors) + " tensors, got " + std::to_string(features.size()));
  }
  if (features.empty()) return {};
  if (!new_features) {
    fail("specdec::round_commit: argument new_features must be given if there are features");
  }
  const Argument target(kOp, "new_features", *new_features);
  target.has_dim(3, "[batch, at least nodes, width]").is_on_device_of(tokens);
  target.has_contiguous_rows().is_not_expanded(2);
  check_least(target, *new_features, 1, params->nodes, "the nodes of tokens");
  const int64_t element = static_cast<int64_t>(new_features->element_size());
  params->new_features = {static_cast<std::byte*>(new_features->mutable_data_ptr()),
                          new_features->stride(0) * element, new_features->stride(1) * element};
  std::vector<FeatureTensor> table;
  int64_t width = 0;
  for (size_t i = 0; i < features.size(); ++i) {
    const std::string name = "features[" + std::to_string(i) + "]";
    const Tensor& tensor = features[i];
    const Argument argument(kOp, name.c_str(), tensor);
    argument.has_dtype(new_features->dtype()).has_dim(3, "[batch, nodes, width]");
    argument.has_shape({params->batch, params->nodes, tensor.size(2)}, "[batch, nodes, width]");
    argument.is_on_device_of(tokens).has_contiguous_rows();
    table.push_back({.data = static_cast<const std::byte*>(tensor.const_data_ptr()),
                     .row_stride = tensor.stride(0) * element,
                     .node_stride = tensor.stride(1) * element,
                     .offset = width * element,
                     .bytes = tensor.size(2) * element});
    width += tensor.size(2);
  }
  target.has_shape({params->batch, new_features->size(1), width},
                   "[batch, at least nodes, the width of all features]");
  if (width * element > INT32_MAX) {
    fail(target.prefix() + " must have fewer than 2^31 bytes per node");
  }
  return table;
}

void round_commit(const std::vector<Tensor>& caches, const Tensor& tokens, const Tensor& verdict,
                  const Tensor& eos, const Tensor& numbers, const Tensor& text,
                  const Tensor& new_tokens, const Tensor& ring, const Tensor& clock,
                  const std::vector<Tensor>& features, const std::optional<Tensor>& new_features) {
  const Argument tokens_arg(kOp, "tokens", tokens), verdict_arg(kOp, "verdict", verdict),
      eos_arg(kOp, "eos", eos), numbers_arg(kOp, "numbers", numbers), text_arg(kOp, "text", text),
      new_tokens_arg(kOp, "new_tokens", new_tokens), ring_arg(kOp, "ring", ring),
      clock_arg(kOp, "clock", clock);
  const int32_t int64 = aoti_torch_dtype_int64(), int32 = aoti_torch_dtype_int32();
  RoundCommitParams params{};
  tokens_arg.has_dtype(int64).has_dim(2, "[batch, nodes]");
  params.tokens = tokens_arg.view2<int64_t>();
  params.batch = tokens.size(0);
  params.nodes = tokens.size(1);
  check_num_nodes(tokens_arg, params.nodes);
  for (const Argument* argument :
       {&verdict_arg, &eos_arg, &numbers_arg, &text_arg, &new_tokens_arg, &ring_arg, &clock_arg}) {
    argument->is_on_device_of(tokens_arg);
  }
  read_verdict(verdict_arg, verdict, &params);
  eos_arg.has_dtype(int64).has_dim(1, "[ids]");
  params.eos = eos_arg.view1<int64_t>();
  params.num_eos = eos.size(0);
  numbers_arg.has_dtype(int64).has_shape({RoundNumber::kHowMany, params.batch}, "[10, batch]");
  params.numbers = written2<int64_t>(numbers_arg, numbers);
  text_arg.has_dtype(int64).has_dim(2, "[batch, capacity]");
  params.capacity = text.size(1);
  text_arg.has_shape({params.batch, params.capacity}, "[batch, capacity]");
  params.text = written2<int64_t>(text_arg, text);
  new_tokens_arg.has_dtype(int64).has_dim(2, "[batch, at least nodes]");
  check_least(new_tokens_arg, new_tokens, 1, params.nodes, "the nodes of tokens");
  new_tokens_arg.has_shape({params.batch, new_tokens.size(1)}, "[batch, at least nodes]");
  params.new_tokens = written2<int64_t>(new_tokens_arg, new_tokens);
  ring_arg.has_dtype(int64).has_dim(2, "[entries, numbers]").has_contiguous_rows();
  check_least(ring_arg, ring, 0, 1, "one entry");
  check_least(ring_arg, ring, 1, params.entry_size(), "1 + batch * (4 + 2 * nodes)");
  params.ring = written2<int64_t>(ring_arg, ring);
  params.num_entries = ring.size(0);
  clock_arg.has_dtype(int32).has_shape({2}, "[2]").has_contiguous_rows();
  params.clock = static_cast<int32_t*>(clock.mutable_data_ptr());
  const auto gathered = read_features(features, new_features, tokens_arg, &params);
  const auto table = cache_tensors(kOp, caches, tokens_arg, params.batch, false);
  if (params.batch > 0) run(table, gathered, params, tokens);
}

}  // namespace

SPECDEC_REGISTER(round_commit)

}  // namespace specdec::glue
