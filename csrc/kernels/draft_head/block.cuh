// What the phases of the fused draft_head share: a block's threads, its shared memory, and the rows
// of a pass.
//
// A block has eight warps, which all compute; the first of them also fills the ring of weights
// (ring.cuh). (A ninth warp for that purpose would cost as many registers as four: warps are
// assigned to the four quarters of a multiprocessor in turn, and each quarter has its own
// registers.) All blocks of the grid go through the phases together (plan.h) and wait for each
// other after each phase. The ring runs ahead, so the weights of the next phase arrive while the
// grid waits.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "fragments.cuh"
#include "specdec/device/cuda.cuh"
#include "specdec/draft_head/kernel_params.h"

namespace specdec {

constexpr int kDraftWarps = 8;
constexpr int kDraftThreads = kDraftWarps * kWarpSize;
constexpr int kMaxStages = 24;

// A stage of the ring: a slice of the rows of a tile. Rows are an odd multiple of a unit apart, half
// of all banks, so that the 8 lanes that load 16 bytes at a time, four from each of two rows, touch
// all banks once. A matrix in tiles has the same units of neighbouring rows side by side, with the
// same effect.
constexpr int kStageRowBytes = kSliceBytes + kUnitBytes;
constexpr int kStageBytes = kTileOuts * kStageRowBytes;
// Memory for what the warps add up, [warp][tile][row][out of tile] floats, for up to kTileRows rows.
// Products of few rows keep their inputs behind the sums (phases/product.cuh).
constexpr int kRowSumBytes = kDraftWarps * kPanelTiles * kTileOuts * 4;
constexpr int kReduceBytes = kTileRows * kRowSumBytes;

// An element of the pass; lists as in kernel_params.h. If the batch row has no new elements, no
// result of the element may be stored, and its numbers must not be used as addresses.
struct PassRow {
  int batch_row;
  int place;       // in a frontier: among the nodes of its batch row; else among its new elements
  int list;        // -1: a new element without logits, which other elements attend to
  int memory;      // its row in residual, projected and so on
  bool is_active;  // its batch row has new elements
  int64_t slot;    // slot of its keys and values
  int64_t position;
  int64_t token;
  const void* hidden;  // [feature_width] raw features, or [hidden] feedback of its parent
};

// The slots that a row sees: slots [first, end), and behind the committed ones those of its node's
// ancestors from slot first_node on.
struct SeenSlots {
  int first;
  int end;
  int first_node;
  int committed;
  const uint64_t* ancestors;  // [words], bit 0 is slot `committed`; null: none
};

// The rows of a pass that belong to one batch row, and how the phase divides the work on them.
struct AttentionPart {
  int layer;
  int first;  // row of the pass
  int count;
  int batch_row;
  int group;  // query heads per key-value head
  int tiles;
  int panels;
  int first_seen;  // no row sees a slot before this one,
  int end;         // or from this one on
  int split_length;
  int first_split;
  int num_splits;  // 0: the batch row is not active

  __device__ __forceinline__ int query_rows() const { return count * group; }
};

// The rows of the left factor of a product: one or two segments with `width` elements each.
struct InputSegments {
  int count;
  int width;
  const void* norms[2];  // [width] weights of their RMS norms, or null: no norm
};

struct DraftShared {
  SharedArray<Mbarrier, kMaxStages> full;              // the weights have landed
  SharedArray<Mbarrier, kMaxStages> empty;             // all warps have read them
  SharedArray<int, kMaxDraftBatch + 1> first_element;  // of a batch row, among all new elements
  SharedArray<PassRow, kPassRows> rows;
  SharedArray<const void*, 2 * kPassRows> inputs;          // [segment][row] of the product
  SharedArray<float, 2 * kPassRows> inverses;              // [segment][row] 1 / root mean square
  SharedArray<uint64_t, kPassRows * kMaxDraftTopK> picks;  // the best of this block's logits
  SharedArray<ExpSum, kPassRows> logit_sums;               // over this block's logits
  SharedArray<ExpSum, kDraftWarps * kTileRows> warp_sums;  // attention
  SharedArray<SeenSlots, kPassRows> seen;                  // by row
  SharedArray<AttentionPart, kPassRows> parts;             // at the first row of each part
  SharedArray<int, 4> flags;                               // results of a phase for the whole block
};

// A thread's view of its block.
template <typename T>
struct DraftBlock {
  const DraftKernelParams& params;
  DraftShared& shared;
  SharedSpan<unsigned char> stages;  // [num_stages][kStageBytes]
  SharedSpan<float> reduce;          // kReduceBytes
  int num_stages;

  __device__ __forceinline__ int warp() const { return static_cast<int>(threadIdx.x) / kWarpSize; }
  __device__ __forceinline__ int lane() const { return static_cast<int>(threadIdx.x) % kWarpSize; }
  __device__ __forceinline__ int index() const { return static_cast<int>(blockIdx.x); }
  __device__ __forceinline__ int count() const { return static_cast<int>(gridDim.x); }
  // A barrier that orders shared memory, and global memory within the block.
  __device__ __forceinline__ void sync() const { block_barrier(); }

  // Row i of scratch memory that has rows of `width` elements.
  __device__ __forceinline__ T* row(void* memory, int64_t i, int64_t width) const {
    return static_cast<T*>(memory) + i * width;
  }
};

// A lane's values of a row of a panel (phases/product.cuh): tiles lane / 8 and 4 + lane / 8, column
// lane % 8. `out` is -1 where there is no output.
struct PanelValues {
  int64_t out[2];
  float value[2];
};

// Sums the panels of all warps, in the order of the warps, and gives each row to one warp, which
// calls use(row, values). values[0] is tile lane / 8 and values[1] tile lane / 8 + 4, both of
// column lane % 8. Of the num_rows rows, at most kTileRows are used.
template <typename T, typename Use>
__device__ __forceinline__ void reduce_panel(const DraftBlock<T>& block, int num_rows,
                                             const float (&c)[kPanelTiles][4], const Use& use) {
  const int lane = block.lane(), rows = min(num_rows, kTileRows);
  const int tile_values = rows * kTileOuts, panel_values = kPanelTiles * tile_values;
  const int own = block.warp() * panel_values + lane / 4 * kTileOuts + lane % 4 * 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (lane / 4 + half * 8 >= rows) break;
#pragma unroll
    for (int tile = 0; tile < kPanelTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        block.reduce[own + tile * tile_values + half * 8 * kTileOuts + i] = c[tile][half * 2 + i];
      }
    }
  }
  block.sync();  // all panels are stored
  for (int row = block.warp(); row < rows; row += kDraftWarps) {
    float values[2] = {0, 0};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = (half * 4 + lane / 8) * tile_values + row * kTileOuts + lane % 8;
#pragma unroll
      for (int warp = 0; warp < kDraftWarps; ++warp) {
        values[half] = exact_add(values[half], block.reduce[warp * panel_values + at]);
      }
    }
    use(row, values);
  }
  block.sync();  // all have read them, so the next ones can be stored
}

}  // namespace specdec
