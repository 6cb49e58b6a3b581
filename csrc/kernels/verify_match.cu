// verify_match: walk draft trees along tokens drawn from the target. The rule and the meaning of
// the arguments: specdec/verify_match.h.
//
// In:  logits [batch, nodes, vocab] f32/bf16/f16, tokens, parents [batch, nodes], seeds, row_ids,
//      root_positions, stochastic [batch]
// Out: path [batch, nodes], num_accepted, next_token, status [batch]
//
// Two launches:
//   pick: one block per (row, node, chunk of the vocabulary). A thread takes groups of 4 tokens
//         (they share one Philox block), adds the noise and keeps its best pick; picks are reduced
//         over the block. Inactive nodes are skipped.
//   walk: one warp per row. At the visited node the lanes reduce the picks of its chunks, then look
//         for the first child that carries the token.
// A pick is (key, ~token) in 64 bits (specdec/pick.h), so the result does not depend on the order
// of any reduction and is bitwise repeatable; no atomics. NaN in a node that the walk does not
// visit ends up in a pick that nobody reads.
//
// Bytes: the logits once, batch * nodes * vocab * element size; with noise about 130 integer and
// float operations per token, which bounds it. Numerics: specdec/rng.h, the bits of the CPU op.
#include <algorithm>

#include "specdec/cuda.cuh"
#include "specdec/launchers.h"
#include "specdec/pick.h"
#include "specdec/rng.h"

