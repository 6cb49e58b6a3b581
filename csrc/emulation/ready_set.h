// The threads that can run, and pseudo-random bits to choose among them.
#pragma once

#include <bit>
#include <cstdint>
#include <vector>

#include "emulation.h"

namespace specdec::emulation {

// SplitMix64: the same choices on every platform.
class RandomBits {
 public:
  explicit RandomBits(uint64_t seed) : state_(seed) {}

  uint64_t next() {
    uint64_t z = state_ += 0x9E3779B97F4A7C15;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
    return z ^ (z >> 31);
  }

 private:
  uint64_t state_;
};

// A set of small integers as bits, with one bit per word above, so that choosing is fast.
class ReadySet {
 public:
  static constexpr int kNone = -1;

  explicit ReadySet(unsigned capacity)
      : words_((capacity + 63) / 64), summary_((words_.size() + 63) / 64) {}

  void insert(unsigned i) {
    words_[i / 64] |= uint64_t{1} << i % 64;
    summary_[i / 4096] |= uint64_t{1} << i / 64 % 64;
  }

  // Takes one out, kNone if there is none.
  int take(ThreadOrder order, RandomBits& random) {
    int i = kNone;
    switch (order) {
      case ThreadOrder::kForward:
        i = first_from(0);
        break;
      case ThreadOrder::kBackward:
        i = last();
        break;
      case ThreadOrder::kShuffled:
        i = first_from(static_cast<unsigned>(random.next() % (words_.size() * 64)));
        if (i == kNone) i = first_from(0);
        break;
    }
    if (i != kNone) erase(static_cast<unsigned>(i));
    return i;
  }

 private:
  void erase(unsigned i) {
    words_[i / 64] &= ~(uint64_t{1} << i % 64);
    if (words_[i / 64] == 0) summary_[i / 4096] &= ~(uint64_t{1} << i / 64 % 64);
  }

  int first_from(unsigned begin) const {
    const uint64_t rest = words_[begin / 64] >> begin % 64;
    if (rest != 0) return static_cast<int>(begin) + std::countr_zero(rest);
    const unsigned next_word = begin / 64 + 1;
    for (unsigned s = next_word / 64; s < summary_.size(); ++s) {
      uint64_t candidates = summary_[s];
      if (s == next_word / 64) candidates &= ~uint64_t{0} << next_word % 64;
      if (candidates == 0) continue;
      const unsigned word = s * 64 + static_cast<unsigned>(std::countr_zero(candidates));
      return static_cast<int>(word * 64) + std::countr_zero(words_[word]);
    }
    return kNone;
  }

  int last() const {
    for (size_t s = summary_.size(); s-- > 0;) {
      if (summary_[s] == 0) continue;
      const size_t word = s * 64 + 63 - static_cast<size_t>(std::countl_zero(summary_[s]));
      return static_cast<int>(word * 64) + 63 - std::countl_zero(words_[word]);
    }
    return kNone;
  }

  std::vector<uint64_t> words_, summary_;
};

}  // namespace specdec::emulation
