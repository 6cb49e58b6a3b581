#include "clocks.h"

#include <algorithm>
#include <bit>

namespace specdec::emulation {
namespace {

template <typename Visit>
void for_each_thread(const Lanes& lanes, const Visit& visit) {
  for (uint32_t rest = lanes.mask; rest != 0; rest &= rest - 1) {
    visit(lanes.warp * 32 + static_cast<unsigned>(std::countr_zero(rest)));
  }
}

}  // namespace

void Knowledge::learn(const Knowledge& other) {
  floor = std::max(floor, other.floor);
  if (other.seen.empty()) return;
  seen.resize(other.seen.size());
  for (size_t i = 0; i < seen.size(); ++i) seen[i] = std::max(seen[i], other.seen[i]);
}

void Knowledge::learn(unsigned actor, Stamp stamp, size_t num_actors) {
  seen.resize(num_actors);
  seen[actor] = std::max(seen[actor], stamp);
}

Clocks::Clocks(unsigned num_threads)
    : threads_(num_threads), of_warps_((num_threads + 31) / 32), of_threads_(num_threads) {}

void Clocks::reset() {
  for (Knowledge& knowledge : of_warps_) knowledge = {};
  newest_ = 0;
  join_block();
}

void Clocks::join_block() {
  ++version_;
  const Stamp floor = newest_, stamp = new_stamp();
  for (Knowledge& knowledge : of_warps_) knowledge.floor = floor;
  for (size_t i = 0; i < threads_.size(); ++i) threads_[i] = {stamp, &of_warps_[i / 32]};
}

// The usual warp barrier: all lanes know the same, so only their last segments are new.
bool Clocks::join_in_place(const Lanes& lanes) {
  Knowledge& common = of_warps_[lanes.warp];
  bool shared = lanes.whole;
  for_each_thread(lanes, [&](unsigned i) { shared &= threads_[i].knowledge == &common; });
  if (!shared) return false;
  common.seen.resize(num_actors());
  const Stamp stamp = new_stamp();
  for_each_thread(lanes, [&](unsigned i) {
    common.seen[i] = threads_[i].stamp;
    threads_[i].stamp = stamp;
  });
  return true;
}

void Clocks::join(std::span<const Lanes> participants) {
  ++version_;
  if (participants.size() == 1 && join_in_place(participants[0])) return;
  Knowledge common;
  for (const Lanes& lanes : participants) {
    const Knowledge* learnt = nullptr;
    for_each_thread(lanes, [&](unsigned i) {
      if (threads_[i].knowledge != learnt) common.learn(*threads_[i].knowledge);
      learnt = threads_[i].knowledge;
      add(i, threads_[i].stamp, common);
    });
  }
  const Stamp stamp = new_stamp();
  for (const Lanes& lanes : participants) {
    if (lanes.whole) of_warps_[lanes.warp] = common;
    for_each_thread(lanes, [&](unsigned i) {
      if (!lanes.whole) of_threads_[i] = common;
      threads_[i] = {stamp, lanes.whole ? &of_warps_[lanes.warp] : &of_threads_[i]};
    });
  }
}

Stamp Clocks::cut(unsigned thread) {
  const Stamp stamp = threads_[thread].stamp;
  threads_[thread].stamp = new_stamp();
  return stamp;
}

void Clocks::release(unsigned thread, Knowledge& object) {
  release_until(thread, cut(thread), object);
}

void Clocks::release_until(unsigned thread, Stamp last, Knowledge& object) const {
  object.learn(*threads_[thread].knowledge);
  add(thread, last, object);
}

Knowledge& Clocks::own_knowledge(unsigned thread) {
  Knowledge& own = of_threads_[thread];
  if (threads_[thread].knowledge != &own) {
    own = *threads_[thread].knowledge;
    threads_[thread].knowledge = &own;
  }
  return own;
}

void Clocks::acquire(unsigned thread, const Knowledge& object) {
  ++version_;
  own_knowledge(thread).learn(object);
}

}  // namespace specdec::emulation
