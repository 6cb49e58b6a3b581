// verify_rejection, verify_recursive, verify_block: walk draft trees whose tokens were sampled. The
// rules and the meaning of the arguments: specdec/verify_sampled.h; the decisions:
// specdec/sampled_walk.h; the arithmetic: specdec/residual.h.
//
// In:  logits [batch, nodes, vocab] f32/bf16/f16, draft_probs [batch, nodes, vocab] f32,
//      tokens, parents [batch, nodes], root_positions, seeds, row_ids [batch]
// Out: path [batch, nodes], num_accepted, next_token, status [batch]
//
// Two launches:
//   statistics: one warp per (row, node, segment of 1024 tokens). The logits stay in registers
//         between the maximum and the sum. Inactive nodes are skipped, and so are leaves' draft
//         laws.
//   walk: a few blocks per row. Thread 0 decides; the block computes the passes that it asks for.
//         Statistics are merged from the first launch. A pass of residual masses (a rejected child
//         with a sibling left, a prefix that block verification tries) reads both laws of one node,
//         a warp per column of the sum. All blocks of a row walk the same way, because walking
//         again is cheaper than a barrier between blocks; the final draw is split between them, and
//         the last one to arrive merges the picks. With many rows there is one block per row.
//
// Sums have the order of residual.h and picks are compared as integers, so nothing depends on how
// many blocks there are. NaN in a node that the walk does not visit ends up in statistics that
// nobody uses.
//
// Bytes: the logits of all nodes and the draft laws of all nodes with children once, then both laws
// of one node per pass of masses and for the draw. Bound by memory in the first launch, by latency
// in the second.
#include <algorithm>

#include "specdec/cuda.cuh"
#include "specdec/launchers.h"
#include "specdec/sampled_walk.h"

namespace specdec {
namespace {

constexpr int kStatisticsThreads = 256;
constexpr int kStatisticsWarps = kStatisticsThreads / kWarpSize;
constexpr int kWalkThreads = 512;
constexpr int kWalkWarps = kWalkThreads / kWarpSize;
constexpr int kTargetBlocks = 128;  // of the walk, about one per multiprocessor
constexpr int kGroup = 4;           // tokens of a thread in a row of a segment
constexpr int kSegmentRows = kSegment / kSumLanes;
static_assert(kSumLanes == kGroup * kWarpSize && kSumColumns == kWarpSize);

// Which vector loads are aligned.
struct Alignment {
  bool logits;
  bool draft;
};

struct Workspace {
  Pick* picks;                 // [batch, slices]
  NodeStatistics* statistics;  // [batch, nodes, segments]
  uint32_t* arrivals;          // [batch] zeroed by the first launch
  int64_t segments;
  int64_t slices;  // blocks per row in the second launch
};

template <typename T>
struct alignas(kGroup * sizeof(T)) AlignedGroup {
  T values[kGroup];
};

// values[i] = convert(data[first + i]), `missing` beyond the vocabulary.
template <typename T, typename F>
__device__ __forceinline__ void load_group(const T* data, int64_t first, int64_t vocab,
                                           bool aligned, float missing, float (&values)[kGroup],
                                           const F& convert) {
  if (aligned && first + kGroup <= vocab) {
    const auto group = load_global<AlignedGroup<T>>(data + first);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) values[i] = convert(group.values[i]);
  } else {
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      values[i] = first + i < vocab ? convert(data[first + i]) : missing;
    }
  }
}

template <typename T>
__device__ __forceinline__ void load_logits(const T* logits, int64_t first, int64_t vocab,
                                            Alignment aligned, float (&values)[kGroup]) {
  load_group(logits, first, vocab, aligned.logits, bits_to_float(kMinusInfinityBits), values,
             [](T value) { return to_float(value); });
}

__device__ __forceinline__ void load_draft(const float* draft, int64_t first, int64_t vocab,
                                           Alignment aligned, float (&values)[kGroup]) {
  load_group(draft, first, vocab, aligned.draft, 0.0f, values,
             [](float value) { return draft_weight(value); });
}

// By halving, the order of residual.h; in all lanes.
__device__ __forceinline__ float warp_sum_by_halving(float value) {
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    value = exact_add(value, shuffle_xor(value, offset));
  }
  return value;
}

