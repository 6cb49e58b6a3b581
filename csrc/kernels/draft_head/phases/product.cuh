// A product of the fused draft_head: up to 32 rows times a weight matrix, whose tiles come through
// the ring.
//
//   out[row, o] = scale[o] * sum over k of input[row, k] weight[o, k] + bias[o]
//
// A block processes its tiles in panels of kPanelTiles and k in slices, the size of a ring stage. A
// warp takes kShare contiguous k of every slice, loads them for all input rows into registers,
// applies the norm if there is one, and multiplies them by every tile of the panel. At the end the
// sums of the warps are added up (reduce_panel). So the order of a sum depends only on its length
// and the type of the weights: not on the block, the other rows or the other outputs.
//
// Input rows are read from global memory once per panel: num_rows * ins elements for
// kPanelTiles * kTileOuts * ins weights. In shared memory a lane reads 16 bytes of weights at a
// time, without bank conflicts (../block.cuh).
#pragma once

#include "kernels/draft_head/ring.cuh"

namespace specdec {

template <typename T, typename W>
struct ProductShape {
  // Bytes of a weight row in a stage: half as many if inputs or products take more registers.
  static constexpr int kBytes = sizeof(W) == 2 ? kSliceBytes : kSliceBytes / 2;
  static constexpr int kSlice = kBytes / static_cast<int>(sizeof(W));
  static constexpr int kShare = kSlice / kDraftWarps;  // number of k of a warp in a slice
  static constexpr int kLane = kVectorElements<W>;     // contiguous elements that a lane loads
  static constexpr int kSteps = kShare / (4 * kLane);
  static constexpr int kInputVectors = kLane / kVectorElements<T>;
  static_assert(kShare % (4 * kLane) == 0 && kInputVectors >= 1);
  static_assert(4 * kLane * sizeof(W) == kUnitBytes);
};

// A lane's inputs in its warp's share, for rows lane / 4 and lane / 4 + 8.
template <typename T, typename W>
struct ShareOfInputs {
  using Shape = ProductShape<T, W>;
  Vector<T> low[Shape::kSteps][Shape::kInputVectors];
  Vector<T> high[Shape::kSteps][Shape::kInputVectors];
};

// The norm weights of these inputs.
template <typename T, typename W>
struct ShareOfNorms {
  using Shape = ProductShape<T, W>;
  Vector<T> weights[Shape::kSteps][Shape::kInputVectors];
};

// The place of element k of a product's input: its segment and the index there.
struct InputPlace {
  int segment;
  int at;

  __device__ __forceinline__ InputPlace(const InputSegments& segments, int k)
      : segment(k >= segments.width ? 1 : 0), at(k - segment * segments.width) {}
};

// Loads inputs as they are in memory.
template <typename T>
__device__ __forceinline__ Vector<T> load_input(const DraftBlock<T>& block,
                                                const InputSegments& segments, int num_rows,
                                                int row, int k) {
  const InputPlace place(segments, k);
  if (row >= num_rows || place.segment >= segments.count) return {make_uint4(0, 0, 0, 0)};
  return load_vector<T>(block.shared.inputs[place.segment * kPassRows + row], place.at,
                        segments.width);
}

// Calls use(step, vector, first row of the lane, k) for all vectors of a lane's share.
template <typename T, typename W, typename Use>
__device__ __forceinline__ void for_share(int lane, int first_row, int first, const Use& use) {
  using Shape = ProductShape<T, W>;
#pragma unroll
  for (int step = 0; step < Shape::kSteps; ++step) {
#pragma unroll
    for (int i = 0; i < Shape::kInputVectors; ++i) {
      use(step, i, first_row + lane / 4,
          first + (step * 4 + lane % 4) * Shape::kLane + i * kVectorElements<T>);
    }
  }
}

template <typename T, typename W>
__device__ __forceinline__ void load_share(const DraftBlock<T>& block,
                                           const InputSegments& segments, int num_rows,
                                           int first_row, int first, ShareOfInputs<T, W>& inputs) {
  for_share<T, W>(block.lane(), first_row, first, [&](int step, int i, int row, int k) {
    inputs.low[step][i] = load_input(block, segments, num_rows, row, k);
    inputs.high[step][i] = load_input(block, segments, num_rows, row + 8, k);
  });
}

// Loads norm weights; zeros if there is no norm.
template <typename T, typename W>
__device__ __forceinline__ void load_norms(const DraftBlock<T>& block,
                                           const InputSegments& segments, int first,
                                           ShareOfNorms<T, W>& norms) {
  for_share<T, W>(block.lane(), 0, first, [&](int step, int i, int /*row*/, int k) {
    const InputPlace place(segments, k);
    const void* norm = place.segment == 0 ? segments.norms[0] : segments.norms[1];
    const bool exists = norm != nullptr && place.segment < segments.count;
    norms.weights[step][i] = load_vector<T>(norm, place.at, exists ? segments.width : 0);
  });
}

// Applies the RMS norms to the loaded inputs.
template <typename T, typename W>
__device__ __forceinline__ void norm_share(const DraftBlock<T>& block,
                                           const InputSegments& segments, int num_rows,
                                           int first_row, int first,
                                           const ShareOfNorms<T, W>& norms,
                                           ShareOfInputs<T, W>& inputs) {
  for_share<T, W>(block.lane(), first_row, first, [&](int step, int i, int row, int k) {
    const InputPlace place(segments, k);
    const void* norm = place.segment == 0 ? segments.norms[0] : segments.norms[1];
    if (norm == nullptr || place.segment >= segments.count || row >= num_rows) return;
    const Vector<T>& weight = norms.weights[step][i];
    const int at = place.segment * kPassRows + row;
    inputs.low[step][i] = normed(inputs.low[step][i], weight, block.shared.inverses[at]);
    if (row + 8 >= num_rows) return;
    inputs.high[step][i] = normed(inputs.high[step][i], weight, block.shared.inverses[at + 8]);
  });
}

// Distances in a stage: of the rows of a tile, and of the units of a row.
struct StageStrides {
  int row;
  int unit;

