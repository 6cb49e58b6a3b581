// Threads that stay together for a run of many short parallel loops. Waking a pool for each takes
// microseconds, as long as such a loop itself; members of a team wait awake.
//
// Loops are cut into a chunk for each member, and who is free takes the next. So a member that the
// system runs late, or never, is not waited for: the leader does its chunks.
#pragma once

#include <atomic>

#include "specdec/parallel.h"

namespace specdec::cpu {

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
};

}  // namespace specdec::cpu
