// round_commit: commits a round of decoding in one launch.
//
// In:  caches [batch, heads, slots, head_dim], features [batch, nodes, width] (several), the trees'
//      tokens [batch, nodes], the result of their verification, eos [num_eos]
// Out: slots of the caches, new_features and new_tokens [batch, nodes, ...], and the state of the
//      rows: numbers, text, an entry of the ring, clock
//
// One block per (cache or features, row, head). Features have one head.
//   1. Outcome: a warp finds how many tokens the row emits. The walk ends early at an
//      end-of-sequence token and at the row's limit.
//   2. Moves: keys and values as in kv_compact, features from their nodes to the first columns.
//   3. Arrival: blocks count in. All have read the state by then, so the last one may change it: a
//      warp per row appends the text and writes the entry; the start of the next block of nodes is
//      the largest end of all rows.
//
// If any row has a status, the round is void: nothing changes but the counts, and the entry says
// why. A row whose numbers are illegal emits nothing and has the status kIllegalNumbers, because a
// kernel can't raise.
//
// More caches than a launch takes are divided over several launches, of which only the last one has
// features and changes the state.
#include "moves.cuh"

namespace specdec {
namespace {

using namespace moves;

constexpr int kWarps = kThreads / kWarpSize;

struct FeatureTable {
  FeatureTensor tensors[kMaxFeatureTensors];
};

struct Shape {
  int max_heads;
  int num_caches;
  int num_features;
  bool is_last;  // of the launches
};

static_assert(sizeof(CacheTable) + sizeof(RoundCommitParams) + sizeof(FeatureTable) +
                      sizeof(Shape) <=
                  4096,
              "the parameters that every driver takes");

template <typename Unit>
struct Shared {
  Stage<Unit> stage;
  SharedValue<int> count;
  SharedValue<bool> is_last;
  SharedArray<int64_t, kWarps> ends;
};

// Whether any row has a status, by one warp, in all lanes.
__device__ bool is_void(const RoundCommitParams& params) {
  bool found = false;
  for (int64_t row = threadIdx.x % kWarpSize; row < params.batch; row += kWarpSize) {
    found |= params.status[row] != 0;
  }
  return warp_any(found);
}

// What a row emits if the round is not void, by one warp, in all lanes.
__device__ RowOutcome find_outcome(const RoundCommitParams& params, int64_t row) {
  const int64_t accepted = params.num_accepted[row];
  if (accepted == -1) return {0, false, 0};
  const int lane = threadIdx.x % kWarpSize;
  bool legal = accepted >= 0 && accepted < params.nodes && params.has_room(row);
  for (int64_t depth = lane; legal && depth <= accepted; depth += kWarpSize) {
    legal = params.is_node(params.path[row * params.nodes + depth]);
  }
  if (!warp_all(legal)) return {0, false, kIllegalNumbers};
  const int64_t length = params.numbers(RoundNumber::kTextLength, row);
  int64_t end = accepted + 1;  // the depth of the first token that ends the row
  for (int64_t depth = lane; depth <= accepted; depth += kWarpSize) {
    if (params.ends(row, params.walked_token(row, depth), length + depth + 1)) {
      end = depth;
      break;
    }
  }
  end = warp_min(end);
  return end <= accepted ? RowOutcome{end + 1, true, 0} : RowOutcome{end, false, 0};
}

template <typename Unit>
__device__ void gather_features(Stage<Unit>& stage, const RoundCommitParams& params,
                                const FeatureTensor& features, int64_t row, int count) {
  if (count == 0) return;
  for (int depth = threadIdx.x; depth < count; depth += kThreads) {
    stage.sources[depth] = params.path[row * params.nodes + depth] * features.node_stride;
    stage.targets[depth] = depth * params.new_features.column_stride;
  }
  copy_slots(stage, features.data + row * features.row_stride,
             params.new_features.data + row * params.new_features.row_stride + features.offset,
             count, static_cast<int>(features.bytes));
}

// Whether this is the last block to arrive. If so, all others have read the state.
template <typename Unit>
__device__ bool count_in(Shared<Unit>& shared, int32_t* arrived) {
  block_barrier();  // no thread of this block reads the state any more
  if (threadIdx.x == 0) {
    const uint32_t before = fetch_add_acq_rel(reinterpret_cast<uint32_t*>(arrived), 1);
    shared.is_last = before == gridDim.x * gridDim.y - 1;
    if (shared.is_last) *arrived = 0;
  }
  block_barrier();  // the other threads acquire through thread 0
  return shared.is_last;
}

// Writes the state of a row and its part of the entry, by one warp. Returns the end of the row.
__device__ int64_t write_row(const RoundCommitParams& params, int64_t row,
                             const RowOutcome& outcome, int64_t* entry) {
  using Number = RoundNumber;
  const int lane = threadIdx.x % kWarpSize;
  const int64_t batch = params.batch, nodes = params.nodes, count = outcome.count;
  const View2<int64_t>& numbers = params.numbers;
  const int64_t length = numbers(Number::kTextLength, row);
  const int64_t end = numbers(Number::kEnd, row) + count;
  int64_t* parts = entry + 1;
  int64_t* tokens = parts + 4 * batch + row * nodes;
  int64_t* path = tokens + batch * nodes;
  for (int64_t i = lane; i < nodes; i += kWarpSize) {
    path[i] = params.path[row * nodes + i];
    tokens[i] = i < count ? params.walked_token(row, i) : -1;
    if (i >= count) continue;
    params.text(row, length + i) = tokens[i];
    params.new_tokens(row, i) = tokens[i];
    if (i == count - 1) numbers(Number::kRoot, row) = tokens[i];
  }
  warp_barrier();  // all lanes have read the numbers
  if (lane == 0) {
    parts[row] = count;
    parts[batch + row] = params.num_accepted[row];
    parts[2 * batch + row] = outcome.ended;
    parts[3 * batch + row] = outcome.status;
    numbers(Number::kTextLength, row) = length + count;
    numbers(Number::kRootPosition, row) += count;
    numbers(Number::kEnd, row) = end;
    numbers(Number::kLength, row) += count;
    numbers(Number::kCount, row) = count;
    if (outcome.ended) numbers(Number::kRootParent, row) = kInactiveParent;
  }
  return end;
}

// Writes the state of all rows and the entry, by one block.
template <typename Unit>
__device__ void write_state(Shared<Unit>& shared, const RoundCommitParams& params) {
  const int warp = threadIdx.x / kWarpSize;
  const int32_t round = params.clock[0];
  int64_t* entry = &params.ring(round % params.num_entries, 0);
  const bool nothing = is_void(params);
  int64_t largest = 0;
  for (int64_t row = warp; row < params.batch; row += kWarps) {
    const RowOutcome outcome =
        nothing ? RowOutcome{0, false, params.status[row]} : find_outcome(params, row);
    const int64_t end = write_row(params, row, outcome, entry);
    largest = end > largest ? end : largest;
  }
  if (threadIdx.x % kWarpSize == 0) shared.ends[warp] = largest;
  block_barrier();  // the ends are complete, and all threads have read the clock
  for (int i = 0; i < kWarps; ++i) {
    const int64_t end = shared.ends[i];
    largest = end > largest ? end : largest;
  }
  for (int64_t row = threadIdx.x; row < params.batch; row += kThreads) {
    params.numbers(RoundNumber::kBlockStart, row) = largest;
  }
  if (threadIdx.x == 0) {
    entry[0] = round + 1;
    params.clock[0] = round + 1;
  }
}

template <typename Unit>
__global__ void __launch_bounds__(kThreads)
    round_commit_kernel(const SPECDEC_GRID_CONSTANT CacheTable caches,
                        const SPECDEC_GRID_CONSTANT FeatureTable features,
                        const SPECDEC_GRID_CONSTANT RoundCommitParams params, Shape shape) {
  SPECDEC_SHARED(Shared<Unit>, shared);
  const int64_t row = blockIdx.x / shape.max_heads;
  const int head = blockIdx.x % shape.max_heads, tensor = blockIdx.y;
  if (threadIdx.x < kWarpSize) {
    const bool nothing = is_void(params);
    const int64_t count = nothing ? 0 : find_outcome(params, row).count;
    if (threadIdx.x == 0) shared.count = static_cast<int>(count);
  }
  block_barrier();  // the count is known
  if (tensor < shape.num_caches) {
    move_slots(shared.stage, caches, tensor, head, params.moves(), row, shared.count);
  } else if (head == 0 && tensor - shape.num_caches < shape.num_features) {
    const FeatureTensor& source = features.tensors[tensor - shape.num_caches];
    gather_features(shared.stage, params, source, row, shared.count);
  }
  if (shape.is_last && count_in(shared, params.clock + 1)) write_state(shared, params);
}

}  // namespace

cudaError_t launch_round_commit(std::span<const CacheTensor> caches,
                                std::span<const FeatureTensor> features,
                                const RoundCommitParams& params, cudaStream_t stream) {
  if (params.nodes < 1 || params.nodes > kMaxNodes || features.size() > kMaxFeatureTensors) {
    return cudaErrorInvalidValue;
  }
  FeatureTable table{};
  std::copy(features.begin(), features.end(), table.tensors);
  uint64_t feature_bits = 0;
  for (const FeatureTensor& tensor : features) {
    feature_bits |= reinterpret_cast<uintptr_t>(tensor.data) |
                    reinterpret_cast<uintptr_t>(params.new_features.data) |
                    static_cast<uint64_t>(tensor.row_stride | tensor.node_stride | tensor.offset |
                                          tensor.bytes | params.new_features.row_stride |
                                          params.new_features.column_stride);
  }
  return for_each_list(caches, [&](const CacheList& list, bool is_last) {
    const int num_features = is_last ? static_cast<int>(features.size()) : 0;
    const Shape shape{std::max(1, list.max_heads()), static_cast<int>(list.size), num_features,
                      is_last};
    const int64_t tensors = std::max<int64_t>(1, list.size + num_features);
    const LaunchConfig config{params.batch * shape.max_heads, tensors, kThreads, stream};
    const uint64_t bits = list.alignment_bits() | (is_last ? feature_bits : 0);
    return with_unit(bits, [&]<typename Unit>(Unit) {
      return launch(round_commit_kernel<Unit>, config, list.table, table, params, shape);
    });
  });
}

}  // namespace specdec
