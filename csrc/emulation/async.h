// Asynchronous copies of an emulated block, and the mbarriers that count them.
//
// A copy lands as late as CUDA allows or at once, by the order of the threads: as late in kBackward
// (cp.async at the wait that covers it, a bulk copy when no thread can run), at once in kForward,
// either in kShuffled. Its destination counts as unwritten until then.
#pragma once

#include <deque>
#include <map>
#include <string>
#include <vector>

#include "grid.h"

namespace specdec::emulation {

struct Copy {
  std::byte* target;
  const std::byte* source;  // null: zeros
  size_t bytes;
  bool landed;
};

// What an Mbarrier in shared memory stands for.
struct MbarrierState {
  int count;              // arrivals per phase
  int pending;            // of the current phase
  int64_t pending_bytes;  // may be negative while the phase is open: copies landed unannounced
  unsigned phase;
  std::vector<Thread*> waiting;
};

class AsyncCopies {
 public:
  explicit AsyncCopies(unsigned num_threads) : groups_(num_threads) {}

  void reset();

  // cp.async of the running thread.
  void copy(void* target, const void* source, size_t bytes, Location where);
  void commit();
  void wait(int num_groups);

  void init(const void* mbarrier, int count, Location where);
  // `bytes` more are expected in the current phase.
  void arrive(const void* mbarrier, int bytes, Location where);
  void wait(const void* mbarrier, int parity, Location where);
  void bulk_copy(void* target, const void* source, int bytes, const void* mbarrier, Location where);

  // Lets one bulk copy land; false if there is none.
  bool land_one();
  std::string describe(const void* mbarrier) const;

 private:
  using Group = std::vector<Copy>;
  struct BulkCopy {
    Copy copy;
    const void* mbarrier;
  };

  MbarrierState& state(const void* mbarrier, const char* what);
  void land(Copy& copy);
  void land(const BulkCopy& bulk);
  void complete_phase(MbarrierState& state);
  bool lands_at_once() const;

  std::vector<std::deque<Group>> groups_;  // per thread; the last one is open
  std::map<const void*, MbarrierState> mbarriers_;
  std::deque<BulkCopy> in_flight_;
};

}  // namespace specdec::emulation