__device__ __forceinline__ float sum_lanes(float (&lanes)[kGroup]) {
#pragma unroll
  for (int i = 0; i < kGroup; ++i) lanes[i] = warp_sum_by_halving(lanes[i]);
  return exact_add(exact_add(lanes[0], lanes[2]), exact_add(lanes[1], lanes[3]));
}

// Orders like the float, NaN above everything.
__device__ __forceinline__ int32_t max_key(float value) {
  return value != value ? INT32_MAX : ordered_key(float_to_bits(value));
}

// The value that has the key; NaN for that of NaN.
__device__ __forceinline__ float key_value(int32_t key) { return bits_to_float(ordered_key(key)); }

// Of the tokens first .. first + 1023, by a warp; draft may be null.
template <typename T>
__device__ NodeStatistics segment_statistics(const T* logits, const float* draft, int64_t first,
                                             int64_t vocab, Alignment aligned) {
  float values[kSegmentRows][kGroup];
  int32_t largest = kMinusInfinityKey;
  first += kGroup * (threadIdx.x % kWarpSize);
#pragma unroll
  for (int row = 0; row < kSegmentRows; ++row) {
    load_logits(logits, first + row * kSumLanes, vocab, aligned, values[row]);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) largest = max(largest, max_key(values[row][i]));
  }
  const float max_logit = key_value(warp_max(largest));
  const float reference = finite_reference(max_logit);
  float target_lanes[kGroup] = {}, draft_lanes[kGroup] = {};
#pragma unroll
  for (int row = 0; row < kSegmentRows; ++row) {
    float weights[kGroup] = {};
    if (draft != nullptr) load_draft(draft, first + row * kSumLanes, vocab, aligned, weights);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      target_lanes[i] = exact_add(target_lanes[i], target_weight(values[row][i], reference));
      draft_lanes[i] = exact_add(draft_lanes[i], weights[i]);
    }
  }
  const float target_mass = sum_lanes(target_lanes);
  return {max_logit, target_mass, sum_lanes(draft_lanes)};
}

__device__ bool is_active(const ParentsRow& parents, int64_t node) {
  for (; node > 0; node = parents[node]) {
    if (!parents.link_is_legal(node)) return false;
  }
  return parents.row_is_active();
}

struct StatisticsShared {
  SharedValue<bool> active;
  SharedValue<bool> has_child;
};

template <typename T>
__global__ void __launch_bounds__(kStatisticsThreads)
    statistics_kernel(const SPECDEC_GRID_CONSTANT VerifySampledParams params,
                      const SPECDEC_GRID_CONSTANT Workspace workspace, Alignment aligned) {
  SPECDEC_SHARED(StatisticsShared, shared);
  const int64_t blocks_per_node = (workspace.segments + kStatisticsWarps - 1) / kStatisticsWarps;
  const int64_t part = blockIdx.x % blocks_per_node;
  const int64_t node = blockIdx.x / blocks_per_node % params.nodes;
  const int64_t row = blockIdx.x / blocks_per_node / params.nodes;
  const int warp = threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;

  if (node == 0 && part == 0 && threadIdx.x == 0) workspace.arrivals[row] = 0;
  if (warp == 0) {
    bool child = false;
    for (int64_t later = node + 1 + lane; later < params.nodes; later += kWarpSize) {
      child |= params.parents(row, later) == node;
    }
    const bool has_child = warp_any(child);
    if (lane == 0) {
      shared.active = is_active({&params.parents(row, 0), params.parents.column_stride}, node);
      shared.has_child = has_child;
    }
  }
  block_barrier();  // all threads know the node
  const int64_t segment = part * kStatisticsWarps + warp;
  if (!shared.active || segment >= workspace.segments) return;

  const T* logits = static_cast<const T*>(params.logits) + row * params.logits_batch_stride +
                    node * params.logits_node_stride;
  const float* draft =
      params.draft_probs + row * params.draft_batch_stride + node * params.draft_node_stride;
  const NodeStatistics statistics = segment_statistics(logits, shared.has_child ? draft : nullptr,
                                                       segment * kSegment, params.vocab, aligned);
  if (lane == 0) {
    workspace.statistics[(row * params.nodes + node) * workspace.segments + segment] = statistics;
  }
}

