// NumPy arrays in and out of the host module. Arrays are checked, never converted: an array of
// another type or rank is an error that says what to pass.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>
#include <vector>

#include "../host/tokens.h"

namespace specdec::bindings {

namespace py = pybind11;

// The batched form of a draft tree: unused nodes carry token 0 and parent kInactive.
inline constexpr int64_t kRootParent = -1;
inline constexpr int64_t kInactive = -2;

inline std::string type_name(const py::handle& object) {
  return py::str(py::type::handle_of(object).attr("__name__"));
}

inline py::array require_int64_array(const py::handle& object, const std::string& name, int ndim) {
  const std::string expected =
      name + " must be an int64 NumPy array with " + std::to_string(ndim) + " dimension(s), got ";
  if (!py::isinstance<py::array>(object)) {
    throw py::type_error(expected + type_name(object) + "; pass numpy.asarray(" + name +
                         ", dtype=numpy.int64)");
  }
  auto array = py::reinterpret_borrow<py::array>(object);
  if (!array.dtype().equal(py::dtype::of<int64_t>())) {
    throw py::type_error(expected + "dtype " + std::string(py::str(array.dtype())) + "; pass " +
                         name + ".astype(numpy.int64)");
  }
  if (array.ndim() != ndim) {
    throw py::value_error(expected + std::to_string(array.ndim()) + " dimension(s)");
  }
  return array;
}

inline TokenView view_row(const py::array& tokens, int64_t row, int64_t count) {
  const auto* data = static_cast<const std::byte*>(tokens.data());
  return {data + row * tokens.strides(0), count, tokens.strides(1)};
}

inline py::array_t<int64_t> to_array(const std::vector<int64_t>& values) {
  return py::array_t<int64_t>(static_cast<py::ssize_t>(values.size()), values.data());
}

}  // namespace specdec::bindings
