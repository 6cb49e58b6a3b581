// verify_match: walks draft trees along tokens drawn from the target. Rule and meaning of the
// arguments: specdec/verify_match.h.
//
// In:  logits [batch, nodes, vocab] f32/bf16/f16, tokens, parents [batch, nodes], seeds, row_ids,
//      root_positions, stochastic [batch]; counters [batch], zero
// Out: path [batch, nodes], num_accepted, next_token, status [batch]; counters zero again
//
// One launch. A block owns a chunk of kChunk tokens for a group of up to kMaxGroup nodes of a row:
//   1. order: the group's nodes are sorted by depth, so that nodes of one depth are consecutive.
//   2. scan: a thread owns kTokens contiguous tokens and has 96 bytes of logits in flight (6 nodes
//      of a 16-bit type). It computes the noise of its tokens once per depth, and only if a token
//      of its warp can still win: after top-k, top-p or min-p most noise is skipped.
//   3. store: the block's pick of each node goes to the workspace, and the block increments the
//      row's counter. The last block of a row to do so has all picks, and the others end.
//   4. walk: that block reduces the picks of all nodes over the chunks, with all loads at once.
//      Then one warp walks in shared memory, so the depth of the walk costs no memory latency.
// A pick is (key, ~token) in 64 bits (specdec/math/pick.h), so the result does not depend on the
// order of any reduction and is bitwise repeatable. NaN in a node that the walk does not visit ends
// up in a pick that is never read. The row's counter orders the picks: each block releases after
// its barrier, the last one acquires.
//
// Cost, for 64 nodes in 8 levels, 128,256 bf16 logits, on an H200 (132 SMs, 4.3 TB/s, 1.75 GHz):
// 16.4 MB, 3.8 us. To stream at that rate, 4.3 TB/s x 0.7 us of latency = 3 MB must be in flight.
// Here 63 chunks x 4 groups of 16 nodes = 252 blocks are resident at once (2 per SM, up to 3), and
// 256 threads x 96 bytes make 48 KB per SM, 6 MB in all. Arithmetic per (node, token): 6 operations
// to convert, add and compare, 1.6 us in all; per (depth, token) about 27 integer and 27 float
// operations of noise, bound by the integer units (64 per cycle and SM): 11 depths (8, and 3 that
// two groups share) in 2.6 us. Both overlap with the stream.
//
// Rows may have any alignment: logits_window.cuh. Numerics: specdec/sampling/rng.h, with the bits
// of the CPU op.
#include <algorithm>

#include "logits_window.cuh"
#include "specdec/device/cuda.cuh"
#include "specdec/launchers.h"
#include "specdec/math/pick.h"
#include "specdec/sampling/rng.h"

namespace specdec {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kTokens = kWindowTokens;  // per thread, two Philox blocks
constexpr int kChunk = kThreads * kTokens;
constexpr int kMaxGroup = kWarpSize;  // one warp orders the nodes of a group
constexpr int kMinGroup = 4;
constexpr int64_t kEnoughBlocks = 200;  // larger groups share more noise, but use fewer blocks
constexpr int32_t kNaNKey = INT32_MAX;  // above the key of infinity

// How the work of a row is divided.
struct Plan {
  int chunks;
  int group;  // nodes per block
  int groups;
};

struct Shared {
  SharedArray<int32_t, kMaxNodes> parents;  // illegal links as kInactiveParent
  SharedArray<int32_t, kMaxGroup> nodes;    // nodes of the block by depth, inactive ones last
  SharedArray<int32_t, kMaxGroup> depths;   // depths of `nodes`
  SharedValue<int32_t> num_active;          // number of active ones
  SharedArray<uint4, kRingVectors * kThreads> ring;
  SharedArray<Pick, kWarps * kMaxGroup> warp_picks;
  SharedValue<bool> is_last;
  SharedArray<int32_t, kMaxNodes> tokens;  // -1: not in the vocabulary
  SharedArray<Pick, kMaxNodes> picks;      // [parts, nodes]
};
static_assert(sizeof(Shared) <= 48 * 1024, "static shared memory");
static_assert(kMaxNodes >= kThreads, "picks has parts * nodes <= max(kThreads, nodes) elements");

// ---- 1. order ----------------------------------------------------------------------------------

__device__ void load_parents(Shared& shared, const VerifyMatchParams& params, int64_t row) {
  const ParentsRow parents{&params.parents(row, 0), params.parents.column_stride};
  for (int node = threadIdx.x; node < params.nodes; node += kThreads) {
    const int64_t parent = parents.link_is_legal(node) ? parents[node] : kInactiveParent;
    shared.parents[node] = static_cast<int32_t>(parent);
  }
}

// -1 if inactive.
__device__ int node_depth(Shared& shared, int node) {
  int depth = 0;
  int parent = shared.parents[node];
  for (; parent >= 0; parent = shared.parents[parent]) ++depth;
  return parent == kRootParent ? depth : -1;
}

// One warp, with one node per lane.
__device__ void order_nodes(Shared& shared, int first_node, int num_nodes) {
  const int lane = threadIdx.x;
  const int depth = lane < num_nodes ? node_depth(shared, first_node + lane) : -1;
  const int key = (depth < 0 ? kMaxNodes : depth) * kWarpSize + lane;
  int rank = 0;
  for (int other = 0; other < kWarpSize; ++other) rank += shuffle(key, other) < key;
  // Lanes without a node are sorted last: they are inactive and have the highest lanes.
  shared.nodes[rank] = first_node + lane;
  shared.depths[rank] = depth;
  const int num_active = warp_sum(depth >= 0 ? 1 : 0);
  if (lane == 0) shared.num_active = num_active;
}

// ---- 2. scan -----------------------------------------------------------------------------------

// Adds noise to a thread's tokens and keeps it for the next nodes of the same depth.
class TokenNoise {
 public:
  __device__ __forceinline__ TokenNoise(const VerifyMatchParams& params, int64_t row,
                                        int64_t first_token)
      : root_(
            NoiseStream::make(params.seeds[row], params.row_ids[row], params.root_positions[row])),
        first_group_(static_cast<uint32_t>(first_token / 4)) {}

