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

// A call stack and where it was left. Default constructed: the stack of whoever calls switch_to.
class Fiber {
 public:
  static constexpr size_t kStackBytes = 128 * 1024;

  Fiber() = default;
  // A stack of its own, on which the first switch to this fiber calls `entry`, which must not
  // return. Throws std::bad_alloc if the system gives no more memory.
  explicit Fiber(void (*entry)());
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // Leaves the running fiber, this one, until something switches back to it.
  void switch_to(Fiber& next);
  // To be called first thing in an `entry`.
  static void on_entry();

 private:
  char* mapping_ = nullptr;  // a guard page, then the stack
  // Bounds of the stack, for AddressSanitizer; of a default constructed fiber known once it was
  // left.
  const void* bottom_ = nullptr;
  size_t size_ = 0;
  void* fake_stack_ = nullptr;           // AddressSanitizer's
  inline static Fiber* left_ = nullptr;  // by the latest switch
#ifdef SPECDEC_FIBER_UCONTEXT
  ucontext_t context_{};
#else
  void* stack_pointer_ = nullptr;
#endif
};

}  // namespace specdec::emulation
