#include "cuda.h"

#ifdef SPECDEC_WITH_CUDA

#include <initializer_list>

#include "limits.h"
#include "specdec/draft_head/scratch.h"
#include "specdec/launchers.h"

namespace specdec::glue {
namespace {

void check_limits(const PackedWeights& packed, const DraftHeadParams& call, int64_t num_new) {
  const HeadWeights& head = packed.head;
  const bool has_8_bit_weights = packed.type != DraftWeightType::kSame;
  std::optional<std::string> refusal =
      kernel_refusal(head, element_size(head.type), has_8_bit_weights, call.shape.depth,
                     call.shape.top_k, call.rows);
  const int64_t elements = call.rows * (num_new + call.shape.depth);
  if (!refusal && elements > INT32_MAX) {
    refusal =
        "on CUDA the elements of all rows must be less than 2^31, not " + std::to_string(elements);
  }
  if (refusal) {
    fail("specdec::draft_head: " + *refusal +
         "; specdec_ext.reference.draft_head drafts without such limits");
  }
}

void check_alignment(const DraftHeadParams& call, int64_t num_new) {
  // The stride of a dimension of size one is never used.
  const auto used = [](int64_t stride, int64_t size) { return size > 1 ? stride : 0; };
  const auto check = [&](const char* name, const void* data,
                         std::initializer_list<int64_t> strides) {
    check_aligned("draft_head", name, data, strides, element_size(call.head.type));
  };
  if (num_new > 0) {
    check("features", call.features,
          {used(call.features_row_stride, call.rows), used(call.features_item_stride, num_new)});
  }
  for (const auto& [name, cache] : {std::pair{"keys", call.keys}, {"values", call.values}}) {
    check(
        name, cache.data,
        {used(cache.layer_stride, std::ssize(call.head.layers)), used(cache.row_stride, call.rows),
         used(cache.head_stride, call.head.kv_heads), used(cache.slot_stride, call.capacity)});
  }
}

// Checks what determines the size of the kernel's memory. Whether the levels match the choices is
// not checked: wrong levels cost nodes of the tree.
void check_levels(const DraftShape& shape, const DraftLevels& levels) {
  const auto check = [&](const char* name, bool holds, const std::vector<int64_t>& given,
                         const std::string& expected) {
    if (holds) return;
    fail_draft_head(name, "must be " + expected + ", got " + describe_numbers(given) +
                              "; ops.draft_head takes them from a TreeConfig");
  };
  const std::string each = "for each of depth = " + std::to_string(shape.depth) + " levels ";
  check("level_ends", std::ssize(levels.ends) == shape.depth, levels.ends,
        each + "the choices up to its end");
  check("widths", std::ssize(levels.widths) == shape.depth, levels.widths,
        each + "the nodes with children above it");
  int64_t before = 0, above = 1;  // choices of earlier levels, number of nodes right above
  for (int64_t level = 0; level < shape.depth; ++level) {
    const int64_t count = levels.ends[level] - before, width = levels.widths[level];
    check("level_ends", count > 0, levels.ends, "ascending from 1");
    check("widths", width >= 1 && width <= above && width <= count, levels.widths,
          each + "at most the nodes above it and on it");
    before = levels.ends[level];
    above = count;
  }
  check("level_ends", before == shape.num_choices, levels.ends,
        "ascending up to all " + std::to_string(shape.num_choices) + " choices");
}

DraftLevels levels_of(const DraftShape& shape, const DraftLevels& given) {
  if (!shape.is_dynamic()) {
    check_levels(shape, given);
    return given;
  }
  DraftLevels levels;
  for (int64_t level = 0; level < shape.depth; ++level) {
    levels.ends.push_back(shape.top_k + level * shape.top_k * shape.top_k);
    levels.widths.push_back(level == 0 ? 1 : shape.top_k);
  }
  return levels;
}

void set_head(const HeadWeights& head, DraftKernelParams* out) {
  const auto to_int = [](int64_t number) { return static_cast<int>(number); };
  const auto matrix = [&](const HeadMatrix& given) -> DraftMatrix {
    return {.weight = given.weight,
            .scale = given.scale,
            .bias = given.bias,
            .outs = to_int(given.outs),
            .ins = to_int(given.ins),
            .in_tiles = given.in_tiles};
  };
  out->norm_before_residual = head.norm_before_residual;
  out->norm_output = head.norm_output;
  out->hidden = to_int(head.hidden);
  out->intermediate = to_int(head.intermediate);
  out->heads = to_int(head.heads);
  out->kv_heads = to_int(head.kv_heads);
  out->head_dim = to_int(head.head_dim);
  out->feature_width = to_int(head.feature_width);
  out->num_features = to_int(head.num_features);
  out->vocab = head.vocab;
  out->mask_token = head.mask_token;
  out->eps = head.eps;
  out->logit_scale = head.logit_scale;
  out->embedding = head.embedding;
  out->draft_to_target = head.draft_to_target;
  out->input_norm = head.input_norm;
  out->fc_norm = head.fc_norm;
  out->lm_head = matrix(head.lm_head);
  out->fc = matrix(head.fc);
  out->embedding_norm = head.embedding_norm;
  out->hidden_norm = head.hidden_norm;
  out->norm = head.norm;
  out->mask_features = head.mask_features;
  for (size_t i = 0; i < head.layers.size(); ++i) {
    const HeadLayer& layer = head.layers[i];
    out->layers[i] = {.input_norm = layer.input_norm,
                      .projections = matrix(layer.query),
                      .query_norm = layer.query_norm,
                      .key_norm = layer.key_norm,
                      .output = matrix(layer.output),
                      .post_norm = layer.post_norm,
                      .gate_up = matrix(layer.gate_up),
                      .down = matrix(layer.down),
                      .window = to_int(layer.window)};
  }
}

void set_plan(const DraftHeadParams& call, const DraftLevels& levels, DraftKernelParams* out) {
  const HeadWeights& head = call.head;
  out->plan.num_layers = static_cast<int>(head.layers.size());
  out->plan.gathers = head.input_norm != nullptr || head.fc_norm != nullptr;
  out->plan.has_fc = head.fc.weight != nullptr;
  out->plan.feeds_fc = head.feeds_fc;
  out->plan.is_parallel = head.is_parallel();
  out->plan.batch = static_cast<int>(call.rows);
  out->plan.depth = static_cast<int>(call.shape.depth);
  int64_t slots = 0;
  for (int64_t level = 0; level < call.shape.depth; ++level) {
    out->plan.widths[level] = static_cast<int16_t>(levels.widths[level]);
    out->level_ends[level] = static_cast<int16_t>(levels.ends[level]);
    out->first_slots[level] = static_cast<int16_t>(slots);
    if (level > 0) slots += levels.widths[level];
  }
  out->words = static_cast<int>((slots + 63) / 64);
  out->choices = call.shape.choices;
  out->num_choices = static_cast<int>(call.shape.num_choices);
  out->num_candidates = static_cast<int>(call.shape.num_candidates());
  out->top_k = static_cast<int>(call.shape.top_k);
  out->nodes = static_cast<int>(call.shape.nodes);
}

void set_call(const DraftHeadParams& call, int64_t num_new, int64_t num_positions,
              DraftKernelParams* out) {
  out->cosines = call.cosines;
  out->sines = call.sines;
  out->rotary_half = static_cast<int>(call.rotary_half);
  out->num_positions = num_positions;
  out->keys = call.keys;
  out->values = call.values;
  out->capacity = call.capacity;
  out->tokens = call.tokens;
  out->num_new = static_cast<int>(num_new);
  out->features = call.features;
  out->features_row_stride = call.features_row_stride;
  out->features_item_stride = call.features_item_stride;
  out->counts = call.counts;
  out->lengths = call.lengths;
  out->positions = call.positions;
  out->roots = call.roots;
  out->noise = call.noise;
  out->tree_tokens = call.tree_tokens;
  out->tree_parents = call.tree_parents;
  out->tree_scores = call.tree_scores;
}

// The given buffer, or a new one for this launch.
Tensor sync_buffer(const HeadWeights& head, const Tensor& features,
                   const std::optional<Tensor>& given) {
  const int64_t bytes = draft_sync_bytes(head.heads, head.head_dim);
  if (!given) return zero_bytes(features, bytes);
  const Argument argument("draft_head", "sync", *given);
  argument.has_dtype(aoti_torch_dtype_uint8()).has_dim(1, "[bytes]");
  argument.is_on_device_of(Argument("draft_head", "features", features));
  if (given->size(0) < bytes || given->stride(0) != 1) {
    fail(argument.prefix() + " must be contiguous with at least " + std::to_string(bytes) +
         " bytes, got shape " + describe_shape(*given) + " with stride " +
         std::to_string(given->stride(0)) + "; PackedHead.pack makes one");
  }
  return *given;
}

}  // namespace

cudaError_t launch_packed(const PackedWeights& packed, const DraftHeadParams& call,
                          const DraftLevels& levels, int64_t num_new, int64_t num_positions,
                          const Tensor& features, const std::optional<Tensor>& sync,
                          bool phase_launches, cudaStream_t stream) {
  check_limits(packed, call, num_new);
  check_alignment(call, num_new);
  DraftKernelParams params{};
  set_head(packed.head, &params);
  set_plan(call, levels_of(call.shape, levels), &params);
  set_call(call, num_new, num_positions, &params);
  const Tensor sync_memory = sync_buffer(packed.head, features, sync);
  if (call.rows == 0) return cudaSuccess;
  const FloatType type = packed.head.type;
  int64_t blocks = 0;
  const cudaError_t error = draft_head_blocks(type, packed.type, &blocks);
  if (error != cudaSuccess) return error;
  const Tensor scratch = empty_bytes(features, draft_scratch_bytes(params, type, blocks));
  params.scratch = place_draft_scratch(params, type, blocks, scratch.mutable_data_ptr());
  params.sync = place_draft_sync(sync_memory.mutable_data_ptr());
  return launch_draft_head(params, type, packed.type, phase_launches, stream);
}

}  // namespace specdec::glue

#endif
