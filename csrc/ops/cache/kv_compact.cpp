// Glue of kv_compact: checks, dispatch to the device of `path`.
#include "specdec/kv_compact.h"

#include <optional>
#include <vector>

#include "cache_tensors.h"
#include "ops/common/dispatch.h"

namespace specdec::glue {
namespace {

constexpr const char* kOp = "kv_compact";

void run(const std::vector<CacheTensor>& caches, const KvMoves& moves, const Tensor& path) {
  dispatch(
      kOp, path,
      [&] {
        // Every index is checked before the first byte is written.
        if (const auto problem = cpu::find_invalid_move(caches, moves)) {
          fail("specdec::kv_compact: " + *problem);
        }
        cpu::kv_compact(caches, moves, kTorchParallelFor);
      },
      [&](auto stream) { return launch_kv_compact(caches, moves, stream); });
}

void kv_compact(const std::vector<Tensor>& caches, const Tensor& path, const Tensor& num_accepted,
                const Tensor& source_starts, const Tensor& target_starts,
                const std::optional<Tensor>& page_table) {
  const Argument path_arg(kOp, "path", path), accepted_arg(kOp, "num_accepted", num_accepted),
      sources_arg(kOp, "source_starts", source_starts),
      targets_arg(kOp, "target_starts", target_starts);
  const int32_t int64 = aoti_torch_dtype_int64();
  path_arg.has_dtype(int64).has_dim(2, "[batch, nodes]");
  const int64_t batch = path.size(0), nodes = path.size(1);
  check_num_nodes(path_arg, nodes);
  for (const Argument* argument : {&accepted_arg, &sources_arg, &targets_arg}) {
    argument->has_dtype(int64).has_shape({batch}, "[batch]").is_on_device_of(path_arg);
  }
  KvMoves moves{.path = path_arg.view2<int64_t>(),
                .num_accepted = accepted_arg.view1<int64_t>(),
                .source_starts = sources_arg.view1<int64_t>(),
                .target_starts = targets_arg.view1<int64_t>(),
                .page_table = {},
                .row_pages = 1,
                .batch = batch,
                .nodes = nodes};
  if (page_table) {
    const Argument table_arg(kOp, "page_table", *page_table);
    table_arg.has_dtype(int64).has_dim(2, "[batch, pages]").is_on_device_of(path_arg);
    moves.row_pages = page_table->size(1);
    table_arg.has_shape({batch, moves.row_pages}, "[batch, pages]");
    moves.page_table = table_arg.view2<int64_t>();
  }
  const auto table = cache_tensors(kOp, caches, path_arg, batch, page_table.has_value());
  if (batch > 0 && !table.empty()) run(table, moves, path);
}

}  // namespace

SPECDEC_REGISTER(kv_compact)

}  // namespace specdec::glue
