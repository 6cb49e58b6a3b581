#include "limits.h"

#include "ops/common/register.h"
#include "specdec/draft_head/plan.h"
#include "weights.h"

namespace specdec::glue {

std::optional<std::string> kernel_refusal(const HeadWeights& head, int64_t element,
                                          bool has_8_bit_weights, int64_t depth, int64_t top_k,
                                          int64_t rows) {
  if (has_8_bit_weights && element == 4) {
    return "on CUDA 8-bit weights need torch.bfloat16 or torch.float16, not torch.float32";
  }
  struct Limit {
    const char* name;
    int64_t given;
    int64_t limit;
  };
  const auto refused = [](const Limit& size, const char* expected) {
    return "on CUDA " + std::string(size.name) + " must be " + expected + " " +
           std::to_string(size.limit) + ", not " + std::to_string(size.given);
  };
  // The kernel reads rows in units of 16 bytes.
  const int64_t unit = 16 / element, matrix_unit = has_8_bit_weights ? 16 : unit;
  const int64_t query_outs = head.heads * head.head_dim;
  for (const Limit& size : {Limit{"hidden_size", head.hidden, matrix_unit},
                            {"intermediate_size", head.intermediate, matrix_unit},
                            {"feature_width", head.feature_width, matrix_unit},
                            {"target_hidden_size", head.feature_width / head.num_features, unit},
                            {"num_heads * head_dim", query_outs, matrix_unit},
                            {"head_dim", head.head_dim, 8}}) {
    if (size.given % size.limit != 0) return refused(size, "a multiple of");
  }
  for (const Limit& size : {Limit{"head_dim", head.head_dim, kMaxDraftHeadDim},
                            {"the number of queries, keys and values",
                             query_outs + 2 * head.kv_heads * head.head_dim, INT32_MAX},
                            {"num_layers", std::ssize(head.layers), kMaxDraftLayers},
                            {"the depth of trees", depth, kMaxDraftDepth},
                            {"the top_k of trees", top_k, kMaxDraftTopK},
                            {"the batch", rows, kMaxDraftBatch}}) {
    if (size.given > size.limit) return refused(size, "at most");
  }
  return std::nullopt;
}

namespace {

std::optional<std::string> draft_head_refusal(const std::vector<int64_t>& layout, int64_t element,
                                              bool has_8_bit_weights, int64_t depth, int64_t top_k,
                                              int64_t rows) {
  return kernel_refusal(read_layout(layout), element, has_8_bit_weights, depth, top_k, rows);
}

}  // namespace

SPECDEC_REGISTER_WITHOUT_TENSORS(draft_head_refusal)

}  // namespace specdec::glue