// What the walk wants of its block.
struct Step {
  Pass pass;
  int32_t node;
  int32_t depth;
  int32_t num_removed;
  ResidualLaw law;
};

struct WalkShared {
  SharedArray<WalkLevel, kMaxNodes> levels;
  SharedArray<int32_t, kMaxNodes> removed;
  SharedArray<Masses, kSumColumns> columns;
  SharedArray<Pick, kWalkWarps> picks;
  SharedValue<Step> step;
  SharedValue<bool> is_last;
};

using Walk = SampledWalk<SharedArray<WalkLevel, kMaxNodes>&, SharedArray<int32_t, kMaxNodes>&>;

// By a warp: its lanes are the columns of the sums.
__device__ NodeStatistics merge_statistics(const NodeStatistics* statistics, int64_t segments) {
  const int lane = threadIdx.x % kWarpSize;
  int32_t largest = kMinusInfinityKey;
  for (int64_t i = lane; i < segments; i += kWarpSize) {
    largest = max(largest, max_key(statistics[i].max));
  }
  const float max_logit = key_value(warp_max(largest));
  const float reference = finite_reference(max_logit);
  float target_mass = 0.0f, draft_mass = 0.0f;
  for (int64_t i = lane; i < segments; i += kWarpSize) {
    target_mass = exact_add(target_mass, rescaled_mass(statistics[i], reference));
    draft_mass = exact_add(draft_mass, statistics[i].draft_mass);
  }
  return {max_logit, warp_sum_by_halving(target_mass), warp_sum_by_halving(draft_mass)};
}

// The laws of the node that a step looks at.
template <typename T>
struct NodeLaws {
  const T* logits;
  const float* draft;
  int64_t vocab;
  Alignment aligned;
  ResidualLaw law;

  __device__ NodeLaws(const VerifySampledParams& params, int64_t row, const Step& step,
                      Alignment alignment)
      : logits(static_cast<const T*>(params.logits) + row * params.logits_batch_stride +
               step.node * params.logits_node_stride),
        draft(params.draft_probs + row * params.draft_batch_stride +
              step.node * params.draft_node_stride),
        vocab(params.vocab),
        aligned(alignment),
        law(step.law) {}

  __device__ __forceinline__ void load_weights(int64_t first, float (&draft_weights)[kGroup],
                                               float (&weights)[kGroup]) const {
#pragma unroll
    for (int i = 0; i < kGroup; ++i) draft_weights[i] = 0.0f;
    if (law.draft_scale > 0.0f) load_draft(draft, first, vocab, aligned, draft_weights);
    load_logits(logits, first, vocab, aligned, weights);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      const float target = target_weight(weights[i], law.reference);
      weights[i] = residual_weight(target, draft_weights[i], law);
    }
  }
};

// Of one segment, by a warp; in all lanes.
template <typename T>
__device__ Masses segment_masses(const NodeLaws<T>& laws, WalkShared& shared, int32_t num_removed,
                                 int64_t first) {
  float residual_lanes[kGroup] = {}, draft_lanes[kGroup] = {};
  first += kGroup * (threadIdx.x % kWarpSize);
  for (int row = 0; row < kSegmentRows; ++row, first += kSumLanes) {
    float draft[kGroup], weights[kGroup];
    laws.load_weights(first, draft, weights);
    for (int32_t removed = 0; removed < num_removed; ++removed) {
      const int64_t place = shared.removed[removed] - first;
#pragma unroll
      for (int i = 0; i < kGroup; ++i) draft[i] = place == i ? 0.0f : draft[i];
    }
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      residual_lanes[i] = exact_add(residual_lanes[i], weights[i]);
      draft_lanes[i] = exact_add(draft_lanes[i], draft[i]);
    }
  }
  const float residual = sum_lanes(residual_lanes);
  return {residual, sum_lanes(draft_lanes)};
}

