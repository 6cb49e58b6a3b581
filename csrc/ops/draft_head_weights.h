// The packed head that the op draft_head takes, as specdec_ext/ops/draft.py makes it.
#pragma once

#include <string>
#include <vector>

#include "glue.h"
#include "specdec/draft_head.h"

namespace specdec::glue {

[[noreturn]] inline void fail_draft_head(const std::string& argument, const std::string& problem) {
  fail("specdec::draft_head: argument " + argument + " " + problem);
}

// [low, end) for messages.
inline std::string half_open(int64_t low, int64_t end) {
  return std::string("[") + std::to_string(low) + ", " + std::to_string(end) + ")";
}

// The head, after a check of every size, dtype, stride and device; `dtype` is that of `features`.
//
//   layout   is_eagle1, norm_before_residual, norm_output, hidden_size, intermediate_size,
//            num_heads, num_kv_heads, head_dim, num_features, feature_width, mask_token_id or -1,
//            draft_vocab_size, then for each layer its sliding window or 0
//   scalars  rms_norm_eps, logit_scale
//   weights  embed_tokens, lm_head, draft_to_target, input_norm, fc_norm, fc, fc bias,
//            hidden_norm, norm, mask_hidden, then for each layer input_layernorm, q_proj, q_proj
//            bias, kv_proj, kv_proj bias, q_norm, k_norm, o_proj, o_proj bias,
//            post_attention_layernorm, gate_up_proj, down_proj; one without elements is
//            absent, and matrices but embed_tokens are in panels (specdec/panels.h)
HeadWeights read_draft_head(const std::vector<Tensor>& weights, const std::vector<int64_t>& layout,
                            const std::vector<double>& scalars, const Argument& features,
                            int32_t dtype);

}  // namespace specdec::glue
