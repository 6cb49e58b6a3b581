#include "async.h"

#include <cstring>

#include "block.h"

namespace specdec::emulation {
namespace {

[[noreturn]] void fail(const std::string& what) { Grid::current().fail(what); }

}  // namespace

bool AsyncCopies::lands_at_once() const {
  if (Emulation::order == ThreadOrder::kShuffled) return Grid::current().random() % 2 == 0;
  return Emulation::order == ThreadOrder::kForward;
}

void AsyncCopies::reset() {
  for (auto& groups : groups_) groups.assign(1, Group());
  mbarriers_.clear();
  in_flight_.clear();
}

void AsyncCopies::land(Copy& copy) {
  if (copy.landed) return;
  copy.landed = true;
  if (copy.source == nullptr) {
    std::memset(copy.target, 0, copy.bytes);
  } else {
    std::memcpy(copy.target, copy.source, copy.bytes);
  }
}

void AsyncCopies::copy(void* target, const void* source, size_t bytes, Location) {
  check_aligned(target, bytes, "the target of cp_async_16");
  if (source != nullptr) check_aligned(source, bytes, "the source of cp_async_16");
  Copy copy{static_cast<std::byte*>(target), static_cast<const std::byte*>(source), bytes, false};
  if (lands_at_once()) land(copy);
  groups_[Grid::current().self().index].back().push_back(copy);
}

void AsyncCopies::commit() { groups_[Grid::current().self().index].emplace_back(); }

void AsyncCopies::wait(int num_groups) {
  std::deque<Group>& groups = groups_[Grid::current().self().index];
  while (groups.size() - 1 > static_cast<size_t>(num_groups)) {
    for (Copy& copy : groups.front()) land(copy);
    groups.pop_front();
  }
}

MbarrierState& AsyncCopies::state(const void* mbarrier, const char* what) {
  const auto found = mbarriers_.find(mbarrier);
  if (found == mbarriers_.end()) fail(std::string(what) + " before mbarrier_init");
  return found->second;
}

void AsyncCopies::init(const void* mbarrier, int count, Location) {
  check_aligned(mbarrier, 8, "an Mbarrier");
  if (count < 1) fail("mbarrier_init with count " + std::to_string(count));
  const bool is_new = mbarriers_.emplace(mbarrier, MbarrierState{count, count, 0, 0, {}}).second;
  if (!is_new) fail("mbarrier_init of an Mbarrier that is initialised already");
}

void AsyncCopies::arrive(const void* mbarrier, int bytes, Location) {
  MbarrierState& barrier = state(mbarrier, "mbarrier_arrive");
  if (barrier.pending == 0) {
    fail("mbarrier_arrive after all " + std::to_string(barrier.count) +
         " arrivals of the phase, which waits for " + std::to_string(barrier.pending_bytes) +
         " bytes");
  }
  --barrier.pending;
  barrier.pending_bytes += bytes;
  complete_phase(barrier);
}

void AsyncCopies::complete_phase(MbarrierState& barrier) {
  if (barrier.pending > 0 || barrier.pending_bytes > 0) return;
  if (barrier.pending_bytes < 0) fail("more bytes were copied than mbarrier_arrive_expect said");
  barrier.pending = barrier.count;
  ++barrier.phase;
  for (Thread* thread : barrier.waiting) Grid::current().release(*thread);
  barrier.waiting.clear();
}

void AsyncCopies::wait(const void* mbarrier, int parity, Location where) {
  Grid& grid = Grid::current();
  // A phase may be over, and the next one too, before a waiting thread runs again; then it waits
  // on.
  while (state(mbarrier, "mbarrier_wait").phase % 2 == static_cast<unsigned>(parity)) {
    state(mbarrier, "mbarrier_wait").waiting.push_back(&grid.self());
    grid.park({.what = "mbarrier_wait", .where = where, .object = mbarrier});
    grid.yield();
  }
}

void AsyncCopies::bulk_copy(void* target, const void* source, int bytes, const void* mbarrier,
                            Location) {
  state(mbarrier, "bulk_copy");
  check_aligned(target, 16, "the target of bulk_copy");
  check_aligned(source, 16, "the source of bulk_copy");
  if (bytes < 16 || bytes % 16 != 0) {
    fail("bulk_copy of " + std::to_string(bytes) + " bytes, must be a multiple of 16");
  }
  const Copy copy{static_cast<std::byte*>(target), static_cast<const std::byte*>(source),
                  static_cast<size_t>(bytes), false};
  in_flight_.push_back({copy, mbarrier});
  if (lands_at_once()) {
    const BulkCopy bulk = in_flight_.back();
    in_flight_.pop_back();
    land(bulk);
  }
}

void AsyncCopies::land(const BulkCopy& bulk) {
  Copy copy = bulk.copy;
  land(copy);
  MbarrierState& barrier = state(bulk.mbarrier, "bulk_copy");
  barrier.pending_bytes -= static_cast<int64_t>(copy.bytes);
  complete_phase(barrier);
}

bool AsyncCopies::land_one() {
  if (in_flight_.empty()) return false;
  // Copies in flight have no order. The newest first surprises most.
  const BulkCopy bulk = in_flight_.back();
  in_flight_.pop_back();
  land(bulk);
  return true;
}

std::string AsyncCopies::describe(const void* mbarrier) const {
  const MbarrierState& barrier = mbarriers_.at(mbarrier);
  return "of phase " + std::to_string(barrier.phase) + " with " +
         std::to_string(barrier.count - barrier.pending) + " of " + std::to_string(barrier.count) +
         " arrivals and " + std::to_string(barrier.pending_bytes) + " bytes outstanding";
}

}  // namespace specdec::emulation
