// A product of the fused draft_head: up to 32 rows times a weight matrix, whose tiles come through
// the ring.
//
//   out[row, o] = scale[o] * sum over k of input[row, k] weight[o, k] + bias[o]
//
// A block processes its tiles in panels of kPanelTiles and k in slices, the size of a ring stage. A
// warp takes kShare contiguous k of every slice, brings them for all input rows into registers, and
// multiplies them by every tile of the panel, two tiles at a time. At the end the sums of the warps
// are added up (reduce_panel). So the order of a sum depends only on its length and the type of the
// weights: not on the block, the other rows or the other outputs.
//
// Where the inputs come from does not change their bits:
//
//   StagedInputs   few rows: they are normed once per product and kept in shared memory
//   GlobalInputs   others: read from global memory, and normed, once per panel: num_rows * ins
//                  elements for kPanelTiles * kTileOuts * ins weights
//
// Two warps share a scheduler, so the instructions per stage set the pace unless they are few. In
// shared memory a lane reads 16 bytes of weights at a time, without bank conflicts (../block.cuh).
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

// The inputs of a product in global memory, for kRowTiles * kTileRows rows. They have two
// functions: begin(first) before each panel, and take(first, inputs), which brings the share that
// begins at k = first into registers; the shares of a panel are taken in the order of k.
template <int kRowTiles, typename T, typename W>
class GlobalInputs {
 public:
  __device__ __forceinline__ GlobalInputs(const DraftBlock<T>& block, const InputSegments& segments,
                                          int num_rows)
      : block_(block), segments_(segments), num_rows_(num_rows) {}

  __device__ __forceinline__ void begin(int first) {
    if constexpr (kLoadsAhead) load(first);
  }

  __device__ __forceinline__ void take(int first, ShareOfInputs<T, W> (&inputs)[kRowTiles]) {
    if constexpr (!kLoadsAhead) load(first);
    const ShareOfNorms<T, W> norms = norms_;
#pragma unroll
    for (int rows = 0; rows < kRowTiles; ++rows) {
      inputs[rows] = inputs_[rows];
      norm_share(block_, segments_, num_rows_, rows * kTileRows, first, norms, inputs[rows]);
    }
    // These loads are in flight while the tiles of this slice are multiplied.
    if constexpr (kLoadsAhead) load(first + ProductShape<T, W>::kSlice);
  }

 private:
  // More would not fit into the registers.
  static constexpr bool kLoadsAhead = kRowTiles == 1 && sizeof(T) == 2;

  __device__ __forceinline__ void load(int first) {
    load_norms(block_, segments_, first, norms_);
#pragma unroll
    for (int rows = 0; rows < kRowTiles; ++rows) {
      load_share(block_, segments_, num_rows_, rows * kTileRows, first, inputs_[rows]);
    }
  }

  const DraftBlock<T>& block_;
  const InputSegments& segments_;
  const int num_rows_;
  ShareOfInputs<T, W> inputs_[kRowTiles];
  ShareOfNorms<T, W> norms_;
};

// The normed inputs of a product of up to 8 rows in shared memory, [num_rows][ins] with a unit
// between the rows, which spreads them over the banks. Functions as in GlobalInputs.
template <typename T, typename W>
class StagedInputs {
 public:
  static constexpr int kMaxRows = kTileRows / 2;

  // Whether the inputs fit behind the sums of a panel.
  __device__ __forceinline__ static bool fit(const InputSegments& segments, int num_rows) {
    return num_rows <= kMaxRows && num_rows * (kRowSumBytes + row_bytes(segments)) <= kReduceBytes;
  }

