// Glue of verify_rejection, verify_recursive and verify_block: checks, outputs, dispatch to the
// device of `logits`.
#include "specdec/verify_sampled.h"

#include "ops/common/dispatch.h"
#include "verification.h"

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
  VerifySampledParams params{};
  const VerifyResult result =
      read_verification(op, logits, tokens, parents, root_positions, seeds, row_ids, &params);
  const Argument draft_arg(op, "draft_probs", draft_probs);
  draft_arg.has_dtype(aoti_torch_dtype_float32());
  draft_arg.has_shape({params.batch, params.nodes, params.vocab}, "[batch, nodes, vocab]");
  draft_arg.is_on_device_of(Argument(op, "logits", logits)).has_contiguous_rows();
  params.rule = rule;
  params.draft_probs = static_cast<const float*>(draft_probs.const_data_ptr());
  params.draft_batch_stride = draft_probs.stride(0);
  params.draft_node_stride = draft_probs.stride(1);
  if (params.batch > 0) run(op, params, logits);
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
