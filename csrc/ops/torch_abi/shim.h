// The functions of torch's stable C ABI that the glue calls. They are declared here, so a build
// does not need torch: it links against an empty library named libtorch_cpu.so, and the functions
// are found when the op library is loaded under torch >= 2.10.
//
// Contract: torch/csrc/inductor/aoti_torch/c/shim.h and torch/csrc/stable/c/shim.h of torch 2.10,
// which later releases keep. python_tests/ops/test_torch_abi.py compiles both side by side and
// compares every type.
#pragma once

#include <cstddef>
#include <cstdint>

// torch's own names, so that the types are identical.
struct AtenTensorOpaque;
struct DeviceGuardOpaque;
struct StableListOpaque;
struct StringOpaque;
class TorchLibraryOpaque;

namespace specdec::torch_abi {

using TensorHandle = AtenTensorOpaque*;
using DeviceGuardHandle = DeviceGuardOpaque*;
using ListHandle = StableListOpaque*;
using StringHandle = StringOpaque*;
using LibraryHandle = TorchLibraryOpaque*;

// 0 means success.
using Error = int32_t;

// One argument or result of an op: a number in the first bytes, or a handle. An optional is a
// pointer to a value on the heap, or null.
using StableValue = uint64_t;

// Takes the arguments from `stack` and writes the results there.
using BoxedFunction = void (*)(StableValue* stack, uint64_t num_arguments, uint64_t num_results);

// Values on the stack follow the rules of this torch release.
inline constexpr uint64_t kVersion = (uint64_t{2} << 56) | (uint64_t{10} << 48);

extern "C" {

int32_t aoti_torch_device_type_cpu();
int32_t aoti_torch_device_type_cuda();

int32_t aoti_torch_dtype_bfloat16();
int32_t aoti_torch_dtype_bool();
int32_t aoti_torch_dtype_float16();
int32_t aoti_torch_dtype_float32();
int32_t aoti_torch_dtype_float64();
int32_t aoti_torch_dtype_float8_e4m3fn();
int32_t aoti_torch_dtype_int32();
int32_t aoti_torch_dtype_int64();
int32_t aoti_torch_dtype_int8();
int32_t aoti_torch_dtype_uint8();
size_t aoti_torch_dtype_element_size(int32_t dtype);

// Tensors. The caller owns what `result` of the next two functions points to.
Error aoti_torch_new_tensor_handle(TensorHandle tensor, TensorHandle* result);
Error aoti_torch_empty_strided(int64_t dim, const int64_t* sizes, const int64_t* strides,
                               int32_t dtype, int32_t device_type, int32_t device_index,
                               TensorHandle* result);
Error aoti_torch_delete_tensor_object(TensorHandle tensor);
Error aoti_torch_get_dim(TensorHandle tensor, int64_t* result);
Error aoti_torch_get_numel(TensorHandle tensor, int64_t* result);
Error aoti_torch_get_size(TensorHandle tensor, int64_t dim, int64_t* result);
Error aoti_torch_get_sizes(TensorHandle tensor, int64_t** result);
Error aoti_torch_get_stride(TensorHandle tensor, int64_t dim, int64_t* result);
Error aoti_torch_get_dtype(TensorHandle tensor, int32_t* result);
Error aoti_torch_get_device_type(TensorHandle tensor, int32_t* result);
Error aoti_torch_get_device_index(TensorHandle tensor, int32_t* result);
Error aoti_torch_is_contiguous(TensorHandle tensor, bool* result);
Error aoti_torch_zero_(TensorHandle tensor);
Error torch_get_const_data_ptr(TensorHandle tensor, const void** result);
Error torch_get_mutable_data_ptr(TensorHandle tensor, void** result);

// Lists among the arguments of an op are owned by the op.
Error torch_list_size(ListHandle list, size_t* result);
Error torch_list_get_item(ListHandle list, size_t index, StableValue* result);
Error torch_delete_list(ListHandle list);

// torch takes the string from the results of an op.
Error torch_new_string_handle(const char* data, size_t length, StringHandle* result);

// Registration. Deleting a library removes its registrations.
Error aoti_torch_library_init_def(const char* name, const char* file, uint32_t line,
                                  LibraryHandle* result);
Error aoti_torch_library_init_impl(const char* name, const char* dispatch_key, const char* file,
                                   uint32_t line, LibraryHandle* result);
Error aoti_torch_library_def(LibraryHandle library, const char* schema);
Error torch_library_impl(LibraryHandle library, const char* op, BoxedFunction function,
                         uint64_t version);
Error aoti_torch_delete_library_object(LibraryHandle library);

// Makes a device the current one until the guard is deleted.
Error aoti_torch_create_device_guard(int32_t device_index, DeviceGuardHandle* result);
Error aoti_torch_delete_device_guard(DeviceGuardHandle guard);

// torch's thread pool: body(begin, end, context) on parts of [begin, end).
Error torch_parallel_for(int64_t begin, int64_t end, int64_t grain,
                         void (*body)(int64_t, int64_t, void*), void* context);
Error torch_get_num_threads(uint32_t* result);

}  // extern "C"

}  // namespace specdec::torch_abi