// By the block; the result is the first warp's.
template <typename T>
__device__ Masses node_masses(const NodeLaws<T>& laws, WalkShared& shared, int32_t num_removed,
                              int64_t segments) {
  const int warp = threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  for (int column = warp; column < kSumColumns; column += kWalkWarps) {
    Masses sum{0.0f, 0.0f};
    for (int64_t segment = column; segment < segments; segment += kSumColumns) {
      const Masses masses = segment_masses(laws, shared, num_removed, segment * kSegment);
      sum = {exact_add(sum.residual, masses.residual), exact_add(sum.draft, masses.draft)};
    }
    if (lane == 0) shared.columns[column] = sum;
  }
  block_barrier();  // all columns are there
  if (warp > 0) return {0.0f, 0.0f};
  const Masses sum = shared.columns[lane];
  return {warp_sum_by_halving(sum.residual), warp_sum_by_halving(sum.draft)};
}

template <typename T>
__device__ Pick segment_draw(const NodeLaws<T>& laws, const NoiseStream& noise, int64_t first) {
  Pick best = kNoPick;
  first += kGroup * (threadIdx.x % kWarpSize);
  for (int row = 0; row < kSegmentRows; ++row, first += kSumLanes) {
    float draft[kGroup], weights[kGroup];
    laws.load_weights(first, draft, weights);
    const Philox4 bits = noise.group_bits(static_cast<uint32_t>(first / kGroup));
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      const float ratio = exact_div(weights[i], exponential(bits.lane[i]));
      const Pick pick = make_pick(float_to_bits(ratio), first + i);
      if (weights[i] > 0.0f && pick > best) best = pick;
    }
  }
  return best;
}

// The best of every slices-th group of segments, by the block; the result is thread 0's.
template <typename T>
__device__ Pick draw(const NodeLaws<T>& laws, const NoiseStream& noise, WalkShared& shared,
                     int64_t segments, int64_t slice, int64_t slices) {
  const int warp = threadIdx.x / kWarpSize;
  Pick best = kNoPick;
  for (int64_t i = slice * kWalkWarps + warp; i < segments; i += slices * kWalkWarps) {
    const Pick pick = segment_draw(laws, noise, i * kSegment);
    best = pick > best ? pick : best;
  }
  best = warp_max(best);
  if (threadIdx.x % kWarpSize == 0) shared.picks[warp] = best;
  block_barrier();  // all warps have stored their picks
  if (threadIdx.x == 0) {
    for (int i = 1; i < kWalkWarps; ++i) {
      const Pick pick = shared.picks[i];
      best = pick > best ? pick : best;
    }
  }
  return best;
}

// Thread 0's new wishes, known to the block.
__device__ Step share_step(const Walk& walk, WalkShared& shared) {
  if (threadIdx.x == 0) {
    shared.step = Step{walk.pass, walk.node, walk.depth, walk.num_removed, walk.law};
  }
  block_barrier();  // the step is there, and so is what thread 0 wrote of the walk
  const Step step = shared.step;
  block_barrier();  // all threads have read it: thread 0 may go on
  return step;
}

// Leaves a slice's pick for the row's last block; true there, with thread 0's `pick` that of all.
__device__ bool arrive_last(const Workspace& workspace, int64_t row, int64_t slice,
                            WalkShared& shared, Pick& pick) {
  if (threadIdx.x == 0) {
    Pick* picks = workspace.picks + row * workspace.slices;
    picks[slice] = pick;
    const uint32_t arrived = fetch_add_acq_rel(&workspace.arrivals[row], 1);
    const bool is_last = arrived + 1 == workspace.slices;
    for (int64_t i = 0; is_last && i < workspace.slices; ++i) {
      const Pick other = load_acquire(picks + i);
      pick = other > pick ? other : pick;
    }
    shared.is_last = is_last;
  }
  block_barrier();  // all threads know whether to go on
  return shared.is_last;
}

