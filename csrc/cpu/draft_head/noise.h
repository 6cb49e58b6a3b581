// The noise that is added to the logits of drafted nodes.
#pragma once

#include <span>
#include <vector>

#include "layers.h"

namespace specdec::cpu {

// The noise of the children of some elements. Consecutive elements of one row and position, which
// are the nodes of a level, share it.
class ChildNoise {
 public:
  void fill(const DraftHeadParams& params, std::span<const DraftElement> elements,
            const ParallelFor& parallel_for);

  // The draft's temperature for an element; 0: no noise.
  float temperature(int64_t element) const { return levels_[level_of_[element]].temperature; }
  // The noise of all draft tokens as children of an element.
  const float* values(int64_t element) const {
    return values_.data() + level_of_[element] * vocab_;
  }

 private:
  struct Level {
    int64_t row;
    int64_t position;
    float temperature;
  };

  int64_t vocab_;
  std::vector<Level> levels_;
  std::vector<int64_t> level_of_;  // [elements]
  std::vector<float> values_;      // [levels, vocab]
};

}  // namespace specdec::cpu
