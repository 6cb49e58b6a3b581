#include "grid.h"

#include <algorithm>
#include <mutex>

#include "block.h"
#include "cuda_runtime.h"

namespace specdec::emulation {
namespace {

// Stacks are kept for later launches, except after a failed launch, because its frames on them are
// never left.
std::vector<std::unique_ptr<Fiber>> all_fibers;
std::vector<Fiber*> free_fibers;

// In shuffled order a few blocks of an ordinary launch run at once. If the kernel orders its writes
// to device memory wrongly, one block then sees another's results half done.
uint64_t num_resident_blocks(const Launch& launch) {
  const uint64_t num_blocks = uint64_t{launch.grid_x} * launch.grid_y;
  if (launch.cooperative) return num_blocks;
  return Emulation::order == ThreadOrder::kShuffled ? std::min<uint64_t>(num_blocks, 4) : 1;
}

}  // namespace

cudaError_t check_launch(int64_t grid_x, int64_t grid_y, int block, int64_t dynamic_shared_bytes,
                         bool cooperative) {
  if (grid_x < 1 || grid_x > INT32_MAX || grid_y < 1 || grid_y > 65535 || block < 1 ||
      block > static_cast<int>(Grid::kMaxThreadsPerBlock)) {
    return cudaErrorInvalidConfiguration;
  }
  if (dynamic_shared_bytes < 0 ||
      dynamic_shared_bytes > static_cast<int64_t>(SharedMemory::kMaxBytes)) {
    return cudaErrorInvalidValue;
  }
  if (cooperative && grid_x * grid_y > Grid::kMaxResidentThreads / block) {
    throw EmulationError("a cooperative launch of " + std::to_string(grid_x * grid_y) +
                         " blocks with " + std::to_string(block) +
                         " threads: all are resident at once, and the emulator holds at most " +
                         std::to_string(Grid::kMaxResidentThreads) +
                         " threads; launch resident_blocks() blocks");
  }
  return cudaSuccess;
}

void Grid::run(const Launch& launch) {
  static std::mutex one_launch_at_a_time;
  const std::lock_guard lock(one_launch_at_a_time);
  gridDim = {launch.grid_x, launch.grid_y, 1};
  blockDim = {launch.block, 1, 1};
  Grid grid(launch);
  const uint64_t num_blocks = uint64_t{launch.grid_x} * launch.grid_y;
  for (uint64_t first = 0; first < num_blocks; first += grid.blocks_.size()) {
    grid.run_blocks(first, std::min<uint64_t>(num_blocks - first, grid.blocks_.size()));
  }
}

Grid::Grid(const Launch& launch)
    : launch_(launch),
      threads_(launch.block * num_resident_blocks(launch)),
      by_rank_(threads_.size()),
      ready_(threads_.size()),
      random_(Emulation::seed) {
  current_ = this;
  for (unsigned slot = 0; slot < threads_.size(); ++slot) {
    threads_[slot].index = slot % launch.block;
    threads_[slot].state = Thread::State::kDone;
  }
  for (size_t slot = 0; slot < threads_.size(); slot += launch.block) {
    blocks_.push_back(std::make_unique<Block>(&threads_[slot], launch.block));
  }
}

Grid::~Grid() { current_ = nullptr; }

// Runs the blocks first .. first + count - 1 to their end; kBackward counts from the last block.
void Grid::run_blocks(uint64_t first, uint64_t count) {
  const uint64_t num_blocks = uint64_t{launch_.grid_x} * launch_.grid_y;
  for (uint64_t i = 0; i < count; ++i) {
    const bool backward = Emulation::order == ThreadOrder::kBackward;
    const uint64_t block = backward ? num_blocks - 1 - first - i : first + i;
    blocks_[i]->reset(static_cast<unsigned>(block % launch_.grid_x),
                      static_cast<unsigned>(block / launch_.grid_x));
  }
  rank_threads(count * launch_.block);
  leave(next_thread());
  if (exception_) {
    free_fibers.clear();
    all_fibers.clear();
    std::rethrow_exception(exception_);
  }
}

// Makes the first threads ready and draws their order.
void Grid::rank_threads(size_t num_threads) {
  for (size_t i = 0; i < num_threads; ++i) {
    const bool backward = Emulation::order == ThreadOrder::kBackward;
    by_rank_[i] = &threads_[backward ? num_threads - 1 - i : i];
  }
  if (Emulation::order == ThreadOrder::kShuffled) {
    for (size_t i = num_threads; i > 1; --i) std::swap(by_rank_[i - 1], by_rank_[random() % i]);
  }
  for (unsigned rank = 0; rank < num_threads; ++rank) {
    by_rank_[rank]->rank = rank;
    by_rank_[rank]->state = Thread::State::kFresh;
    ready_.insert(rank);
  }
}

// Continues with `next`, or with the caller of the launch if it is null. Returns when the fiber
// that called is continued.
void Grid::leave(Thread* next) {
  Fiber* const left = fiber_;
  Fiber* target = &caller_;
  if (next != nullptr) {
    self_ = next;
    threadIdx = {next->index, 0, 0};
    blockIdx = {next->block->x(), next->block->y(), 0};
    if (next->state == Thread::State::kFresh) {
      if (free_fibers.empty()) {
        all_fibers.push_back(std::make_unique<Fiber>(&Grid::fiber_main));
        free_fibers.push_back(all_fibers.back().get());
      }
      next->fiber = free_fibers.back();
      free_fibers.pop_back();
    }
    next->state = Thread::State::kReady;
    target = next->fiber;
  }
  if (target == left) return;
  fiber_ = target;
  left->switch_to(*target);
}

// A fiber runs one fresh thread after another, as long as there are any.
void Grid::fiber_main() {
  Fiber::on_entry();
  for (;;) {
    Thread* next = nullptr;
    try {
      current_->launch_.kernel();
      next = current_->end_thread();
    } catch (...) {
      current_->exception_ = std::current_exception();
    }
    current_->leave(next);
  }
}

// Ends the running thread and returns the thread to continue with.
Thread* Grid::end_thread() {
  self_->state = Thread::State::kDone;
  progress_ = true;
  self_->block->end_thread(*self_);
  free_fibers.push_back(self_->fiber);  // a fresh thread will use this very stack
  return next_thread();
}

void Grid::park(const Wait& wait) {
  self_->wait = wait;
  self_->state = Thread::State::kWaiting;
  progress_ = true;
}

void Grid::yield() { leave(next_thread()); }

void Grid::poll(const Wait& wait, bool first) {
  self_->wait = wait;
  self_->state = Thread::State::kWaiting;
  polling_.push_back(self_);
  progress_ |= first;
  yield();
}

void Grid::release(Thread& thread) {
  thread.state = Thread::State::kReady;
  ready_.insert(thread.rank);
}

bool Grid::land_one_copy() {
  return std::any_of(blocks_.begin(), blocks_.end(),
                     [](const auto& block) { return block->copies().land_one(); });
}

// Returns null when all threads have ended.
Thread* Grid::next_thread() {
  std::optional<unsigned> rank = ready_.take();
  if (!rank && progress_ && !polling_.empty()) {
    progress_ = false;
    for (Thread* thread : polling_) release(*thread);
    polling_.clear();
    rank = ready_.take();
  }
  while (!rank && land_one_copy()) rank = ready_.take();
  if (rank) return by_rank_[*rank];
  const auto done = [](const Thread& thread) { return thread.state == Thread::State::kDone; };
  if (!std::all_of(threads_.begin(), threads_.end(), done)) {
    exception_ = std::make_exception_ptr(
        EmulationError("emulated kernel " + kernel() + ": deadlock: " + describe_waits()));
  }
  return nullptr;
}

void Grid::fail(const std::string& what) const {
  throw EmulationError("emulated kernel " + kernel() + ", " + describe(*self_->block) +
                       ", thread " + std::to_string(self_->index) + ": " + what);
}

std::string Grid::kernel() const {
  const std::string launched = "launched at " + file_and_line(launch_.where);
  if (kernel_name_ != nullptr) return std::string(kernel_name_) + ", " + launched;
  return launched + " in " + launch_.where.function_name();
}

// Neighbouring threads that wait for the same thing are one entry of the list.
std::string Grid::describe_waits() const {
  constexpr int kMaxGroups = 16;
  const auto what = [](const Thread& thread) {
    return thread.state == Thread::State::kDone ? "ended" : thread.block->describe_wait(thread);
  };
  std::string text = "no thread can run";
  int groups = 0;
  for (size_t first = 0, end; first < threads_.size(); first = end) {
    const Thread& thread = threads_[first];
    const std::string wait = what(thread);
    for (end = first + 1; end < threads_.size() && threads_[end].block == thread.block;) {
      if (what(threads_[end]) != wait) break;
      ++end;
    }
    if (++groups > kMaxGroups) return text + "; and more";
    text += "; " + describe(*thread.block);
    text += end == first + 1 ? ", thread " + std::to_string(thread.index)
                             : ", threads " + std::to_string(thread.index) + " to " +
                                   std::to_string(threads_[end - 1].index);
    text += " " + wait;
  }
  return text;
}

void check_aligned(const void* address, size_t bytes, const char* what, Location where) {
  if (reinterpret_cast<uintptr_t>(address) % bytes == 0) return;
  Grid::current().fail(what + at(where) + " is not aligned to " + std::to_string(bytes) + " bytes");
}

std::string describe(const Block& block) {
  return "block (" + std::to_string(block.x()) + ", " + std::to_string(block.y()) + ")";
}

}  // namespace specdec::emulation
