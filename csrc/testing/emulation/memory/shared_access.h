// Shared memory as kernels see it on the host: every access to an element is checked.
#pragma once

#include <concepts>
#include <cstdint>
#include <source_location>
#include <type_traits>
#include <utility>

#include "testing/emulation/threads/block.h"

namespace specdec {
namespace emulation {

SharedMemory& shared_memory();  // that of the running thread's block
[[noreturn]] void fail_bounds(int64_t index, int64_t size, Location where);

// An index, and the place in the source where it is used.
struct Index {
  int64_t value;
  Location where;

  template <std::convertible_to<int64_t> T>
  Index(T&& index, Location location = Location::current())
      : value(static_cast<int64_t>(std::forward<T>(index))), where(location) {}

  int64_t check(int64_t size) const {
    if (value < 0 || value >= size) fail_bounds(value, size, where);
    return value;
  }
};

}  // namespace emulation

// An element of shared memory in an expression. Only temporaries can be used, so that
// `auto x = a[i]`, a copy on the device, does not silently become a reference here.
template <typename T>
class SharedElement {
 public:
  SharedElement(T* address, emulation::Location where) : address_(address), where_(where) {}
  SharedElement(const SharedElement&) = delete;

  operator T() && { return load(); }
  T* operator&() && { return address_; }
  T operator=(T value) && { return store(value); }
  T operator=(SharedElement&& other) && { return store(other.load()); }
  template <typename U>
  T operator+=(const U& value) && {
    return store(static_cast<T>(load() + value));
  }
  template <typename U>
  T operator-=(const U& value) && {
    return store(static_cast<T>(load() - value));
  }
  template <typename U>
  T operator*=(const U& value) && {
    return store(static_cast<T>(load() * value));
  }
  template <typename U>
  T operator|=(const U& value) && {
    return store(static_cast<T>(load() | value));
  }
  template <typename U>
  T operator&=(const U& value) && {
    return store(static_cast<T>(load() & value));
  }
  template <typename U>
  T operator^=(const U& value) && {
    return store(static_cast<T>(load() ^ value));
  }
  T operator++() && { return store(static_cast<T>(load() + 1)); }
  T operator--() && { return store(static_cast<T>(load() - 1)); }

 private:
  T load() const {
    emulation::shared_memory().access(address_, sizeof(T), emulation::AccessKind::kRead, where_);
    return *address_;
  }
  T store(T value) const {
    emulation::shared_memory().access(address_, sizeof(T), emulation::AccessKind::kWrite, where_);
    return *address_ = value;
  }

  T* address_;
  emulation::Location where_;
};

template <typename T, int kSize>
class SharedArray {
 public:
  SharedElement<T> operator[](emulation::Index i) { return {elements_ + i.check(kSize), i.where}; }
  T* pointer(emulation::Index i) { return elements_ + i.check(kSize); }

 private:
  static_assert(std::is_trivially_copyable_v<T>);
  T elements_[kSize];
};

template <typename T>
class SharedValue {
 public:
  SharedValue(const SharedValue&) = delete;  // `auto x = value` must not copy the element
  SharedValue& operator=(const SharedValue&) = delete;

  operator T() const {
    emulation::shared_memory().access(&element_, sizeof(T), emulation::AccessKind::kRead, {});
    return element_;
  }
  T operator=(T value) {
    emulation::shared_memory().access(&element_, sizeof(T), emulation::AccessKind::kWrite, {});
    return element_ = value;
  }
  T* pointer() { return &element_; }

 private:
  static_assert(std::is_trivially_copyable_v<T>);
  T element_;
};

template <typename T>
class SharedSpan {
 public:
  SharedSpan(T* data, int64_t size) : data_(data), size_(size) {}

  SharedElement<T> operator[](emulation::Index i) const {
    return {data_ + i.check(size_), i.where};
  }
  T* pointer(emulation::Index i) const { return data_ + i.check(size_); }

  SharedSpan subspan(emulation::Index first, int64_t count) const {
    if (count < 0 || first.value < 0 || first.value > size_ - count) {
      emulation::fail_bounds(first.value + count, size_, first.where);
    }
    return SharedSpan(data_ + first.value, count);
  }

  // A span over the same bytes with elements of type U.
  template <typename U>
  SharedSpan<U> as(emulation::Location where = emulation::Location::current()) const {
    emulation::check_aligned(data_, alignof(U), "a SharedSpan cast to another type", where);
    return SharedSpan<U>(reinterpret_cast<U*>(data_),
                         size_ * static_cast<int64_t>(sizeof(T)) / static_cast<int64_t>(sizeof(U)));
  }

 private:
  T* data_;
  int64_t size_;
};

namespace emulation {

// Shared memory of the running thread's block; `kernel` is the kernel's name for messages.
void* static_shared(size_t bytes, const char* kernel);
SharedSpan<std::byte> dynamic_shared(const char* kernel);

template <typename T>
SharedSpan<T> dynamic_shared_as(const char* kernel) {
  return dynamic_shared(kernel).as<T>();
}

}  // namespace emulation
}  // namespace specdec

#define SPECDEC_SHARED(Type, name) \
  Type& name =                     \
      *static_cast<Type*>(::specdec::emulation::static_shared(sizeof(Type), __PRETTY_FUNCTION__))

#define SPECDEC_DYNAMIC_SHARED(T, name) \
  const ::specdec::SharedSpan<T> name = \
      ::specdec::emulation::dynamic_shared_as<T>(__PRETTY_FUNCTION__)
