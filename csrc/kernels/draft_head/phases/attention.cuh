// The phase `attend` of the fused draft_head: attention, from scratch.queries and the cache to
// scratch.attended. (Split keys with an exact merge: Flash-Decoding, Dao et al. 2023.)
//
// Query heads that share a key-value head are rows of the same product: query row i of a batch row
// is head i % group of element i / group. A work item is
//
//   (batch row, key-value head, tile of 16 query rows, panel of 64 dimensions, split of the slots)
//
// and item i belongs to block i % blocks. Each warp processes an eighth of the split, in steps of
// 16 slots (attention_tile.cuh). Then the warps merge in shared memory, and the block writes the
// largest score, the sum and the values of the split. sync.arrivals counts the finished splits of a
// panel; the block that finishes last merges them, in order. Example: 4 query heads on each of 2
// key-value heads of 128 dimensions, a batch row with 8 elements and 300 slots: 32 query rows are 2
// tiles; 2 heads x 2 tiles x 2 panels x 3 splits are 24 items.
//
// Splits are anchored at slot 0. Their length depends on the number of slots of the batch row, not
// on which of its elements are in the pass. Slots that a row does not see change none of its bits.
// So its bits depend neither on other rows nor on the number of blocks.
//
// Scores, sums and values are float32; weights are rounded to T for their product with values.
#pragma once

#include "attention_tile.cuh"
#include "kernels/draft_head/block.cuh"
#include "kernels/draft_head/tree.cuh"
#include "rotate.cuh"

namespace specdec {

struct AttentionItem {
  int kv_head;
  int tile;
  int panel;
  int split;

  __device__ __forceinline__ AttentionItem(const AttentionPart& part, int i)
      : kv_head(i / part.num_splits / part.panels / part.tiles),
        tile(i / part.num_splits / part.panels % part.tiles),
        panel(i / part.num_splits % part.panels),
        split(part.first_split + i % part.num_splits) {}

