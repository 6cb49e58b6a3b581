// verify_rejection, verify_recursive, verify_block: walk draft trees whose tokens were sampled.
// Rules and meaning of the arguments: specdec/verify_sampled.h; decisions:
// specdec/sampling/sampled_walk.h; arithmetic: specdec/sampling/residual.h.
//
// In:  logits [batch, nodes, vocab] f32/bf16/f16, draft_probs [batch, nodes, vocab] f32,
//      tokens, parents [batch, nodes], root_positions, seeds, row_ids [batch]
// Out: path [batch, nodes], num_accepted, next_token, status [batch]
//
// Two launches:
//   statistics (sampled_statistics.cuh): maximum and sums of both distributions, by segment.
//   walk: a few blocks per row. Thread 0 decides; the block computes the passes that it asks for.
//         Statistics are merged from the first launch. A pass of residual masses (a rejected child
//         with a sibling left, a prefix that block verification tries) reads both distributions of
//         one node, with one warp per column of the sum. All blocks of a row do the same walk,
//         because that is cheaper than a barrier between blocks. They share the final draw, and the
//         last one to arrive merges the picks. With many rows there is one block per row.
//
// Sums have the order of residual.h and picks are compared as integers, so results do not depend on
// the number of blocks. NaN in a node that the walk does not visit ends up in statistics that are
// never used.
//
// Bytes: the logits of all nodes and the draft distributions of all nodes with children once, then
// both distributions of one node per pass of masses and for the draw. The first launch is bound by
// memory, the second by latency.
#include <algorithm>

#include "sampled_statistics.cuh"
#include "specdec/launchers.h"

namespace specdec {
namespace {

constexpr int kWalkThreads = 512;
constexpr int kWalkWarps = kWalkThreads / kWarpSize;
constexpr int kTargetBlocks = 128;  // number of blocks of the walk, about one per multiprocessor

// A pass that the walk asks its block for.
struct Step {
  Pass pass;
  int32_t node;
  int32_t depth;
  int32_t num_removed;
  ResidualDistribution residual;
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

// The distributions of the node of a step.
template <typename T>
struct NodeDistributions {
  const T* logits;
  const float* draft;
  int64_t vocab;
  VectorAlignment aligned;
  ResidualDistribution residual;

  __device__ NodeDistributions(const VerifySampledParams& params, int64_t row, const Step& step,
                               VectorAlignment alignment)
      : logits(static_cast<const T*>(params.logits) + row * params.logits_batch_stride +
               step.node * params.logits_node_stride),
        draft(params.draft_probs + row * params.draft_batch_stride +
              step.node * params.draft_node_stride),
        vocab(params.vocab),
        aligned(alignment),
        residual(step.residual) {}

