// Glue of verify_rejection, verify_recursive and verify_block: checks, outputs, dispatch to the
// device of `logits`.
#include "specdec/verify_sampled.h"

#include "ops/common/dispatch.h"
#include "verify_result.h"

namespace specdec::glue {
namespace {

void run(const char* op, const VerifySampledParams& params, const Tensor& logits) {
  dispatch(
      op, logits, [&] { cpu::verify_sampled(params, kTorchParallelFor); },
      [&](auto stream) {
        const Tensor workspace = empty_bytes(logits, verify_sampled_workspace_bytes(params));
        return launch_verify_sampled(params, workspace.mutable_data_ptr(), stream);
      });
}

Tensor verify_sampled(const char* op, SampledRule rule, const Tensor& logits,
                      const Tensor& draft_probs, const Tensor& tokens, const Tensor& parents,
                      const Tensor& root_positions, const Tensor& seeds, const Tensor& row_ids) {
  const Argument logits_arg(op, "logits", logits), draft_arg(op, "draft_probs", draft_probs),
      tokens_arg(op, "tokens", tokens), parents_arg(op, "parents", parents),
      positions_arg(op, "root_positions", root_positions), seeds_arg(op, "seeds", seeds),
      row_ids_arg(op, "row_ids", row_ids);
  const LogitsType type = check_logits_type(logits_arg, logits);
  logits_arg.has_dim(3, "[batch, nodes, vocab]");
  check_vocab(logits_arg, logits, INT32_MAX);
  const int64_t batch = logits.size(0), nodes = logits.size(1), vocab = logits.size(2);
  check_num_nodes(logits_arg, nodes);
  draft_arg.has_dtype(aoti_torch_dtype_float32());
  draft_arg.has_shape({batch, nodes, vocab}, "[batch, nodes, vocab]").is_on_device_of(logits_arg);
  check_vocab(draft_arg, draft_probs, INT32_MAX);
  const int32_t int64 = aoti_torch_dtype_int64();
  for (const Argument* argument : {&tokens_arg, &parents_arg}) {
    argument->has_dtype(int64).has_shape({batch, nodes}, "[batch, nodes]");
    argument->is_on_device_of(logits_arg);
  }
  for (const Argument* argument : {&positions_arg, &seeds_arg, &row_ids_arg}) {
    argument->has_dtype(int64).has_shape({batch}, "[batch]").is_on_device_of(logits_arg);
  }

  const VerifyResult result(logits, batch, nodes);
  if (batch > 0) {
    run(op,
        {.rule = rule,
         .logits = logits.const_data_ptr(),
         .logits_type = type,
         .logits_batch_stride = logits.stride(0),
         .logits_node_stride = logits.stride(1),
         .draft_probs = static_cast<const float*>(draft_probs.const_data_ptr()),
         .draft_batch_stride = draft_probs.stride(0),
         .draft_node_stride = draft_probs.stride(1),
         .tokens = tokens_arg.view2<int64_t>(),
         .parents = parents_arg.view2<int64_t>(),
         .root_positions = positions_arg.view1<int64_t>(),
         .seeds = seeds_arg.view1<int64_t>(),
         .row_ids = row_ids_arg.view1<int64_t>(),
         .batch = batch,
         .nodes = nodes,
         .vocab = vocab,
         .path = result.path,
         .num_accepted = result.num_accepted,
         .next_token = result.next_token,
         .status = result.status},
        logits);
  }
  return result.packed;
}

Tensor verify_rejection(const Tensor& logits, const Tensor& draft_probs, const Tensor& tokens,
                        const Tensor& parents, const Tensor& root_positions, const Tensor& seeds,
                        const Tensor& row_ids) {
  return verify_sampled("verify_rejection", SampledRule::kRejection, logits, draft_probs, tokens,
                        parents, root_positions, seeds, row_ids);
}

Tensor verify_recursive(const Tensor& logits, const Tensor& draft_probs, const Tensor& tokens,
                        const Tensor& parents, const Tensor& root_positions, const Tensor& seeds,
                        const Tensor& row_ids) {
  return verify_sampled("verify_recursive", SampledRule::kRecursive, logits, draft_probs, tokens,
                        parents, root_positions, seeds, row_ids);
}

Tensor verify_block(const Tensor& logits, const Tensor& draft_probs, const Tensor& tokens,
                    const Tensor& parents, const Tensor& root_positions, const Tensor& seeds,
                    const Tensor& row_ids) {
  return verify_sampled("verify_block", SampledRule::kBlock, logits, draft_probs, tokens, parents,
                        root_positions, seeds, row_ids);
}

}  // namespace

SPECDEC_REGISTER(verify_rejection)
SPECDEC_REGISTER(verify_recursive)
SPECDEC_REGISTER(verify_block)

}  // namespace specdec::glue