  __device__ __forceinline__ int num_rows(const AttentionPart& part) const {
    return min(part.query_rows() - tile * kTileRows, kTileRows);
  }
  // The row of the pass and the head that belong to a row of the tile.
  __device__ __forceinline__ int pass_row(const AttentionPart& part, int row) const {
    return part.first + (tile * kTileRows + row) / part.group;
  }
  __device__ __forceinline__ int head(const AttentionPart& part, int row) const {
    return kv_head * part.group + (tile * kTileRows + row) % part.group;
  }
};

__device__ __forceinline__ int committed_slots(const DraftKernelParams& params, int batch_row) {
  return static_cast<int>(params.lengths[batch_row] + params.counts[batch_row]);
}

// The index of the `window`-th highest ancestor bit; 0 if there are fewer.
__device__ __forceinline__ int first_seen_node(const uint64_t* ancestors, int words, int window) {
  for (int word = words - 1; word >= 0; --word) {
    uint64_t bits = ancestors[word];
    const int count = __popcll(bits);
    if (count < window) {
      window -= count;
      continue;
    }
    for (int left = count - window; left > 0; --left) bits &= bits - 1;
    return word * 64 + __ffsll(static_cast<long long>(bits)) - 1;
  }
  return 0;
}

// A mask of the first `count` of 16 bits.
__device__ __forceinline__ uint32_t first_bits(int count) {
  return (1u << min(max(count, 0), kStepSlots)) - 1;
}

// Bit i: the row sees slot + i.
__device__ __forceinline__ uint32_t seen_bits(const SeenSlots& seen, int words, int slot) {
  uint32_t bits = first_bits(seen.end - slot) & ~first_bits(seen.first - slot);
  const int node = slot - seen.committed;
  if (seen.ancestors == nullptr || node <= -kStepSlots) return bits;
  uint64_t nodes;
  if (node < 0) {
    nodes = seen.ancestors[0] << -node;
  } else {
    const int word = node / 64, shift = node % 64;
    nodes = word < words ? seen.ancestors[word] >> shift : 0;
    if (shift > 64 - kStepSlots && word + 1 < words) {
      nodes |= seen.ancestors[word + 1] << (64 - shift);
    }
  }
  return bits | (static_cast<uint32_t>(nodes) & 0xFFFF & ~first_bits(seen.first_node - slot));
}

template <typename T>
__device__ __forceinline__ SeenSlots seen_slots(const DraftBlock<T>& block, const DraftPass& pass,
                                                const PassRow& row, int window) {
  const DraftKernelParams& params = block.params;
  const int b = row.batch_row;
  SeenSlots seen{0, static_cast<int>(row.slot) + 1, 0, 0, nullptr};
  if (pass.kind == PassKind::kFrontier) {
    seen.end = seen.committed = committed_slots(params, b);
    seen.ancestors = DraftTreeRow(params, b).ancestors(pass.level) + row.place * params.words;
  }
  if (window > 0) {
    const int64_t slot_zero = params.positions[b] - params.lengths[b];
    const int first = static_cast<int>(row.position - slot_zero) - window + 1;
    seen.first = min(max(first, 0), seen.end);
    if (seen.ancestors != nullptr) {
      seen.first_node = seen.committed + first_seen_node(seen.ancestors, params.words, window);
    }
  }
  return seen;
}

// The number of slots of a batch row up to the last element of the pass.
template <typename T>
__device__ __forceinline__ int used_slots(const DraftBlock<T>& block, const DraftPass& pass,
                                          int batch_row) {
  const DraftPlan& plan = block.params.plan;
  const int committed = committed_slots(block.params, batch_row);
  if (pass.kind != PassKind::kFrontier) return committed + plan.kept_width() - 1;
  return committed + block.params.first_slots[pass.level] + plan.widths[pass.level];
}

// The part that begins at a row of the pass.
template <typename T>
__device__ __forceinline__ AttentionPart attention_part(const DraftBlock<T>& block,
                                                        const DraftPass& pass, int layer,
                                                        int first) {
  const DraftKernelParams& params = block.params;
  const PassRow first_row = block.shared.rows[first];
  PassRow last_row = first_row;
  int end = first + 1;
  for (; end < pass.num_rows; ++end) {
    const PassRow row = block.shared.rows[end];
    if (row.batch_row != first_row.batch_row) break;
    last_row = row;
  }
  AttentionPart part{};
  part.first = first;
  part.count = end - first;
  if (!first_row.is_active) return part;
  part.layer = layer;
  part.batch_row = first_row.batch_row;
  part.group = params.heads / params.kv_heads;
  part.tiles = (part.query_rows() + kTileRows - 1) / kTileRows;
  part.panels = (params.head_dim + kPanelDims - 1) / kPanelDims;
  // Slots and windows advance from row to row.
  part.first_seen = seen_slots(block, pass, first_row, params.layers[layer].window).first;
  part.end = static_cast<int>(last_row.slot) + 1;
  constexpr int kAllSplits = kSplitKeys * kMaxSplits;
  part.split_length =
      (used_slots(block, pass, part.batch_row) + kAllSplits - 1) / kAllSplits * kSplitKeys;
  part.first_split = part.first_seen / part.split_length;
  part.num_splits = (part.end - 1) / part.split_length + 1 - part.first_split;
  return part;
}

// Processes the warp's eighth of a split.
template <typename T>
__device__ __forceinline__ void attend_split(const DraftBlock<T>& block, const AttentionPart& part,
                                             const AttentionItem& item, PanelState<T>& state) {
  const DraftKernelParams& params = block.params;
  const int panel = item.panel * kPanelDims;
  AttentionInputs<T> inputs{
      .queries = {nullptr, nullptr},
      .keys = cached_head<T>(params.keys, part.layer, part.batch_row, item.kv_head, 0),
      .values = cached_head<T>(params.values, part.layer, part.batch_row, item.kv_head, 0) + panel,
      .key_stride = params.keys.slot_stride,
      .value_stride = params.values.slot_stride,
      .end = part.end,
      .head_dim = params.head_dim,
      .panel_dims = params.head_dim - panel,
      .scale = exact_div(1.0f, sqrtf(static_cast<float>(params.head_dim)))};
  int rows[2] = {-1, -1};  // rows of the pass
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = block.lane() / 4 + 8 * half;
    if (row >= item.num_rows(part)) continue;
    rows[half] = item.pass_row(part, row);
    const PassRow element = block.shared.rows[rows[half]];
    inputs.queries[half] = block.row(params.scratch.queries, element.memory, params.query_outs()) +
                           item.head(part, row) * params.head_dim;
  }
  const int length = part.split_length / kDraftWarps;
  const int begin = item.split * part.split_length + block.warp() * length;
  const int end = min(begin + length, part.end);
  for (int slot = max(begin, part.first_seen / kStepSlots * kStepSlots); slot < end;
       slot += kStepSlots) {
    uint32_t seen[2] = {0, 0};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (rows[half] < 0) continue;
      seen[half] = seen_bits(block.shared.seen[rows[half]], params.words, slot);
    }
    attend_step(inputs, seen, slot, state);
  }
}

