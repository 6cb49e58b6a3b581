#include "specdec/cpu/thread_team.h"

#include <algorithm>
#include <chrono>
#include <thread>

namespace specdec::cpu {
namespace {

constexpr int64_t kMaxChunks = 0xFFFF;

// Waits without giving up the processor for about as long as the leader works alone between two
// loops, then yields to other threads.
class Wait {
 public:
  void again() {
    if (++turns_ > kAwakeTurns) {
      if (yielding_since_ == 0) yielding_since_ = nanoseconds_now();
      std::this_thread::yield();
      return;
    }
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

  // Nanoseconds since the first yield; 0 if there was none.
  int64_t yielded() const { return yielding_since_ == 0 ? 0 : nanoseconds_now() - yielding_since_; }

 private:
  static constexpr int kAwakeTurns = 4096;
  int turns_ = 0;
  int64_t yielding_since_ = 0;
};

}  // namespace

Sharing sharing;

int64_t nanoseconds_now() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

void Sharing::report(int64_t waited, int64_t ran, int64_t now) {
  if (waited <= std::max(kLongWait, ran / kLongPart)) return;
  const bool is_soon = now - alone_until_.load(std::memory_order_relaxed) < kSoon;
  const int64_t last = pause_.load(std::memory_order_relaxed);
  const int64_t pause = is_soon ? std::min(2 * last, kLastPause) : kFirstPause;
  pause_.store(pause, std::memory_order_relaxed);
  alone_until_.store(now + pause, std::memory_order_relaxed);
}

void ThreadTeam::help() {
  Wait wait;
  while (!is_over_.load(std::memory_order_acquire)) {
    if (take_chunk()) {
      wait = Wait();
    } else {
      wait.again();
    }
  }
}

void ThreadTeam::run(void* team, int64_t count, int64_t grain, ParallelFor::Body body,
                     void* context) {
  static_cast<ThreadTeam*>(team)->loop(count, grain, body, context);
}

void ThreadTeam::loop(int64_t count, int64_t grain, ParallelFor::Body body, void* context) {
  const int64_t longest = std::max(kMaxGrains * grain, (count + kMaxChunks - 1) / kMaxChunks);
  const int64_t parts = threads_ * kChunksPerMember;
  const int64_t largest = std::clamp((count + parts - 1) / parts, grain, longest);
  const int64_t chunks = (count + largest - 1) / largest;
  chunks_done_.store(0, std::memory_order_relaxed);
  count_.store(count, std::memory_order_relaxed);
  body_.store(body, std::memory_order_relaxed);
  context_.store(context, std::memory_order_relaxed);
  const uint64_t number = (ticket_.load(std::memory_order_relaxed) >> 32) + 1;
  ticket_.store(number << 32 | static_cast<uint64_t>(chunks) << 16, std::memory_order_release);
  while (take_chunk()) {
  }
  Wait wait;
  while (chunks_done_.load(std::memory_order_acquire) < chunks) wait.again();
  waited_ += wait.yielded();
}

// Returns false if no chunk is left.
bool ThreadTeam::take_chunk() {
  uint64_t ticket = ticket_.load(std::memory_order_acquire);
  while (true) {
    const int64_t chunks = ticket >> 16 & 0xFFFF, chunk = ticket & 0xFFFF;
    if (chunk >= chunks) return false;
    const int64_t count = count_.load(std::memory_order_relaxed);
    const int64_t begin = chunk * count / chunks, end = (chunk + 1) * count / chunks;
    const ParallelFor::Body body = body_.load(std::memory_order_relaxed);
    void* context = context_.load(std::memory_order_relaxed);
    if (!ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel,
                                       std::memory_order_acquire)) {
      continue;
    }
    body(begin, end, context);
    chunks_done_.fetch_add(1, std::memory_order_release);
    return true;
  }
}

}  // namespace specdec::cpu
