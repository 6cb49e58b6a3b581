#include "async.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "shared_memory.h"

namespace specdec::emulation {
namespace {

[[noreturn]] void fail(const std::string& what) { Grid::current().fail(what); }

unsigned running_thread() { return Grid::current().self().index; }

}  // namespace

void AsyncCopies::reset() {
  for (Thread& thread : threads_) {
    thread.copies.clear();
    thread.group = 0;
  }
  mbarriers_.clear();
  in_flight_.clear();
}

void AsyncCopies::end_block() const {
  if (in_flight_.empty()) return;
  fail("the block ends before its bulk_copy" + at(in_flight_.back().where) + " does");
}

bool AsyncCopies::lands_at_once() const {
  if (Emulation::order == ThreadOrder::kShuffled) return Grid::current().random() % 2 == 0;
  return Emulation::order == ThreadOrder::kForward;
}

void AsyncCopies::move(Copy& copy) {
  if (copy.moved) return;
  copy.moved = true;
  if (copy.source == nullptr) {
    std::memset(copy.target, 0, copy.bytes);
  } else {
    std::memcpy(copy.target, copy.source, copy.bytes);
  }
}

void AsyncCopies::copy(void* target, const void* source, Location where) {
  check_aligned(source, 16, "the source of cp_async_16", where);
  shared_.start_copy(target, 16, where, 16, "the target of cp_async_16");
  Thread& self = threads_[running_thread()];
  self.copies.push_back({static_cast<std::byte*>(target), static_cast<const std::byte*>(source), 16,
                         false, self.group});
  if (lands_at_once()) move(self.copies.back());
}

void AsyncCopies::commit() { ++threads_[running_thread()].group; }

void AsyncCopies::wait_groups(int num_groups) {
  Thread& self = threads_[running_thread()];
  const auto first_open =
      std::find_if(self.copies.begin(), self.copies.end(),
                   [&](const Copy& copy) { return copy.group >= self.group - num_groups; });
  for (auto copy = self.copies.begin(); copy != first_open; ++copy) {
    move(*copy);
    const unsigned thread = running_thread();
    shared_.end_copy(copy->target, copy->bytes, thread, clocks_.stamp(thread));
  }
  self.copies.erase(self.copies.begin(), first_open);
}

AsyncCopies::Mbarrier& AsyncCopies::use(const void* mbarrier, AccessKind kind, Location where,
                                        const char* what) {
  const auto found = mbarriers_.find(mbarrier);
  if (found == mbarriers_.end()) fail(std::string(what) + at(where) + " before mbarrier_init");
  shared_.access(mbarrier, 8, kind, where);
  return found->second;
}

void AsyncCopies::init(const void* mbarrier, int count, Location where) {
  shared_.access(mbarrier, 8, AccessKind::kWrite, where, 8, "an Mbarrier");
  if (count < 1) fail("mbarrier_init" + at(where) + " with count " + std::to_string(count));
  if (mbarriers_.size() == Clocks::kMaxMbarriers) fail("more than 64 mbarriers in a block");
  Mbarrier barrier{};
  barrier.actor = clocks_.num_threads() + static_cast<unsigned>(mbarriers_.size());
  barrier.count = barrier.pending = count;
  barrier.initialiser = running_thread();
  if (!mbarriers_.emplace(mbarrier, std::move(barrier)).second) {
    fail("mbarrier_init" + at(where) + " of an Mbarrier that is in use");
  }
}

void AsyncCopies::proxy_fence() {
  for (auto& [_, barrier] : mbarriers_) {
    barrier.seen_by_copies |= barrier.initialiser == running_thread();
  }
}

void AsyncCopies::arrive(const void* mbarrier, int bytes, Location where) {
  Mbarrier& barrier = use(mbarrier, AccessKind::kAtomicUpdate, where, "mbarrier_arrive");
  if (barrier.pending == 0) {
    fail("mbarrier_arrive" + at(where) + " after all " + std::to_string(barrier.count) +
         " arrivals of the phase, in which " + std::to_string(barrier.pending_bytes) +
         " bytes are outstanding");
  }
  clocks_.release(running_thread(), barrier.arriving);
  --barrier.pending;
  barrier.pending_bytes += bytes;
  complete_phase(barrier);
}

void AsyncCopies::complete_phase(Mbarrier& barrier) {
  if (barrier.pending > 0 || barrier.pending_bytes > 0) return;
  if (barrier.pending_bytes < 0) {
    fail("bulk copies of a phase brought " + std::to_string(-barrier.pending_bytes) +
         " bytes more than mbarrier_arrive_expect announced");
  }
  barrier.pending = barrier.count;
  barrier.completed = barrier.arriving;
  ++barrier.phase;
  for (emulation::Thread* thread : barrier.waiting) Grid::current().release(*thread);
  barrier.waiting.clear();
}

void AsyncCopies::wait(const void* mbarrier, int parity, Location where) {
  Grid& grid = Grid::current();
  Mbarrier& barrier = use(mbarrier, AccessKind::kAtomicRead, where, "mbarrier_wait");
  // Two phases may complete before a waiting thread runs again; then it waits on, as on a GPU.
  while (barrier.phase % 2 == static_cast<unsigned>(parity)) {
    barrier.waiting.push_back(&grid.self());
    grid.park({.what = "mbarrier_wait", .where = where, .object = mbarrier});
    grid.yield();
  }
  clocks_.acquire(running_thread(), barrier.completed);
}

void AsyncCopies::bulk_copy(void* target, const void* source, int bytes, const void* mbarrier,
                            Location where) {
  if (!use(mbarrier, AccessKind::kAtomicUpdate, where, "bulk_copy").seen_by_copies) {
    fail("bulk_copy" + at(where) +
         ": no fence.proxy.async follows the initialisation of its Mbarrier");
  }
  check_aligned(source, 16, "the source of bulk_copy", where);
  if (bytes < 16 || bytes % 16 != 0) {
    fail("bulk_copy" + at(where) + " of " + std::to_string(bytes) +
         " bytes, must be a multiple of 16");
  }
  ++Emulation::num_bulk_copies;
  const size_t size = static_cast<size_t>(bytes);
  shared_.start_copy(target, size, where, 16, "the target of bulk_copy");
  const Copy copy{static_cast<std::byte*>(target), static_cast<const std::byte*>(source), size,
                  false, 0};
  if (lands_at_once()) {
    land({copy, mbarrier, where});
  } else {
    in_flight_.push_back({copy, mbarrier, where});
  }
}

void AsyncCopies::land(BulkCopy bulk) {
  Mbarrier& barrier = mbarriers_.at(bulk.mbarrier);
  move(bulk.copy);
  const Stamp stamp = clocks_.new_stamp();
  shared_.end_copy(bulk.copy.target, bulk.copy.bytes, barrier.actor, stamp);
  clocks_.add(barrier.actor, stamp, barrier.arriving);
  barrier.pending_bytes -= static_cast<int64_t>(bulk.copy.bytes);
  complete_phase(barrier);
}

bool AsyncCopies::land_one() {
  if (in_flight_.empty()) return false;
  // Copies in flight have no order. The newest first is the least expected one.
  const BulkCopy bulk = in_flight_.back();
  in_flight_.pop_back();
  land(bulk);
  return true;
}

std::string AsyncCopies::describe(const void* mbarrier) const {
  const Mbarrier& barrier = mbarriers_.at(mbarrier);
  return "for phase " + std::to_string(barrier.phase) + ", which has " +
         std::to_string(barrier.count - barrier.pending) + " of " + std::to_string(barrier.count) +
         " arrivals and waits for " + std::to_string(barrier.pending_bytes) + " bytes";
}

}  // namespace specdec::emulation
