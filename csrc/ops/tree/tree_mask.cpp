// Glue of tree_mask: checks, outputs, dispatch to the device of `parents`.
#include "specdec/tree/tree_mask.h"

#include <tuple>

#include "ops/common/dispatch.h"

namespace specdec::glue {
namespace {

void run(const TreeMaskParams& params, const Tensor& parents) {
  dispatch(
      "tree_mask", parents, [&] { cpu::tree_mask(params, kTorchParallelFor); },
      [&](auto stream) { return launch_tree_mask(params, stream); });
}

using TreeMaskResult = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

TreeMaskResult tree_mask(const Tensor& parents, const Tensor& root_positions) {
  const Argument parents_arg("tree_mask", "parents", parents);
  const Argument roots_arg("tree_mask", "root_positions", root_positions);
  const int32_t int64 = aoti_torch_dtype_int64();
  parents_arg.has_dtype(int64).has_dim(2, "[batch, nodes]");
  const int64_t batch = parents.size(0), nodes = parents.size(1), words = (nodes + 63) / 64;
  check_num_nodes(parents_arg, nodes);
  roots_arg.has_dtype(int64).has_shape({batch}, "[batch]").is_on_device_of(parents_arg);

  TreeMaskResult result{
      empty_int64(parents, {batch, nodes, words}), empty_int64(parents, {batch, nodes}),
      empty_int64(parents, {batch, nodes}),        empty_int64(parents, {batch, nodes}),
      empty_int64(parents, {batch, nodes}),        empty_int64(parents, {batch, nodes, nodes})};
  if (batch > 0) {
    run({.parents = parents_arg.view2<int64_t>(),
         .root_positions = roots_arg.view1<int64_t>(),
         .batch = batch,
         .nodes = nodes,
         .words = words,
         .ancestors = int64_data(std::get<0>(result)),
         .depths = int64_data(std::get<1>(result)),
         .positions = int64_data(std::get<2>(result)),
         .first_child = int64_data(std::get<3>(result)),
         .next_sibling = int64_data(std::get<4>(result)),
         .paths = int64_data(std::get<5>(result))},
        parents);
  }
  return result;
}

}  // namespace

SPECDEC_REGISTER(tree_mask)

}  // namespace specdec::glue
