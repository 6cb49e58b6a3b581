// What the phases of the fused draft_head share: a block's threads, its shared memory, and the rows
// of a pass.
//
// A block has eight warps, all of which compute; the first of them also keeps the ring of weights
// full (draft_ring.cuh). (A ninth warp for that would cost as many registers as four: warps are
// given to the four quarters of a multiprocessor in turn, and each quarter has its own.) All blocks
// of the grid walk through the phases together (draft_plan.h) and wait for each other after each;
// the ring runs ahead, so the weights of the next phase arrive while the grid waits.
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

// A stage of the ring: a slice of the rows of a tile. The distance of rows is an odd number of half
// lines of banks, so that the 8 lanes that load 16 bytes at a time, four from each of two rows,
// touch all banks once.
constexpr int kStageRowBytes = kSliceBytes + 64;
constexpr int kStageBytes = kTileOuts * kStageRowBytes;
// What the warps add up together: [warp][tile][row][out of tile] floats.
constexpr int kTileValues = kTileRows * kTileOuts;
constexpr int kPanelValues = kPanelTiles * kTileValues;
constexpr int kReduceBytes = kDraftWarps * kPanelValues * 4;

// An element of the pass; lists as in draft_kernel.h. Of a batch row without new elements nothing
// may be kept, and its numbers address nothing.
struct PassRow {
  int batch_row;
  int place;       // of a frontier: among the nodes of its batch row; else among its new elements
  int list;        // -1: a new element that only others attend to
  int memory;      // its row in residual, projected and so on
  bool is_active;  // its batch row has new elements
  int64_t slot;    // of its keys and values
  int64_t position;
  int64_t token;
  const void* hidden;  // [feature_width] features as they come, or [hidden] feedback of its parent
};

// What a row sees: slots [first, end), and behind the committed ones those of its node's ancestors
// from slot first_node on.
struct SeenSlots {
  int first;
  int end;
  int first_node;
  int committed;
  const uint64_t* ancestors;  // [words], bit 0 is slot `committed`; null: none
};

// The rows of a pass that belong to one batch row, and how the phase divides them.
struct AttentionPart {
  int layer;
  int first;  // row of the pass
  int count;
  int batch_row;
  int group;  // query heads of a key-value head
  int tiles;
  int panels;
  int first_seen;  // slots before are seen by no row,
  int end;         // and slots from here on neither
  int split_length;
  int first_split;
  int num_splits;  // 0: the batch row is not active

  __device__ __forceinline__ int query_rows() const { return count * group; }
};

// The rows of the left factor of a product: one or two segments of `width` elements each.
struct InputSegments {
  int count;
  int width;
  const void* norms[2];  // [width] weights of their RMS norms, or null: as they are
};

struct DraftShared {
  SharedArray<Mbarrier, kMaxStages> full;              // the weights are there
  SharedArray<Mbarrier, kMaxStages> empty;             // all warps are done with them
  SharedArray<int, kMaxDraftBatch + 1> first_element;  // of a batch row, among all new elements
  SharedArray<PassRow, kPassRows> rows;
  SharedArray<const void*, 2 * kPassRows> inputs;          // [segment][row] of the product
  SharedArray<float, 2 * kPassRows> inverses;              // [segment][row] 1 / root mean square
  SharedArray<uint64_t, kPassRows * kMaxDraftTopK> picks;  // best of this block's logits
  SharedArray<ExpSum, kPassRows> logit_sums;               // of this block's logits
  SharedArray<ExpSum, kDraftWarps * kTileRows> warp_sums;  // of attention
  SharedArray<SeenSlots, kPassRows> seen;                  // of the rows
  SharedArray<AttentionPart, kPassRows> parts;             // at their first rows
  SharedArray<int, 4> flags;                               // for what a phase has to tell
};

// A block as its threads see it.
template <typename T>
struct DraftBlock {
  const DraftKernelParams& params;
  DraftShared& shared;
  SharedSpan<unsigned char> stages;  // [num_stages][kStageBytes]
  SharedSpan<float> reduce;          // [kDraftWarps][kPanelValues]
  int num_stages;

  __device__ __forceinline__ int warp() const { return static_cast<int>(threadIdx.x) / kWarpSize; }
  __device__ __forceinline__ int lane() const { return static_cast<int>(threadIdx.x) % kWarpSize; }
  __device__ __forceinline__ int index() const { return static_cast<int>(blockIdx.x); }
  __device__ __forceinline__ int count() const { return static_cast<int>(gridDim.x); }
  // Orders shared memory, and global memory for the block.
  __device__ __forceinline__ void sync() const { block_barrier(); }

  // Row i of scratch memory with rows of `width` elements.
  __device__ __forceinline__ T* row(void* memory, int64_t i, int64_t width) const {
    return static_cast<T*>(memory) + i * width;
  }
};

// In a row of panel values (draft_product.cuh) a lane has those of tiles lane / 8 and 4 + lane / 8,
// column lane % 8. `out` is -1 where there is none.
struct PanelValues {
  int64_t out[2];
  float value[2];
};

// Sums the panels that all warps hold and hands each row to one warp: use(row, values)
// with the value of tile lane / 8 (+ 4), column lane % 8 in values[0 (1)]. The order of the sum is
// that of the warps.
// At most kTileRows rows.
template <typename T, typename Use>
__device__ __forceinline__ void reduce_panel(const DraftBlock<T>& block, int num_rows,
                                             const float (&c)[kPanelTiles][4], const Use& use) {
  const int lane = block.lane();
  const int own = block.warp() * kPanelValues + lane / 4 * kTileOuts + lane % 4 * 2;
#pragma unroll
  for (int tile = 0; tile < kPanelTiles; ++tile) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      block.reduce[own + tile * kTileValues + i / 2 * 8 * kTileOuts + i % 2] = c[tile][i];
    }
  }
  block.sync();  // all panels are there
  for (int row = block.warp(); row < min(num_rows, kTileRows); row += kDraftWarps) {
    float values[2] = {0, 0};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = (half * 4 + lane / 8) * kTileValues + row * kTileOuts + lane % 8;
#pragma unroll
      for (int warp = 0; warp < kDraftWarps; ++warp) {
        values[half] = exact_add(values[half], block.reduce[warp * kPanelValues + at]);
      }
    }
    use(row, values);
  }
  block.sync();  // before anyone writes the next ones
}

}  // namespace specdec