__device__ __forceinline__ int64_t split_index(const DraftKernelParams& params, int row, int head,
                                               int split) {
  return (int64_t{row} * params.heads + head) * kMaxSplits + split;
}

// Merges the warps' statistics of row `row` of the tile, in the order of the warps.
template <typename T>
__device__ __forceinline__ ExpSum merged_warps(const DraftBlock<T>& block, int row) {
  float largest = -INFINITY, sum = 0;
#pragma unroll
  for (int warp = 0; warp < kDraftWarps; ++warp) {
    const ExpSum part = block.shared.warp_sums[warp * kTileRows + row];
    largest = max_or_nan(largest, part.largest);
  }
#pragma unroll
  for (int warp = 0; warp < kDraftWarps; ++warp) {
    const ExpSum part = block.shared.warp_sums[warp * kTileRows + row];
    sum = exact_fma(part.sum, softmax_weight(part.largest, largest), sum);
  }
  return {largest, sum};
}

// Merges the warps' states and writes the split's sums and values to scratch memory. All panels
// write the same sums.
template <typename T>
__device__ __forceinline__ void write_split(const DraftBlock<T>& block, const AttentionPart& part,
                                            const AttentionItem& item, PanelState<T>& state) {
  static_assert(kPanelDims == kPanelTiles * kTileOuts);
  const DraftKernelParams& params = block.params;
  const int lane = block.lane(), num_rows = item.num_rows(part);
  sum_lanes(state);
  if (lane % 4 == 0) {
    const int own = block.warp() * kTileRows + lane / 4;
    block.shared.warp_sums[own] = ExpSum{state.largest[0], state.sum[0]};
    block.shared.warp_sums[own + 8] = ExpSum{state.largest[1], state.sum[1]};
  }
  block.sync();  // all statistics are stored
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = lane / 4 + 8 * half;
    const ExpSum merged = merged_warps(block, row);
    const float factor = softmax_weight(state.largest[half], merged.largest);
#pragma unroll
    for (int d = 0; d < kPanelTiles; ++d) {
      state.values[d][2 * half] = exact_mul(state.values[d][2 * half], factor);
      state.values[d][2 * half + 1] = exact_mul(state.values[d][2 * half + 1], factor);
    }
    if (block.warp() == 0 && lane % 4 == 0 && row < num_rows) {
      params.scratch.split_sums[split_index(params, item.pass_row(part, row), item.head(part, row),
                                            item.split)] = merged;
    }
  }
  reduce_panel(block, num_rows, state.values, [&](int row, const float (&values)[2]) {
    const int dim = item.panel * kPanelDims + lane % 8 * 8 + lane / 8;
    if (dim >= params.head_dim) return;
    float* out = params.scratch.split_values + dim +
                 split_index(params, item.pass_row(part, row), item.head(part, row), item.split) *
                     params.head_dim;
    out[0] = values[0];
    out[4] = values[1];
  });
}

