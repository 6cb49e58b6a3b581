// Registers ops with torch, and converts between torch's stack of values and the arguments and
// results of a C++ function.
#pragma once

#include <cstring>
#include <initializer_list>
#include <memory>
#include <optional>
#include <source_location>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include "tensor.h"

namespace specdec::torch_abi {

// Converts a value of type T on the stack: take() reads an argument, which the caller then owns;
// give() makes a result, which torch then owns.
template <typename T>
struct OnStack {
  static_assert(std::is_arithmetic_v<T> || std::is_pointer_v<T>, "an op can't take or give this");

  static T take(StableValue value) {
    T result;
    std::memcpy(&result, &value, sizeof(result));  // little-endian: the first bytes
    return result;
  }
  static StableValue give(T given) {
    StableValue value = 0;
    std::memcpy(&value, &given, sizeof(given));
    return value;
  }
};

template <>
struct OnStack<Tensor> {
  static Tensor take(StableValue value) { return Tensor(OnStack<TensorHandle>::take(value)); }
  static StableValue give(Tensor given) { return OnStack<TensorHandle>::give(given.release()); }
};

template <>
struct OnStack<std::string> {
  static StableValue give(const std::string& given) {
    return OnStack<StringHandle>::give(
        SPECDEC_TORCH_GET(StringHandle, torch_new_string_handle, given.data(), given.size()));
  }
};

template <typename T>
struct OnStack<std::optional<T>> {
  static std::optional<T> take(StableValue value) {
    const std::unique_ptr<StableValue> content(OnStack<StableValue*>::take(value));
    if (content == nullptr) return std::nullopt;
    return OnStack<T>::take(*content);
  }
  static StableValue give(const std::optional<T>& given) {
    return OnStack<StableValue*>::give(given ? new StableValue(OnStack<T>::give(*given)) : nullptr);
  }
};

template <typename T>
struct OnStack<std::vector<T>> {
  static std::vector<T> take(StableValue value) {
    struct Delete {
      void operator()(ListHandle list) const { torch_delete_list(list); }
    };
    const std::unique_ptr<StableListOpaque, Delete> list(OnStack<ListHandle>::take(value));
    std::vector<T> items;
    const size_t size = SPECDEC_TORCH_GET(size_t, torch_list_size, list.get());
    items.reserve(size);
    for (size_t i = 0; i < size; ++i) {
      items.push_back(
          OnStack<T>::take(SPECDEC_TORCH_GET(StableValue, torch_list_get_item, list.get(), i)));
    }
    return items;
  }
};

// boxed<&f> calls f in the way torch calls ops.
template <typename Result, typename... Arguments>
struct Boxing {
  template <Result (*function)(Arguments...)>
  static void call(StableValue* stack, uint64_t num_arguments, uint64_t num_results) {
    check_counts(num_arguments, num_results);
    auto arguments = take(stack, std::index_sequence_for<Arguments...>());
    if constexpr (std::is_void_v<Result>) {
      std::apply(function, arguments);
    } else {
      give(stack, std::apply(function, arguments));
    }
  }

 private:
  template <typename T>
  struct Count : std::integral_constant<size_t, std::is_void_v<T> ? 0 : 1> {};
  template <typename... T>
  struct Count<std::tuple<T...>> : std::integral_constant<size_t, sizeof...(T)> {};

  static void check_counts(uint64_t num_arguments, uint64_t num_results) {
    if (num_arguments != sizeof...(Arguments) || num_results != Count<Result>::value) {
      throw std::runtime_error("specdec_ext: an op does not have the arguments of its schema");
    }
  }

  template <size_t... index>
  static auto take(StableValue* stack, std::index_sequence<index...>) {
    return std::tuple<std::remove_cvref_t<Arguments>...>{
        OnStack<std::remove_cvref_t<Arguments>>::take(stack[index])...};
  }

  template <typename T>
  static void give(StableValue* stack, T result) {
    stack[0] = OnStack<T>::give(std::move(result));
  }
  template <typename... T>
  static void give(StableValue* stack, std::tuple<T...> results) {
    std::apply([&](T&... each) { ((*stack++ = OnStack<T>::give(std::move(each))), ...); }, results);
  }
};

template <typename Result, typename... Arguments>
Boxing<Result, Arguments...> boxing_of(Result (*)(Arguments...));

template <auto function>
inline constexpr BoxedFunction boxed = &decltype(boxing_of(function))::template call<function>;

// Ops of one namespace. They stay registered for the life of the object.
class Library {
 public:
  using Location = std::source_location;  // torch names it if it refuses a registration

  // Declares the ops of `schemas`.
  Library(const char* name, std::initializer_list<const char*> schemas,
          Location where = Location::current())
      : handle_(SPECDEC_TORCH_GET(LibraryHandle, aoti_torch_library_init_def, name,
                                  where.file_name(), where.line())) {
    for (const char* schema : schemas) {
      check(aoti_torch_library_def(handle_, schema), "aoti_torch_library_def");
    }
  }
  // Starts the implementations for one kind of device, which impl() adds.
  Library(const char* name, const char* dispatch_key, Location where = Location::current())
      : handle_(SPECDEC_TORCH_GET(LibraryHandle, aoti_torch_library_init_impl, name, dispatch_key,
                                  where.file_name(), where.line())) {}
  ~Library() { aoti_torch_delete_library_object(handle_); }
  Library(const Library&) = delete;
  Library& operator=(const Library&) = delete;

  void impl(const char* op, BoxedFunction function) {
    check(torch_library_impl(handle_, op, function, kVersion), "torch_library_impl");
  }

 private:
  LibraryHandle handle_;
};

}  // namespace specdec::torch_abi
