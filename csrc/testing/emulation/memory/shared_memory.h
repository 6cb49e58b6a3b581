// The shared memory of an emulated block.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

#include "testing/emulation/races/shadow.h"

namespace specdec::emulation {

// A heap block of exactly the requested size, so that AddressSanitizer detects accesses outside.
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

  explicit SharedMemory(Clocks& clocks)
      : static_{"static", {}, Shadow(clocks)}, dynamic_{"dynamic", {}, Shadow(clocks)} {}

  void* static_block(size_t bytes);
  std::byte* dynamic_block();
  // Marks all bytes as never written and sets them to 0xAB.
  void reset();
  // Called when all threads have passed a barrier.
  void forget_accesses();

  // Checks an access of the running thread to checked memory. Accesses to device memory are not
  // checked.
  void access(const void* address, size_t bytes, AccessKind kind, Location where);
  // The same for an address that must be in shared memory and a multiple of `alignment`; `what`
  // names the operation for messages.
  void access(const void* address, size_t bytes, AccessKind kind, Location where, size_t alignment,
              const char* what);
  // Begins and ends an asynchronous copy of the running thread to checked memory.
  void start_copy(const void* target, size_t bytes, Location where, size_t alignment,
                  const char* what);
  void end_copy(const void* target, size_t bytes, unsigned actor, Stamp stamp);

 private:
  struct Region {
    const char* name;
    HeapBlock memory;
    Shadow shadow;

    size_t offset(const void* address) const {
      return static_cast<size_t>(static_cast<const std::byte*>(address) - memory.data());
    }
    void allocate(size_t bytes);
    void reset();
  };

  Region* find(const void* address);
  Region& require(const void* address, size_t bytes, size_t alignment, const char* what,
                  Location where);

  Region static_, dynamic_;
};

}  // namespace specdec::emulation
