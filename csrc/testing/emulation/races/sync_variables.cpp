#include "sync_variables.h"

namespace specdec::emulation {

void SyncVariables::reset() {
  released_.clear();
  for (Thread& thread : threads_) thread = {};
}

void SyncVariables::load_acquire(unsigned thread, const void* address) {
  const auto found = released_.find(address);
  if (found != released_.end()) clocks_.acquire(thread, found->second);
}

void SyncVariables::load_relaxed(unsigned thread, const void* address, Location where) {
  read_relaxed(thread, address);
  threads_[thread].unfenced = where;
}

void SyncVariables::read_relaxed(unsigned thread, const void* address) {
  std::vector<const void*>& addresses = threads_[thread].read_relaxed;
  const bool is_known = !addresses.empty() && addresses.back() == address;  // a spin
  if (!is_known && released_.contains(address)) addresses.push_back(address);
}

// A store discards what was released through former values.
void SyncVariables::store_release(unsigned thread, const void* address) {
  Knowledge& released = released_[address];
  released = {};
  clocks_.release(thread, released);
}

// A read-modify-write keeps what was released through the value that it replaces.
void SyncVariables::update(unsigned thread, const void* address, MemoryOrder order) {
  if (order == MemoryOrder::kAcquireRelease) {
    load_acquire(thread, address);
    clocks_.release(thread, released_[address]);
    return;
  }
  read_relaxed(thread, address);
  const Thread& self = threads_[thread];
  if (self.fence != 0) clocks_.release_until(thread, self.fence, released_[address]);
}

void SyncVariables::fence(unsigned thread) {
  Thread& self = threads_[thread];
  for (const void* address : self.read_relaxed) load_acquire(thread, address);
  self.read_relaxed.clear();
  self.unfenced.reset();
  self.fence = clocks_.cut(thread);
}

}  // namespace specdec::emulation
