// A tensor of torch and its device, through the functions of shim.h.
#pragma once

#include <span>
#include <stdexcept>
#include <string>
#include <utility>

#include "shim.h"

namespace specdec::torch_abi {

// Raises RuntimeError with the name of the failed function. torch prints the reason itself.
inline void check(Error error, const char* function) {
  if (error != 0)
    throw std::runtime_error("specdec_ext: torch's " + std::string(function) + " failed");
}

// Calls `function` with `arguments` and a pointer to its result, and returns the result.
#define SPECDEC_TORCH_GET(type, function, ...)                                             \
  [&] {                                                                                    \
    type result{};                                                                         \
    ::specdec::torch_abi::check(function(__VA_ARGS__ __VA_OPT__(, ) & result), #function); \
    return result;                                                                         \
  }()

// A reference to a tensor: copies share its memory.
class Tensor {
 public:
  // Takes ownership of the handle.
  explicit Tensor(TensorHandle handle) : handle_(handle) {}
  Tensor(const Tensor& other)
      : handle_(SPECDEC_TORCH_GET(TensorHandle, aoti_torch_new_tensor_handle, other.handle_)) {}
  Tensor(Tensor&& other) noexcept : handle_(other.release()) {}
  Tensor& operator=(Tensor other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~Tensor() {
    if (handle_ != nullptr) aoti_torch_delete_tensor_object(handle_);
  }

  TensorHandle get() const { return handle_; }
  // Gives the handle away. This tensor must not be used afterwards.
  TensorHandle release() noexcept { return std::exchange(handle_, nullptr); }

  int64_t dim() const { return SPECDEC_TORCH_GET(int64_t, aoti_torch_get_dim, handle_); }
  int64_t numel() const { return SPECDEC_TORCH_GET(int64_t, aoti_torch_get_numel, handle_); }
  int64_t size(int64_t dim) const {
    return SPECDEC_TORCH_GET(int64_t, aoti_torch_get_size, handle_, dim);
  }
  int64_t stride(int64_t dim) const {
    return SPECDEC_TORCH_GET(int64_t, aoti_torch_get_stride, handle_, dim);
  }
  // Valid for the life of the tensor.
  std::span<const int64_t> sizes() const {
    return {SPECDEC_TORCH_GET(int64_t*, aoti_torch_get_sizes, handle_), static_cast<size_t>(dim())};
  }
  int32_t dtype() const { return SPECDEC_TORCH_GET(int32_t, aoti_torch_get_dtype, handle_); }
  size_t element_size() const { return aoti_torch_dtype_element_size(dtype()); }
  int32_t device_type() const {
    return SPECDEC_TORCH_GET(int32_t, aoti_torch_get_device_type, handle_);
  }
  int32_t device_index() const {
    return SPECDEC_TORCH_GET(int32_t, aoti_torch_get_device_index, handle_);
  }
  bool is_cpu() const { return device_type() == aoti_torch_device_type_cpu(); }
  bool is_contiguous() const { return SPECDEC_TORCH_GET(bool, aoti_torch_is_contiguous, handle_); }
  const void* const_data_ptr() const {
    return SPECDEC_TORCH_GET(const void*, torch_get_const_data_ptr, handle_);
  }
  void* mutable_data_ptr() const {
    return SPECDEC_TORCH_GET(void*, torch_get_mutable_data_ptr, handle_);
  }

 private:
  TensorHandle handle_;
};

// Makes a device the current one for the life of the guard.
class DeviceGuard {
 public:
  explicit DeviceGuard(int32_t device_index)
      : handle_(
            SPECDEC_TORCH_GET(DeviceGuardHandle, aoti_torch_create_device_guard, device_index)) {}
  ~DeviceGuard() { aoti_torch_delete_device_guard(handle_); }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  DeviceGuardHandle handle_;
};

}  // namespace specdec::torch_abi