  // Stores the inputs. All threads of the block call it; ends with a barrier.
  __device__ __forceinline__ StagedInputs(const DraftBlock<T>& block, const InputSegments& segments,
                                          int num_rows)
      : memory_(block.reduce.template as<unsigned char>().subspan(
            num_rows * kRowSumBytes, kReduceBytes - num_rows * kRowSumBytes)),
        ins_(segments.count * segments.width),
        row_(-1),
        lane_(block.lane()) {
    const int bytes = row_bytes(segments);
    const int vectors = segments.width / kVectorElements<T>;
    for (int part = 0; part < segments.count * num_rows; ++part) {
      const int segment = part / num_rows, row = part % num_rows;
      const int at = segment * kPassRows + row;
      const void* data = block.shared.inputs[at];
      const void* norm = segment == 0 ? segments.norms[0] : segments.norms[1];
      const float inverse = block.shared.inverses[at];
      for (int i = static_cast<int>(threadIdx.x); i < vectors; i += kDraftThreads) {
        const int k = i * kVectorElements<T>;
        Vector<T> x = load_vector<T>(data, k, segments.width);
        if (norm) x = normed(x, load_vector<T>(norm, k, segments.width), inverse);
        store_shared(memory_.pointer(row * bytes + (segment * vectors + i) * 16), x.bytes);
      }
    }
    if (lane_ / 4 < num_rows) row_ = lane_ / 4 * bytes;
    block.sync();  // all inputs are stored
  }

  __device__ __forceinline__ void begin(int /*first*/) {}

  __device__ __forceinline__ void take(int first, ShareOfInputs<T, W> (&inputs)[1]) {
    for_share<T, W>(lane_, 0, first, [&](int step, int i, int /*row*/, int k) {
      const Vector<T> none{make_uint4(0, 0, 0, 0)};
      inputs[0].low[step][i] = inputs[0].high[step][i] = none;
      if (row_ < 0 || k >= ins_) return;
      inputs[0].low[step][i].bytes =
          load_shared<uint4>(memory_.pointer(row_ + k * static_cast<int>(sizeof(T))));
    });
  }

 private:
  __device__ __forceinline__ static int row_bytes(const InputSegments& segments) {
    return segments.count * segments.width * static_cast<int>(sizeof(T)) + kUnitBytes;
  }

  const SharedSpan<unsigned char> memory_;
  const int ins_;
  int row_;  // first byte of the lane's row, or -1
  const int lane_;
};

// The weights of a tile in a warp's share of k.
template <typename T, typename W>
struct ShareOfWeights {
  uint4 bytes[ProductShape<T, W>::kSteps];
};

// Where a lane finds its weights in a stage. Rows of a tile and units of a row have other distances
// in a matrix in tiles than in one in rows.
template <typename T, typename W>
class StageReader {
 public:
  using Shape = ProductShape<T, W>;

  __device__ __forceinline__ StageReader(const DraftBlock<T>& block, const DraftMatrix& matrix,
                                         const TileSchedule& tiles)
      : tiles_(tiles),
        has_short_tiles_(!matrix.in_tiles && tiles.part() % kTileOuts > 0),
        ins_(matrix.ins),
        row_bytes_(matrix.in_tiles ? kUnitBytes : kStageRowBytes),
        unit_bytes_(matrix.in_tiles ? kTileOuts * kUnitBytes : kUnitBytes),
        lane_(block.lane()),
        share_(block.warp() * Shape::kSteps * unit_bytes_ + lane_ % 4 * 16) {}

  // Loads the weights of a tile, whose share begins at k = first.
  __device__ __forceinline__ ShareOfWeights<T, W> load(const SharedSpan<unsigned char>& stage,
                                                       int tile, int first) const {
    int row = lane_ / 4;
    // Missing rows of a tile were not copied: their lanes read the last row.
    if (has_short_tiles_) row = min(row, tiles_.num_outs(tile) - 1);
    const int at = share_ + row * row_bytes_;
    ShareOfWeights<T, W> weights;
#pragma unroll
    for (int step = 0; step < Shape::kSteps; ++step) {
      const bool is_inside = first + (step * 4 + lane_ % 4) * Shape::kLane < ins_;
      weights.bytes[step] = make_uint4(0, 0, 0, 0);
      if (is_inside) {
        weights.bytes[step] = load_shared<uint4>(stage.pointer(at + step * unit_bytes_));
      }
    }
    return weights;
  }

