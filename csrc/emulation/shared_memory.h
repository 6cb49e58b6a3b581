// The shared memory of an emulated block.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

#include "grid.h"

namespace specdec::emulation {

// A heap block of exactly the size asked for, so that AddressSanitizer sees what is outside.
class HeapBlock {
 public:
  static constexpr size_t kAlignment = 128;

  HeapBlock() = default;
  explicit HeapBlock(size_t bytes)
      : bytes_(bytes),
        data_(static_cast<std::byte*>(::operator new(bytes, std::align_val_t{kAlignment}))) {}

  std::byte* data() const { return data_.get(); }
  size_t size() const { return bytes_; }
  bool holds(const void* pointer) const {
    const auto offset = reinterpret_cast<uintptr_t>(pointer) - reinterpret_cast<uintptr_t>(data());
    return offset < bytes_;
  }

 private:
  struct Delete {
    void operator()(std::byte* data) const {
      ::operator delete(data, std::align_val_t{kAlignment});
    }
  };
  size_t bytes_ = 0;
  std::unique_ptr<std::byte, Delete> data_;
};

class SharedMemory {
 public:
  static constexpr size_t kMaxStaticBytes = 48 * 1024;
  static constexpr size_t kMaxBytes = 227 * 1024;

  void* static_block(size_t bytes);
  std::byte* dynamic_block();
  int64_t dynamic_bytes() const { return static_cast<int64_t>(dynamic_.size()); }
  // Fills everything with 0xAB.
  void reset();

  // Accesses of the running thread. Addresses that are not in this block's shared memory are legal:
  // an atomic may work on device memory.
  void read(const void* address, size_t bytes, Location where);
  void write(const void* address, size_t bytes, Location where);
  void atomic(const void* address, size_t bytes, Location where);

 private:
  HeapBlock static_, dynamic_;
};

}  // namespace specdec::emulation