  __device__ __forceinline__ void add_to(float (&scores)[kTokens], int depth) {
    if (depth != depth_) {
      depth_ = depth;
      compute();
    }
#pragma unroll
    for (int i = 0; i < kTokens; ++i) scores[i] = exact_add(scores[i], values_[i]);
  }

 private:
  __device__ __forceinline__ void compute() {
    NoiseStream stream = root_;
    stream.position += static_cast<uint32_t>(depth_ + 1);
#pragma unroll
    for (int group = 0; group < kTokens / 4; ++group) {
      const Philox4 bits = stream.group_bits(first_group_ + group);
#pragma unroll
      for (int i = 0; i < 4; ++i) values_[4 * group + i] = gumbel(bits.lane[i]);
    }
  }

  NoiseStream root_;
  uint32_t first_group_;
  int depth_ = -1;
  float values_[kTokens];
};

__device__ __forceinline__ float largest_or_nan(const float (&scores)[kTokens]) {
  float largest = scores[0];
#pragma unroll
  for (int i = 1; i < kTokens; ++i) largest = max_or_nan(largest, scores[i]);
  return largest;
}

// Returns true, with the warp's best pick, in the one lane that holds it.
__device__ __forceinline__ bool warp_pick(const float (&scores)[kTokens], float largest,
                                          int64_t first_token, Pick* pick) {
  const int32_t key = largest != largest ? kNaNKey : ordered_key(canonical_bits(largest));
  const int32_t warp_key = warp_max(key);
  const uint32_t holders = ballot(key == warp_key);
  // Lanes have ascending tokens, so the lowest lane with the best score has the lowest token.
  const uint32_t lower_lanes = (1u << (threadIdx.x % kWarpSize)) - 1;
  if (key != warp_key || (holders & lower_lanes) != 0) return false;
  *pick = key == kNaNKey ? kNaNPick : kNoPick;
  if (key > kMinusInfinityKey && key < kNaNKey) {
    int64_t token = first_token;
#pragma unroll
    for (int i = kTokens - 1; i >= 0; --i) {
      if (scores[i] == largest) token = first_token + i;
    }
    *pick = make_pick(key, token);
  }
  return true;
}

template <typename T, bool kAligned>
__device__ __forceinline__ void scan_nodes(Shared& shared, const VerifyMatchParams& params,
                                           int64_t row, int chunk) {
  using Window = LogitsWindow<T, kAligned>;
  const int64_t first_token = int64_t{chunk} * kChunk + threadIdx.x * kTokens;
  const int num_active = shared.num_active;
  const auto logits = [&](int i) {
    const int64_t node = shared.nodes[i];
    return static_cast<const T*>(params.logits) + row * params.logits_batch_stride +
           node * params.logits_node_stride;
  };
  const auto fetch = [&](int i, int slot) {
    if (i < num_active) Window::fetch(shared.ring, slot, logits(i), first_token, params.vocab);
    cp_async_commit();  // one group per node, empty or not, so that waiting can count groups
  };
  for (int i = 0; i < Window::kInFlight; ++i) fetch(i, i);

  const bool stochastic = params.stochastic[row];
  TokenNoise noise(params, row, first_token);
  for (int i = 0, slot = 0; i < num_active; ++i) {
    cp_async_wait<Window::kInFlight - 1>();
    float scores[kTokens];
    Window::read(shared.ring, slot, logits(i), scores);
    fetch(i + Window::kInFlight, slot);
    slot = slot + 1 < Window::kInFlight ? slot + 1 : 0;

    float largest = largest_or_nan(scores);
    if (stochastic && warp_any(largest != bits_to_float(kMinusInfinityBits))) {
      noise.add_to(scores, shared.depths[i]);
      largest = largest_or_nan(scores);
    }
    Pick pick;
    if (warp_pick(scores, largest, first_token, &pick)) {
      shared.warp_picks[threadIdx.x / kWarpSize * kMaxGroup + i] = pick;
    }
  }
}

// ---- 3. store -----------------------------------------------------------------------------------

// picks: [chunks, nodes] of the row.
__device__ void store_picks(Shared& shared, Pick* picks, const VerifyMatchParams& params, int chunk,
                            int num_nodes) {
  const int slot = threadIdx.x;
  if (slot >= num_nodes) return;
  Pick best = kNoPick;
  if (slot < shared.num_active) {
    for (int warp = 0; warp < kWarps; ++warp) {
      const Pick pick = shared.warp_picks[warp * kMaxGroup + slot];
      best = pick > best ? pick : best;
    }
  }
  picks[chunk * params.nodes + shared.nodes[slot]] = best;
}

// Whether this is the last block of the row to arrive. If so, it sees what the others have stored.
__device__ bool count_in(Shared& shared, uint32_t* counter, uint32_t num_blocks) {
  block_barrier();  // all picks of this block are stored
  if (threadIdx.x == 0) {
    shared.is_last = fetch_add_acq_rel(counter, 1) == num_blocks - 1;
    if (shared.is_last) *counter = 0;  // no other block uses it any more
  }
  block_barrier();  // the other threads acquire through thread 0
  return shared.is_last;
}

// ---- 4. walk -----------------------------------------------------------------------------------

// Reduces [chunks, nodes] to [parts, nodes], with as many parts as there are threads for.
__device__ void reduce_picks(Shared& shared, const Pick* picks, int chunks, int nodes, int parts) {
  for (int i = threadIdx.x; i < parts * nodes; i += kThreads) {
    const int part = i / nodes, node = i % nodes;
    Pick best = kNoPick;
#pragma unroll 8
    for (int chunk = part; chunk < chunks; chunk += parts) {
      const Pick pick = picks[int64_t{chunk} * nodes + node];
      best = pick > best ? pick : best;
    }
    shared.picks[i] = best;
  }
}

__device__ void load_tokens(Shared& shared, const VerifyMatchParams& params, int64_t row) {
  for (int node = threadIdx.x; node < params.nodes; node += kThreads) {
    const int64_t token = params.tokens(row, node);
    shared.tokens[node] = token >= 0 && token < params.vocab ? static_cast<int32_t>(token) : -1;
  }
}

// The pick of a node, by one warp, in all lanes.
__device__ Pick node_pick(Shared& shared, int node, int nodes, int parts) {
  Pick best = kNoPick;
  for (int part = threadIdx.x; part < parts; part += kWarpSize) {
    const Pick pick = shared.picks[part * nodes + node];
    best = pick > best ? pick : best;
  }
  return warp_max(best);
}

// The first child of `node` that carries `token`, or `nodes`, by one warp, in all lanes.
__device__ int find_child(Shared& shared, int node, int32_t token, int nodes) {
  int child = nodes;
  for (int later = node + 1 + threadIdx.x; later < nodes; later += kWarpSize) {
    if (shared.parents[later] == node && shared.tokens[later] == token) {
      child = later;
      break;
    }
  }
  return warp_min(child);
}

// The walk, by one warp.
__device__ void walk(Shared& shared, const VerifyMatchParams& params, int64_t row, int parts) {
  const int lane = threadIdx.x, nodes = static_cast<int>(params.nodes);
  int64_t* path = params.path + row * nodes;
  int num_visited = 0;
  int64_t next_token = -1;
  MatchStatus status = MatchStatus::kOk;

  int node = shared.parents[0] == kRootParent ? 0 : nodes;
  while (node < nodes) {  // ends, because children come after their parents
    const Pick pick = node_pick(shared, node, nodes, parts);
    if (pick == kNaNPick || pick == kNoPick) {
      status = pick == kNaNPick ? MatchStatus::kNaN : MatchStatus::kNoFiniteLogit;
      break;
    }
    if (lane == 0) path[num_visited] = node;
    ++num_visited;
    const int64_t token = picked_token(pick);
    node = find_child(shared, node, static_cast<int32_t>(token), nodes);
    if (node == nodes) next_token = token;
  }

  for (int depth = num_visited + lane; depth < nodes; depth += kWarpSize) path[depth] = -1;
  if (lane == 0) {
    params.num_accepted[row] = num_visited - 1;
    params.next_token[row] = next_token;
    params.status[row] = static_cast<int64_t>(status);
  }
}

// ------------------------------------------------------------------------------------------------

template <typename T, bool kAligned>
__global__ void __launch_bounds__(kThreads, 3)
    verify_match_kernel(VerifyMatchParams params, Plan plan, uint32_t* counters, Pick* workspace) {
  SPECDEC_SHARED(Shared, shared);
  const int chunk = blockIdx.x % plan.chunks;
  const int group = blockIdx.x / plan.chunks % plan.groups;
  const int64_t row = blockIdx.x / plan.chunks / plan.groups;
  const int nodes = static_cast<int>(params.nodes);
  const int first_node = group * plan.group;
  const int num_nodes = min(plan.group, nodes - first_node);
  Pick* picks = workspace + row * plan.chunks * nodes;

  load_parents(shared, params, row);
  block_barrier();  // parents are complete before any thread walks
  if (threadIdx.x < kWarpSize) order_nodes(shared, first_node, num_nodes);
  block_barrier();  // the order is visible to all threads
  scan_nodes<T, kAligned>(shared, params, row, chunk);
  block_barrier();  // all warps have stored their picks
  store_picks(shared, picks, params, chunk, num_nodes);
  if (!count_in(shared, counters + row, plan.chunks * plan.groups)) return;

  const int parts = max(1, kThreads / nodes);
  reduce_picks(shared, picks, plan.chunks, nodes, parts);
  load_tokens(shared, params, row);
  block_barrier();  // picks and tokens are complete
  if (threadIdx.x < kWarpSize) walk(shared, params, row, parts);
}

int64_t num_chunks(const VerifyMatchParams& params) { return (params.vocab + kChunk - 1) / kChunk; }

Plan make_plan(const VerifyMatchParams& params) {
  const int64_t chunks = num_chunks(params);
  int64_t group = kMaxGroup;
  const auto groups = [&] { return (params.nodes + group - 1) / group; };
  while (group > kMinGroup && params.batch * chunks * groups() < kEnoughBlocks) group /= 2;
  return {static_cast<int>(chunks), static_cast<int>(group), static_cast<int>(groups())};
}

// Whether every row of logits starts at a multiple of 16 bytes.
template <typename T>
bool rows_are_aligned(const VerifyMatchParams& params) {
  constexpr int64_t kElements = sizeof(uint4) / sizeof(T);
  return reinterpret_cast<uintptr_t>(params.logits) % sizeof(uint4) == 0 &&
         params.logits_batch_stride % kElements == 0 && params.logits_node_stride % kElements == 0;
}

}  // namespace

int64_t verify_match_workspace_bytes(const VerifyMatchParams& params) {
  return params.batch * params.nodes * num_chunks(params) * static_cast<int64_t>(sizeof(Pick));
}

cudaError_t launch_verify_match(const VerifyMatchParams& params, uint32_t* counters,
                                void* workspace, cudaStream_t stream) {
  if (params.nodes < 1 || params.nodes > kMaxNodes) return cudaErrorInvalidValue;
  const Plan plan = make_plan(params);
  const LaunchConfig config{params.batch * plan.chunks * plan.groups, 1, kThreads, stream};
  return with_float_type(params.logits_type, [&](auto element) {
    using T = decltype(element);
    const auto kernel =
        rows_are_aligned<T>(params) ? verify_match_kernel<T, true> : verify_match_kernel<T, false>;
    return launch(kernel, config, params, plan, counters, static_cast<Pick*>(workspace));
  });
}

}  // namespace specdec
