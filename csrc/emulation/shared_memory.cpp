#include "shared_memory.h"

#include <cstring>
#include <string>

#include "shared_access.h"

namespace specdec::emulation {

void* SharedMemory::static_block(size_t bytes) {
  if (static_.size() == 0) {
    if (bytes > kMaxStaticBytes) {
      Grid::current().fail("static shared memory of " + std::to_string(bytes) +
                           " bytes, at most 49152 are possible");
    }
    static_ = HeapBlock(bytes);
    std::memset(static_.data(), 0xAB, bytes);
  }
  if (static_.size() != bytes) Grid::current().fail("two static shared memories in one kernel");
  return static_.data();
}

std::byte* SharedMemory::dynamic_block() {
  const auto bytes = static_cast<size_t>(Grid::current().launch().dynamic_shared_bytes);
  if (dynamic_.size() == 0) {
    dynamic_ = HeapBlock(bytes);
    std::memset(dynamic_.data(), 0xAB, bytes);
  }
  return dynamic_.data();
}

void SharedMemory::reset() {
  for (const HeapBlock* block : {&static_, &dynamic_}) {
    if (block->size() > 0) std::memset(block->data(), 0xAB, block->size());
  }
}

void SharedMemory::read(const void*, size_t, Location) {}
void SharedMemory::write(const void*, size_t, Location) {}
void SharedMemory::atomic(const void*, size_t, Location) {}

SharedMemory& shared_memory() { return block().shared(); }

void* static_shared(size_t bytes, const char* kernel) {
  Grid::current().name_kernel(kernel);
  return shared_memory().static_block(bytes);
}

SharedSpan<std::byte> dynamic_shared(const char* kernel) {
  Grid::current().name_kernel(kernel);
  return {shared_memory().dynamic_block(), shared_memory().dynamic_bytes()};
}

void fail_bounds(int64_t index, int64_t size, Location where) {
  Grid::current().fail("index " + std::to_string(index) + " of shared memory with " +
                       std::to_string(size) + " elements (" + describe(where) + ")");
}

}  // namespace specdec::emulation
