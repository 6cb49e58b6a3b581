// The memory order of atomic operations: what a thread learns when it reads a value that another
// thread of the block wrote. The rules are those of C++ and PTX: a release makes what happened
// before it known to the acquire that reads its value; relaxed operations do so only together with
// fences.
//
// Atomics in device memory order accesses to shared memory too. Chains through other blocks are not
// tracked, so a relaxed load, with which a thread waits for other blocks, must be followed by a
// fence before the block goes on.
#pragma once

#include <optional>
#include <unordered_map>
#include <vector>

#include "clocks.h"
#include "location.h"

namespace specdec::emulation {

enum class MemoryOrder { kRelaxed, kAcquireRelease };

class SyncVariables {
 public:
  explicit SyncVariables(Clocks& clocks) : clocks_(clocks), threads_(clocks.num_threads()) {}
  void reset();

  void load_acquire(unsigned thread, const void* address);
  void load_relaxed(unsigned thread, const void* address, Location where);
  void store_release(unsigned thread, const void* address);
  void update(unsigned thread, const void* address, MemoryOrder order);
  void fence(unsigned thread);
  // The latest relaxed load of a thread, if no fence followed.
  std::optional<Location> unfenced_load(unsigned thread) const { return threads_[thread].unfenced; }

 private:
  struct Thread {
    Stamp fence = 0;                        // stamp of the segment before the latest fence; 0: none
    std::vector<const void*> read_relaxed;  // since then, if there is something to learn
    std::optional<Location> unfenced;       // the latest load_relaxed since then
  };

  void read_relaxed(unsigned thread, const void* address);

  Clocks& clocks_;
  std::unordered_map<const void*, Knowledge> released_;  // by address, for the current values
  std::vector<Thread> threads_;
};

}  // namespace specdec::emulation
