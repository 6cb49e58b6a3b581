// Glue of kv_compact: checks, the table of caches, dispatch to the device of `path`.
#include "specdec/kv_compact.h"

#include <optional>
#include <vector>

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

// The required first dimensions of a cache.
struct CacheShape {
  const char* dims;   // the shape for the message
  int64_t batch;      // for a cache without pages
  int64_t page_size;  // for a cache with pages: that of the first cache
  bool paged;
};

void check_shape(const Argument& argument, const Tensor& cache, const CacheShape& shape) {
  argument.has_dim(4, shape.dims);
  if (!shape.paged && cache.size(0) != shape.batch) {
    fail(argument.prefix() + " must have the batch of path, " + std::to_string(shape.batch) +
         ", got shape " + describe_shape(cache) + "; pools of pages need a page_table");
  }
  if (shape.paged && cache.size(2) != shape.page_size) {
    fail(argument.prefix() + " must have the page size of caches[0], " +
         std::to_string(shape.page_size) + ", because they share a page_table; got shape " +
         describe_shape(cache));
  }
  argument.has_contiguous_rows().is_not_expanded(3);
  if (cache.size(1) > INT32_MAX ||
      cache.size(3) > INT32_MAX / static_cast<int64_t>(cache.element_size())) {
    fail(argument.prefix() + " must have fewer than 2^31 heads and bytes per slot, got shape " +
         describe_shape(cache));
  }
}

CacheTensor cache_tensor(const Tensor& cache) {
  const int64_t element = static_cast<int64_t>(cache.element_size());
  return {.data = static_cast<std::byte*>(cache.mutable_data_ptr()),
          .layout = {.page_stride = cache.stride(0) * element,
                     .head_stride = cache.stride(1) * element,
                     .slot_stride = cache.stride(2) * element,
                     .pages = cache.size(0),
                     .page_size = cache.size(2),
                     .heads = static_cast<int32_t>(cache.size(1)),
                     .slot_bytes = static_cast<int32_t>(cache.size(3) * element)}};
}

std::vector<CacheTensor> cache_tensors(const std::vector<Tensor>& caches, const Argument& path,
                                       int64_t batch, bool paged) {
  const CacheShape shape{
      .dims = paged ? "[pages, heads, page_size, head_dim]" : "[batch, heads, slots, head_dim]",
      .batch = batch,
      .page_size = paged && !caches.empty() && caches[0].dim() == 4 ? caches[0].size(2) : 0,
      .paged = paged};
  std::vector<CacheTensor> table;
  table.reserve(caches.size());
  for (size_t i = 0; i < caches.size(); ++i) {
    const std::string name = "caches[" + std::to_string(i) + "]";
    const Argument argument(kOp, name.c_str(), caches[i]);
    argument.is_on_device_of(path);
    check_shape(argument, caches[i], shape);
    table.push_back(cache_tensor(caches[i]));
  }
  return table;
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
  const auto table = cache_tensors(caches, path_arg, batch, page_table.has_value());
  if (batch > 0 && !table.empty()) run(table, moves, path);
}

}  // namespace

SPECDEC_REGISTER(kv_compact)

}  // namespace specdec::glue
