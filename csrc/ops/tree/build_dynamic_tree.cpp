// Glue of build_dynamic_tree: checks, outputs, dispatch to the device of `scores`.
#include "specdec/tree/build_dynamic_tree.h"

#include <tuple>

#include "ops/common/dispatch.h"

namespace specdec::glue {
namespace {

void run(const BuildDynamicTreeParams& params, const Tensor& scores) {
  dispatch(
      "build_dynamic_tree", scores, [&] { cpu::build_dynamic_tree(params, kTorchParallelFor); },
      [&](auto stream) { return launch_build_dynamic_tree(params, stream); });
}

using BuildDynamicTreeResult = std::tuple<Tensor, Tensor, Tensor>;

BuildDynamicTreeResult build_dynamic_tree(const Tensor& scores, const Tensor& tokens,
                                          const Tensor& parents, const Tensor& root_tokens,
                                          int64_t nodes) {
  constexpr const char* kOp = "build_dynamic_tree";
  const Argument scores_arg(kOp, "scores", scores), tokens_arg(kOp, "tokens", tokens),
      parents_arg(kOp, "parents", parents), roots_arg(kOp, "root_tokens", root_tokens);
  scores_arg.has_dtype(aoti_torch_dtype_float32()).has_dim(2, "[batch, candidates]");
  const int64_t batch = scores.size(0), candidates = scores.size(1);
  if (candidates > kMaxCandidates) {
    fail(scores_arg.prefix() + " must have at most " + std::to_string(kMaxCandidates) +
         " candidates per row, got " + std::to_string(candidates) +
         "; keep fewer per level or draft fewer levels");
  }
  check_num_nodes(kOp, nodes);
  const int32_t int64 = aoti_torch_dtype_int64();
  for (const Argument* argument : {&tokens_arg, &parents_arg}) {
    argument->has_dtype(int64).has_shape({batch, candidates}, "[batch, candidates]");
    argument->is_on_device_of(scores_arg);
  }
  roots_arg.has_dtype(int64).has_shape({batch}, "[batch]").is_on_device_of(scores_arg);

  BuildDynamicTreeResult result{empty_int64(scores, {batch, nodes}),
                                empty_int64(scores, {batch, nodes}),
                                empty_int64(scores, {batch, nodes})};
  if (batch > 0) {
    run({.scores = scores_arg.view2<float>(),
         .tokens = tokens_arg.view2<int64_t>(),
         .parents = parents_arg.view2<int64_t>(),
         .root_tokens = roots_arg.view1<int64_t>(),
         .batch = batch,
         .candidates = candidates,
         .nodes = nodes,
         .tree_tokens = int64_data(std::get<0>(result)),
         .tree_parents = int64_data(std::get<1>(result)),
         .selected = int64_data(std::get<2>(result))},
        scores);
  }
  return result;
}

}  // namespace

SPECDEC_REGISTER(build_dynamic_tree)

}  // namespace specdec::glue
