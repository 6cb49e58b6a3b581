#include "fiber.h"

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <new>

// The build defines SPECDEC_ASAN where kernels are compiled with AddressSanitizer.
#ifdef SPECDEC_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace specdec::emulation {
namespace {

size_t page_bytes() {
  static const size_t bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

size_t mapping_bytes() { return Fiber::kStackBytes + page_bytes(); }

}  // namespace

#ifndef SPECDEC_FIBER_UCONTEXT
// swapcontext makes two system calls per switch. This function saves only what the x86-64 System V
// ABI requires a callee to preserve: six registers and the stack pointer. (The ABI also names the
// control words of the floating-point units, which are never changed here.)
extern "C" void specdec_switch_stack(void** saved_stack_pointer, void* stack_pointer);
asm(R"(
    .text
    .p2align 4
    .globl specdec_switch_stack
    .hidden specdec_switch_stack
    .type specdec_switch_stack, @function
specdec_switch_stack:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
    .size specdec_switch_stack, .-specdec_switch_stack
)");
#endif

Fiber::Fiber(void (*entry)()) {
  void* mapping = mmap(nullptr, mapping_bytes(), PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping == MAP_FAILED) throw std::bad_alloc();
  mapping_ = static_cast<char*>(mapping);
  mprotect(mapping_, page_bytes(), PROT_NONE);  // an overflow faults instead of corrupting
  bottom_ = mapping_ + page_bytes();
  size_ = kStackBytes;
#ifdef SPECDEC_FIBER_UCONTEXT
  getcontext(&context_);
  context_.uc_stack.ss_sp = mapping_ + page_bytes();
  context_.uc_stack.ss_size = size_;
  makecontext(&context_, entry, 0);
#else
  // Stacks that begin at the same offset in their pages would compete for the same cache lines.
  static std::atomic<unsigned> num_fibers{0};
  const size_t colour = num_fibers++ % 32 * 64;
  void** top = reinterpret_cast<void**>(mapping_ + mapping_bytes() - colour);
  *--top = nullptr;  // ends backtraces, and puts the stack pointer where a call would
  *--top = reinterpret_cast<void*>(entry);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  stack_pointer_ = top;
#endif
}

Fiber::~Fiber() {
  if (mapping_ == nullptr) return;
#ifdef SPECDEC_ASAN
  __asan_unpoison_memory_region(mapping_, mapping_bytes());  // frames that were never left
#endif
  munmap(mapping_, mapping_bytes());
}

void Fiber::switch_to(Fiber& next) {
  left_ = this;
#ifdef SPECDEC_ASAN
  __sanitizer_start_switch_fiber(&fake_stack_, next.bottom_, next.size_);
#endif
#ifdef SPECDEC_FIBER_UCONTEXT
  swapcontext(&context_, &next.context_);
#else
  specdec_switch_stack(&stack_pointer_, next.stack_pointer_);
#endif
#ifdef SPECDEC_ASAN
  __sanitizer_finish_switch_fiber(fake_stack_, &left_->bottom_, &left_->size_);
#endif
}

void Fiber::on_entry() {
#ifdef SPECDEC_ASAN
  __sanitizer_finish_switch_fiber(nullptr, &left_->bottom_, &left_->size_);
#endif
}

}  // namespace specdec::emulation
