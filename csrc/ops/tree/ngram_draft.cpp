// Glue of ngram_draft: checks, outputs, dispatch to the device of `tokens`.
#include "specdec/tree/ngram_draft.h"

#include <optional>
#include <tuple>

#include "ops/common/dispatch.h"
#include "specdec/cpu/ngram_trie.h"

namespace specdec::glue {
namespace {

constexpr const char* kOp = "ngram_draft";

void run(const NgramDraftParams& params, const Tensor& tokens) {
  dispatch(
      kOp, tokens, [&] { cpu::ngram_draft(params, kTorchParallelFor); },
      [&](auto stream) { return launch_ngram_draft(params, stream); });
}

using NgramDraftResult = std::tuple<Tensor, Tensor, Tensor>;

NgramDraftResult ngram_draft(const Tensor& tokens, const Tensor& lengths, int64_t nodes,
                             int64_t min_ngram, int64_t max_ngram, int64_t num_branches,
                             const std::optional<Tensor>& num_padded) {
  const Argument tokens_arg(kOp, "tokens", tokens), lengths_arg(kOp, "lengths", lengths);
  const int32_t int64 = aoti_torch_dtype_int64();
  tokens_arg.has_dtype(int64).has_dim(2, "[batch, capacity]");
  const int64_t batch = tokens.size(0), capacity = tokens.size(1);
  if (capacity > INT32_MAX) {
    fail(tokens_arg.prefix() + " must have fewer than 2^31 tokens per row, got shape " +
         describe_shape(tokens));
  }
  lengths_arg.has_dtype(int64).has_shape({batch}, "[batch]").is_on_device_of(tokens_arg);
  NgramDraftParams params{};
  if (num_padded) {
    const Argument padded_arg(kOp, "num_padded", *num_padded);
    padded_arg.has_dtype(int64).has_shape({batch}, "[batch]").is_on_device_of(tokens_arg);
    params.num_padded = padded_arg.view1<int64_t>();
  }
  check_num_nodes(kOp, nodes);
  for (const auto& problem :
       {cpu::find_invalid_ngram(min_ngram, max_ngram), cpu::find_invalid_branches(num_branches)}) {
    if (problem) fail(std::string("specdec::") + kOp + ": argument " + *problem);
  }

  NgramDraftResult result{empty_int64(tokens, {batch, nodes}), empty_int64(tokens, {batch, nodes}),
                          empty_int64(tokens, {batch})};
  params.columns = tokens_arg.view2<int64_t>();
  params.lengths = lengths_arg.view1<int64_t>();
  params.batch = batch;
  params.capacity = capacity;
  params.nodes = nodes;
  params.min_ngram = min_ngram;
  params.max_ngram = max_ngram;
  params.num_branches = num_branches;
  params.tokens = int64_data(std::get<0>(result));
  params.parents = int64_data(std::get<1>(result));
  params.match_lengths = int64_data(std::get<2>(result));
  if (batch > 0) run(params, tokens);
  return result;
}

}  // namespace

SPECDEC_REGISTER(ngram_draft)

}  // namespace specdec::glue
