// Threads that stay together for a run of many short parallel loops. Waking a pool for each takes
// microseconds, as long as such a loop itself; members of a team wait awake.
//
// Loops are cut into a chunk for each member, and who is free takes the next. So a member that the
// system runs late, or never, is not waited for: the leader does its chunks. A member that the
// system interrupts within a chunk is waited for, and so is one that comes too late to take any,
// when the pool gathers its threads at the end: where other processes want the processors that is a
// time slice of theirs, longer than a whole run of loops. `Sharing` notices, and runs are led alone
// for a while.
#pragma once

#include <atomic>

#include "specdec/core/parallel.h"

namespace specdec::cpu {

// Whether the processors are shared with others, told by how long leaders wait for their helpers.
//
// A long wait is a strike: for a pause, which doubles from strike to strike, there are no helpers.
// What a strike costs is so a small share of the time, and helpers are back soon after others are
// gone. Runs without a long wait shorten the next pause again. Any thread may ask and report; a
// race between two makes a pause a little too long or short. Times are of one clock, in
// nanoseconds.
class Sharing {
 public:
  // Helpers that a processor has to be found for first may take tens of microseconds.
  static constexpr int64_t kLongWait = 300'000;
  static constexpr int64_t kFirstPause = 20'000'000, kLastPause = 1'000'000'000;
  // Good runs in a row that halve the next pause.
  static constexpr int64_t kGoodRuns = 32;

  bool is_alone(int64_t now) const { return now < alone_until_.load(std::memory_order_relaxed); }
  void report(int64_t waited, int64_t now);

 private:
  std::atomic<int64_t> alone_until_{0};
  std::atomic<int64_t> pause_{kFirstPause};
  std::atomic<int64_t> good_runs_{0};
};

// Of this process.
extern Sharing sharing;
// Of a clock that never goes back.
int64_t nanoseconds_now();

class ThreadTeam {
 public:
  // The leader included.
  explicit ThreadTeam(int64_t threads) : threads_(threads) {}
  ThreadTeam(const ThreadTeam&) = delete;
  ThreadTeam& operator=(const ThreadTeam&) = delete;

  // work(parallel_for), by the leader; afterwards, or if it throws, members are let go.
  template <typename F>
  void lead(const F& work) {
    struct Dismissal {
      ~Dismissal() { is_over.store(true, std::memory_order_release); }
      std::atomic<bool>& is_over;
    } dismissal{is_over_};
    work(ParallelFor{run, this, kGrainDivisor});
  }

  // Nanoseconds that the leader has waited for chunks of others, short waits aside. To be asked by
  // the leader.
  int64_t waited() const { return waited_; }

  // By every other member: takes part in the leader's loops until its work is over.
  void help();

 private:
  // Handing a loop to waiting threads takes about as much less than waking them.
  static constexpr int64_t kGrainDivisor = 16;

  static void run(void* team, int64_t count, int64_t grain, ParallelFor::Body body, void* context);
  void loop(int64_t count, int64_t grain, ParallelFor::Body body, void* context);
  bool take_chunk();

  // Whose chunks can be taken: the number of the loop, its chunks, and those that were taken, in
  // 32, 16 and 16 bits. A member that finds one left may read the loop below and then, if the
  // ticket is the same still, take it: the next loop is not written before all chunks are done.
  alignas(64) std::atomic<uint64_t> ticket_{0};
  alignas(64) std::atomic<int64_t> chunks_done_{0};
  alignas(64) std::atomic<bool> is_over_{false};
  // The loop.
  std::atomic<int64_t> count_{0};
  std::atomic<int64_t> chunk_size_{0};
  std::atomic<ParallelFor::Body> body_{nullptr};
  std::atomic<void*> context_{nullptr};

  const int64_t threads_;
  int64_t waited_ = 0;
};

}  // namespace specdec::cpu