 private:
  const TileSchedule& tiles_;
  const bool has_short_tiles_;
  const int ins_;
  const int row_bytes_;
  const int unit_bytes_;
  const int lane_;
  const int share_;
};

// c[row tile] += inputs times a tile of weights, in quad `quad` of step `step`.
template <typename T, typename W, int kRowTiles>
__device__ __forceinline__ void multiply_quad(const ShareOfInputs<T, W> (&inputs)[kRowTiles],
                                              const ShareOfWeights<T, W>& weights, int step,
                                              int quad, int tile,
                                              float (&c)[kRowTiles][kPanelTiles][4]) {
  const int vector = quad / kVectorQuads<T>, part = quad % kVectorQuads<T>;
  const Quad<T> own = weight_quad<T, W>(weights.bytes[step], quad);
#pragma unroll
  for (int rows = 0; rows < kRowTiles; ++rows) {
    multiply<T>(c[rows][tile], inputs[rows].low[step][vector].quad(part),
                inputs[rows].high[step][vector].quad(part), own);
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
// kRowTiles * kTileRows.
template <int kRowTiles, typename T, typename W, typename Ring, typename Inputs, typename Use>
__device__ __forceinline__ void multiply_inputs(const DraftBlock<T>& block, Ring& ring,
                                                const DraftMatrix& matrix, bool is_paired,
                                                Inputs from, int num_rows, const Use& use) {
  using Shape = ProductShape<T, W>;
  constexpr int kTogether = Ring::kTogether;  // tiles whose sums do not wait for each other
  static_assert(kPanelTiles % kTogether == 0);
  const TileSchedule tiles{matrix.outs, is_paired};
  const StageReader<T, W> reader(block, matrix, tiles);
  const int own = block.warp() * Shape::kShare;
  const int end = tiles.first_tile(block.index() + 1, block.count());
  for (int panel = tiles.first_tile(block.index(), block.count()); panel < end;
       panel += kPanelTiles) {
    float c[kRowTiles][kPanelTiles][4] = {};
    from.begin(own);
    for (int slice = 0; slice < matrix.ins; slice += Shape::kSlice) {
      const int first = slice + own;
      ShareOfInputs<T, W> inputs[kRowTiles];
      from.take(first, inputs);
#pragma unroll
      for (int tile = 0; tile < kPanelTiles; tile += kTogether) {
        const int count = min(end - panel - tile, kTogether);
        if (count <= 0) break;
        ShareOfWeights<T, W> weights[kTogether] = {};
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          if (i >= count) break;
          weights[i] = reader.load(ring.wait(i), panel + tile + i, first);
        }
#pragma unroll
        for (int step = 0; step < Shape::kSteps; ++step) {
#pragma unroll
          for (int quad = 0; quad < Shape::kLane / 4; ++quad) {
#pragma unroll
            for (int i = 0; i < kTogether; ++i) {
              multiply_quad(inputs, weights[i], step, quad, tile + i, c);
            }
          }
        }
        ring.release(count);
        ring.refill();
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

// All branches give the same bits of a row. shared.inputs and shared.inverses describe the inputs.
template <typename T, typename W, typename Ring, typename Use>
__device__ __forceinline__ void multiply_rows(const DraftBlock<T>& block, Ring& ring,
                                              const DraftMatrix& matrix, bool is_paired,
                                              const InputSegments& segments, int num_rows,
                                              const Use& use) {
  static_assert(kPassRows == 2 * kTileRows);
  const auto multiply = [&](auto row_tiles, auto from) {
    multiply_inputs<decltype(row_tiles)::value, T, W>(block, ring, matrix, is_paired, from,
                                                      num_rows, use);
  };
  if (StagedInputs<T, W>::fit(segments, num_rows)) {
    multiply(std::integral_constant<int, 1>{}, StagedInputs<T, W>(block, segments, num_rows));
  } else if (num_rows <= kTileRows) {
    multiply(std::integral_constant<int, 1>{}, GlobalInputs<1, T, W>(block, segments, num_rows));
  } else {
    multiply(std::integral_constant<int, 2>{}, GlobalInputs<2, T, W>(block, segments, num_rows));
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
