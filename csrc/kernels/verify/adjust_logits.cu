// adjust_logits: adjusts the logits of every node by the text up to the node. Definition:
// specdec/adjust_logits.h.
//
// In:  logits [batch, nodes, vocab] f32/bf16/f16; tokens, parents [batch, nodes];
//      text [batch, columns]; lengths, skips, penalties, ngram_sizes [batch];
//      adjustments [count, 3]; tables [count, vocab]
// Out: scores [batch, nodes, vocab] f32
//
// One launch. A block owns a chunk of kTokens tokens for a group of up to kGroupNodes nodes:
//   1. load: parents and tokens of the row's nodes go to shared memory.
//   2. place: a thread per node of the group walks up to the root for the node's depth, which
//      decides which adjustments the node has.
//   3. mark: every token of the chunk has a word with two bits for each node of the group: whether
//      the penalty applies to the token, and whether it is banned. The threads read the row's text
//      once. For a column whose token is in the chunk, they compare what is before the column with
//      the end of each node's text, so a text is compared once by all chunks together. The thread of
//      a node does the same for the tokens of its path.
//   4. adjust: a thread reads the words of its kGroup tokens once, and then, node by node, loads
//      the logits, applies the node's adjustments in order, and stores the scores.
//
// Lengths are read from memory and the grid depends on shapes only, so a CUDA graph can repeat the
// launch. The words are ORs, so the result does not depend on the order of threads.
//
// Bytes: each logit is read once, each score written once. ESTIMATE for 64 nodes of 128k tokens in
// bf16 on an H200: 49 MB, 11 us; each of 504 blocks also reads the row's text, 64 KB for 8k tokens,
// 33 MB from L2 in all, and the chunk's part of the tables, which stays in L1 from node to node.
#include "score_group.cuh"
#include "specdec/launchers.h"

namespace specdec {
namespace {

constexpr int kThreads = 256;
constexpr int kTokens = kThreads * kGroup;
constexpr int kGroupNodes = 16;
constexpr int kBanShift = 16;  // of the bits of bans in a token's word, above those of the penalty
static_assert(kGroupNodes <= kBanShift && kBanShift + kGroupNodes <= 32, "one word per token");
static_assert(kMaxAdjustments <= 32, "one bit per adjustment");

struct Shared {
  SharedArray<int64_t, kMaxNodes> tokens;
  SharedArray<int32_t, kMaxNodes> parents;  // kInactiveParent if the link is illegal
  SharedArray<uint32_t, kTokens> marks;
  SharedArray<int32_t, kGroupNodes> depths;
  SharedArray<uint32_t, kGroupNodes> active;  // bits of the adjustments of each node
  SharedArray<int32_t, kMaxAdjustments> kinds;
  SharedValue<uint32_t> penalised;  // bits of the group's nodes with a penalty
  SharedValue<uint32_t> banned;     // bits of the group's nodes with bans
};
static_assert(sizeof(Shared) <= 48 * 1024, "static shared memory");

struct Grid {
  int64_t chunks;
  int64_t groups;
  bool logits_aligned;
  bool scores_aligned;
  bool tables_aligned;
};

// The tokens of a row, for TextEnd.
struct RowText {
  Shared& shared;
  const AdjustLogitsParams& params;
  int64_t row;

  __device__ int64_t token(int64_t node) const { return shared.tokens[static_cast<int>(node)]; }
  __device__ int64_t parent(int64_t node) const { return shared.parents[static_cast<int>(node)]; }
  __device__ int64_t column(int64_t i) const { return params.text(row, i); }
};

// The part of a row that a block takes.
struct Block {
  Shared& shared;
  const AdjustLogitsParams& params;
  int64_t row;
  int64_t first_token;
  int first_node;
  int nodes;       // of the group
  int64_t length;  // of the row's text
  int64_t size;    // of n-grams

  __device__ RowText text() const { return {shared, params, row}; }
  __device__ TextEnd end_of(int i) const { return {first_node + i, length}; }

  __device__ void load() const {
    const ParentsRow parents{&params.parents(row, 0), params.parents.column_stride};
    for (int node = threadIdx.x; node < first_node + nodes; node += kThreads) {
      shared.parents[node] =
          static_cast<int32_t>(parents.link_is_legal(node) ? parents[node] : kInactiveParent);
      shared.tokens[node] = params.tokens(row, node);
    }
    for (int i = threadIdx.x; i < kTokens; i += kThreads) shared.marks[i] = 0;
    if (threadIdx.x < params.count) {
      shared.kinds[threadIdx.x] = static_cast<int32_t>(params.adjustments(threadIdx.x, 0));
    }
    if (threadIdx.x == 0) {
      shared.penalised = 0;
      shared.banned = 0;
    }
  }

