#include "shadow.h"

#include <algorithm>

namespace specdec::emulation {
namespace {

// Whether two accesses of different threads to one cell must be ordered.
bool conflict(AccessKind a, AccessKind b) {
  const auto either = [&](AccessKind kind) { return a == kind || b == kind; };
  if (either(AccessKind::kWrite)) return true;
  return either(AccessKind::kRead) && either(AccessKind::kAtomicUpdate);
}

const char* present_tense(AccessKind kind) {
  switch (kind) {
    case AccessKind::kRead:
      return "reads";
    case AccessKind::kAtomicRead:
      return "reads atomically";
    case AccessKind::kAtomicUpdate:
      return "updates atomically";
    case AccessKind::kWrite:
      break;
  }
  return "writes";
}

const char* past_tense(AccessKind kind) {
  switch (kind) {
    case AccessKind::kRead:
      return "read";
    case AccessKind::kAtomicRead:
      return "read atomically";
    case AccessKind::kAtomicUpdate:
      return "updated atomically";
    case AccessKind::kWrite:
      break;
  }
  return "wrote";
}

}  // namespace

void AccessSets::clear() {
  cleared_ += static_cast<Id>(sets_.empty() ? 0 : sets_.size() - 1);
  sets_.assign(1, Set{});
}

AccessSets::Id AccessSets::add(Id id, const Access& access, Stamp stamp) {
  const Id rest = find(id) == nullptr ? cleared_ : id;
  Set& base = sets_[rest - cleared_];
  if (base.last_successor != kEmpty) {
    const Set& next = sets_[base.last_successor - cleared_];
    if (next.thread == access.thread && next.stamp == stamp && next.kind == access.kind) {
      return base.last_successor;
    }
  }
  const Id added = cleared_ + static_cast<Id>(sets_.size());
  base.last_successor = added;
  Set set{.rest = rest,
          .last_successor = kEmpty,
          .stamp = stamp,
          .thread = static_cast<uint16_t>(access.thread),
          .kind = access.kind,
          .where = access.where,
          .newest_read = base.newest_read,
          .newest_atomic_read = base.newest_atomic_read,
          .newest_atomic_update = base.newest_atomic_update};
  Stamp& newest = access.kind == AccessKind::kRead         ? set.newest_read
                  : access.kind == AccessKind::kAtomicRead ? set.newest_atomic_read
                                                           : set.newest_atomic_update;
  newest = std::max(newest, stamp);
  sets_.push_back(set);
  return added;
}

void Shadow::reset(size_t bytes, bool counts_as_written) {
  counts_as_written_ = counts_as_written;
  words_.assign((bytes + 3) / 4, {});
  sets_.clear();
}

// The cell at `offset` for an access that reaches to `end`; moves `offset` behind the cell.
ShadowCell& Shadow::next_cell(size_t& offset, size_t end) {
  const size_t first = offset / 4 * 4;
  ShadowCell& word = words_[first / 4];
  if (!word.split) {
    if (offset == first && end - offset >= 4) {
      offset += 4;
      return word;
    }
    bytes_.resize(words_.size() * 4);
    std::fill_n(bytes_.begin() + static_cast<ptrdiff_t>(first), 4, word);
    word.split = true;
  }
  return bytes_[offset++];
}

// Whether all accesses of the set that conflict with this one happened before it.
bool Shadow::is_ordered(AccessSets::Id id, const Access& access) {
  const AccessSets::Set* set = sets_.find(id);
  const Stamp floor = clocks_.floor(access.thread);
  if (set == nullptr || set->newest_conflict(access.kind) <= floor) return true;
  const Ordered question{id, access.thread, access.kind, clocks_.version()};
  if (question == ordered_) return true;
  for (; set != nullptr && set->newest_conflict(access.kind) > floor; set = sets_.find(set->rest)) {
    if (conflict(access.kind, set->kind) &&
        !clocks_.happened_before(set->thread, set->stamp, access.thread)) {
      return false;
    }
  }
  ordered_ = question;
  return true;
}

bool Shadow::is_legal(const ShadowCell& cell, const Access& access) {
  if (cell.in_flight) return false;
  if (cell.write_stamp == 0 && !counts_as_written_) return access.kind == AccessKind::kWrite;
  return clocks_.happened_before(cell.writer, cell.write_stamp, access.thread) &&
         is_ordered(cell.accesses, access);
}

std::string Shadow::describe_problem(const ShadowCell& cell, const Access& access) const {
  const auto actor = [&](unsigned who) {
    return who < clocks_.num_threads() ? "thread " + std::to_string(who) : "a bulk copy";
  };
  const char* const race = ", and no barrier orders the two: a race";
  if (cell.in_flight) {
    return "to which " + actor(cell.writer) + " copies asynchronously" + at(cell.where) +
           ", and nothing waited for the end of the copy";
  }
  if (cell.write_stamp == 0 && !counts_as_written_) return "which no thread has written";
  if (!clocks_.happened_before(cell.writer, cell.write_stamp, access.thread)) {
    return "which " + actor(cell.writer) + " wrote" + at(cell.where) + race;
  }
  const AccessSets::Set* set = sets_.find(cell.accesses);
  while (!conflict(access.kind, set->kind) ||
         clocks_.happened_before(set->thread, set->stamp, access.thread)) {
    set = sets_.find(set->rest);
  }
  return "which " + actor(set->thread) + " " + past_tense(set->kind) + at(set->where) + race;
}

void Shadow::record(ShadowCell& cell, const Access& access) {
  const Stamp stamp = clocks_.stamp(access.thread);
  if (access.kind == AccessKind::kWrite) {
    cell.write_stamp = stamp;
    cell.writer = static_cast<uint16_t>(access.thread);
    cell.where = access.where;
    cell.accesses = AccessSets::kEmpty;
    return;
  }
  const AccessSets::Set* set = sets_.find(cell.accesses);
  if (set != nullptr) {
    if (set->thread == access.thread && set->stamp == stamp && set->kind == access.kind) return;
    // A write that is ordered after this read is also ordered after everything that the read is
    // ordered after. (A read may be ordered after this read but not after atomic operations.)
    const Access as_write{AccessKind::kWrite, access.thread, access.where};
    if (set->newest_atomic_read == 0 && set->newest_atomic_update == 0 &&
        clocks_.happened_before(set->thread, set->stamp, access.thread) &&
        is_ordered(cell.accesses, as_write)) {
      cell.accesses = AccessSets::kEmpty;
    }
  }
  cell.accesses = sets_.add(cell.accesses, access, stamp);
}

bool Shadow::access(size_t offset, size_t bytes, const Access& access) {
  for (size_t next = offset; next < offset + bytes;) {
    const size_t here = next;
    ShadowCell& cell = next_cell(next, offset + bytes);
    if (!is_legal(cell, access)) {
      problem_ = present_tense(access.kind) + (" byte " + std::to_string(here)) + at(access.where) +
                 ", " + describe_problem(cell, access);
      return false;
    }
    record(cell, access);
  }
  return true;
}

bool Shadow::start_copy(size_t offset, size_t bytes, const Access& access) {
  if (!this->access(offset, bytes, access)) return false;
  for (size_t next = offset; next < offset + bytes;) {
    next_cell(next, offset + bytes).in_flight = true;
  }
  return true;
}

void Shadow::end_copy(size_t offset, size_t bytes, unsigned actor, Stamp stamp) {
  for (size_t next = offset; next < offset + bytes;) {
    ShadowCell& cell = next_cell(next, offset + bytes);
    cell.in_flight = false;
    cell.writer = static_cast<uint16_t>(actor);
    cell.write_stamp = stamp;
  }
}

}  // namespace specdec::emulation
