// CPU ops verify_rejection, verify_recursive and verify_block: all rows walk in lock step. In every
// turn each row's walk (specdec/sampling/sampled_walk.h) asks for one pass over the vocabulary of
// its node; a task is a part of such a pass. Only visited nodes are read, and draft distributions
// only where there is a child.
//
// A pass processes segments of 1024 tokens in rows of 128 (specdec/sampling/residual.h), in plain
// loops that compilers vectorise. It is compiled for several instruction sets, of which one is
// chosen at run time. All give the same bits, because roundings and the order of sums are explicit.
#include "specdec/verify_sampled.h"

#include <algorithm>
#include <vector>

#include "cpu/math/philox.h"
#include "specdec/cpu/isa.h"
#include "specdec/math/pick.h"
#include "specdec/sampling/residual.h"
#include "specdec/sampling/rng.h"
#include "specdec/sampling/sampled_walk.h"

namespace specdec::cpu {
namespace {

static_assert(kBulkTokens == kSumLanes);
constexpr int64_t kTaskSegments = 8;
constexpr int64_t kGrainTokens = 16384;  // below this, waking a thread costs more than it saves

using Walk = SampledWalk<WalkLevel*, int32_t*>;

// A pass over the distributions of one node.
struct NodePass {
  Pass pass;
  const void* logits;
  const float* draft_probs;  // null if not needed
  int64_t vocab;
  ResidualDistribution residual;
  const int32_t* removed;
  int32_t num_removed;
  NoiseStream noise;
  BulkBits fill_bits;
};

union SegmentResult {
  NodeStatistics statistics;
  Masses masses;
  Pick pick;
};

template <typename T>
SPECDEC_HOST_DEVICE void load_logits(const NodePass& pass, int64_t first, float* logits) {
  const T* values = static_cast<const T*>(pass.logits);
  if (first + kSumLanes <= pass.vocab) {
    for (int i = 0; i < kSumLanes; ++i) logits[i] = to_float(values[first + i]);
    return;
  }
  std::fill_n(logits, kSumLanes, bits_to_float(kMinusInfinityBits));
  for (int64_t i = 0; i < pass.vocab - first; ++i) logits[i] = to_float(values[first + i]);
}

SPECDEC_HOST_DEVICE void load_draft(const NodePass& pass, int64_t first, float* draft) {
  const bool is_whole = first + kSumLanes <= pass.vocab;
  if (pass.draft_probs == nullptr || !is_whole) std::fill_n(draft, kSumLanes, 0.0f);
  if (pass.draft_probs == nullptr) return;
  if (is_whole) {
    for (int i = 0; i < kSumLanes; ++i) draft[i] = draft_weight(pass.draft_probs[first + i]);
    return;
  }
  for (int64_t i = 0; i < pass.vocab - first; ++i) {
    draft[i] = draft_weight(pass.draft_probs[first + i]);
  }
}

SPECDEC_HOST_DEVICE float sum_lanes(float* lanes) {
  for (int width = kSumLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) lanes[i] = exact_add(lanes[i], lanes[i + width]);
  }
  return lanes[0];
}

template <typename T>
SPECDEC_HOST_DEVICE NodeStatistics segment_statistics(const NodePass& pass, int64_t first) {
  float logits[kSegment];
  int32_t largest_key = kMinusInfinityKey;
  int32_t largest_magnitude = 0;
  const int64_t end = std::min(first + kSegment, pass.vocab);
  for (int64_t row = first; row < end; row += kSumLanes) {
    float* values = logits + (row - first);
    load_logits<T>(pass, row, values);
    for (int i = 0; i < kSumLanes; ++i) {
      const int32_t bits = float_to_bits(values[i]);
      largest_key = std::max(largest_key, ordered_key(bits));
      largest_magnitude = std::max(largest_magnitude, bits & 0x7FFFFFFF);
    }
  }
  const float max = bits_to_float(largest_magnitude > kInfinityBits ? largest_magnitude
                                                                    : ordered_key(largest_key));
  const float reference = finite_reference(max);
  float target_lanes[kSumLanes] = {};
  float draft_lanes[kSumLanes] = {};
  for (int64_t row = first; row < end; row += kSumLanes) {
    const float* values = logits + (row - first);
    float draft[kSumLanes];
    load_draft(pass, row, draft);
    for (int i = 0; i < kSumLanes; ++i) {
      target_lanes[i] = exact_add(target_lanes[i], target_weight(values[i], reference));
      draft_lanes[i] = exact_add(draft_lanes[i], draft[i]);
    }
  }
  return {max, sum_lanes(target_lanes), sum_lanes(draft_lanes)};
}

// Computes the weights of pass.residual for kSumLanes tokens from the loaded draft.
template <typename T>
SPECDEC_HOST_DEVICE void load_weights(const NodePass& pass, int64_t first, float* draft,
                                      float* weights) {
  load_draft(pass, first, draft);
  load_logits<T>(pass, first, weights);
  for (int i = 0; i < kSumLanes; ++i) {
    weights[i] = residual_weight(target_weight(weights[i], pass.residual.reference), draft[i],
                                 pass.residual);
  }
}

template <typename T>
SPECDEC_HOST_DEVICE Masses segment_masses(const NodePass& pass, int64_t first) {
  float residual_lanes[kSumLanes] = {};
  float draft_lanes[kSumLanes] = {};
  const int64_t end = std::min(first + kSegment, pass.vocab);
  for (int64_t row = first; row < end; row += kSumLanes) {
    float draft[kSumLanes], weights[kSumLanes];
    load_weights<T>(pass, row, draft, weights);
    for (int32_t i = 0; i < pass.num_removed; ++i) {
      const int64_t lane = pass.removed[i] - row;
      if (lane >= 0 && lane < kSumLanes) draft[lane] = 0.0f;
    }
    for (int i = 0; i < kSumLanes; ++i) {
      residual_lanes[i] = exact_add(residual_lanes[i], weights[i]);
      draft_lanes[i] = exact_add(draft_lanes[i], draft[i]);
    }
  }
  return {sum_lanes(residual_lanes), sum_lanes(draft_lanes)};
}

// Nonnegative floats have the order of their bits.
SPECDEC_HOST_DEVICE int32_t largest_bits(const float* values) {
  int32_t largest = 0;
  for (int i = 0; i < kSumLanes; ++i) largest = std::max(largest, float_to_bits(values[i]));
  return largest;
}

SPECDEC_HOST_DEVICE uint32_t smallest(const uint32_t* bits) {
  uint32_t smallest = UINT32_MAX;
  for (int i = 0; i < kSumLanes; ++i) smallest = std::min(smallest, bits[i]);
  return smallest;
}

// Whether a weight with these bits can beat `best` if its time is at least `time`.
SPECDEC_HOST_DEVICE bool may_win(int32_t weight_bits, float time, Pick best) {
  const float bound = exact_div(bits_to_float(weight_bits), time);
  return best == kNoPick || make_pick(float_to_bits(bound), 0) > (best | UINT32_MAX);
}

// The winner of the exponential race among a segment and `best`, the winner of earlier segments.
template <typename T>
SPECDEC_HOST_DEVICE Pick segment_draw(const NodePass& pass, int64_t first, Pick best) {
  const int64_t end = std::min(first + kSegment, pass.vocab);
  for (int64_t row = first; row < end; row += kSumLanes) {
    float draft[kSumLanes], weights[kSumLanes], ratios[kSumLanes];
    load_weights<T>(pass, row, draft, weights);
    // A row is skipped if even its largest weight with its smallest time loses. This is exact,
    // because rounding is monotonic and a tie loses to the lower token found before.
    const int32_t largest = largest_bits(weights);
    if (largest == 0 || !may_win(largest, exponential_bound(0), best)) continue;
    uint32_t bits[kSumLanes];
    pass.fill_bits(pass.noise, static_cast<uint32_t>(row / 4), bits);
    if (!may_win(largest, exponential_bound(smallest(bits)), best)) continue;
    for (int i = 0; i < kSumLanes; ++i) ratios[i] = exact_div(weights[i], exponential(bits[i]));
    const int32_t winner = largest_bits(ratios);
    int64_t i = 0;
    while (!(weights[i] > 0.0f) || float_to_bits(ratios[i]) != winner) ++i;
    best = std::max(best, make_pick(winner, row + i));
  }
  return best;
}

template <typename T>
SPECDEC_HOST_DEVICE void run_segments(const NodePass& pass, int64_t begin, int64_t end,
                                      SegmentResult* results) {
  Pick best = kNoPick;
  for (int64_t segment = begin; segment < end; ++segment) {
    const int64_t first = segment * kSegment;
    if (pass.pass == Pass::kStatistics) {
      results[segment].statistics = segment_statistics<T>(pass, first);
    } else if (pass.pass == Pass::kMasses) {
      results[segment].masses = segment_masses<T>(pass, first);
    } else {
      results[segment].pick = best = segment_draw<T>(pass, first, best);
    }
  }
}

NodePass node_pass(const VerifySampledParams& params, const Walk& walk, int64_t row,
                   const int32_t* removed) {
  const int64_t logits_offset =
      row * params.logits_batch_stride + walk.node * params.logits_node_stride;
  const bool needs_draft =
      walk.pass == Pass::kStatistics ? walk.has_child() : walk.residual.draft_scale > 0.0f;
  return {.pass = walk.pass,
          .logits = static_cast<const std::byte*>(params.logits) +
                    logits_offset * element_size(params.logits_type),
          .draft_probs = needs_draft ? params.draft_probs + row * params.draft_batch_stride +
                                           walk.node * params.draft_node_stride
                                     : nullptr,
          .vocab = params.vocab,
          .residual = walk.residual,
          .removed = removed,
          .num_removed = walk.num_removed,
          .noise = walk.noise(walk.depth, Purpose::kResidual),
          .fill_bits = bulk_bits(cpu_isa())};
}

// Adds value(segment) over all segments in the order of residual.h.
template <typename F>
float sum_segments(int64_t segments, const F& value) {
  float columns[kSumColumns] = {};
  for (int64_t segment = 0; segment < segments; ++segment) {
    float& column = columns[segment % kSumColumns];
    column = exact_add(column, value(segment));
  }
  for (int width = kSumColumns / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) columns[i] = exact_add(columns[i], columns[i + width]);
  }
  return columns[0];
}