  __device__ __forceinline__ explicit StageStrides(bool in_tiles)
      : row(in_tiles ? kUnitBytes : kStageRowBytes),
        unit(in_tiles ? kTileOuts * kUnitBytes : kUnitBytes) {}
};

// c[row tile][tile] += inputs times the warp's share of a tile of weights.
template <typename T, typename W, int kRowTiles>
__device__ __forceinline__ void multiply_share(const ShareOfInputs<T, W> (&inputs)[kRowTiles],
                                               const SharedSpan<unsigned char>& stage,
                                               const StageStrides& strides, int warp, int lane,
                                               int num_outs, int first, int ins, int tile,
                                               float (&c)[kRowTiles][kPanelTiles][4]) {
  using Shape = ProductShape<T, W>;
  // Missing rows of the tile may not have been copied: their lanes read the last row.
  const int row = min(lane / 4, num_outs - 1);
  const int at = row * strides.row + warp * Shape::kSteps * strides.unit + lane % 4 * 16;
#pragma unroll
  for (int step = 0; step < Shape::kSteps; ++step) {
    const bool is_inside = first + (step * 4 + lane % 4) * Shape::kLane < ins;
    uint4 bytes = make_uint4(0, 0, 0, 0);
    if (is_inside) bytes = load_shared<uint4>(stage.pointer(at + step * strides.unit));
#pragma unroll
    for (int quad = 0; quad < Shape::kLane / 4; ++quad) {
      const int vector = quad / kVectorQuads<T>, part = quad % kVectorQuads<T>;
      const Quad<T> weights = weight_quad<T, W>(bytes, quad);
#pragma unroll
      for (int rows = 0; rows < kRowTiles; ++rows) {
        multiply<T>(c[rows][tile], inputs[rows].low[step][vector].quad(part),
                    inputs[rows].high[step][vector].quad(part), weights);
      }
    }
  }
}

// A lane's outputs from a row of sums: scaled, with the bias.
template <typename T>
__device__ __forceinline__ PanelValues panel_values(const DraftMatrix& matrix,
                                                    const TileSchedule& tiles, int panel, int end,
                                                    int lane, const float (&sums)[2]) {
  PanelValues values;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int tile = panel + half * 4 + lane / kTileOuts;
    const int column = lane % kTileOuts;
    const bool exists = tile < end && column < tiles.num_outs(tile);
    const int64_t out = exists ? tiles.first_out(tile) + column : -1;
    float value = sums[half];
    if (exists && matrix.scale) value = exact_mul(value, matrix.scale[out]);
    if (exists && matrix.bias) {
      value = exact_add(value, load_float(static_cast<const T*>(matrix.bias) + out));
    }
    values.out[half] = out;
    values.value[half] = value;
  }
  return values;
}

