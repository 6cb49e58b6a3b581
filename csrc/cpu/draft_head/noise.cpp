#include "noise.h"

#include "cpu/math/token_noise.h"

namespace specdec::cpu {
namespace {

constexpr int64_t kChunk = 512;  // tokens of a task

}  // namespace

void ChildNoise::fill(const DraftHeadParams& params, std::span<const DraftElement> elements,
                      const ParallelFor& parallel_for) {
  vocab_ = params.head.draft_vocab;
  levels_.clear();
  level_of_.clear();
  for (const DraftElement& each : elements) {
    if (levels_.empty() || levels_.back().row != each.row ||
        levels_.back().position != each.position) {
      levels_.push_back({each.row, each.position, params.noise.temperature(each.row)});
    }
    level_of_.push_back(std::ssize(levels_) - 1);
  }
  if (params.noise.temperatures.data == nullptr) return;
  values_.resize(std::max<size_t>(values_.size(), levels_.size() * vocab_));
  const View1<const int64_t> ids{params.head.draft_to_target, 1};
  const int64_t chunks = (vocab_ + kChunk - 1) / kChunk;
  parallel_for(std::ssize(levels_) * chunks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const Level& level = levels_[task / chunks];
      if (level.temperature == 0.0f) continue;
      const int64_t first = task % chunks * kChunk;
      fill_noise(params.noise.stream(level.row, level.position + kPredictsAhead), ids, first,
                 std::min(kChunk, vocab_ - first), values_.data() + task / chunks * vocab_ + first);
    }
  });
}

}  // namespace specdec::cpu