  // Finds the depth and the adjustments of node i of the group.
  __device__ void place(int i) const {
    int depth = 0, parent = shared.parents[first_node + i];
    for (; parent >= 0; ++depth) parent = shared.parents[parent];
    uint32_t active = 0, kinds = 0;
    for (int j = 0; parent == kRootParent && j < params.count; ++j) {
      const Adjustment kind = adjustment_at(params, j, length + depth);
      if (kind <= Adjustment::kOff || kind >= Adjustment::kCount) continue;
      active |= 1u << j;
      kinds |= 1u << static_cast<int>(kind);
    }
    shared.depths[i] = depth;
    shared.active[i] = active;
    const auto has = [=](Adjustment kind) { return kinds >> static_cast<int>(kind) & 1; };
    if (has(Adjustment::kPenalise)) atomic_or(shared.penalised.pointer(), 1u << i);
    if (has(Adjustment::kBan) && size > 0) atomic_or(shared.banned.pointer(), 1u << i);
  }

  // Adds `mark` to the word of a token, if the token is in the chunk.
  template <typename Mark>
  __device__ void mark_token(int64_t token, const Mark& mark) const {
    const int64_t i = token - first_token;
    if (i < 0 || i >= kTokens) return;
    const uint32_t bits = mark();
    if (bits != 0) atomic_or(shared.marks.pointer(static_cast<int>(i)), bits);
  }

  // Marks the token in each column of the text.
  __device__ void mark_text() const {
    const uint32_t penalised = shared.penalised, banned = shared.banned;
    if (penalised == 0 && banned == 0) return;
    const int64_t skip = params.skips[row];
    for (int64_t column = threadIdx.x; column < length; column += kThreads) {
      mark_token(params.text(row, column), [&] {
        uint32_t bits = column >= skip ? penalised : 0;
        if (column < size - 1) return bits;
        for (int i = 0; i < nodes; ++i) {
          const bool repeats =
              (banned >> i & 1) && same_endings(text(), {0, column}, end_of(i), size - 1);
          bits |= static_cast<uint32_t>(repeats) << (kBanShift + i);
        }
        return bits;
      });
    }
  }

  // Marks the tokens on the path to node i of the group.
  __device__ void mark_path(int i) const {
    const bool is_penalised = shared.penalised >> i & 1, is_banned = shared.banned >> i & 1;
    if (!is_penalised && !is_banned) return;
    int64_t column = length + shared.depths[i];
    for (int node = first_node + i; node > 0; node = shared.parents[node]) {
      --column;
      mark_token(shared.tokens[node], [&] {
        const bool counts = is_penalised && column >= params.skips[row];
        const TextEnd before{shared.parents[node], length};
        const bool repeats =
            is_banned && column >= size - 1 && same_endings(text(), before, end_of(i), size - 1);
        return static_cast<uint32_t>(counts) << i | static_cast<uint32_t>(repeats)
                                                        << (kBanShift + i);
      });
    }
  }

  __device__ void apply(int index, int64_t token, uint32_t penalised_tokens, uint32_t banned_tokens,
                        bool aligned, ScoreGroup<float>& scores) const {
    const int32_t number = shared.kinds[index];
    const Adjustment kind{number};
    if (kind == Adjustment::kAdd || kind == Adjustment::kOverwrite) {
      const float* row_table = params.tables + index * params.table_stride;
      const ScoreGroup<float> table = load_scores(row_table, token, params.vocab, aligned);
#pragma unroll
      for (int j = 0; j < kGroup; ++j) {
        scores.values[j] = kind == Adjustment::kAdd
                               ? exact_add(scores.values[j], table.values[j])
                               : overwritten(scores.values[j], table.values[j]);
      }
    } else if (kind == Adjustment::kPenalise && penalised_tokens != 0) {
      const float penalty = params.penalties[row];
#pragma unroll
      for (int j = 0; j < kGroup; ++j) {
        if (penalised_tokens >> j & 1) scores.values[j] = penalised(scores.values[j], penalty);
      }
    } else if (kind == Adjustment::kBan) {
#pragma unroll
      for (int j = 0; j < kGroup; ++j) {
        if (banned_tokens >> j & 1) scores.values[j] = kRemovedScore;
      }
    }
  }