NodeStatistics merge_statistics(const SegmentResult* results, int64_t segments) {
  float max = results[0].statistics.max;
  for (int64_t i = 1; i < segments; ++i) {
    const float other = results[i].statistics.max;
    if (other > max || other != other) max = other;  // a NaN in max stays
  }
  const float reference = finite_reference(max);
  const auto target = [&](int64_t i) { return rescaled_mass(results[i].statistics, reference); };
  const auto draft = [&](int64_t i) { return results[i].statistics.draft_mass; };
  return {max, sum_segments(segments, target), sum_segments(segments, draft)};
}

void finish_pass(Walk& walk, const SegmentResult* results, int64_t segments) {
  switch (walk.pass) {
    case Pass::kStatistics:
      return walk.on_statistics(merge_statistics(results, segments));
    case Pass::kMasses:
      return walk.on_masses(
          {sum_segments(segments, [&](int64_t i) { return results[i].masses.residual; }),
           sum_segments(segments, [&](int64_t i) { return results[i].masses.draft; })});
    default: {
      Pick best = kNoPick;
      for (int64_t i = 0; i < segments; ++i) best = std::max(best, results[i].pick);
      return walk.on_draw(best);
    }
  }
}

}  // namespace

void verify_sampled(const VerifySampledParams& params, const ParallelFor& parallel_for) {
  const auto run = with_float_type(
      params.logits_type, []<typename T>(T) { return build_for<run_segments<T>>(cpu_isa()); });
  std::vector<WalkLevel> levels(params.batch * params.nodes);
  std::vector<int32_t> removed(params.batch * params.nodes);
  std::vector<Walk> walks;
  std::vector<int64_t> rows;  // rows whose walks go on
  walks.reserve(params.batch);
  for (int64_t row = 0; row < params.batch; ++row) {
    const int64_t first = row * params.nodes;
    walks.emplace_back(params, row, levels.data() + first, removed.data() + first).start();
    rows.push_back(row);
  }

  const int64_t segments = num_segments(params.vocab);
  const int64_t parts = (segments + kTaskSegments - 1) / kTaskSegments;
  const int64_t task_tokens = std::min(params.vocab, kTaskSegments * kSegment);
  const int64_t grain = std::max<int64_t>(1, kGrainTokens / task_tokens);
  std::vector<NodePass> passes;
  std::vector<SegmentResult> results(params.batch * segments);
  while (true) {
    std::erase_if(rows, [&](int64_t row) { return walks[row].pass == Pass::kDone; });
    if (rows.empty()) break;
    passes.clear();
    for (const int64_t row : rows) {
      passes.push_back(node_pass(params, walks[row], row, removed.data() + row * params.nodes));
    }
    const int64_t tasks = static_cast<int64_t>(rows.size()) * parts;
    parallel_for(tasks, grain, [&](int64_t begin, int64_t end) {
      for (int64_t task = begin; task < end; ++task) {
        const int64_t first = task % parts * kTaskSegments;
        const int64_t last = std::min(first + kTaskSegments, segments);
        run(passes[task / parts], first, last, results.data() + task / parts * segments);
      }
    });
    for (size_t i = 0; i < rows.size(); ++i) {
      finish_pass(walks[rows[i]], results.data() + i * segments, segments);
    }
  }
  for (const Walk& walk : walks) walk.write_outputs();
}

}  // namespace specdec::cpu
