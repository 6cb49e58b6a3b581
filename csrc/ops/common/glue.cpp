#include "glue.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "specdec/core/tree.h"

namespace specdec::glue {
namespace {

struct DeviceId {
  int32_t type;
  int32_t index;

  bool operator==(const DeviceId&) const = default;
  std::string describe() const {
    if (type == aoti_torch_device_type_cpu()) return "cpu";
    if (type == aoti_torch_device_type_cuda()) return "cuda:" + std::to_string(index);
    return "another device";
  }
};

DeviceId device_of(const Tensor& tensor) { return {tensor.device_type(), tensor.device_index()}; }

template <typename Sizes>
std::string join(const Sizes& sizes) {
  std::string text = "[";
  for (const int64_t size : sizes) {
    if (text.size() > 1) text += ", ";
    text += std::to_string(size);
  }
  return text + "]";
}

}  // namespace

void fail(const std::string& message) { throw std::invalid_argument(message); }

std::string describe_shape(const Tensor& tensor) { return join(tensor.sizes()); }

std::string describe_numbers(std::span<const int64_t> numbers) { return join(numbers); }

const char* dtype_name(int32_t dtype) {
  if (dtype == aoti_torch_dtype_int64()) return "torch.int64";
  if (dtype == aoti_torch_dtype_int32()) return "torch.int32";
  if (dtype == aoti_torch_dtype_bool()) return "torch.bool";
  if (dtype == aoti_torch_dtype_float32()) return "torch.float32";
  if (dtype == aoti_torch_dtype_float64()) return "torch.float64";
  if (dtype == aoti_torch_dtype_float16()) return "torch.float16";
  if (dtype == aoti_torch_dtype_bfloat16()) return "torch.bfloat16";
  if (dtype == aoti_torch_dtype_int8()) return "torch.int8";
  if (dtype == aoti_torch_dtype_uint8()) return "torch.uint8";
  if (dtype == aoti_torch_dtype_float8_e4m3fn()) return "torch.float8_e4m3fn";
  return "another dtype";
}

std::string Argument::prefix() const {
  return "specdec::" + std::string(op_) + ": argument " + name_;
}

const Argument& Argument::has_dtype(int32_t dtype) const {
  const int32_t given = dtype_of(tensor_);
  if (given != dtype) {
    fail(prefix() + " must be " + dtype_name(dtype) + ", got " + dtype_name(given) +
         "; convert it with .to(" + dtype_name(dtype) + ")");
  }
  return *this;
}

const Argument& Argument::has_dim(int64_t dim, const char* expected) const {
  if (tensor_.dim() != dim) {
    fail(prefix() + " must be " + expected + ", got shape " + describe_shape(tensor_));
  }
  return *this;
}

const Argument& Argument::has_shape(std::initializer_list<int64_t> shape,
                                    const char* expected) const {
  const auto sizes = tensor_.sizes();
  if (!std::equal(sizes.begin(), sizes.end(), shape.begin(), shape.end())) {
    fail(prefix() + " must be " + expected + " = " + join(shape) + ", got shape " +
         describe_shape(tensor_));
  }
  return *this;
}

const Argument& Argument::is_on_device_of(const Argument& other) const {
  const DeviceId given = device_of(tensor_), expected = device_of(other.tensor_);
  if (given != expected) {
    fail(prefix() + " must be on the device of " + other.name_ + ", " + expected.describe() +
         ", got " + given.describe());
  }
  return *this;
}

const Argument& Argument::has_contiguous_rows() const {
  const int64_t last = tensor_.dim() - 1;
  if (tensor_.size(last) > 1 && tensor_.stride(last) != 1) {
    fail(prefix() + " must be contiguous in its last dimension, got stride " +
         std::to_string(tensor_.stride(last)) + "; call .contiguous() on it");
  }
  return *this;
}

const Argument& Argument::is_not_expanded(int64_t dims) const {
  for (int64_t dim = 0; dim < dims; ++dim) {
    if (tensor_.size(dim) > 1 && tensor_.stride(dim) == 0) {
      fail(prefix() + " must not be an expanded tensor, got stride 0 in dimension " +
           std::to_string(dim) + "; it is written in place, so give it memory of its own");
    }
  }
  return *this;
}

void check_aligned(const char* op, const char* argument, const void* data,
                   std::initializer_list<int64_t> strides, int64_t element_size) {
  bool is_aligned = reinterpret_cast<uintptr_t>(data) % 16 == 0;
  for (const int64_t stride : strides) is_aligned &= stride * element_size % 16 == 0;
  if (!is_aligned) {
    fail("specdec::" + std::string(op) + ": argument " + argument +
         " must begin every row at a multiple of 16 bytes on CUDA; call .contiguous() on it, or "
         "lay it out so");
  }
}

void check_num_nodes(const Argument& argument, int64_t nodes) {
  if (nodes < 1 || nodes > kMaxNodes) {
    fail(argument.prefix() + " must have 1 to " + std::to_string(kMaxNodes) +
         " nodes per row (node 0 is the root), got " + std::to_string(nodes));
  }
}

void check_num_nodes(const char* op, int64_t nodes) {
  if (nodes < 1 || nodes > kMaxNodes) {
    fail("specdec::" + std::string(op) + ": argument nodes must be 1 to " +
         std::to_string(kMaxNodes) + " (node 0 is the root), got " + std::to_string(nodes));
  }
}

FloatType check_float_type(const Argument& argument, const Tensor& tensor, bool takes_float16) {
  const int32_t dtype = dtype_of(tensor);
  if (dtype == aoti_torch_dtype_float32()) return FloatType::kFloat32;
  if (dtype == aoti_torch_dtype_bfloat16()) return FloatType::kBFloat16;
  if (takes_float16 && dtype == aoti_torch_dtype_float16()) return FloatType::kFloat16;
  fail(argument.prefix() + " must be " +
       (takes_float16 ? "torch.float32, torch.bfloat16 or torch.float16"
                      : "torch.float32 or torch.bfloat16") +
       ", got " + dtype_name(dtype) + "; convert it with .to(torch.float32)");
}

void check_vocab(const Argument& argument, const Tensor& logits, int64_t max_vocab) {
  const int64_t last = logits.dim() - 1, vocab = logits.size(last);
  if (vocab < 1 || vocab > max_vocab) {
    fail(argument.prefix() + " must have a vocabulary of 1 to " + std::to_string(max_vocab) +
         " tokens, got shape " + describe_shape(logits));
  }
  argument.has_contiguous_rows();
}

DraftNoise read_noise(const char* op, const std::vector<Tensor>& tensors, int64_t rows,
                      const Argument& other) {
  const auto read = [&](size_t i, const char* name, int32_t dtype) {
    const Argument argument(op, name, tensors[i]);
    return argument.has_dtype(dtype).has_shape({rows}, "[rows]").is_on_device_of(other);
  };
  const int32_t int64 = aoti_torch_dtype_int64();
  return {read(0, "temperatures", aoti_torch_dtype_float32()).view1<float>(),
          read(1, "seeds", int64).view1<int64_t>(), read(2, "row_ids", int64).view1<int64_t>()};
}

Tensor empty(const Tensor& like, std::span<const int64_t> shape, int32_t dtype) {
  constexpr size_t kMaxDim = 16;
  if (shape.size() > kMaxDim) fail("specdec: a tensor has more than 16 dimensions");
  int64_t strides[kMaxDim];
  int64_t stride = 1;
  for (size_t i = shape.size(); i-- > 0;) {
    strides[i] = stride;
    stride *= shape[i];
  }
  const DeviceId device = device_of(like);
  Tensor tensor(SPECDEC_TORCH_GET(TensorHandle, aoti_torch_empty_strided,
                                  static_cast<int64_t>(shape.size()), shape.data(), strides, dtype,
                                  device.type, device.index));
#ifdef SPECDEC_EMULATED
  // Filled with NaN, so that a kernel which reads memory that it has not written gives a wrong
  // result.
  if (tensor.numel() > 0) {
    std::memset(tensor.mutable_data_ptr(), 0xFF, tensor.numel() * tensor.element_size());
  }
#endif
  return tensor;
}

Tensor empty_int64(const Tensor& like, std::initializer_list<int64_t> shape) {
  return empty(like, {shape.begin(), shape.size()}, aoti_torch_dtype_int64());
}

Tensor empty_float(const Tensor& like, std::initializer_list<int64_t> shape) {
  return empty(like, {shape.begin(), shape.size()}, aoti_torch_dtype_float32());
}

Tensor empty_bytes(const Tensor& like, int64_t count) {
  return empty(like, {&count, 1}, aoti_torch_dtype_uint8());
}

Tensor zero_bytes(const Tensor& like, int64_t count) {
  Tensor tensor = empty_bytes(like, count);
  check(aoti_torch_zero_(tensor.get()), "aoti_torch_zero_");
  return tensor;
}

const ParallelFor kTorchParallelFor{
    [](void*, int64_t count, int64_t grain, ParallelFor::Body body, void* context) {
      if (cpu::sharing.is_alone(cpu::nanoseconds_now())) return body(0, count, context);
      check(torch_parallel_for(0, count, grain, body, context), "torch_parallel_for");
    }};

}  // namespace specdec::glue
