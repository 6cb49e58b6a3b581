// The result of the verification ops: one int64 tensor, so that the host needs one copy.
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

}  // namespace specdec::glue
