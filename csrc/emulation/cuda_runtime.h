// A stand-in for the CUDA runtime that runs kernels on the host, for tests on machines without a
// GPU.
//
// The same .cu files are compiled as C++ with this folder on the include path. Blocks run one after
// another; every thread of a block is a fiber that runs until it waits at a barrier or a shuffle or
// ends. When no fiber can run, a barrier that all live threads wait at opens, and a shuffle that
// all live lanes of a warp wait at; anything else is a divergent barrier and ends the program with
// a message. Threads run in forward, backward or shuffled order (Emulation::order): a missing
// barrier changes the result of one of them. Shared memory is a heap block of exact size filled
// with 0xAB, so that AddressSanitizer sees overflows and uninitialised reads are noticed.
//
// Not shown: speed, memory ordering, races inside one fiber order.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#include "cuda_runtime_api.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(threads)

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

struct alignas(8) uint2 {
  unsigned x, y;
};

inline dim3 threadIdx, blockIdx, blockDim;

using std::max;
using std::min;

namespace specdec {

enum class ThreadOrder { kForward, kBackward, kShuffled };

class Emulation {
 public:
  inline static ThreadOrder order = ThreadOrder::kForward;

  static void run_grid(const std::function<void()>& kernel, unsigned grid_x, unsigned grid_y,
                       unsigned block) {
    Emulation emulation(kernel, block);
    for (unsigned y = 0; y < grid_y; ++y) {
      for (unsigned x = 0; x < grid_x; ++x) {
        blockIdx = {x, y, 1};
        emulation.run_block();
      }
    }
  }

  static void barrier() { current->wait(Wait::kBlock); }

  // Bits of `value` as the lane `mask` away holds it.
  static uint64_t shuffle_xor(uint64_t value, int mask) {
    Thread& self = current->threads_[threadIdx.x];
    // Two buffers in turn: a lane can be at most one shuffle ahead of the others.
    const int buffer = self.num_shuffles++ % 2;
    self.shuffled[buffer] = value;
    current->wait(Wait::kWarp);
    return current->threads_[threadIdx.x ^ static_cast<unsigned>(mask)].shuffled[buffer];
  }

  template <typename T>
  static T& shared() {
    if (!current->shared_) {
      current->shared_ = std::unique_ptr<void, void (*)(void*)>(
          std::aligned_alloc(std::max(alignof(T), sizeof(void*)), sizeof(T)), std::free);
      std::memset(current->shared_.get(), 0xAB, sizeof(T));
    }
    return *static_cast<T*>(current->shared_.get());
  }

 private:
  enum class Wait { kNothing, kBlock, kWarp, kDone };
  static constexpr size_t kStackBytes = 256 * 1024;
  static constexpr unsigned kWarp = 32;

  struct Thread {
    ucontext_t context;
    std::unique_ptr<char[]> stack{new char[kStackBytes]};
    Wait wait;
    int num_shuffles;
    uint64_t shuffled[2];
  };

  Emulation(const std::function<void()>& kernel, unsigned block)
      : kernel_(kernel), threads_(block) {
    blockDim = {block, 1, 1};
  }

  void run_block() {
    current = this;
    shared_.reset();
    for (Thread& thread : threads_) {
      thread.wait = Wait::kNothing;
      thread.num_shuffles = 0;
      getcontext(&thread.context);
      thread.context.uc_stack.ss_sp = thread.stack.get();
      thread.context.uc_stack.ss_size = kStackBytes;
      thread.context.uc_link = &scheduler_;
      makecontext(&thread.context, &Emulation::enter, 0);
    }
    do {
      for (unsigned index : thread_order()) {
        if (threads_[index].wait != Wait::kNothing) continue;
        threadIdx = {index, 1, 1};
        swapcontext(&scheduler_, &threads_[index].context);
      }
    } while (release());
  }

  static void enter() {
    current->kernel_();
    current->threads_[threadIdx.x].wait = Wait::kDone;
  }

  void wait(Wait what) {
    const dim3 self = threadIdx;
    threads_[self.x].wait = what;
    swapcontext(&threads_[self.x].context, &scheduler_);
    threadIdx = self;
  }

  // Opens what can be opened; false when all threads are done.
  bool release() {
    bool all_done = true, all_at_barrier = true, opened = false;
    for (const Thread& thread : threads_) {
      all_done &= thread.wait == Wait::kDone;
      all_at_barrier &= thread.wait == Wait::kDone || thread.wait == Wait::kBlock;
    }
    if (all_done) return false;
    for (size_t first = 0; first < threads_.size(); first += kWarp) {
      const auto begin = threads_.begin() + first;
      const auto end = begin + std::min<size_t>(kWarp, threads_.size() - first);
      const bool at_shuffle =
          std::all_of(begin, end, [](const Thread& t) { return t.wait == Wait::kWarp; });
      if (at_shuffle || all_at_barrier) {
        for (auto thread = begin; thread != end; ++thread) {
          if (thread->wait != Wait::kDone) thread->wait = Wait::kNothing;
        }
        opened = true;
      }
    }
    if (!opened) {
      std::fprintf(stderr, "divergent barrier or shuffle in block (%u, %u)\n", blockIdx.x,
                   blockIdx.y);
      std::abort();
    }
    return true;
  }

  std::vector<unsigned> thread_order() {
    std::vector<unsigned> indices(threads_.size());
    for (size_t i = 0; i < indices.size(); ++i) indices[i] = static_cast<unsigned>(i);
    if (order == ThreadOrder::kBackward) std::reverse(indices.begin(), indices.end());
    if (order == ThreadOrder::kShuffled) std::shuffle(indices.begin(), indices.end(), random_);
    return indices;
  }

  inline static Emulation* current = nullptr;
  const std::function<void()>& kernel_;
  std::vector<Thread> threads_;
  std::unique_ptr<void, void (*)(void*)> shared_{nullptr, std::free};
  ucontext_t scheduler_;
  std::mt19937 random_{0};
};

}  // namespace specdec

inline void __syncthreads() { specdec::Emulation::barrier(); }

template <typename T>
T __shfl_xor_sync(uint32_t /*all lanes*/, T value, int mask) {
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(value));
  bits = specdec::Emulation::shuffle_xor(bits, mask);
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}
