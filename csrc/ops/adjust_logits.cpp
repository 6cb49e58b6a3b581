// Glue of adjust_logits: checks, output, dispatch to the device of `logits`.
#include "specdec/adjust_logits.h"

#include "ops/common/dispatch.h"

namespace specdec::glue {
namespace {

constexpr const char* kOp = "adjust_logits";

void run(const AdjustLogitsParams& params, const Tensor& logits) {
  dispatch(
      kOp, logits,
      [&] {
        if (const auto problem = cpu::find_invalid_argument(params)) {
          fail("specdec::adjust_logits: " + *problem);
        }
        cpu::adjust_logits(params, kTorchParallelFor);
      },
      [&](auto stream) { return launch_adjust_logits(params, stream); });
}

void check_adjustments(const Argument& adjustments_arg, const Tensor& adjustments,
                       const Argument& tables_arg, int64_t vocab) {
  adjustments_arg.has_dtype(aoti_torch_dtype_int64()).has_dim(2, "[count, 3]");
  const int64_t count = adjustments.size(0);
  adjustments_arg.has_shape({count, kAdjustmentFields}, "[count, 3]");
  if (count > kMaxAdjustments) {
    fail(adjustments_arg.prefix() + " must have at most " + std::to_string(kMaxAdjustments) +
         " rows, got " + std::to_string(count) + "; call the op again for the others");
  }
  tables_arg.has_dtype(aoti_torch_dtype_float32()).has_shape({count, vocab}, "[count, vocab]");
  tables_arg.has_contiguous_rows();
}

Tensor adjust_logits(const Tensor& logits, const Tensor& tokens, const Tensor& parents,
                     const Tensor& text, const Tensor& lengths, const Tensor& skips,
                     const Tensor& penalties, const Tensor& ngram_sizes, const Tensor& adjustments,
                     const Tensor& tables) {
  const Argument logits_arg(kOp, "logits", logits), tokens_arg(kOp, "tokens", tokens),
      parents_arg(kOp, "parents", parents), text_arg(kOp, "text", text),
      lengths_arg(kOp, "lengths", lengths), skips_arg(kOp, "skips", skips),
      penalties_arg(kOp, "penalties", penalties), sizes_arg(kOp, "ngram_sizes", ngram_sizes),
      adjustments_arg(kOp, "adjustments", adjustments), tables_arg(kOp, "tables", tables);
  const FloatType type = check_float_type(logits_arg, logits);
  logits_arg.has_dim(3, "[batch, nodes, vocab]");
  check_vocab(logits_arg, logits, INT32_MAX);
  const int64_t batch = logits.size(0), nodes = logits.size(1), vocab = logits.size(2);
  check_num_nodes(logits_arg, nodes);
  const int32_t int64 = aoti_torch_dtype_int64();
  for (const Argument* argument : {&tokens_arg, &parents_arg}) {
    argument->has_dtype(int64).has_shape({batch, nodes}, "[batch, nodes]");
  }
  text_arg.has_dtype(int64).has_dim(2, "[batch, columns]");
  const int64_t columns = text.size(1);
  text_arg.has_shape({batch, columns}, "[batch, columns]");
  for (const Argument* argument : {&lengths_arg, &skips_arg, &sizes_arg}) {
    argument->has_dtype(int64).has_shape({batch}, "[batch]");
  }
  penalties_arg.has_dtype(aoti_torch_dtype_float32()).has_shape({batch}, "[batch]");
  check_adjustments(adjustments_arg, adjustments, tables_arg, vocab);
  for (const Argument* argument : {&tokens_arg, &parents_arg, &text_arg, &lengths_arg, &skips_arg,
                                   &penalties_arg, &sizes_arg, &adjustments_arg, &tables_arg}) {
    argument->is_on_device_of(logits_arg);
  }
  const Tensor scores = empty_float(logits, {batch, nodes, vocab});
  if (batch > 0) {
    run({.logits = logits.const_data_ptr(),
         .logits_type = type,
         .logits_batch_stride = logits.stride(0),
         .logits_node_stride = logits.stride(1),
         .tokens = tokens_arg.view2<int64_t>(),
         .parents = parents_arg.view2<int64_t>(),
         .text = text_arg.view2<int64_t>(),
         .lengths = lengths_arg.view1<int64_t>(),
         .skips = skips_arg.view1<int64_t>(),
         .penalties = penalties_arg.view1<float>(),
         .ngram_sizes = sizes_arg.view1<int64_t>(),
         .adjustments = adjustments_arg.view2<int64_t>(),
         .tables = static_cast<const float*>(tables.const_data_ptr()),
         .table_stride = tables.stride(0),
         .batch = batch,
         .nodes = nodes,
         .columns = columns,
         .count = adjustments.size(0),
         .vocab = vocab,
         .scores = static_cast<float*>(scores.mutable_data_ptr())},
        logits);
  }
  return scores;
}

}  // namespace

SPECDEC_REGISTER(adjust_logits)

}  // namespace specdec::glue
