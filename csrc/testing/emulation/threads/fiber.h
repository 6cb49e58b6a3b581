// Fibers: call stacks that run in turn on one operating system thread.
#pragma once

#include <cstddef>

#if !defined(__x86_64__)
#define SPECDEC_FIBER_UCONTEXT
#endif
#ifdef SPECDEC_FIBER_UCONTEXT
#include <ucontext.h>
#endif

namespace specdec::emulation {

// A call stack and the point where it was left. Default constructed: the stack of the thread that
// calls switch_to.
class Fiber {
 public:
  // A kernel of draft heads that is translated from PTX and compiled without optimisation takes more
  // than 128 KiB. The system supplies only the pages that are written.
  static constexpr size_t kStackBytes = 256 * 1024;

  Fiber() = default;
  // A stack of its own. The first switch to this fiber calls `entry` on it, which must not return.
  // Throws std::bad_alloc if the system has no more memory.
  explicit Fiber(void (*entry)());
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // Leaves this fiber, which must be the running one, until something switches back to it.
  void switch_to(Fiber& next);
  // An `entry` must call it first.
  static void on_entry();

 private:
  char* mapping_ = nullptr;  // a guard page, then the stack
  // Bounds of the stack, for AddressSanitizer. For a default constructed fiber they are known after
  // it has been left once.
  const void* bottom_ = nullptr;
  size_t size_ = 0;
  void* fake_stack_ = nullptr;           // of AddressSanitizer
  inline static Fiber* left_ = nullptr;  // the fiber that the latest switch left
#ifdef SPECDEC_FIBER_UCONTEXT
  ucontext_t context_{};
#else
  void* stack_pointer_ = nullptr;
#endif
};

}  // namespace specdec::emulation
