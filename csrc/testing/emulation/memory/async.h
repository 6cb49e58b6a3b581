// Asynchronous copies of an emulated block, and the mbarriers that count them.
//
// The thread order decides when a copy lands. In kBackward it lands as late as CUDA allows
// (cp.async at the wait that covers it, a bulk copy when no thread can run), in kForward at once,
// in kShuffled either way. In every order only threads that have waited may read its target.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "testing/emulation/races/clocks.h"
#include "testing/emulation/races/shadow.h"
#include "testing/emulation/threads/grid.h"

namespace specdec::emulation {

class SharedMemory;

class AsyncCopies {
 public:
  AsyncCopies(Clocks& clocks, SharedMemory& shared)
      : clocks_(clocks), shared_(shared), threads_(clocks.num_threads()) {}

  void reset();
  // Called when all threads have ended.
  void end_block() const;

  // cp.async of the running thread; a null source gives zeros. wait() waits for all but the latest
  // groups.
  void copy(void* target, const void* source, Location where);
  void commit();
  void wait_groups(int num_groups);

  void init(const void* mbarrier, int count, Location where);
  // Expects `bytes` more in the current phase.
  void arrive(const void* mbarrier, int bytes, Location where);
  void wait(const void* mbarrier, int parity, Location where);
  // Lets bulk copies see the mbarriers that the running thread has initialised.
  void proxy_fence();
  void bulk_copy(void* target, const void* source, int bytes, const void* mbarrier, Location where);

  // Lets one bulk copy land; returns false if there is none.
  bool land_one();
  std::string describe(const void* mbarrier) const;

 private:
  struct Copy {
    std::byte* target;
    const std::byte* source;
    size_t bytes;
    bool moved;
    int group;
  };
  struct Thread {
    std::vector<Copy> copies;
    int group = 0;  // the open group
  };
  // The state of an Mbarrier in shared memory.
  struct Mbarrier {
    unsigned actor;         // the actor of its copies
    int count;              // arrivals per phase
    int pending;            // of these, arrivals missing in the current phase
    int64_t pending_bytes;  // negative if copies have landed before they were announced
    unsigned phase;
    unsigned initialiser;           // the thread
    bool seen_by_copies;            // a fence followed its initialisation
    Knowledge arriving, completed;  // what threads that arrive release, now and in completed phases
    std::vector<emulation::Thread*> waiting;
  };
  struct BulkCopy {
    Copy copy;
    const void* mbarrier;
    Location where;
  };

  bool lands_at_once() const;
  static void move(Copy& copy);
  // Checks that the running thread may use it in this way.
  Mbarrier& use(const void* mbarrier, AccessKind kind, Location where, const char* what);
  void land(BulkCopy bulk);
  void complete_phase(Mbarrier& barrier);

  Clocks& clocks_;
  SharedMemory& shared_;
  std::vector<Thread> threads_;
  std::map<const void*, Mbarrier> mbarriers_;
  std::vector<BulkCopy> in_flight_;
};

}  // namespace specdec::emulation
