// Glue of draft_head: checks of everything that addresses memory, outputs, dispatch to the device
// of `features`. Numbers in tensors are checked here for the CPU. For CUDA the kernel checks them,
// because the host does not read device memory.
#include "specdec/draft_head.h"

#include <algorithm>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "cuda.h"
#include "ops/common/dispatch.h"
#include "specdec/tree/build_dynamic_tree.h"
#include "weights.h"

namespace specdec::glue {
namespace {

constexpr const char* kOp = "draft_head";

// Checks that choices are in level order: parents precede their children, and depths never
// decrease.
DraftLevels check_choices(const DraftShape& shape) {
  DraftLevels levels;
  std::vector<int64_t> depths(shape.num_choices + 1);
  std::vector<bool> is_expanded(shape.num_choices + 1);
  for (int64_t i = 0; i < shape.num_choices; ++i) {
    const int64_t parent = shape.choices(i, 0), rank = shape.choices(i, 1);
    const auto fail_node = [&](const std::string& expected) {
      fail_draft_head("choices", "has the node (" + std::to_string(parent) + ", " +
                                     std::to_string(rank) + ") in row " + std::to_string(i) +
                                     "; expected " + expected);
    };
    if (parent < 0 || parent > i) fail_node("an earlier node as parent, in " + half_open(0, i + 1));
    if (rank < 0 || rank >= shape.top_k) fail_node("a rank in " + half_open(0, shape.top_k));
    depths[i + 1] = depths[parent] + 1;
    if (depths[i + 1] < depths[i]) fail_node("level order");
    if (depths[i + 1] > depths[i]) {
      levels.ends.push_back(0);
      levels.widths.push_back(0);
    }
    levels.ends.back() = i + 1;
    if (!is_expanded[parent]) ++levels.widths.back();
    is_expanded[parent] = true;
  }
  if (depths.back() != shape.depth) {
    fail_draft_head("depth", "must be the depth of choices, " + std::to_string(depths.back()) +
                                 ", got " + std::to_string(shape.depth));
  }
  return levels;
}

// Compares the given levels of a static tree with its choices, if the host can read these.
void check_levels(const DraftShape& shape, const DraftLevels& given) {
  if (shape.is_dynamic()) return;
  const DraftLevels expected = check_choices(shape);
  const auto check = [](const char* name, const std::vector<int64_t>& numbers,
                        const std::vector<int64_t>& expected) {
    if (numbers == expected) return;
    fail_draft_head(name, "must be " + describe_numbers(expected) + " for these choices, got " +
                              describe_numbers(numbers));
  };
  check("level_ends", given.ends, expected.ends);
  check("widths", given.widths, expected.widths);
}

DraftShape read_shape(const Tensor& choices, int64_t depth, int64_t top_k, int64_t nodes,
                      const Argument& features) {
  const Argument argument(kOp, "choices", choices);
  argument.has_dtype(aoti_torch_dtype_int64()).has_dim(2, "[choices, 2]");
  argument.has_shape({choices.size(0), 2}, "[choices, 2]");
  argument.is_on_device_of(features);
  const auto in_range = [](const char* name, int64_t given, int64_t low, int64_t high) {
    if (given >= low && given <= high) return;
    fail_draft_head(name, "must be " + std::to_string(low) + " to " + std::to_string(high) +
                              ", got " + std::to_string(given));
  };
  in_range("depth", depth, 1, kMaxCandidates);
  in_range("top_k", top_k, 1, kMaxCandidates);
  in_range("nodes", nodes, 1, kMaxNodes);
  const DraftShape shape{argument.view2<int64_t>(), choices.size(0), depth, top_k, nodes};
  if (!shape.is_dynamic()) {
    if (shape.num_choices >= nodes) {
      fail(argument.prefix() + " must be fewer than nodes, " + std::to_string(nodes) +
           ", got shape " + describe_shape(choices));
    }
  } else if (shape.num_candidates() > kMaxCandidates) {
    fail_draft_head("top_k", "= " + std::to_string(top_k) + " at depth " + std::to_string(depth) +
                                 " makes " + std::to_string(shape.num_candidates()) +
                                 " candidates; expected at most " + std::to_string(kMaxCandidates) +
                                 ", so draft fewer levels or keep fewer per level");
  }
  return shape;
}

HeadCache read_cache(const char* name, const Tensor& cache, const HeadWeights& head, int64_t rows,
                     int64_t capacity, const Argument& features, int32_t dtype) {
  const Argument argument(kOp, name, cache);
  argument.has_dtype(dtype).has_shape(
      {std::ssize(head.layers), rows, head.kv_heads, capacity, head.head_dim},
      "[layers, rows, kv_heads, capacity, head_dim]");
  argument.is_on_device_of(features).has_contiguous_rows().is_not_expanded(4);
  return {cache.mutable_data_ptr(), cache.stride(0), cache.stride(1), cache.stride(2),
          cache.stride(3)};
}

// Checks every number that addresses memory.
void check_rows(const DraftHeadParams& params, int64_t num_new, int64_t num_positions) {
  const int64_t slots = draft_slots(params.shape, params.head.is_parallel());
  const int64_t levels = params.shape.depth - 1;  // number of levels below the last new element
  const auto text = [](int64_t number) { return std::to_string(number); };
  for (int64_t row = 0; row < params.rows; ++row) {
    const int64_t count = params.counts[row];
    const auto check = [&](const char* name, int64_t given, int64_t end, const auto& reason) {
      if (given >= 0 && given < end) return;
      fail_draft_head(name, "has " + text(given) + " in row " + text(row) + "; expected " +
                                half_open(0, std::max<int64_t>(end, 0)) + reason());
    };
    const auto no_reason = [] { return ""; };
    check("counts", count, num_new + 1, no_reason);
    check("roots", params.roots[row], params.head.vocab, no_reason);
    if (count == 0) continue;
    check("lengths", params.lengths[row], params.capacity - count - slots + 1, [&] {
      return ": a capacity of " + text(params.capacity) + " slots less " + text(count) +
             " new elements and " + text(slots) + " of the draft; grow keys and values";
    });
    check("positions", params.positions[row], num_positions - count - levels + 1, [&] {
      return ": cosines and sines have " + text(num_positions) + " positions, for " + text(count) +
             " new elements and " + text(levels) + " levels; make longer tables";
    });
    for (int64_t i = 0; i < count; ++i) {
      check("tokens", params.tokens(row, i), params.head.vocab, no_reason);
    }
  }
}

void run_on_cpu(const DraftHeadParams& params, const DraftLevels& levels, int64_t num_new,
                int64_t num_positions) {
  check_levels(params.shape, levels);
  check_rows(params, num_new, num_positions);
  std::optional<std::string> problem;
  with_team([&](const ParallelFor& threads) { problem = cpu::draft_head(params, threads); });
  if (problem) {
    fail("specdec::draft_head: argument weights holds " + *problem);
  }
}

using DraftHeadResult = std::tuple<Tensor, Tensor, Tensor>;

DraftHeadResult draft_head(const std::vector<Tensor>& weights, const std::vector<int64_t>& layout,
                           const std::vector<double>& scalars, const Tensor& cosines,
                           const Tensor& sines, const Tensor& keys, const Tensor& values,
                           const Tensor& tokens, const Tensor& features, const Tensor& counts,
                           const Tensor& lengths, const Tensor& positions, const Tensor& roots,
                           const Tensor& choices, int64_t depth, int64_t top_k, int64_t nodes,
                           const std::vector<int64_t>& level_ends,
                           const std::vector<int64_t>& widths,
                           const std::optional<std::vector<Tensor>>& noise,
                           const std::optional<Tensor>& sync, bool phase_launches) {
  const Argument features_arg(kOp, "features", features), tokens_arg(kOp, "tokens", tokens),
      keys_arg(kOp, "keys", keys), cosines_arg(kOp, "cosines", cosines),
      sines_arg(kOp, "sines", sines);
  features_arg.has_dim(3, "[rows, new, feature_width]");
  const int32_t dtype = dtype_of(features), int64 = aoti_torch_dtype_int64();
  const PackedWeights packed = read_draft_head(weights, layout, scalars, features);
  const HeadWeights& head = packed.head;
  const int64_t rows = features.size(0), num_new = features.size(1);
  features_arg.has_shape({rows, num_new, head.feature_width}, "[rows, new, feature_width]");
  features_arg.has_contiguous_rows();
  tokens_arg.has_dtype(int64).has_shape({rows, num_new}, "[rows, new]");
  tokens_arg.is_on_device_of(features_arg);
  keys_arg.has_dim(5, "[layers, rows, kv_heads, capacity, head_dim]");
  cosines_arg.has_dtype(aoti_torch_dtype_float32()).has_dim(2, "[positions, rotary / 2]");
  cosines_arg.is_on_device_of(features_arg).has_contiguous_rows();
  sines_arg.has_dtype(aoti_torch_dtype_float32());
  sines_arg.has_shape({cosines.size(0), cosines.size(1)}, "[positions, rotary / 2]");
  sines_arg.is_on_device_of(features_arg).has_contiguous_rows();
  if (2 * cosines.size(1) > head.head_dim) {
    fail(cosines_arg.prefix() + " must have at most head_dim / 2 = " +
         std::to_string(head.head_dim / 2) + " columns, got shape " + describe_shape(cosines));
  }
  const auto per_row = [&](const char* name, const Tensor& tensor) {
    const Argument argument(kOp, name, tensor);
    argument.has_dtype(int64).has_shape({rows}, "[rows]").is_on_device_of(features_arg);
    return argument.view1<int64_t>();
  };
  const int64_t capacity = keys.size(3);
  if (capacity > INT32_MAX) {
    fail(keys_arg.prefix() + " must have less than 2^31 slots, got shape " + describe_shape(keys));
  }
  const DraftShape shape = read_shape(choices, depth, top_k, nodes, features_arg);
  const DraftLevels levels{level_ends, widths};
  if (shape.is_dynamic() && !(level_ends.empty() && widths.empty())) {
    fail_draft_head(level_ends.empty() ? "widths" : "level_ends",
                    "must be empty for a dynamic tree, whose choices are, got " +
                        describe_numbers(level_ends.empty() ? widths : level_ends));
  }
  if (noise && noise->size() != 3) {
    fail_draft_head("noise", "must be temperatures, seeds and row_ids, got " +
                                 std::to_string(noise->size()) + " tensors");
  }
  DraftHeadResult result{empty_int64(features, {rows, nodes}), empty_int64(features, {rows, nodes}),
                         empty_float(features, {rows, nodes})};
  const DraftHeadParams params{
      .head = head,
      .shape = shape,
      .cosines = cosines_arg.view2<float>(),
      .sines = sines_arg.view2<float>(),
      .rotary_half = cosines.size(1),
      .keys = read_cache("keys", keys, head, rows, capacity, features_arg, dtype),
      .values = read_cache("values", values, head, rows, capacity, features_arg, dtype),
      .capacity = capacity,
      .tokens = tokens_arg.view2<int64_t>(),
      .features = features.const_data_ptr(),
      .features_row_stride = features.stride(0),
      .features_item_stride = features.stride(1),
      .counts = per_row("counts", counts),
      .lengths = per_row("lengths", lengths),
      .positions = per_row("positions", positions),
      .roots = per_row("roots", roots),
      .noise = noise ? read_noise(kOp, *noise, rows, features_arg) : DraftNoise{},
      .rows = rows,
      .tree_tokens = int64_data(std::get<0>(result)),
      .tree_parents = int64_data(std::get<1>(result)),
      .tree_scores = static_cast<float*>(std::get<2>(result).mutable_data_ptr())};
  dispatch(
      kOp, features, [&] { run_on_cpu(params, levels, num_new, cosines.size(0)); },
      [&](auto stream) {
        return launch_packed(packed, params, levels, num_new, cosines.size(0), features, sync,
                             phase_launches, stream);
      });
  return result;
}

}  // namespace

SPECDEC_REGISTER(draft_head)

}  // namespace specdec::glue
