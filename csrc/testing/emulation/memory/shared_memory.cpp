#include "shared_memory.h"

#include <cstring>
#include <string>

#include "shared_access.h"

namespace specdec::emulation {
namespace {

unsigned running_thread() { return Grid::current().self().index; }

[[noreturn]] void fail(const std::string& what) { Grid::current().fail(what); }

}  // namespace

void SharedMemory::Region::allocate(size_t bytes) {
  memory = HeapBlock(bytes);
  reset();
}

void SharedMemory::Region::reset() {
  if (memory.size() > 0) std::memset(memory.data(), 0xAB, memory.size());
  shadow.reset(memory.size(), Grid::current().launch().shared_memory_counts_as_written);
}

void SharedMemory::reset() {
  static_.reset();
  dynamic_.reset();
}

void SharedMemory::forget_accesses() {
  static_.shadow.forget_accesses();
  dynamic_.shadow.forget_accesses();
}

void* SharedMemory::static_block(size_t bytes) {
  const auto dynamic_bytes = static_cast<size_t>(Grid::current().launch().dynamic_shared_bytes);
  if (bytes > kMaxStaticBytes || bytes + dynamic_bytes > kMaxBytes) {
    fail("static shared memory of " + std::to_string(bytes) + " bytes, besides " +
         std::to_string(dynamic_bytes) + " dynamic ones: at most 48 KB, and 227 KB together");
  }
  if (static_.memory.size() == 0) static_.allocate(bytes);
  if (static_.memory.size() != bytes) fail("two static shared memories in one kernel");
  return static_.memory.data();
}

std::byte* SharedMemory::dynamic_block() {
  const auto bytes = static_cast<size_t>(Grid::current().launch().dynamic_shared_bytes);
  if (dynamic_.memory.size() != bytes) dynamic_.allocate(bytes);
  return dynamic_.memory.data();
}

SharedMemory::Region* SharedMemory::find(const void* address) {
  if (static_.memory.holds(address)) return &static_;
  return dynamic_.memory.holds(address) ? &dynamic_ : nullptr;
}

void SharedMemory::access(const void* address, size_t bytes, AccessKind kind, Location where) {
  Region* region = find(address);
  if (region == nullptr) return;
  Shadow& shadow = region->shadow;
  if (shadow.access(region->offset(address), bytes, {kind, running_thread(), where})) return;
  fail(std::string(region->name) + " shared memory: " + shadow.problem());
}

SharedMemory::Region& SharedMemory::require(const void* address, size_t bytes, size_t alignment,
                                            const char* what, Location where) {
  check_aligned(address, alignment, what, where);
  Region* region = find(address);
  if (region == nullptr) fail(what + at(where) + " is not in the block's shared memory");
  if (region->offset(address) + bytes > region->memory.size()) {
    fail(what + at(where) + ": " + std::to_string(bytes) + " bytes from byte " +
         std::to_string(region->offset(address)) + " of " + region->name +
         " shared memory, which has " + std::to_string(region->memory.size()) + " bytes");
  }
  return *region;
}

void SharedMemory::access(const void* address, size_t bytes, AccessKind kind, Location where,
                          size_t alignment, const char* what) {
  require(address, bytes, alignment, what, where);
  access(address, bytes, kind, where);
}

void SharedMemory::start_copy(const void* target, size_t bytes, Location where, size_t alignment,
                              const char* what) {
  Region& region = require(target, bytes, alignment, what, where);
  const Access access{AccessKind::kWrite, running_thread(), where};
  if (region.shadow.start_copy(region.offset(target), bytes, access)) return;
  fail(std::string(region.name) + " shared memory: " + region.shadow.problem());
}

void SharedMemory::end_copy(const void* target, size_t bytes, unsigned actor, Stamp stamp) {
  Region& region = *find(target);
  region.shadow.end_copy(region.offset(target), bytes, actor, stamp);
}

SharedMemory& shared_memory() { return block().shared(); }

void* static_shared(size_t bytes, const char* kernel) {
  Grid::current().name_kernel(kernel);
  return shared_memory().static_block(bytes);
}

SharedSpan<std::byte> dynamic_shared(const char* kernel) {
  Grid::current().name_kernel(kernel);
  return {shared_memory().dynamic_block(), Grid::current().launch().dynamic_shared_bytes};
}

void fail_bounds(int64_t index, int64_t size, Location where) {
  fail("index " + std::to_string(index) + " of shared memory with " + std::to_string(size) +
       " elements" + at(where));
}

}  // namespace specdec::emulation
