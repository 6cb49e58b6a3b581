// The set of runnable threads, ordered by rank, and pseudo-random bits to draw the ranks.
#pragma once

#include <bit>
#include <cstdint>
#include <optional>
#include <vector>

namespace specdec::emulation {

// SplitMix64, which gives the same choices on every platform.
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

// A set of small integers as bits, with one bit per word above, so that removing the first is fast.
class ReadySet {
 public:
  explicit ReadySet(size_t capacity)
      : words_((capacity + 63) / 64), summary_((words_.size() + 63) / 64) {}

  void insert(unsigned i) {
    words_[i / 64] |= uint64_t{1} << i % 64;
    summary_[i / 4096] |= uint64_t{1} << i / 64 % 64;
  }

  // Removes and returns the first one.
  std::optional<unsigned> take() {
    for (size_t s = 0; s < summary_.size(); ++s) {
      if (summary_[s] == 0) continue;
      const size_t w = s * 64 + static_cast<size_t>(std::countr_zero(summary_[s]));
      const int bit = std::countr_zero(words_[w]);
      words_[w] &= words_[w] - 1;
      if (words_[w] == 0) summary_[s] &= summary_[s] - 1;
      return static_cast<unsigned>(w * 64) + static_cast<unsigned>(bit);
    }
    return std::nullopt;
  }

 private:
  std::vector<uint64_t> words_, summary_;
};

}  // namespace specdec::emulation
