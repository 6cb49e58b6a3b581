#include "block.h"

#include <bit>
#include <cstdio>
#include <cstring>

namespace specdec::emulation {
namespace {

bool same_text(const char* a, const char* b) { return a == b || std::strcmp(a, b) == 0; }

bool same_place(Location a, Location b) {
  return a.line() == b.line() && a.column() == b.column() &&
         same_text(a.file_name(), b.file_name());
}

std::string hexadecimal(uint32_t lanes) {
  char text[16];
  std::snprintf(text, sizeof(text), "0x%08X", lanes);
  return text;
}

// Checks that lane `lane`, which is at `other`, is at the same `meeting` as all others.
void check_same(const Meeting& meeting, const Meeting& other, unsigned lane) {
  const bool is_barrier = meeting.complete == nullptr;
  if (same_text(other.what, meeting.what) &&
      (is_barrier || same_place(other.where, meeting.where))) {
    return;
  }
  Grid::current().fail("divergent " + std::string(meeting.what) + at(meeting.where) + ": lane " +
                       std::to_string(lane) + " is at " + other.what + at(other.where));
}

}  // namespace

Block::Block(Thread* threads, unsigned num_threads)
    : threads_(threads),
      num_threads_(num_threads),
      warps_((num_threads + 31) / 32),
      clocks_(num_threads),
      shared_(clocks_),
      atomics_(clocks_),
      copies_(clocks_, shared_) {
  for (unsigned i = 0; i < num_threads; ++i) threads_[i].block = this;
}

void Block::reset(unsigned x, unsigned y) {
  x_ = x;
  y_ = y;
  num_live_ = num_threads_;
  num_at_barrier_ = 0;
  for (unsigned warp = 0; warp < warps_.size(); ++warp) {
    const unsigned lanes = std::min(num_threads_ - warp * 32, 32u);
    warps_[warp] = {.live = 0xFFFFFFFF >> (32 - lanes), .meeting = 0};
  }
  clocks_.reset();
  shared_.reset();
  atomics_.reset();
  copies_.reset();
}

// What a thread has waited for with relaxed loads is visible only after a fence.
void Block::require_fence(const Thread& thread) const {
  const std::optional<Location> load = atomics_.unfenced_load(thread.index);
  if (load) Grid::current().fail("no thread_fence follows load_relaxed" + at(*load));
}

void Block::barrier(Location where) {
  Grid& grid = Grid::current();
  require_fence(grid.self());
  if (num_at_barrier_++ == 0) barrier_site_ = where;
  if (!same_place(where, barrier_site_)) {
    grid.fail("divergent barrier: block_barrier" + at(where) +
              " while other threads wait at block_barrier" + at(barrier_site_));
  }
  grid.park({.what = "block_barrier", .where = where});
  if (num_at_barrier_ == num_live_) release_barrier();
  grid.yield();
}

// All live threads are at the barrier, so every waiting thread waits there.
void Block::release_barrier() {
  num_at_barrier_ = 0;
  clocks_.join_block();
  shared_.forget_accesses();
  for (unsigned i = 0; i < num_threads_; ++i) {
    if (threads_[i].state == Thread::State::kWaiting) Grid::current().release(threads_[i]);
  }
}

void Block::named_barrier(int id, int num_threads, Location where) {
  Grid& grid = Grid::current();
  if (id < 1 || id >= static_cast<int>(named_.size())) {
    grid.fail("named_barrier " + std::to_string(id) + ": the id must be 1 to 15");
  }
  NamedBarrier& barrier = named_[static_cast<size_t>(id)];
  if (num_threads < 32 || num_threads % 32 != 0 || num_threads > static_cast<int>(num_threads_)) {
    grid.fail("named_barrier for " + std::to_string(num_threads) +
              " threads: must be whole warps of the block's " + std::to_string(num_threads_));
  }
  if (barrier.waiting.empty()) barrier.num_threads = num_threads;
  if (barrier.num_threads != num_threads) {
    grid.fail("named_barrier " + std::to_string(id) + " for " + std::to_string(num_threads) +
              " threads while others wait there for " + std::to_string(barrier.num_threads));
  }
  require_fence(grid.self());
  barrier.waiting.push_back(&grid.self());
  grid.park({.what = "named_barrier", .where = where, .id = id});
  if (static_cast<int>(barrier.waiting.size()) == num_threads) {
    join(barrier.waiting);
    for (Thread* thread : barrier.waiting) grid.release(*thread);
    barrier.waiting.clear();
  }
  grid.yield();
}

void Block::join(const std::vector<Thread*>& threads) {
  std::vector<uint32_t> masks(warps_.size());
  for (const Thread* thread : threads) masks[thread->warp()] |= 1u << thread->lane();
  std::vector<Lanes> participants;
  for (unsigned warp = 0; warp < masks.size(); ++warp) {
    const bool whole = masks[warp] == warps_[warp].live;
    if (masks[warp] != 0) participants.push_back({warp, masks[warp], whole});
  }
  clocks_.join(participants);
}

void Block::meet(const Meeting& meeting, void* operand) {
  Grid& grid = Grid::current();
  Thread& self = grid.self();
  if ((meeting.lanes >> self.lane() & 1) == 0) {
    grid.fail(std::string(meeting.what) + " for lanes " + hexadecimal(meeting.lanes) +
              ", to which lane " + std::to_string(self.lane()) + " does not belong");
  }
  const uint32_t absent = meeting.lanes & ~warps_[self.warp()].live;
  if (absent != 0 && meeting.needs_all_lanes) {
    grid.fail("divergent " + std::string(meeting.what) + at(meeting.where) + ": lane " +
              std::to_string(std::countr_zero(absent)) + " has ended");
  }
  if (meeting.complete == nullptr) require_fence(self);
  self.meeting = &meeting;
  self.operand = operand;
  warps_[self.warp()].meeting |= 1u << self.lane();
  grid.park({.what = meeting.what, .where = meeting.where, .lanes = meeting.lanes});
  try_meeting(self.warp(), meeting);
  grid.yield();
}

// Completes a meeting if all its live lanes have arrived.
void Block::try_meeting(unsigned warp_index, const Meeting& meeting) {
  Warp& warp = warps_[warp_index];
  const uint32_t present = meeting.lanes & warp.live;
  if ((present & ~warp.meeting) != 0) return;
  LaneOperands operands{};
  for (uint32_t rest = present; rest != 0; rest &= rest - 1) {
    const unsigned lane = static_cast<unsigned>(std::countr_zero(rest));
    const Thread& thread = threads_[warp_index * 32 + lane];
    if (thread.meeting->lanes != meeting.lanes) return;  // it meets other lanes first
    check_same(meeting, *thread.meeting, lane);
    operands[lane] = thread.operand;
  }
  if (meeting.complete != nullptr) {
    meeting.complete(operands);
  } else {
    const Lanes lanes{warp_index, present, present == warp.live};
    clocks_.join({&lanes, 1});
  }
  warp.meeting &= ~present;
  for (uint32_t rest = present; rest != 0; rest &= rest - 1) {
    const unsigned lane = static_cast<unsigned>(std::countr_zero(rest));
    Grid::current().release(threads_[warp_index * 32 + lane]);
  }
}

void Block::end_thread(Thread& self) {
  require_fence(self);
  Warp& warp = warps_[self.warp()];
  warp.live &= ~(1u << self.lane());
  --num_live_;
  if (num_live_ == 0) copies_.end_block();
  if (num_live_ > 0 && num_at_barrier_ == num_live_) release_barrier();
  for (uint32_t rest = warp.meeting; rest != 0; rest &= rest - 1) {
    const unsigned lane = static_cast<unsigned>(std::countr_zero(rest));
    const Meeting& meeting = *threads_[self.warp() * 32 + lane].meeting;
    const bool is_expected = (meeting.lanes >> self.lane() & 1) != 0;
    if (is_expected && meeting.needs_all_lanes) {
      Grid::current().fail("divergent " + std::string(meeting.what) + at(meeting.where) +
                           ": the thread ends while lane " + std::to_string(lane) +
                           " waits for it there");
    }
    if (is_expected && (warp.meeting >> lane & 1) != 0) try_meeting(self.warp(), meeting);
  }
}

std::string Block::describe_wait(const Thread& thread) const {
  const Wait& wait = thread.wait;
  std::string text = std::string("at ") + wait.what;
  if (wait.id != 0) {
    const NamedBarrier& barrier = named_[static_cast<size_t>(wait.id)];
    text += " " + std::to_string(wait.id) + " with " + std::to_string(barrier.waiting.size()) +
            " of " + std::to_string(barrier.num_threads) + " threads";
  }
  if (wait.lanes != 0) text += " for lanes " + hexadecimal(wait.lanes);
  if (wait.object != nullptr) text += " " + copies_.describe(wait.object);
  return text + at(wait.where);
}

}  // namespace specdec::emulation
