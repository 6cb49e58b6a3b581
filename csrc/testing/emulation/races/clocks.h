// Happens-before between the threads of a block, by vector clocks.
//
// The run of a thread is divided into segments, at every point where other threads can learn what
// it has done. A segment has a stamp from one counter of the block, so stamps grow in the order of
// execution. A thread's knowledge is, for every other thread, the newest segment that happened
// before; in addition all segments of all threads up to `floor` happened before.
//
// Lanes of a warp that learn the same things share one Knowledge, and a barrier of the block only
// raises floors, so that the usual synchronisation is cheap.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace specdec::emulation {

using Stamp = uint32_t;

struct Knowledge {
  Stamp floor = 0;
  std::vector<Stamp> seen;  // by actor; empty: nothing beyond `floor`

  bool covers(unsigned actor, Stamp stamp) const {
    return stamp <= floor || (!seen.empty() && stamp <= seen[actor]);
  }
  void learn(const Knowledge& other);
  void learn(unsigned actor, Stamp stamp, size_t num_actors);
};

// Lanes of one warp; whole: all of its lanes that have not ended.
struct Lanes {
  unsigned warp;
  uint32_t mask;
  bool whole;
};

// Actors are the threads, by index, followed by the mbarriers, each for the copies that it counts.
class Clocks {
 public:
  static constexpr unsigned kMaxMbarriers = 64;

  explicit Clocks(unsigned num_threads);
  void reset();

  unsigned num_threads() const { return static_cast<unsigned>(threads_.size()); }
  Stamp stamp(unsigned thread) const { return threads_[thread].stamp; }
  Stamp new_stamp() { return ++newest_; }
  bool happened_before(unsigned actor, Stamp stamp, unsigned thread) const {
    return actor == thread || threads_[thread].knowledge->covers(actor, stamp);
  }
  Stamp floor(unsigned thread) const { return threads_[thread].knowledge->floor; }
  // Changes whenever a thread learns something.
  uint64_t version() const { return version_; }

  // Lets all threads of the block, or these lanes, learn what the others have done.
  void join_block();
  void join(std::span<const Lanes> participants);
  // Ends the thread's segment; returns its stamp.
  Stamp cut(unsigned thread);
  // Lets threads that acquire `object` learn what `thread` did until now, or until the segment
  // `last`.
  void release(unsigned thread, Knowledge& object);
  void release_until(unsigned thread, Stamp last, Knowledge& object) const;
  void acquire(unsigned thread, const Knowledge& object);
  void add(unsigned actor, Stamp stamp, Knowledge& object) const {
    object.learn(actor, stamp, num_actors());
  }

 private:
  struct Thread {
    Stamp stamp;
    Knowledge* knowledge;  // shared by the warp, or the thread's own
  };

  size_t num_actors() const { return threads_.size() + kMaxMbarriers; }
  Knowledge& own_knowledge(unsigned thread);
  bool join_in_place(const Lanes& lanes);

  std::vector<Thread> threads_;
  std::vector<Knowledge> of_warps_, of_threads_;
  Stamp newest_ = 0;
  uint64_t version_ = 0;
};

}  // namespace specdec::emulation