namespace specdec {
namespace {

constexpr int kThreads = 256;
constexpr int kGroup = 4;  // tokens per Philox block
constexpr int64_t kChunk = 4096;
static_assert(kChunk % (kThreads * kGroup) == 0, "threads of a block share the chunk evenly");

template <typename T>
struct alignas(kGroup * sizeof(T)) AlignedGroup {
  T values[kGroup];
};

struct PickShared {
  int32_t depth;  // of the node, -1 inactive
  SharedArray<Pick, kThreads / kWarpSize> warp_picks;
};

__device__ int32_t node_depth(const ParentsRow& parents, int64_t node) {
  int32_t depth = 0;
  for (; node > 0; ++depth) {
    if (!parents.link_is_legal(node)) return -1;
    node = parents[node];
  }
  return parents.row_is_active() ? depth : -1;
}

// The pick of one score, without the rule for NaN.
__device__ __forceinline__ Pick score_pick(float score, int64_t token) {
  const int32_t key = ordered_key(canonical_bits(score));
  return key > kMinusInfinityKey ? make_pick(key, token) : kNoPick;
}

// The best of tokens first .. first + 3, of which those below vocab exist.
template <typename T>
__device__ Pick group_pick(const T* logits, int64_t first, int64_t vocab, bool aligned,
                           const NoiseStream& noise, bool stochastic) {
  AlignedGroup<T> group;
  if (aligned) {
    group = *reinterpret_cast<const AlignedGroup<T>*>(logits + first);
  } else {
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      group.values[i] = logits[first + i < vocab ? first + i : vocab - 1];
    }
  }
  Philox4 bits{};
  if (stochastic) bits = noise.group_bits(static_cast<uint32_t>(first / kGroup));
  Pick best = kNoPick;
#pragma unroll
  for (int i = 0; i < kGroup; ++i) {
    float score = to_float(group.values[i]);
    const bool is_nan = score != score;
    if (stochastic) score = exact_add(score, gumbel(bits.lane[i]));
    Pick pick = is_nan ? kNaNPick : score_pick(score, first + i);
    if (first + i >= vocab) pick = kNoPick;
    best = pick > best ? pick : best;
  }
  return best;
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    pick_kernel(VerifyMatchParams params, Pick* picks, int64_t chunks, bool aligned) {
  SPECDEC_SHARED(PickShared, shared);
  const int64_t chunk = blockIdx.x % chunks;
  const int64_t node = blockIdx.x / chunks % params.nodes;
  const int64_t row = blockIdx.x / chunks / params.nodes;

  if (threadIdx.x == 0) {
    shared.depth = node_depth({&params.parents(row, 0), params.parents.column_stride}, node);
  }
  block_barrier();  // the depth is known to all threads
  if (shared.depth < 0) return;

  const T* logits = static_cast<const T*>(params.logits) + row * params.logits_batch_stride +
                    node * params.logits_node_stride;
  const NoiseStream noise = NoiseStream::make(params.seeds[row], params.row_ids[row],
                                              params.root_positions[row] + shared.depth + 1);
  const bool stochastic = params.stochastic[row];
  const int64_t end = min((chunk + 1) * kChunk, params.vocab);
  Pick best = kNoPick;
  for (int64_t first = chunk * kChunk + threadIdx.x * kGroup; first < end;
       first += kThreads * kGroup) {
    const Pick pick = group_pick(logits, first, params.vocab, aligned, noise, stochastic);
    best = pick > best ? pick : best;
  }

  best = warp_max(best);
  if (threadIdx.x % kWarpSize == 0) shared.warp_picks[threadIdx.x / kWarpSize] = best;
  block_barrier();  // all warps have stored their picks
  if (threadIdx.x == 0) {
    for (int warp = 0; warp < kThreads / kWarpSize; ++warp) {
      best = shared.warp_picks[warp] > best ? shared.warp_picks[warp] : best;
    }
    picks[blockIdx.x] = best;
  }
}

// The first child of `node` that carries `token`, or `nodes`; the same in all lanes.
__device__ int64_t find_child(const VerifyMatchParams& params, int64_t row, int64_t node,
                              int64_t token) {
  int64_t child = params.nodes;
  for (int64_t later = node + 1 + threadIdx.x; later < params.nodes; later += kWarpSize) {
    if (params.parents(row, later) == node && params.tokens(row, later) == token) {
      child = later;
      break;
    }
  }
  return warp_min(child);
}

__global__ void __launch_bounds__(kWarpSize)
    walk_kernel(VerifyMatchParams params, const Pick* picks, int64_t chunks) {
  const int64_t row = blockIdx.x;
  const int lane = threadIdx.x;
  int64_t* path = params.path + row * params.nodes;
  int64_t num_visited = 0;
  int64_t next_token = -1;
  MatchStatus status = MatchStatus::kOk;

  int64_t node = params.parents(row, 0) == kRootParent ? 0 : params.nodes;
  while (node < params.nodes) {  // ends, because children come after their parents
    const Pick* node_picks = picks + (row * params.nodes + node) * chunks;
    Pick pick = kNoPick;
    for (int64_t chunk = lane; chunk < chunks; chunk += kWarpSize) {
      pick = node_picks[chunk] > pick ? node_picks[chunk] : pick;
    }
    pick = warp_max(pick);
    if (pick == kNaNPick || pick == kNoPick) {
      status = pick == kNaNPick ? MatchStatus::kNaN : MatchStatus::kNoFiniteLogit;
      break;
    }
    if (lane == 0) path[num_visited] = node;
    ++num_visited;
    const int64_t token = picked_token(pick);
    node = find_child(params, row, node, token);
    if (node == params.nodes) next_token = token;
  }

  for (int64_t depth = num_visited + lane; depth < params.nodes; depth += kWarpSize) {
    path[depth] = -1;
  }
  if (lane == 0) {
    params.num_accepted[row] = num_visited - 1;
    params.next_token[row] = next_token;
    params.status[row] = static_cast<int64_t>(status);
  }
}

int64_t num_chunks(const VerifyMatchParams& params) { return (params.vocab + kChunk - 1) / kChunk; }

template <typename T>
cudaError_t launch_typed(const VerifyMatchParams& params, Pick* picks, cudaStream_t stream) {
  const int64_t chunks = num_chunks(params);
  const bool aligned = reinterpret_cast<uintptr_t>(params.logits) % sizeof(AlignedGroup<T>) == 0 &&
                       params.vocab % kGroup == 0 && params.logits_batch_stride % kGroup == 0 &&
                       params.logits_node_stride % kGroup == 0;
  const LaunchConfig pick_config{params.batch * params.nodes * chunks, 1, kThreads, stream};
  const cudaError_t error = launch(pick_kernel<T>, pick_config, params, picks, chunks, aligned);
  if (error != cudaSuccess) return error;
  return launch(walk_kernel, {params.batch, 1, kWarpSize, stream}, params, picks, chunks);
}

}  // namespace

int64_t verify_match_workspace_bytes(const VerifyMatchParams& params) {
  return params.batch * params.nodes * num_chunks(params) * static_cast<int64_t>(sizeof(Pick));
}

cudaError_t launch_verify_match(const VerifyMatchParams& params, void* workspace,
                                cudaStream_t stream) {
  if (params.nodes < 1 || params.nodes > kMaxNodes) return cudaErrorInvalidValue;
  Pick* picks = static_cast<Pick*>(workspace);
  return with_logits_type(params.logits_type,
                          [&]<typename T>(T) { return launch_typed<T>(params, picks, stream); });
}

}  // namespace specdec
