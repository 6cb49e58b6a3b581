// Converts NumPy arrays for the host module, through NumPy's array interface. Arrays are checked
// but never converted: for an array of another type or rank the error says what to pass.
#pragma once

#include <algorithm>
#include <cstddef>
#include <initializer_list>
#include <type_traits>

#include "python.h"
#include "retrieval/tokens.h"

namespace specdec::bindings {

// The target of an array's __array_struct__; numpy.org/doc/stable/reference/arrays.interface.html.
struct ArrayInterface {
  int two;
  int dim;
  char kind;  // 'i': signed integer
  int item_bytes;
  int flags;
  Py_ssize_t* shape;
  Py_ssize_t* strides;
  void* data;
  PyObject* description;

  static constexpr int kNativeByteOrder = 0x200;
};

// An attribute of NumPy, cached for the life of the process.
inline PyObject* numpy(const char* attribute) {
  const Object module(PyImport_ImportModule("numpy"));
  return Object(PyObject_GetAttrString(module.get(), attribute)).release();
}

template <typename T>
PyObject* dtype_of() {
  static_assert(std::is_same_v<T, int64_t> || std::is_same_v<T, double>);
  static PyObject* const dtype =
      Object(PyObject_CallFunction(numpy("dtype"), "s",
                                   std::is_same_v<T, double> ? "float64" : "int64"))
          .release();
  return dtype;
}

// An array that Python owns, kept alive.
class Array {
 public:
  // A new array [shape...] of unset int64 or double.
  template <typename T>
  static Array make(std::initializer_list<int64_t> shape) {
    static PyObject* const empty = numpy("empty");
    const Object sizes(PyTuple_New(std::ssize(shape)));
    Py_ssize_t dim = 0;
    for (const int64_t size : shape) PyTuple_SetItem(sizes.get(), dim++, integer(size).release());
    return Array(Object(PyObject_CallFunctionObjArgs(empty, sizes.get(), dtype_of<T>(), nullptr)));
  }

  // Requires an int64 array of `dim` dimensions; `name` is the argument's name.
  static Array require_int64(PyObject* object, const std::string& name, int dim) {
    static PyObject* const ndarray = numpy("ndarray");
    const std::string expected =
        name + " must be an int64 NumPy array with " + std::to_string(dim) + " dimension(s), got ";
    const int is_array = PyObject_IsInstance(object, ndarray);
    if (is_array < 0) throw PythonError{};
    if (is_array == 0) {
      throw TypeError(expected + type_name(object) + "; pass numpy.asarray(" + name +
                      ", dtype=numpy.int64)");
    }
    Array array{Object(Py_NewRef(object))};
    const ArrayInterface& found = *array.interface_;
    if (found.kind != 'i' || found.item_bytes != 8 ||
        !(found.flags & ArrayInterface::kNativeByteOrder)) {
      const Object dtype(PyObject_GetAttrString(object, "dtype"));
      throw TypeError(expected + "dtype " + text_of(dtype.get()) + "; pass " + name +
                      ".astype(numpy.int64)");
    }
    if (found.dim != dim) {
      throw std::invalid_argument(expected + std::to_string(found.dim) + " dimension(s)");
    }
    return array;
  }

  int64_t size(int dim) const { return interface_->shape[dim]; }
  template <typename T>
  T* data() const {
    return static_cast<T*>(interface_->data);
  }
  // A 1-d array of token ids.
  TokenView view() const { return {data<std::byte>(), size(0), interface_->strides[0]}; }
  // The first `count` token ids of row `row` of a 2-d array.
  TokenView view_row(int64_t row, int64_t count) const {
    return {data<std::byte>() + row * interface_->strides[0], count, interface_->strides[1]};
  }

  const Object& object() const { return array_; }

 private:
  explicit Array(Object array)
      : array_(std::move(array)),
        capsule_(PyObject_GetAttrString(array_.get(), "__array_struct__")),
        interface_(
            static_cast<const ArrayInterface*>(PyCapsule_GetPointer(capsule_.get(), nullptr))) {
    if (interface_ == nullptr) throw PythonError{};
  }

  Object array_;
  Object capsule_;
  const ArrayInterface* interface_;
};

inline Array to_array(const std::vector<int64_t>& values) {
  const Array array = Array::make<int64_t>({std::ssize(values)});
  std::copy(values.begin(), values.end(), array.data<int64_t>());
  return array;
}

template <typename... Arrays>
Object tuple_of(const Arrays&... arrays) {
  return Object(PyTuple_Pack(sizeof...(arrays), arrays.object().get()...));
}

}  // namespace specdec::bindings
