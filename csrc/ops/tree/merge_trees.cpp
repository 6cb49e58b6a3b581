// Glue of merge_trees: checks, outputs, dispatch to the device of the first tree.
#include "specdec/tree/merge_trees.h"

#include <tuple>
#include <vector>

#include "ops/common/dispatch.h"

namespace specdec::glue {
namespace {

constexpr const char* kOp = "merge_trees";

void run(const MergeTreesParams& params, const Tensor& tokens) {
  dispatch(
      kOp, tokens,
      [&] {
        if (const auto problem = cpu::find_other_root(params)) {
          fail(std::string("specdec::") + kOp + ": argument " + *problem);
        }
        cpu::merge_trees(params, kTorchParallelFor);
      },
      [&](auto stream) { return launch_merge_trees(params, stream); });
}

void check_lists(const std::vector<Tensor>& tokens, const std::vector<Tensor>& parents) {
  if (tokens.empty() || tokens.size() > kMaxMergedTrees) {
    fail(std::string("specdec::") + kOp + ": argument tokens must be a list of 1 to " +
         std::to_string(kMaxMergedTrees) + " trees, got " + std::to_string(tokens.size()));
  }
  if (parents.size() != tokens.size()) {
    fail(std::string("specdec::") + kOp + ": argument parents must have one tensor per tree, " +
         std::to_string(tokens.size()) + ", got " + std::to_string(parents.size()));
  }
}

std::tuple<Tensor, Tensor> merge_trees(const std::vector<Tensor>& tokens,
                                       const std::vector<Tensor>& parents, int64_t nodes) {
  check_lists(tokens, parents);
  check_num_nodes(kOp, nodes);
  const int32_t int64 = aoti_torch_dtype_int64();
  const Argument first_arg(kOp, "tokens[0]", tokens[0]);
  first_arg.has_dim(2, "[batch, nodes]");
  MergeTreesParams params{};
  params.batch = tokens[0].size(0);
  params.nodes = nodes;
  for (size_t i = 0; i < tokens.size(); ++i) {
    const std::string index = "[" + std::to_string(i) + "]", tokens_name = "tokens" + index,
                      parents_name = "parents" + index;
    const Argument tokens_arg(kOp, tokens_name.c_str(), tokens[i]),
        parents_arg(kOp, parents_name.c_str(), parents[i]);
    tokens_arg.has_dim(2, "[batch, nodes]");
    const int64_t tree_nodes = tokens[i].size(1);
    for (const Argument* argument : {&tokens_arg, &parents_arg}) {
      argument->has_dtype(int64).has_shape({params.batch, tree_nodes}, "[batch, nodes]");
      argument->is_on_device_of(first_arg);
    }
    check_num_nodes(tokens_arg, tree_nodes);
    params.trees[params.num_trees++] = {.tokens = tokens_arg.view2<int64_t>(),
                                        .parents = parents_arg.view2<int64_t>(),
                                        .nodes = tree_nodes};
  }
  std::tuple<Tensor, Tensor> result{empty_int64(tokens[0], {params.batch, nodes}),
                                    empty_int64(tokens[0], {params.batch, nodes})};
  params.tokens = int64_data(std::get<0>(result));
  params.parents = int64_data(std::get<1>(result));
  if (params.batch > 0) run(params, tokens[0]);
  return result;
}

}  // namespace

SPECDEC_REGISTER(merge_trees)

}  // namespace specdec::glue