// Whether this block finished the last of the panel's splits. If so, it sees what the other blocks
// wrote.
template <typename T>
__device__ __forceinline__ bool is_last_split(const DraftBlock<T>& block, const AttentionPart& part,
                                              const AttentionItem& item) {
  if (threadIdx.x == 0) {
    // A part has no more tiles than its rows have query heads, so its counters overlap with no
    // other's.
    const int tile = (item.kv_head * kPassRows + part.first) * part.group + item.tile;
    uint32_t* arrivals = block.params.sync.arrivals + tile * part.panels + item.panel;
    const bool is_last =
        fetch_add_acq_rel(arrivals, 1) == static_cast<uint32_t>(part.num_splits) - 1;
    if (is_last) *arrivals = 0;  // no other block arrives
    block.shared.flags[0] = is_last;
  }
  block.sync();  // the answer is stored
  return block.shared.flags[0] != 0;
}

// Writes row `row` of the tile. All lanes of a warp call it; a lane has two dimensions.
template <typename T>
__device__ __forceinline__ void merge_splits(const DraftBlock<T>& block, const AttentionPart& part,
                                             const AttentionItem& item, int row) {
  const DraftKernelParams& params = block.params;
  const int lane = block.lane(), head = item.head(part, row), end = part.num_splits;
  const int dim = item.panel * kPanelDims + 2 * lane;
  const int64_t first = split_index(params, item.pass_row(part, row), head, part.first_split);
  const ExpSum* sums = params.scratch.split_sums + first;
  const float* values = params.scratch.split_values + first * params.head_dim + dim;
  float largest = -INFINITY;
  for (int split = lane; split < end; split += kWarpSize) {
    largest = max_or_nan(largest, sums[split].largest);
  }
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    largest = max_or_nan(largest, shuffle_xor(largest, offset));
  }
  float sum = 0;
  float2 merged{0, 0};
#pragma unroll 8
  for (int split = 0; split < end; ++split) {
    const float weight = softmax_weight(sums[split].largest, largest);
    sum = exact_fma(sums[split].sum, weight, sum);
    if (dim >= params.head_dim) continue;
    const float2 part_values = load_global<float2>(values + int64_t{split} * params.head_dim);
    merged.x = exact_fma(part_values.x, weight, merged.x);
    merged.y = exact_fma(part_values.y, weight, merged.y);
  }
  if (dim >= params.head_dim) return;
  const PassRow element = block.shared.rows[item.pass_row(part, row)];
  T* out = block.row(params.scratch.attended, element.memory, params.query_outs()) +
           head * params.head_dim + dim;
  store_float(out, exact_div(merged.x, sum));
  store_float(out + 1, exact_div(merged.y, sum));
}

// Describes what each row sees, and the part that begins at a row.
template <typename T>
__device__ __forceinline__ void prepare_attention(const DraftBlock<T>& block, const DraftPass& pass,
                                                  int layer) {
  const int i = static_cast<int>(threadIdx.x);
  if (i < pass.num_rows) {
    const PassRow row = block.shared.rows[i];
    if (row.is_active) {
      block.shared.seen[i] = seen_slots(block, pass, row, block.params.layers[layer].window);
    }
    bool begins = i == 0;
    if (i > 0) {
      const PassRow before = block.shared.rows[i - 1];
      begins = before.batch_row != row.batch_row;
    }
    if (begins) block.shared.parts[i] = attention_part(block, pass, layer, i);
  }
  block.sync();  // all parts are stored
}

template <typename T>
__device__ __forceinline__ void attend(const DraftBlock<T>& block, const DraftPass& pass,
                                       int layer) {
  prepare_attention(block, pass, layer);
  int first_item = 0;  // first item of the part
  for (int first = 0; first < pass.num_rows;) {
    // A reference, because a copy would take registers.
    const AttentionPart& part = *block.shared.parts.pointer(first);
    first += part.count;
    const int items = block.params.kv_heads * part.tiles * part.panels * part.num_splits;
    const int skip = first_item % block.count();
    for (int i = (block.index() + block.count() - skip) % block.count(); i < items;
         i += block.count()) {
      const AttentionItem item(part, i);
      PanelState<T> state;
      state.clear();
      attend_split(block, part, item, state);
      write_split(block, part, item, state);
      if (!is_last_split(block, part, item)) continue;
      for (int row = block.warp(); row < item.num_rows(part); row += kDraftWarps) {
        merge_splits(block, part, item, row);
      }
    }
    first_item += items;
  }
}

}  // namespace specdec
