// A team of threads that stays together for many short parallel loops. Waking a pool takes
// microseconds, as long as such a loop itself, so the members of a team wait without sleeping.
//
// Each loop is cut into some chunks per member, as even as possible, and a free member takes the
// next chunk. So members that run at different speeds, as the memory serves them, end at about the
// same time, and if the system runs a member late or never, others do its chunks. Two waits remain:
// for a member that the system interrupts within a chunk, and for the pool to gather its threads at
// the end. Where other processes compete for the processors, such a wait is a time slice of theirs,
// longer than all loops of a run. `Sharing` notices this, and then leaders work alone for a while.
#pragma once

#include <atomic>

#include "specdec/core/parallel.h"

namespace specdec::cpu {

// Detects whether other processes use the processors, by how long leaders wait for their helpers.
//
// A long wait is a strike: leaders then work alone for a pause, about as long as what helpers would
// have to save to make up for it. A strike soon after a pause doubles the next one, because the other
// processes are still there; a later one, such as a moment's work of the system, does not. Any thread
// may ask and report; a race makes a pause a little too long or short. Times are nanoseconds of one
// clock.
class Sharing {
 public:
  // Longer than the tens of microseconds that the system may need to find processors for the
  // helpers. In a long run, so are the waits for the last chunks of its loops, together less than
  // this part of its time.
  static constexpr int64_t kLongWait = 300'000;
  static constexpr int64_t kLongPart = 8;
  static constexpr int64_t kFirstPause = 5'000'000, kLastPause = 1'000'000'000;
  static constexpr int64_t kSoon = 100'000'000;

  bool is_alone(int64_t now) const { return now < alone_until_.load(std::memory_order_relaxed); }
  // A run has ended in which the leader waited for helpers.
  void report(int64_t waited, int64_t ran, int64_t now);

 private:
  std::atomic<int64_t> alone_until_{-kSoon};
  std::atomic<int64_t> pause_{kFirstPause};
};

// The detector of this process.
extern Sharing sharing;
// Time of a monotonic clock.
int64_t nanoseconds_now();

class ThreadTeam {
 public:
  // `threads` includes the leader.
  explicit ThreadTeam(int64_t threads) : threads_(threads) {}
  ThreadTeam(const ThreadTeam&) = delete;
  ThreadTeam& operator=(const ThreadTeam&) = delete;

  // Called by the leader: runs work(parallel_for), and releases the members when it returns or
  // throws.
  template <typename F>
  void lead(const F& work) {
    struct Dismissal {
      ~Dismissal() { is_over.store(true, std::memory_order_release); }
      std::atomic<bool>& is_over;
    } dismissal{is_over_};
    work(ParallelFor{run, this, kGrainDivisor});
  }

  // Nanoseconds that the leader has waited for chunks of others, without short waits. For the
  // leader only.
  int64_t waited() const { return waited_; }

  // Called by every other member: takes part in the leader's loops until the leader's work is over.
  void help();

 private:
  // Handing a loop to waiting threads is cheaper than waking them by about this factor.
  static constexpr int64_t kGrainDivisor = 16;
  static constexpr int64_t kChunksPerMember = 4;
  // In grains, a chunk at most: about 0.1 ms, shorter than a long wait, so that the last chunk of a
  // long loop is not taken for one.
  static constexpr int64_t kMaxGrains = 256;

  static void run(void* team, int64_t count, int64_t grain, ParallelFor::Body body, void* context);
  void loop(int64_t count, int64_t grain, ParallelFor::Body body, void* context);
  bool take_chunk();

  // The number of the current loop, its chunks, and the chunks taken so far, in 32, 16 and 16 bits.
  // A member that sees a free chunk reads the loop below and then takes the chunk if the ticket has
  // not changed. The next loop is not written before all chunks are done.
  alignas(64) std::atomic<uint64_t> ticket_{0};
  alignas(64) std::atomic<int64_t> chunks_done_{0};
  alignas(64) std::atomic<bool> is_over_{false};
  // The current loop.
  std::atomic<int64_t> count_{0};
  std::atomic<ParallelFor::Body> body_{nullptr};
  std::atomic<void*> context_{nullptr};

  const int64_t threads_;
  int64_t waited_ = 0;
};

}  // namespace specdec::cpu
