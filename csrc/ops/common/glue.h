// What the glue of every op needs: checks of arguments, whose messages name the argument, what was
// expected and what was given; allocation; threads; the device.
#pragma once

#include <initializer_list>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "ops/torch_abi/tensor.h"
#include "specdec/core/float_types.h"
#include "specdec/core/parallel.h"
#include "specdec/core/platform.h"
#include "specdec/cpu/thread_team.h"
#include "specdec/sampling/coupling.h"

namespace specdec::glue {

using namespace torch_abi;  // its functions are used everywhere

// Raises ValueError.
[[noreturn]] void fail(const std::string& message);

std::string describe_shape(const Tensor& tensor);
std::string describe_numbers(std::span<const int64_t> numbers);
inline int32_t dtype_of(const Tensor& tensor) { return tensor.dtype(); }
const char* dtype_name(int32_t dtype);

// An argument with its name. The checks return it, so that they can be chained.
class Argument {
 public:
  Argument(const char* op, const char* name, const Tensor& tensor)
      : op_(op), name_(name), tensor_(tensor) {}

  const Argument& has_dtype(int32_t dtype) const;
  // Checks the number of dimensions. `expected` is the shape for the message: "[batch, nodes]".
  const Argument& has_dim(int64_t dim, const char* expected) const;
  const Argument& has_shape(std::initializer_list<int64_t> shape, const char* expected) const;
  const Argument& is_on_device_of(const Argument& other) const;
  // Checks the stride of the last dimension.
  const Argument& has_contiguous_rows() const;
  // Checks that no element of the first `dims` dimensions shares its memory with another one.
  const Argument& is_not_expanded(int64_t dims) const;
  // "specdec::op: argument name", for messages of further checks.
  std::string prefix() const;

  template <typename T>
  View1<const T> view1() const {
    return {static_cast<const T*>(tensor_.const_data_ptr()), tensor_.stride(0)};
  }

  template <typename T>
  View2<const T> view2() const {
    return {static_cast<const T*>(tensor_.const_data_ptr()), tensor_.stride(0), tensor_.stride(1)};
  }

 private:
  const char* op_;
  const char* name_;
  const Tensor& tensor_;
};

// Checks that all rows of a tensor, which has these strides before the last one, begin at multiples
// of 16 bytes.
void check_aligned(const char* op, const char* argument, const void* data,
                   std::initializer_list<int64_t> strides, int64_t element_size);

// Checks that `nodes` is in [1, kMaxNodes]: the nodes per row of an argument, or the argument nodes.
void check_num_nodes(const Argument& argument, int64_t nodes);
void check_num_nodes(const char* op, int64_t nodes);

// The ops of the CPU alone do not take float16.
FloatType check_float_type(const Argument& argument, const Tensor& tensor,
                           bool takes_float16 = true);
// Checks that the last dimension is contiguous and has 1 to `max_vocab` tokens.
void check_vocab(const Argument& argument, const Tensor& logits, int64_t max_vocab);

// The noise of a drafter's rows: temperatures [rows] float32, seeds and row_ids [rows] int64, on the
// device of `other`.
DraftNoise read_noise(const char* op, const std::vector<Tensor>& tensors, int64_t rows,
                      const Argument& other);

// Uninitialised contiguous tensors on the device of `like`.
Tensor empty(const Tensor& like, std::span<const int64_t> shape, int32_t dtype);
Tensor empty_int64(const Tensor& like, std::initializer_list<int64_t> shape);
Tensor empty_float(const Tensor& like, std::initializer_list<int64_t> shape);
Tensor empty_bytes(const Tensor& like, int64_t count);
Tensor zero_bytes(const Tensor& like, int64_t count);

inline int64_t* int64_data(const Tensor& tensor) {
  return static_cast<int64_t*>(tensor.mutable_data_ptr());
}

// Runs loops on torch's thread pool, or in the caller if other processes use the processors
// (`cpu::Sharing`).
extern const ParallelFor kTorchParallelFor;

// Runs work(parallel_for). The threads of torch's pool stay awake from its first loop to its last,
// unless other processes use the processors (`cpu::Sharing`).
template <typename F>
void with_team(const F& work) {
  const int64_t threads = SPECDEC_TORCH_GET(uint32_t, torch_get_num_threads);
  if (threads < 2 || cpu::sharing.is_alone(cpu::nanoseconds_now())) {
    cpu::ThreadTeam(1).lead(work);
    return;
  }
  cpu::ThreadTeam team(threads);
  const int64_t began = cpu::nanoseconds_now();
  int64_t led = 0;
  kTorchParallelFor(threads, 1, [&](int64_t begin, int64_t) {
    if (begin > 0) return team.help();
    team.lead(work);
    led = cpu::nanoseconds_now();
  });
  const int64_t now = cpu::nanoseconds_now();
  cpu::sharing.report(team.waited() + now - led, now - began, now);
}

}  // namespace specdec::glue
