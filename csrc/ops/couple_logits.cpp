// Glue of couple_logits: checks, output, dispatch to the device of `logits`.
#include "specdec/couple_logits.h"

#include <optional>

#include "ops/common/dispatch.h"

namespace specdec::glue {
namespace {

constexpr const char* kOp = "couple_logits";

Tensor couple_logits(const Tensor& logits, const Tensor& temperatures, const Tensor& seeds,
                     const Tensor& row_ids, const Tensor& positions,
                     const std::optional<Tensor>& token_ids) {
  const Argument logits_arg(kOp, "logits", logits), positions_arg(kOp, "positions", positions);
  const FloatType type = check_float_type(logits_arg, logits);
  logits_arg.has_dim(2, "[rows, vocab]");
  check_vocab(logits_arg, logits, INT32_MAX);
  const int64_t rows = logits.size(0), vocab = logits.size(1);
  positions_arg.has_dtype(aoti_torch_dtype_int64()).has_shape({rows}, "[rows]");
  positions_arg.is_on_device_of(logits_arg);
  View1<const int64_t> ids{};
  if (token_ids) {
    const Argument ids_arg(kOp, "token_ids", *token_ids);
    ids_arg.has_dtype(aoti_torch_dtype_int64()).has_shape({vocab}, "[vocab]");
    ids = ids_arg.is_on_device_of(logits_arg).view1<int64_t>();
  }
  const Tensor scores = empty_float(logits, {rows, vocab});
  const CoupleLogitsParams params{
      .logits = logits.const_data_ptr(),
      .logits_type = type,
      .logits_row_stride = logits.stride(0),
      .noise = read_noise(kOp, {temperatures, seeds, row_ids}, rows, logits_arg),
      .positions = positions_arg.view1<int64_t>(),
      .token_ids = ids,
      .rows = rows,
      .vocab = vocab,
      .scores = static_cast<float*>(scores.mutable_data_ptr())};
  if (rows > 0) {
    dispatch(
        kOp, logits, [&] { cpu::couple_logits(params, kTorchParallelFor); },
        [&](auto stream) { return launch_couple_logits(params, stream); });
  }
  return scores;
}

}  // namespace

SPECDEC_REGISTER(couple_logits)

}  // namespace specdec::glue
