// Glue of verify_match: checks, outputs, dispatch to the device of `logits`.
#include "specdec/verify_match.h"

#include <optional>

#include "ops/common/dispatch.h"
#include "verification.h"

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
  VerifyMatchParams params{};
  const VerifyResult result =
      read_verification(kOp, logits, tokens, parents, root_positions, seeds, row_ids, &params);
  const Argument logits_arg(kOp, "logits", logits), stochastic_arg(kOp, "stochastic", stochastic);
  stochastic_arg.has_dtype(aoti_torch_dtype_bool()).has_shape({params.batch}, "[batch]");
  stochastic_arg.is_on_device_of(logits_arg);
  params.stochastic = stochastic_arg.view1<bool>();
  if (counters) {
    check_counters(Argument(kOp, "counters", *counters), logits_arg, *counters, params.batch);
  }
  if (params.batch > 0) run(params, logits, counters);
  return result.packed;
}

}  // namespace

SPECDEC_REGISTER(verify_match)

}  // namespace specdec::glue