  template <typename T>
  __device__ void adjust(const Grid& grid) const {
    const int64_t token = first_token + threadIdx.x * kGroup;
    uint32_t marks[kGroup];
#pragma unroll
    for (int j = 0; j < kGroup; ++j) marks[j] = shared.marks[threadIdx.x * kGroup + j];
    for (int i = 0; i < nodes; ++i) {
      const int64_t node = first_node + i;
      const T* logits = static_cast<const T*>(params.logits) + row * params.logits_batch_stride +
                        node * params.logits_node_stride;
      ScoreGroup<float> scores = load_scores(logits, token, params.vocab, grid.logits_aligned);
      uint32_t penalised_tokens = 0, banned_tokens = 0;
#pragma unroll
      for (int j = 0; j < kGroup; ++j) {
        penalised_tokens |= (marks[j] >> i & 1) << j;
        banned_tokens |= (marks[j] >> (kBanShift + i) & 1) << j;
      }
      for (uint32_t active = shared.active[i]; active != 0; active &= active - 1) {
        apply(__ffs(static_cast<int>(active)) - 1, token, penalised_tokens, banned_tokens,
              grid.tables_aligned, scores);
      }
      store_scores(params.scores + (row * params.nodes + node) * params.vocab, token, params.vocab,
                   grid.scores_aligned, scores);
    }
  }
};

template <typename T>
__global__ void __launch_bounds__(kThreads)
    adjust_kernel(const SPECDEC_GRID_CONSTANT AdjustLogitsParams params,
                  const SPECDEC_GRID_CONSTANT Grid grid) {
  SPECDEC_SHARED(Shared, shared);
  const int64_t group = blockIdx.x / grid.chunks % grid.groups;
  const int64_t row = blockIdx.x / grid.chunks / grid.groups;
  const int first_node = static_cast<int>(group) * kGroupNodes;
  const int64_t given_length = params.lengths[row];
  const Block block{.shared = shared,
                    .params = params,
                    .row = row,
                    .first_token = blockIdx.x % grid.chunks * kTokens,
                    .first_node = first_node,
                    .nodes = min(kGroupNodes, static_cast<int>(params.nodes) - first_node),
                    .length = given_length < 0                ? 0
                              : given_length > params.columns ? params.columns
                                                              : given_length,
                    .size = params.ngram_sizes[row]};
  block.load();
  block_barrier();  // the row's nodes are loaded, and the marks are zero
  const int thread = threadIdx.x;
  if (thread < block.nodes) block.place(thread);
  block_barrier();  // the adjustments of the group's nodes are known
  block.mark_text();
  if (thread < block.nodes) block.mark_path(thread);
  block_barrier();  // the marks are complete
  block.template adjust<T>(grid);
}

}  // namespace

cudaError_t launch_adjust_logits(const AdjustLogitsParams& params, cudaStream_t stream) {
  if (params.nodes < 1 || params.nodes > kMaxNodes || params.count > kMaxAdjustments) {
    return cudaErrorInvalidValue;
  }
  return with_float_type(params.logits_type, [&]<typename T>(T) {
    // Whether groups of the type that `rows` has begin at multiples of their size.
    const auto aligned = [&]<typename U>(const U* rows, std::initializer_list<int64_t> strides) {
      bool is_aligned = params.vocab % kGroup == 0 &&
                        reinterpret_cast<uintptr_t>(rows) % sizeof(ScoreGroup<U>) == 0;
      for (const int64_t stride : strides) is_aligned &= stride % kGroup == 0;
      return is_aligned;
    };
    const Grid grid{
        .chunks = (params.vocab + kTokens - 1) / kTokens,
        .groups = (params.nodes + kGroupNodes - 1) / kGroupNodes,
        .logits_aligned = aligned(static_cast<const T*>(params.logits),
                                  {params.logits_batch_stride, params.logits_node_stride}),
        .scores_aligned = aligned(params.scores, {}),
        .tables_aligned = aligned(params.tables, {params.table_stride})};
    return launch(adjust_kernel<T>, {params.batch * grid.groups * grid.chunks, 1, kThreads, stream},
                  params, grid);
  });
}

}  // namespace specdec
