// Python objects in C++, on the limited API of Python 3.10, so that one binary serves every Python
// from 3.10 on.
#pragma once

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030A0000
#include <Python.h>

#include <cstdint>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace specdec::bindings {

// Thrown when a Python exception is set.
struct PythonError {};

// Python's TypeError as a C++ exception. std::invalid_argument becomes ValueError.
struct TypeError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// An owned reference.
class Object {
 public:
  // Takes ownership. Null means that Python has set an error.
  explicit Object(PyObject* owned) : object_(owned) {
    if (owned == nullptr) throw PythonError{};
  }
  Object(const Object& other) : object_(other.object_) { Py_XINCREF(object_); }
  Object(Object&& other) noexcept : object_(other.release()) {}
  Object& operator=(Object other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~Object() { Py_XDECREF(object_); }

  static Object none() { return Object(Py_NewRef(Py_None)); }

  PyObject* get() const { return object_; }
  PyObject* release() noexcept { return std::exchange(object_, nullptr); }

 private:
  PyObject* object_;
};

// Releases the GIL for the life of the object.
class ReleaseGil {
 public:
  ReleaseGil() : state_(PyEval_SaveThread()) {}
  ~ReleaseGil() { PyEval_RestoreThread(state_); }
  ReleaseGil(const ReleaseGil&) = delete;
  ReleaseGil& operator=(const ReleaseGil&) = delete;

 private:
  PyThreadState* state_;
};

inline std::string text_of(PyObject* object) {
  const Object text(PyObject_Str(object));
  Py_ssize_t size = 0;
  const char* data = PyUnicode_AsUTF8AndSize(text.get(), &size);
  if (data == nullptr) throw PythonError{};
  return {data, static_cast<size_t>(size)};
}

inline std::string type_name(PyObject* object) {
  const Object name(
      PyObject_GetAttrString(reinterpret_cast<PyObject*>(Py_TYPE(object)), "__name__"));
  return text_of(name.get());
}

// Calls body() and turns C++ exceptions into Python exceptions; `failed` is the result that means
// an error in Python.
template <typename Result, typename Body>
Result translated(Result failed, const Body& body) noexcept {
  try {
    return body();
  } catch (const PythonError&) {
  } catch (const TypeError& error) {
    PyErr_SetString(PyExc_TypeError, error.what());
  } catch (const std::invalid_argument& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (const std::length_error& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return failed;
}

// The arguments of a call, read with the formats of PyArg_ParseTupleAndKeywords.
struct Arguments {
  PyObject* positional;
  PyObject* keywords;

  template <typename... Targets>
  void parse(const char* format, std::initializer_list<const char*> names,
             Targets*... targets) const {
    std::vector<char*> list;
    for (const char* name : names) list.push_back(const_cast<char*>(name));
    list.push_back(nullptr);
    if (!PyArg_ParseTupleAndKeywords(positional, keywords, format, list.data(), targets...)) {
      throw PythonError{};
    }
  }
};

// Wraps Object f(PyObject* self, const Arguments&) as a method or a function of a module. The doc
// begins with the signature in the form that inspect reads: "name(a, b=1)\n--\n\n".
template <Object (*function)(PyObject* self, const Arguments& arguments)>
PyMethodDef method(const char* name, const char* doc, int flags = 0) {
  const PyCFunctionWithKeywords call = [](PyObject* self, PyObject* positional,
                                          PyObject* keywords) -> PyObject* {
    return translated<PyObject*>(
        nullptr, [&] { return function(self, Arguments{positional, keywords}).release(); });
  };
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(call)),
          METH_VARARGS | METH_KEYWORDS | flags, doc};
}

inline Object integer(int64_t value) { return Object(PyLong_FromLongLong(value)); }

// The Python class of a C++ class T, which T* create(const Arguments&) makes.
template <typename T>
class Class {
 public:
  template <T* (*create)(const Arguments&), int64_t (T::*length)() const>
  static void define(PyObject* module, const char* name, const char* doc,
                     std::vector<PyMethodDef> methods, std::vector<PyGetSetDef> properties = {}) {
    // Python keeps pointers into these for the life of the class.
    static const std::string full_name = std::string("specdec_ext._host.") + name;
    static std::vector<PyMethodDef> all_methods;
    static std::vector<PyGetSetDef> all_properties;
    all_methods = std::move(methods);
    all_methods.push_back({});
    all_properties = std::move(properties);
    all_properties.push_back({});
    const newfunc make = [](PyTypeObject* type, PyObject* positional,
                            PyObject* keywords) -> PyObject* {
      return translated<PyObject*>(nullptr, [&] {
        Object self(PyType_GenericAlloc(type, 0));
        reinterpret_cast<Instance*>(self.get())->value = create({positional, keywords});
        return self.release();
      });
    };
    const destructor destroy = [](PyObject* self) {
      PyTypeObject* type = Py_TYPE(self);
      delete reinterpret_cast<Instance*>(self)->value;
      reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
      Py_DECREF(type);
    };
    const lenfunc size = [](PyObject* self) -> Py_ssize_t { return (value(self).*length)(); };
    PyType_Slot slots[] = {{Py_tp_doc, const_cast<char*>(doc)},
                           {Py_tp_new, reinterpret_cast<void*>(make)},
                           {Py_tp_dealloc, reinterpret_cast<void*>(destroy)},
                           {Py_mp_length, reinterpret_cast<void*>(size)},
                           {Py_tp_methods, all_methods.data()},
                           {Py_tp_getset, all_properties.data()},
                           {0, nullptr}};
    PyType_Spec spec{full_name.c_str(), sizeof(Instance), 0, Py_TPFLAGS_DEFAULT, slots};
    type_ = Object(PyType_FromSpec(&spec)).release();
    if (PyModule_AddObjectRef(module, name, type_) < 0) throw PythonError{};
  }

