// Glue of kv_compact: checks, the table of caches, dispatch to the device of `path`.
#include "specdec/kv_compact.h"

#include <vector>

#include "dispatch.h"

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

CacheTensor cache_tensor(const Tensor& cache, size_t index, int64_t batch, const Argument& path) {
  const std::string name = "caches[" + std::to_string(index) + "]";
  const Argument argument(kOp, name.c_str(), cache);
  argument.has_dim(4, "[batch, heads, slots, head_dim]").is_on_device_of(path);
  const auto sizes = cache.sizes(), strides = cache.strides();
  if (sizes[0] != batch) {
    fail(argument.prefix() + " must have the batch of path, " + std::to_string(batch) +
         ", got shape " + describe_shape(cache));
  }
  if (sizes[3] > 1 && strides[3] != 1) {
    fail(argument.prefix() + " must be contiguous in its last dimension, got stride " +
         std::to_string(strides[3]) + "; lay the cache out as [..., head_dim]");
  }
  for (int dim = 0; dim < 3; ++dim) {
    if (sizes[dim] > 1 && strides[dim] == 0) {
      fail(argument.prefix() + " must not be an expanded tensor, got stride 0 in dimension " +
           std::to_string(dim) + "; it is written in place, so give it memory of its own");
    }
  }
  const int64_t element = static_cast<int64_t>(cache.element_size());
  if (sizes[1] > INT32_MAX || sizes[3] > INT32_MAX / element) {
    fail(argument.prefix() + " must have fewer than 2^31 heads and bytes per slot, got shape " +
         describe_shape(cache));
  }
  return {.data = static_cast<std::byte*>(cache.mutable_data_ptr()),
          .batch_stride = strides[0] * element,
          .head_stride = strides[1] * element,
          .slot_stride = strides[2] * element,
          .slots = sizes[2],
          .heads = static_cast<int32_t>(sizes[1]),
          .slot_bytes = static_cast<int32_t>(sizes[3] * element)};
}

void kv_compact(const std::vector<Tensor>& caches, const Tensor& path, const Tensor& num_accepted,
                const Tensor& source_starts, const Tensor& target_starts) {
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
  std::vector<CacheTensor> table;
  table.reserve(caches.size());
  for (size_t i = 0; i < caches.size(); ++i) {
    table.push_back(cache_tensor(caches[i], i, batch, path_arg));
  }
  if (batch == 0 || table.empty()) return;
  run(table,
      {.path = path_arg.view2<int64_t>(),
       .num_accepted = accepted_arg.view1<int64_t>(),
       .source_starts = sources_arg.view1<int64_t>(),
       .target_starts = targets_arg.view1<int64_t>(),
       .batch = batch,
       .nodes = nodes},
      path);
}

}  // namespace

SPECDEC_REGISTER(kv_compact)

}  // namespace specdec::glue
