// What the verification ops share: most of their arguments, and the result, which is one int64
// tensor, so that the host needs one copy.
#pragma once

#include "ops/common/glue.h"

namespace specdec::glue {

// The parts are stored one after the other; specdec_ext/ops/verify_match.py names them.
struct VerifyResult {
  VerifyResult(const Tensor& like, int64_t batch, int64_t nodes)
      : packed(empty_int64(like, {batch * (nodes + 3)})),
        path(int64_data(packed)),
        num_accepted(path + batch * nodes),
        next_token(num_accepted + batch),
        status(next_token + batch) {}

  Tensor packed;
  int64_t* path;          // [batch, nodes]
  int64_t* num_accepted;  // [batch]
  int64_t* next_token;    // [batch]
  int64_t* status;        // [batch]
};

// Checks the arguments that all verification ops take, and sets everything that follows from them.
template <typename Params>
VerifyResult read_verification(const char* op, const Tensor& logits, const Tensor& tokens,
                               const Tensor& parents, const Tensor& root_positions,
                               const Tensor& seeds, const Tensor& row_ids, Params* params) {
  const Argument logits_arg(op, "logits", logits), tokens_arg(op, "tokens", tokens),
      parents_arg(op, "parents", parents), positions_arg(op, "root_positions", root_positions),
      seeds_arg(op, "seeds", seeds), row_ids_arg(op, "row_ids", row_ids);
  params->logits_type = check_float_type(logits_arg, logits);
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
  params->logits = logits.const_data_ptr();
  params->logits_batch_stride = logits.stride(0);
  params->logits_node_stride = logits.stride(1);
  params->tokens = tokens_arg.view2<int64_t>();
  params->parents = parents_arg.view2<int64_t>();
  params->root_positions = positions_arg.view1<int64_t>();
  params->seeds = seeds_arg.view1<int64_t>();
  params->row_ids = row_ids_arg.view1<int64_t>();
  params->batch = batch;
  params->nodes = nodes;
  params->vocab = logits.size(2);
  VerifyResult result(logits, batch, nodes);
  params->path = result.path;
  params->num_accepted = result.num_accepted;
  params->next_token = result.next_token;
  params->status = result.status;
  return result;
}

}  // namespace specdec::glue
