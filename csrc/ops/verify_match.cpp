// Glue of verify_match: checks, outputs, dispatch to the device of `logits`.
#include "specdec/verify_match.h"

#include <optional>

#include "ops/common/dispatch.h"
#include "verify_result.h"

namespace specdec::glue {
namespace {

void run(const VerifyMatchParams& params, const Tensor& logits,
         const std::optional<Tensor>& given_counters) {
  dispatch(
      "verify_match", logits, [&] { cpu::verify_match(params, kTorchParallelFor); },
      [&](auto stream) {
        const Tensor counters = given_counters
                                    ? *given_counters
                                    : zero_bytes(logits, params.batch * int64_t{sizeof(uint32_t)});
        const Tensor workspace = empty_bytes(logits, verify_match_workspace_bytes(params));
        return launch_verify_match(params, static_cast<uint32_t*>(counters.mutable_data_ptr()),
                                   workspace.mutable_data_ptr(), stream);
      });
}

void check_counters(const Argument& argument, const Argument& logits, const Tensor& counters,
                    int64_t batch) {
  argument.has_dtype(aoti_torch_dtype_int32()).has_dim(1, "[batch] or longer");
  argument.is_on_device_of(logits);
  if (counters.size(0) < batch || (batch > 1 && counters.stride(0) != 1)) {
    fail(argument.prefix() + " must be contiguous with at least batch = " + std::to_string(batch) +
         " elements, got shape " + describe_shape(counters) + " with stride " +
         std::to_string(counters.stride(0)));
  }
}

Tensor verify_match(const Tensor& logits, const Tensor& tokens, const Tensor& parents,
                    const Tensor& root_positions, const Tensor& seeds, const Tensor& row_ids,
                    const Tensor& stochastic, const std::optional<Tensor>& counters) {
  constexpr const char* kOp = "verify_match";
  const Argument logits_arg(kOp, "logits", logits), tokens_arg(kOp, "tokens", tokens),
      parents_arg(kOp, "parents", parents), positions_arg(kOp, "root_positions", root_positions),
      seeds_arg(kOp, "seeds", seeds), row_ids_arg(kOp, "row_ids", row_ids),
      stochastic_arg(kOp, "stochastic", stochastic);
  const LogitsType type = check_logits_type(logits_arg, logits);
  logits_arg.has_dim(3, "[batch, nodes, vocab]");
  check_vocab(logits_arg, logits, INT32_MAX);
  const int64_t batch = logits.size(0), nodes = logits.size(1);
  check_num_nodes(logits_arg, nodes);
  const int32_t int64 = aoti_torch_dtype_int64();
  for (const Argument* argument : {&tokens_arg, &parents_arg}) {
    argument->has_dtype(int64).has_shape({batch, nodes}, "[batch, nodes]");
    argument->is_on_device_of(logits_arg);
  }
  for (const Argument* argument : {&positions_arg, &seeds_arg, &row_ids_arg}) {
    argument->has_dtype(int64).has_shape({batch}, "[batch]").is_on_device_of(logits_arg);
  }
  stochastic_arg.has_dtype(aoti_torch_dtype_bool()).has_shape({batch}, "[batch]");
  stochastic_arg.is_on_device_of(logits_arg);
  if (counters) check_counters(Argument(kOp, "counters", *counters), logits_arg, *counters, batch);

  const VerifyResult result(logits, batch, nodes);
  if (batch > 0) {
    run({.logits = logits.const_data_ptr(),
         .logits_type = type,
         .logits_batch_stride = logits.stride(0),
         .logits_node_stride = logits.stride(1),
         .tokens = tokens_arg.view2<int64_t>(),
         .parents = parents_arg.view2<int64_t>(),
         .root_positions = positions_arg.view1<int64_t>(),
         .seeds = seeds_arg.view1<int64_t>(),
         .row_ids = row_ids_arg.view1<int64_t>(),
         .stochastic = stochastic_arg.view1<bool>(),
         .batch = batch,
         .nodes = nodes,
         .vocab = logits.size(2),
         .path = result.path,
         .num_accepted = result.num_accepted,
         .next_token = result.next_token,
         .status = result.status},
        logits, counters);
  }
  return result.packed;
}

}  // namespace

SPECDEC_REGISTER(verify_match)

}  // namespace specdec::glue