template <typename T>
__global__ void __launch_bounds__(kWalkThreads)
    walk_kernel(const SPECDEC_GRID_CONSTANT VerifySampledParams params,
                const SPECDEC_GRID_CONSTANT Workspace workspace, Alignment aligned) {
  SPECDEC_SHARED(WalkShared, shared);
  const int64_t slice = blockIdx.x % workspace.slices;
  const int64_t row = blockIdx.x / workspace.slices;
  Walk walk(params, row, shared.levels, shared.removed);
  if (threadIdx.x == 0) walk.start();
  Step step = share_step(walk, shared);

  while (step.pass == Pass::kStatistics || step.pass == Pass::kMasses) {
    if (step.pass == Pass::kMasses) {
      const Masses masses = node_masses(NodeLaws<T>(params, row, step, aligned), shared,
                                        step.num_removed, workspace.segments);
      if (threadIdx.x == 0) walk.on_masses(masses);
    } else if (threadIdx.x < kWarpSize) {
      const int64_t first = (row * params.nodes + step.node) * workspace.segments;
      const NodeStatistics merged =
          merge_statistics(workspace.statistics + first, workspace.segments);
      if (threadIdx.x == 0) walk.on_statistics(merged);
    }
    step = share_step(walk, shared);
  }
  if (step.pass == Pass::kDone) {  // an inactive row or bad logits
    if (slice == 0 && threadIdx.x == 0) walk.write_outputs();
    return;
  }

  const NoiseStream noise = walk.noise(step.depth, Purpose::kResidual);
  Pick pick = draw(NodeLaws<T>(params, row, step, aligned), noise, shared, workspace.segments,
                   slice, workspace.slices);
  if (!arrive_last(workspace, row, slice, shared, pick)) return;
  if (threadIdx.x == 0) walk.on_draw(pick);
  step = share_step(walk, shared);
  while (step.pass == Pass::kDraw) {  // rare: the residual was 0 everywhere
    pick = draw(NodeLaws<T>(params, row, step, aligned), noise, shared, workspace.segments, 0, 1);
    if (threadIdx.x == 0) walk.on_draw(pick);
    step = share_step(walk, shared);
  }
  if (threadIdx.x == 0) walk.write_outputs();
}

int64_t num_slices(const VerifySampledParams& params) {
  const int64_t useful = (num_segments(params.vocab) + kWalkWarps - 1) / kWalkWarps;
  return std::clamp<int64_t>(kTargetBlocks / params.batch, 1, useful);
}

template <typename T>
Alignment alignment(const VerifySampledParams& params) {
  const auto aligned = [](const void* data, size_t size, int64_t stride0, int64_t stride1) {
    return reinterpret_cast<uintptr_t>(data) % (kGroup * size) == 0 && stride0 % kGroup == 0 &&
           stride1 % kGroup == 0;
  };
  return {aligned(params.logits, sizeof(T), params.logits_batch_stride, params.logits_node_stride),
          aligned(params.draft_probs, sizeof(float), params.draft_batch_stride,
                  params.draft_node_stride)};
}

template <typename T>
cudaError_t launch_typed(const VerifySampledParams& params, const Workspace& workspace,
                         cudaStream_t stream) {
  const Alignment aligned = alignment<T>(params);
  const int64_t blocks_per_node = (workspace.segments + kStatisticsWarps - 1) / kStatisticsWarps;
  const cudaError_t error =
      launch(statistics_kernel<T>,
             {params.batch * params.nodes * blocks_per_node, 1, kStatisticsThreads, stream}, params,
             workspace, aligned);
  if (error != cudaSuccess) return error;
  return launch(walk_kernel<T>, {params.batch * workspace.slices, 1, kWalkThreads, stream}, params,
                workspace, aligned);
}

}  // namespace

int64_t verify_sampled_workspace_bytes(const VerifySampledParams& params) {
  const int64_t statistics = params.batch * params.nodes * num_segments(params.vocab);
  return params.batch * num_slices(params) * static_cast<int64_t>(sizeof(Pick)) +
         statistics * static_cast<int64_t>(sizeof(NodeStatistics)) +
         params.batch * static_cast<int64_t>(sizeof(uint32_t));
}

cudaError_t launch_verify_sampled(const VerifySampledParams& params, void* workspace,
                                  cudaStream_t stream) {
  if (params.nodes < 1 || params.nodes > kMaxNodes) return cudaErrorInvalidValue;
  const int64_t segments = num_segments(params.vocab), slices = num_slices(params);
  Pick* picks = static_cast<Pick*>(workspace);
  auto* statistics = reinterpret_cast<NodeStatistics*>(picks + params.batch * slices);
  auto* arrivals = reinterpret_cast<uint32_t*>(statistics + params.batch * params.nodes * segments);
  const Workspace parts{picks, statistics, arrivals, segments, slices};
  return with_logits_type(params.logits_type, [&]<typename T>(T) -> cudaError_t {
    return launch_typed<T>(params, parts, stream);
  });
}

}  // namespace specdec