  __device__ __forceinline__ void load_weights(int64_t first, float (&draft_weights)[kGroup],
                                               float (&weights)[kGroup]) const {
#pragma unroll
    for (int i = 0; i < kGroup; ++i) draft_weights[i] = 0.0f;
    if (residual.draft_scale > 0.0f) load_draft(draft, first, vocab, aligned, draft_weights);
    load_logits(logits, first, vocab, aligned, weights);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      const float target = target_weight(weights[i], residual.reference);
      weights[i] = residual_weight(target, draft_weights[i], residual);
    }
  }
};

// Masses of one segment, by a warp, in all lanes.
template <typename T>
__device__ Masses segment_masses(const NodeDistributions<T>& distributions, WalkShared& shared,
                                 int32_t num_removed, int64_t first) {
  float residual_lanes[kGroup] = {}, draft_lanes[kGroup] = {};
  first += kGroup * (threadIdx.x % kWarpSize);
  for (int row = 0; row < kSegmentRows; ++row, first += kSumLanes) {
    float draft[kGroup], weights[kGroup];
    distributions.load_weights(first, draft, weights);
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

// Masses of a node, by the block; the first warp has the result.
template <typename T>
__device__ Masses node_masses(const NodeDistributions<T>& distributions, WalkShared& shared,
                              int32_t num_removed, int64_t segments) {
  const int warp = threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  for (int column = warp; column < kSumColumns; column += kWalkWarps) {
    Masses sum{0.0f, 0.0f};
    for (int64_t segment = column; segment < segments; segment += kSumColumns) {
      const Masses masses = segment_masses(distributions, shared, num_removed, segment * kSegment);
      sum = {exact_add(sum.residual, masses.residual), exact_add(sum.draft, masses.draft)};
    }
    if (lane == 0) shared.columns[column] = sum;
  }
  block_barrier();  // all columns are stored
  if (warp > 0) return {0.0f, 0.0f};
  const Masses sum = shared.columns[lane];
  return {warp_sum_by_halving(sum.residual), warp_sum_by_halving(sum.draft)};
}

template <typename T>
__device__ Pick segment_draw(const NodeDistributions<T>& distributions, const NoiseStream& noise,
                             int64_t first) {
  Pick best = kNoPick;
  first += kGroup * (threadIdx.x % kWarpSize);
  for (int row = 0; row < kSegmentRows; ++row, first += kSumLanes) {
    float draft[kGroup], weights[kGroup];
    distributions.load_weights(first, draft, weights);
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

// The best pick of every slices-th group of segments, by the block; thread 0 has the result.
template <typename T>
__device__ Pick draw(const NodeDistributions<T>& distributions, const NoiseStream& noise,
                     WalkShared& shared, int64_t segments, int64_t slice, int64_t slices) {
  const int warp = threadIdx.x / kWarpSize;
  Pick best = kNoPick;
  for (int64_t i = slice * kWalkWarps + warp; i < segments; i += slices * kWalkWarps) {
    const Pick pick = segment_draw(distributions, noise, i * kSegment);
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

// Shares thread 0's next step with the block.
__device__ Step share_step(const Walk& walk, WalkShared& shared) {
  if (threadIdx.x == 0) {
    shared.step = Step{walk.pass, walk.node, walk.depth, walk.num_removed, walk.residual};
  }
  block_barrier();  // the step is stored, and so is what thread 0 wrote of the walk
  const Step step = shared.step;
  block_barrier();  // all threads have read it: thread 0 may go on
  return step;
}

// Stores a slice's pick. Returns true in the row's last block, where thread 0's `pick` is then the
// best of all slices.
__device__ bool arrive_last(const SampledWorkspace& workspace, int64_t row, int64_t slice,
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

// The second bound, one block per multiprocessor, lets ptxas use the 128 registers per thread that
// such a block has. Without it, ptxas may limit the kernel to 64 and spill the rest, so that two
// blocks fit.
template <typename T>
__global__ void __launch_bounds__(kWalkThreads, 1)
    walk_kernel(const SPECDEC_GRID_CONSTANT VerifySampledParams params,
                const SPECDEC_GRID_CONSTANT SampledWorkspace workspace, VectorAlignment aligned) {
  SPECDEC_SHARED(WalkShared, shared);
  const int64_t slice = blockIdx.x % workspace.slices;
  const int64_t row = blockIdx.x / workspace.slices;
  Walk walk(params, row, shared.levels, shared.removed);
  if (threadIdx.x == 0) walk.start();
  Step step = share_step(walk, shared);

  while (step.pass == Pass::kStatistics || step.pass == Pass::kMasses) {
    if (step.pass == Pass::kMasses) {
      const Masses masses = node_masses(NodeDistributions<T>(params, row, step, aligned), shared,
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
  Pick pick = draw(NodeDistributions<T>(params, row, step, aligned), noise, shared,
                   workspace.segments, slice, workspace.slices);
  if (!arrive_last(workspace, row, slice, shared, pick)) return;
  if (threadIdx.x == 0) walk.on_draw(pick);
  step = share_step(walk, shared);
  while (step.pass == Pass::kDraw) {  // rare: the residual was 0 everywhere
    pick = draw(NodeDistributions<T>(params, row, step, aligned), noise, shared, workspace.segments,
                0, 1);
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
cudaError_t launch_typed(const VerifySampledParams& params, const SampledWorkspace& workspace,
                         cudaStream_t stream) {
  const VectorAlignment aligned = vector_alignment<T>(params);
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
  const SampledWorkspace parts{picks, statistics, arrivals, segments, slices};
  return with_float_type(params.logits_type, [&]<typename T>(T) -> cudaError_t {
    return launch_typed<T>(params, parts, stream);
  });
}

}  // namespace specdec
