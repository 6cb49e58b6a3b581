#include "cache_tensors.h"

namespace specdec::glue {
namespace {

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
    fail(argument.prefix() + " must have the batch of the other arguments, " +
         std::to_string(shape.batch) + ", got shape " + describe_shape(cache) +
         "; pools of pages need kv_compact with a page_table");
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

}  // namespace

std::vector<CacheTensor> cache_tensors(const char* op, const std::vector<Tensor>& caches,
                                       const Argument& on_device_of, int64_t batch, bool paged) {
  const CacheShape shape{
      .dims = paged ? "[pages, heads, page_size, head_dim]" : "[batch, heads, slots, head_dim]",
      .batch = batch,
      .page_size = paged && !caches.empty() && caches[0].dim() == 4 ? caches[0].size(2) : 0,
      .paged = paged};
  std::vector<CacheTensor> table;
  table.reserve(caches.size());
  for (size_t i = 0; i < caches.size(); ++i) {
    const std::string name = "caches[" + std::to_string(i) + "]";
    const Argument argument(op, name.c_str(), caches[i]);
    argument.is_on_device_of(on_device_of);
    check_shape(argument, caches[i], shape);
    table.push_back(cache_tensor(caches[i]));
  }
  return table;
}

}  // namespace specdec::glue