// Calls use(row, PanelValues) in all lanes of the warp that owns the row. num_rows is at most
// kRowTiles * kTileRows. shared.inputs and shared.inverses describe the inputs.
template <int kRowTiles, typename T, typename W, typename Ring, typename Use>
__device__ __forceinline__ void multiply_row_tiles(const DraftBlock<T>& block, Ring& ring,
                                                   const DraftMatrix& matrix, bool is_paired,
                                                   const InputSegments& segments, int num_rows,
                                                   const Use& use) {
  using Shape = ProductShape<T, W>;
  // More would not fit into the registers.
  constexpr bool kLoadsAhead = kRowTiles == 1 && sizeof(T) == 2;
  const TileSchedule tiles{matrix.outs, is_paired};
  const StageStrides strides(matrix.in_tiles);
  const int end = tiles.first_tile(block.index() + 1, block.count());
  const auto load = [&](int first, ShareOfInputs<T, W>(&inputs)[kRowTiles],
                        ShareOfNorms<T, W>& norms) {
    load_norms(block, segments, first, norms);
#pragma unroll
    for (int rows = 0; rows < kRowTiles; ++rows) {
      load_share(block, segments, num_rows, rows * kTileRows, first, inputs[rows]);
    }
  };
  for (int panel = tiles.first_tile(block.index(), block.count()); panel < end;
       panel += kPanelTiles) {
    float c[kRowTiles][kPanelTiles][4] = {};
    ShareOfInputs<T, W> inputs[kRowTiles];
    ShareOfNorms<T, W> norms;
    [[maybe_unused]] ShareOfInputs<T, W> coming[kRowTiles];
    [[maybe_unused]] ShareOfNorms<T, W> coming_norms;
    const int own = block.warp() * Shape::kShare;
    if constexpr (kLoadsAhead) load(own, coming, coming_norms);
    for (int slice = 0; slice < matrix.ins; slice += Shape::kSlice) {
      const int first = slice + own;
      if constexpr (kLoadsAhead) {
        norms = coming_norms;
      } else {
        load(first, inputs, norms);
      }
#pragma unroll
      for (int rows = 0; rows < kRowTiles; ++rows) {
        if constexpr (kLoadsAhead) inputs[rows] = coming[rows];
        norm_share(block, segments, num_rows, rows * kTileRows, first, norms, inputs[rows]);
      }
      // These loads are in flight while the tiles of this slice are multiplied.
      if constexpr (kLoadsAhead) load(first + Shape::kSlice, coming, coming_norms);
#pragma unroll
      for (int tile = 0; tile < kPanelTiles; ++tile) {
        if (panel + tile >= end) break;
        const SharedSpan<unsigned char> stage = ring.wait();
        if (first < matrix.ins) {
          multiply_share<T, W>(inputs, stage, strides, block.warp(), block.lane(),
                               tiles.num_outs(panel + tile), first, matrix.ins, tile, c);
        }
        ring.release();
        if (tile % Ring::kRefillTiles == Ring::kRefillTiles - 1) ring.refill();
      }
      ring.end_slice();
    }
#pragma unroll
    for (int rows = 0; rows < kRowTiles; ++rows) {
      const int first_row = rows * kTileRows;
      reduce_panel(block, num_rows - first_row, c[rows], [&](int row, const float (&sums)[2]) {
        use(first_row + row, panel_values<T>(matrix, tiles, panel, end, block.lane(), sums));
      });
    }
  }
}

// Both branches give the same bits of a row.
template <typename T, typename W, typename Ring, typename Use>
__device__ __forceinline__ void multiply_rows(const DraftBlock<T>& block, Ring& ring,
                                              const DraftMatrix& matrix, bool is_paired,
                                              const InputSegments& segments, int num_rows,
                                              const Use& use) {
  static_assert(kPassRows == 2 * kTileRows);
  if (num_rows <= kTileRows) {
    multiply_row_tiles<1, T, W>(block, ring, matrix, is_paired, segments, num_rows, use);
  } else {
    multiply_row_tiles<2, T, W>(block, ring, matrix, is_paired, segments, num_rows, use);
  }
}

// Describes the stages that multiply_rows takes from the ring.
template <typename T, typename W>
__device__ __forceinline__ MatrixStages stages_of(const DraftMatrix& matrix, bool is_paired,
                                                  int block, int num_blocks) {
  return {matrix, is_paired, static_cast<int>(sizeof(W)), ProductShape<T, W>::kBytes,
          block,  num_blocks};
}

}  // namespace specdec
