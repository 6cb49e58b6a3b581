// A running launch: its threads are fibers, which one scheduler runs in turn on the calling thread.
//
// The blocks of an ordinary launch run one after another. The blocks of a cooperative launch are
// all resident in the same scheduler, not on threads of the operating system: the run is
// deterministic, a deadlock is detected because no thread can run, and the sanitizers need no
// memory model.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cuda_runtime_api.h"
#include "emulation.h"
#include "fiber.h"
#include "ready_set.h"
#include "testing/emulation/races/location.h"

namespace specdec::emulation {

class Block;

// What a thread waits for, in the words of the message about a deadlock.
struct Wait {
  const char* what = nullptr;
  Location where;
  uint32_t lanes = 0;            // lanes of a meeting
  int id = 0;                    // number of a named barrier
  const void* object = nullptr;  // an Mbarrier
};

struct Meeting;

struct Thread {
  enum class State : uint8_t { kFresh, kReady, kWaiting, kDone };

  Block* block;
  unsigned index;  // in the block
  unsigned rank;   // the runnable thread with the lowest rank runs
  State state;
  Wait wait;
  const Meeting* meeting;  // the meeting where this lane waits, and its operands, on its own stack
  void* operand;
  Fiber* fiber;

  unsigned lane() const { return index % 32; }
  unsigned warp() const { return index / 32; }
};

struct Launch {
  std::function<void()> kernel;
  unsigned grid_x, grid_y, block;
  int64_t dynamic_shared_bytes;
  bool cooperative;
  Location where;
  // nvcc copies whole structs, with padding that nothing has written. So reads of shared memory
  // that was never written are no error in its code.
  bool shared_memory_counts_as_written = false;
};

// CUDA's answer to the configuration of a launch, for the values that the emulator supports.
cudaError_t check_launch(int64_t grid_x, int64_t grid_y, int block, int64_t dynamic_shared_bytes,
                         bool cooperative);

class Grid {
 public:
  static constexpr unsigned kMaxThreadsPerBlock = 1024;
  // Limit for a cooperative launch. Each waiting thread holds a stack, which takes two of the
  // system's memory mappings.
  static constexpr unsigned kMaxResidentThreads = 16 * 1024;

  // Runs a launch to its end. Throws EmulationError.
  static void run(const Launch& launch);
  static Grid& current() { return *current_; }

  explicit Grid(const Launch& launch);
  ~Grid();

  const Launch& launch() const { return launch_; }
  Thread& self() { return *self_; }

  // Called by the running thread: waits until released, while other threads run.
  void park(const Wait& wait);
  void yield();
  // Yields until all other threads wait; `first` marks a new spin. A spin that no thread can end is
  // an error.
  void poll(const Wait& wait, bool first);
  [[noreturn]] void fail(const std::string& what) const;

  void release(Thread& thread);
  uint64_t random() { return random_.next(); }
  void name_kernel(const char* name) { kernel_name_ = name; }

 private:
  void run_blocks(uint64_t first, uint64_t count);
  void rank_threads(size_t num_threads);
  Thread* next_thread();
  bool land_one_copy();
  void leave(Thread* next);
  Thread* end_thread();
  [[noreturn]] static void fiber_main();
  std::string kernel() const;
  std::string describe_waits() const;

  inline static Grid* current_ = nullptr;

  const Launch& launch_;
  const char* kernel_name_ = nullptr;
  std::vector<Thread> threads_;
  std::vector<std::unique_ptr<Block>> blocks_;
  std::vector<Thread*> by_rank_;
  ReadySet ready_;
  RandomBits random_;
  std::vector<Thread*> polling_;
  bool progress_ = false;  // since all polling threads were asked

  Thread* self_ = nullptr;
  Fiber caller_;
  Fiber* fiber_ = &caller_;  // the running fiber
  std::exception_ptr exception_;
};

// Fails unless `address` is a multiple of `bytes`; `what` names it in the message.
void check_aligned(const void* address, size_t bytes, const char* what, Location where);

std::string describe(const Block& block);

}  // namespace specdec::emulation
