// The packed head that the op draft_head takes, as specdec_ext/ops/packed_head.py makes it.
#pragma once

#include <string>
#include <vector>

#include "ops/common/glue.h"
#include "specdec/draft_head.h"
#include "specdec/draft_head/kernel_params.h"

namespace specdec::glue {

[[noreturn]] inline void fail_draft_head(const std::string& argument, const std::string& problem) {
  fail("specdec::draft_head: argument " + argument + " " + problem);
}

// The range [low, end) for messages.
inline std::string half_open(int64_t low, int64_t end) {
  return std::string("[") + std::to_string(low) + ", " + std::to_string(end) + ")";
}

// Whether the op runs on the CUDA kernel, possibly emulated.
inline bool runs_kernel([[maybe_unused]] const Tensor& tensor) {
#ifdef SPECDEC_EMULATED
  return true;
#else
  return !tensor.is_cpu();
#endif
}

struct PackedWeights {
  HeadWeights head;
  DraftWeightType type;  // type of the weight matrices
};

// Reads the sizes and flags of a head, `layout` below. Its weights and numbers stay zero.
HeadWeights read_layout(const std::vector<int64_t>& layout);

// Reads the head and checks every size, dtype, stride and device. Its dtype is that of `features`.
//
//   layout   feeds_fc, norm_before_residual, norm_output, hidden_size, intermediate_size,
//            num_heads, num_kv_heads, head_dim, num_features, feature_width, mask_token_id or -1,
//            draft_vocab_size, then for each layer its sliding window or 0
//   scalars  rms_norm_eps, logit_scale
//   weights  embed_tokens, lm_head, draft_to_target, input_norm, fc_norm, fc, fc bias,
//            embedding_norm, hidden_norm, norm, mask_hidden, then for each layer input_layernorm,
//            qkv_proj, qkv_proj bias, q_norm, k_norm, o_proj, o_proj bias,
//            post_attention_layernorm, gate_up_proj, down_proj; a tensor without elements is absent
//
// For the kernel each matrix is [outs, ins] or in tiles, [tiles, units of an output, 8 outputs,
// elements of a unit of 64 bytes] (TileSchedule in plan.h; gate_up_proj is a pair). For the CPU
// matrices are in panels (specdec/cpu/panels.h); in qkv_proj the panels of queries precede those of
// keys and values. embed_tokens is [tokens, hidden_size].
//
// If lm_head is int8 or, for the kernel, float8_e4m3fn, so are fc and the matrices of all layers, but not the
// embedding. Then the float32 scales, one per output, follow the weights: those of lm_head, of fc,
// then for each layer those of qkv_proj, o_proj, gate_up_proj, down_proj. A weight is its 8-bit
// number times the scale.
PackedWeights read_draft_head(const std::vector<Tensor>& weights,
                              const std::vector<int64_t>& layout,
                              const std::vector<double>& scalars, const Tensor& features);

}  // namespace specdec::glue
