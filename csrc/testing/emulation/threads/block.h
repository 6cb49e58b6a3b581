// A block of an emulated launch: its shared memory and the synchronisation of its threads.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "grid.h"
#include "testing/emulation/memory/async.h"
#include "testing/emulation/memory/shared_memory.h"
#include "testing/emulation/races/clocks.h"
#include "testing/emulation/races/sync_variables.h"

namespace specdec::emulation {

// The operands of the lanes that meet, by lane; null for a lane that does not take part.
using LaneOperands = std::array<void*, 32>;

// A meeting of lanes. The lane that arrives last computes all results with `complete`. Without a
// `complete` function, the meeting is a barrier and orders memory.
struct Meeting {
  const char* what;
  Location where;
  uint32_t lanes;
  void (*complete)(const LaneOperands& operands);
  // A barrier or vote completes without lanes that have ended or never existed. A shuffle does not,
  // because there is no value to read.
  bool needs_all_lanes;
};

class Block {
 public:
  Block(Thread* threads, unsigned num_threads);

  unsigned x() const { return x_; }
  unsigned y() const { return y_; }
  SharedMemory& shared() { return shared_; }
  SyncVariables& atomics() { return atomics_; }
  AsyncCopies& copies() { return copies_; }

  // Restores the state before any thread has run.
  void reset(unsigned x, unsigned y);

  // Called by the running thread; returns when all others have arrived.
  void barrier(Location where);
  void named_barrier(int id, int num_threads, Location where);
  void meet(const Meeting& meeting, void* operand);
  // Called when the running thread has ended.
  void end_thread(Thread& self);

  std::string describe_wait(const Thread& thread) const;

 private:
  struct NamedBarrier {
    int num_threads = 0;
    std::vector<Thread*> waiting;
  };
  struct Warp {
    uint32_t live = 0, meeting = 0;  // lanes that have not ended; lanes that wait for other lanes
  };

  void require_fence(const Thread& thread) const;
  void release_barrier();
  void join(const std::vector<Thread*>& threads);
  void try_meeting(unsigned warp, const Meeting& meeting);

  unsigned x_ = 0, y_ = 0;
  Thread* threads_;
  unsigned num_threads_;
  unsigned num_live_ = 0, num_at_barrier_ = 0;
  Location barrier_site_;
  std::vector<Warp> warps_;
  std::array<NamedBarrier, 16> named_;
  Clocks clocks_;
  SharedMemory shared_;
  SyncVariables atomics_;
  AsyncCopies copies_;
};

// The block of the running thread.
inline Block& block() { return *Grid::current().self().block; }

}  // namespace specdec::emulation