  static void constant(const char* name, int64_t value) {
    if (PyObject_SetAttrString(type_, name, integer(value).get()) < 0) throw PythonError{};
  }

  // The C++ value of an object of this class.
  static T& value(PyObject* self) { return *reinterpret_cast<Instance*>(self)->value; }

  static bool is_type_of(PyObject* object) {
    return PyObject_TypeCheck(object, reinterpret_cast<PyTypeObject*>(type_));
  }

 private:
  struct Instance {
    PyObject_HEAD T* value;
  };

  static inline PyObject* type_ = nullptr;
};

// A read-only attribute that a method of T computes.
template <typename T, int64_t (T::*function)() const>
PyGetSetDef property(const char* name, const char* doc = nullptr) {
  const getter get = [](PyObject* self, void*) -> PyObject* {
    return translated<PyObject*>(
        nullptr, [&] { return integer((Class<T>::value(self).*function)()).release(); });
  };
  return {name, get, nullptr, doc, nullptr};
}

// The items of a sequence, kept alive.
inline std::vector<Object> items_of(PyObject* sequence) {
  const Py_ssize_t size = PySequence_Size(sequence);
  if (size < 0) throw PythonError{};
  std::vector<Object> items;
  for (Py_ssize_t i = 0; i < size; ++i) items.emplace_back(PySequence_GetItem(sequence, i));
  return items;
}

inline std::vector<int64_t> integers_of(PyObject* sequence) {
  std::vector<int64_t> numbers;
  for (const Object& item : items_of(sequence)) {
    numbers.push_back(PyLong_AsLongLong(item.get()));
    if (numbers.back() == -1 && PyErr_Occurred()) throw PythonError{};
  }
  return numbers;
}

// The objects of one class in a sequence. `name` and `expected` are for the message: "indexes", "an
// NgramIndex".
template <typename T>
class Instances {
 public:
  Instances(PyObject* sequence, const char* name, const char* expected)
      : items_(items_of(sequence)) {
    for (size_t i = 0; i < items_.size(); ++i) {
      PyObject* item = items_[i].get();
      if (Class<T>::is_type_of(item)) continue;
      throw TypeError(std::string(name) + "[" + std::to_string(i) + "] must be " + expected +
                      ", got " + (item == Py_None ? "None" : type_name(item)));
    }
  }

  int64_t size() const { return std::ssize(items_); }
  T& operator[](int64_t i) const { return Class<T>::value(items_[i].get()); }

 private:
  std::vector<Object> items_;
};

}  // namespace specdec::bindings
