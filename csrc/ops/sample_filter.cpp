// Glue of sample_filter: checks, output, dispatch to the device of `logits`.
#include "specdec/sample_filter.h"

#include "ops/common/dispatch.h"

namespace specdec::glue {
namespace {

constexpr const char* kOp = "sample_filter";

void run(const SampleFilterParams& params, const Tensor& logits) {
  dispatch(
      kOp, logits,
      [&] {
        if (const auto problem = cpu::find_invalid_parameter(params)) {
          fail("specdec::sample_filter: " + *problem);
        }
        cpu::sample_filter(params, kTorchParallelFor);
      },
      [&](auto stream) {
        const Tensor workspace = empty_bytes(logits, sample_filter_workspace_bytes(params));
        return launch_sample_filter(params, workspace.mutable_data_ptr(), stream);
      });
}

Tensor sample_filter(const Tensor& logits, const Tensor& temperature, const Tensor& top_k,
                     const Tensor& top_p, const Tensor& min_p) {
  const Argument logits_arg(kOp, "logits", logits),
      temperature_arg(kOp, "temperature", temperature), top_k_arg(kOp, "top_k", top_k),
      top_p_arg(kOp, "top_p", top_p), min_p_arg(kOp, "min_p", min_p);
  const FloatType type = check_float_type(logits_arg, logits);
  logits_arg.has_dim(2, "[rows, vocab]");
  check_vocab(logits_arg, logits, kMaxFilterVocab);
  const int64_t rows = logits.size(0), vocab = logits.size(1);
  for (const Argument* argument : {&temperature_arg, &top_p_arg, &min_p_arg}) {
    argument->has_dtype(aoti_torch_dtype_float32());
  }
  top_k_arg.has_dtype(aoti_torch_dtype_int64());
  for (const Argument* argument : {&temperature_arg, &top_k_arg, &top_p_arg, &min_p_arg}) {
    argument->has_shape({rows}, "[rows]").is_on_device_of(logits_arg);
  }
  const Tensor scores = empty_float(logits, {rows, vocab});
  if (rows > 0) {
    run({.logits = logits.const_data_ptr(),
         .logits_type = type,
         .logits_row_stride = logits.stride(0),
         .temperature = temperature_arg.view1<float>(),
         .top_k = top_k_arg.view1<int64_t>(),
         .top_p = top_p_arg.view1<float>(),
         .min_p = min_p_arg.view1<float>(),
         .rows = rows,
         .vocab = vocab,
         .scores = static_cast<float*>(scores.mutable_data_ptr())},
        logits);
  }
  return scores;
}

}  // namespace

SPECDEC_REGISTER(sample_filter)

}  // namespace specdec::glue
