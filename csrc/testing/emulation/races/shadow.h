// The emulator's record of each byte of a block's shared memory, which detects races and reads of
// memory that was never written.
//
// Each cell stores the last plain write, and the reads and atomic operations since then. An access
// is a race if it conflicts with a stored access that did not happen before it (clocks.h). Cells
// are words of four bytes; a word that is accessed in parts becomes four cells.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "clocks.h"
#include "location.h"

namespace specdec::emulation {

enum class AccessKind : uint8_t { kRead, kAtomicRead, kAtomicUpdate, kWrite };

struct Access {
  AccessKind kind;
  unsigned thread;
  Location where;
};

// Sets of accesses to a cell. Cells with the same accesses share one set. A set is its newest
// access and the set before it.
class AccessSets {
 public:
  using Id = uint32_t;
  static constexpr Id kEmpty = 0;

  struct Set {
    Id rest;
    Id last_successor;  // the set that was last made by adding to this one
    Stamp stamp;
    uint16_t thread;
    AccessKind kind;
    Location where;
    Stamp newest_read, newest_atomic_read, newest_atomic_update;  // in the whole set; 0: none

    // The newest stamp among the accesses that conflict with an access of this kind.
    Stamp newest_conflict(AccessKind with) const {
      if (with == AccessKind::kAtomicRead) return 0;
      if (with == AccessKind::kRead) return newest_atomic_update;
      if (with == AccessKind::kAtomicUpdate) return newest_read;
      return std::max({newest_read, newest_atomic_read, newest_atomic_update});
    }
  };

  AccessSets() { clear(); }
  // Makes all sets empty.
  void clear();
  const Set* find(Id id) const { return id <= cleared_ ? nullptr : &sets_[id - cleared_]; }
  Id add(Id id, const Access& access, Stamp stamp);

 private:
  std::vector<Set> sets_;  // sets_[0] is the empty set
  Id cleared_ = 0;         // ids up to this one belong to former sets
};

struct ShadowCell {
  Stamp write_stamp = 0;  // 0: never written
  AccessSets::Id accesses = AccessSets::kEmpty;
  uint16_t writer = 0;     // an actor
  bool in_flight = false;  // by an asynchronous copy that no thread has waited for
  bool split = false;      // the word's four cells are used instead
  Location where;          // place of the write
};

class Shadow {
 public:
  explicit Shadow(Clocks& clocks) : clocks_(clocks) {}

  // Marks all `bytes` as never written; reading such a byte is an error unless `counts_as_written`.
  void reset(size_t bytes, bool counts_as_written);
  // Called when all threads have passed a barrier.
  void forget_accesses() { sets_.clear(); }

  // Records an access. Returns false if it is illegal; problem() then says why.
  bool access(size_t offset, size_t bytes, const Access& access);
  // Records a copy that `access.thread` starts; it ends as a write of `actor`.
  bool start_copy(size_t offset, size_t bytes, const Access& access);
  void end_copy(size_t offset, size_t bytes, unsigned actor, Stamp stamp);
  const std::string& problem() const { return problem_; }

 private:
  ShadowCell& next_cell(size_t& offset, size_t end);
  bool is_legal(const ShadowCell& cell, const Access& access);
  std::string describe_problem(const ShadowCell& cell, const Access& access) const;
  bool is_ordered(AccessSets::Id id, const Access& access);
  void record(ShadowCell& cell, const Access& access);

  Clocks& clocks_;
  AccessSets sets_;
  bool counts_as_written_ = false;
  std::vector<ShadowCell> words_, bytes_;
  // The latest question with the answer yes, because neighbouring cells ask it again.
  struct Ordered {
    AccessSets::Id id = AccessSets::kEmpty;
    unsigned thread = 0;
    AccessKind kind = AccessKind::kRead;
    uint64_t version = 0;  // version of the clocks
    bool operator==(const Ordered&) const = default;
  } ordered_;
  std::string problem_;
};

}  // namespace specdec::emulation
