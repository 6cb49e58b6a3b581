// The loops of `linear`, written once and compiled for each instruction set. The including file
// defines SPECDEC_LINEAR_TARGET, a target attribute or nothing, and formats: the vector code of one
// element type on one instruction set. A format has
//
//   Element      storage type; 64 bytes of it are a step, one or two elements for each of 16 lanes
//   Vector       16 / kParts lanes in a register; kParts of them are the sums of an output element
//   Operand      the part of a step for one Vector
//   kMaxRows     largest number of input rows in a register block
//   kStreamRows  largest number of input rows of a stream, see below
//   kStreamOuts  weight rows in its register block, if there is one input row
//   num_outs(r)  weight rows in a register block of r input rows; divides kTileOuts
//   load(p), load_first(p, count)             the Operand at p; its first elements, then zeros
//   keep(operand)                             keeps it in a register, see step()
//   multiply_add(vector, weights, inputs)
//   zero(), load_lanes(p), store_lanes(v, p)
//   total(four elements' vectors, out)        the sums over the lanes
//
// Loops, outermost first: tiles of kTileOuts weight rows, chunks of in_features, blocks of input
// rows, blocks of weight rows. A block's chunk of inputs stays in L1 while the tile's weights are
// read (kInputBytes). The tile's chunk of weights stays in L2 until the other blocks of input rows
// have used it. Between chunks the lanes are stored in memory, which does not change their bits.
//
// A pass of few rows is a stream: one block of all its input rows, and one weight row at a time or a
// few for a single input row. So a thread reads the weights nearly in the order of memory, which is
// what hardware prefetches best. Other passes read several weight rows at a time, because each input
// is then loaded less often.
#pragma once

#include <array>
#include <cstring>
#include <utility>

#include "cpu/products/products.h"

#define SPECDEC_LINEAR_INLINE inline __attribute__((always_inline)) SPECDEC_LINEAR_TARGET
#define SPECDEC_UNROLL _Pragma("GCC unroll 32")

namespace specdec::cpu {

constexpr int64_t kInputBytes = 16384;  // a block's chunk of inputs, half of L1
constexpr int64_t kChunkBytes = 2048;   // of one row, if the pass is no stream

// Copies the first `count` of kMost elements, or all of them if there are fewer. A size that compilers know
// takes no call.
template <int64_t kMost, class Element>
SPECDEC_LINEAR_INLINE void copy_first(const Element* from, int64_t count, Element* to) {
  if (count >= kMost) {
    std::memcpy(to, from, kMost * sizeof(Element));
  } else {
    std::memcpy(to, from, count * sizeof(Element));
  }
}

// The sums of a register block: of kRows input rows and kOuts weight rows, in F::kParts vectors.
template <class F, int kRows, int kOuts>
using BlockSums = typename F::Vector[kRows][kOuts][F::kParts];

template <class F, int kRows, int kOuts>
SPECDEC_LINEAR_INLINE void clear_block(BlockSums<F, kRows, kOuts>& sums) {
  SPECDEC_UNROLL for (int i = 0; i < kRows * kOuts * F::kParts; ++i) {
    sums[i / F::kParts / kOuts][i / F::kParts % kOuts][i % F::kParts] = F::zero();
  }
}

// Writes the outputs of a register block, whose first input row and weight row are `row` and `out`.
// `Stored` is the type of biases and outputs.
template <class F, class Stored, int kRows, int kOuts>
SPECDEC_LINEAR_INLINE void finish_block(const LinearParams& params, int64_t row, int64_t out,
                                        const BlockSums<F, kRows, kOuts>& sums) {
  const Stored* bias = params.bias ? static_cast<const Stored*>(params.bias) + out : nullptr;
  Stored* output = static_cast<Stored*>(params.output) + row * params.output_stride + out;
  constexpr int kElements = kRows * kOuts;
  SPECDEC_UNROLL for (int first = 0; first < kElements; first += 4) {
    typename F::Vector four[4][F::kParts];
    SPECDEC_UNROLL for (int i = 0; i < 4 * F::kParts; ++i) {
      const int element = first + i / F::kParts, part = i % F::kParts;
      four[i / F::kParts][part] =
          element < kElements ? sums[element / kOuts][element % kOuts][part] : F::zero();
    }
    float totals[4];
    F::total(four, totals);
    SPECDEC_UNROLL for (int i = 0; i < 4; ++i) {
      if (first + i == kElements) break;
      const int r = (first + i) / kOuts, o = (first + i) % kOuts;
      from_float(bias ? totals[i] + to_float(bias[o]) : totals[i],
                 output + r * params.output_stride + o);
    }
  }
}

template <class F>
class LinearKernel {
 public:
  static int64_t block_rows(int64_t rows) {
    return is_stream(rows) ? rows : even_part(rows, F::kMaxRows);
  }

  SPECDEC_LINEAR_TARGET static void run(const LinearPass& pass, int64_t first_out,
                                        int64_t end_out) {
    alignas(64) float lanes[kPassRows * kTileOuts * kLanes];
    const LinearParams& params = pass.params;
    const int64_t chunk_bytes = is_stream(pass.rows) ? kInputBytes / pass.rows : kChunkBytes;
    const int64_t chunk = even_part(pass.steps, chunk_bytes / kStepBytes) * kStep;
    for (int64_t out = first_out; out < end_out; out += kTileOuts) {
      const int64_t num_outs = std::min(kTileOuts, end_out - out);
      for (int64_t first = 0; first < pass.steps * kStep; first += chunk) {
        const bool is_last = first + chunk >= params.in_features;
        // A stream prefetches its next block. Others prefetch the next chunk: that of the next tile
        // after a tile's last one, and none after the last tile.
        int64_t next = chunk;
        if (is_stream(pass.rows)) {
          next = block_outs<true>(pass.rows) * params.weight_stride;
        } else if (is_last) {
          next = out + kTileOuts < end_out ? kTileOuts * params.weight_stride - first : 0;
        }
        run_chunk(pass, lanes,
                  {params, out, num_outs, first, std::min(chunk, params.in_features - first), next,
                   first == 0, is_last});
      }
    }
  }

 private:
  using Element = typename F::Element;
  using Vector = typename F::Vector;
  using Operand = typename F::Operand;
  static constexpr int kParts = F::kParts;
  static constexpr int64_t kStep = kStepBytes / sizeof(Element);
  static constexpr int64_t kPart = kStep / kParts;
  static constexpr int64_t kPartLanes = kLanes / kParts;

  // A chunk of in_features for a tile of weight rows.
  struct Chunk {
    const LinearParams& params;
    int64_t first_out;
    int64_t num_outs;
    int64_t first;  // first element of in_features
    int64_t count;
    int64_t next;  // elements from a weight row's chunk to the one to prefetch meanwhile
    bool is_first;
    bool is_last;
  };

  using BlockFunction = void (*)(const Chunk&, const Element* inputs, int64_t row, float* lanes);

  static bool is_stream(int64_t rows) { return rows <= F::kStreamRows; }

  // Weight rows in a register block of so many input rows.
  template <bool kIsStream>
  static constexpr int block_outs(int rows) {
    if (!kIsStream) return F::num_outs(rows);
    return rows == 1 ? F::kStreamOuts : 1;
  }

  template <bool kIsStream, size_t... kIndex>
  static constexpr auto functions_by_rows(std::index_sequence<kIndex...>) {
    return std::array<BlockFunction, sizeof...(kIndex)>{
        run_block<kIndex + 1, block_outs<kIsStream>(kIndex + 1)>...};
  }

  SPECDEC_LINEAR_TARGET static void run_chunk(const LinearPass& pass, float* lanes,
                                              const Chunk& chunk) {
    static constexpr auto kBlocks =
        functions_by_rows<false>(std::make_index_sequence<F::kMaxRows>());
    static constexpr auto kStreams =
        functions_by_rows<true>(std::make_index_sequence<F::kStreamRows>());
    const BlockFunction* functions = is_stream(pass.rows) ? kStreams.data() : kBlocks.data();
    const Element* inputs = reinterpret_cast<const Element*>(pass.inputs);
    for (int64_t row = 0; row < pass.rows; row += pass.block_rows) {
      const int64_t rows = std::min(pass.block_rows, pass.rows - row);
      functions[rows - 1](chunk, inputs + row * pass.steps * kStep + rows * chunk.first,
                          pass.first_row + row, lanes + row * kTileOuts * kLanes);
    }
  }

  // Multiplies one block of kRows input rows with the tile, kOuts weight rows at a time. `lanes` is
  // [kRows, kTileOuts, kLanes].
  template <int kRows, int kOuts>
  SPECDEC_LINEAR_TARGET static void run_block(const Chunk& chunk, const Element* inputs,
                                              int64_t row, float* lanes) {
    static_assert(kTileOuts % kOuts == 0);
    int64_t out = 0;
    for (; out + kOuts <= chunk.num_outs; out += kOuts) {
      multiply<kRows, kOuts>(chunk, inputs, row, out, lanes + out * kLanes);
    }
    for (; out < chunk.num_outs; ++out) {
      multiply<kRows, 1>(chunk, inputs, row, out, lanes + out * kLanes);
    }
  }

  template <int kRows, int kOuts>
  using Sums = BlockSums<F, kRows, kOuts>;

  // A register block: kRows input rows x kOuts weight rows of the tile, from `out` on.
  template <int kRows, int kOuts>
  SPECDEC_LINEAR_INLINE static void multiply(const Chunk& chunk, const Element* inputs, int64_t row,
                                             int64_t out, float* lanes) {
    const Element* weights[kOuts];
    for (int i = 0; i < kOuts; ++i) {
      weights[i] = static_cast<const Element*>(chunk.params.weight) +
                   (chunk.first_out + out + i) * chunk.params.weight_stride + chunk.first;
    }
    Sums<kRows, kOuts> sums;
    begin<kRows, kOuts>(chunk.is_first, lanes, sums);
    const int64_t count = chunk.count, next = chunk.next;
    int64_t k = 0;
    for (; k + kStep <= count; k += kStep) {
      // Prefetches into L2. With several rows at a time, the hardware prefetcher restarts with each,
      // which was measured to reach half of the bandwidth; one row at a time needs no help.
      if constexpr (kOuts > 1) {
        SPECDEC_UNROLL for (int i = 0; i < kOuts; ++i) {
          __builtin_prefetch(weights[i] + k + next, 0, 2);
        }
      }
      step<kRows, kOuts>(inputs + kRows * k, weights, k, kStep, sums);
    }
    if (k < count) step<kRows, kOuts>(inputs + kRows * k, weights, k, count - k, sums);
    if (chunk.is_last) {
      finish_block<F, Element, kRows, kOuts>(chunk.params, row, chunk.first_out + out, sums);
    } else {
      SPECDEC_UNROLL for (int i = 0; i < kRows * kOuts * kParts; ++i) {
        F::store_lanes(sums[i / kParts / kOuts][i / kParts % kOuts][i % kParts],
                       lanes + lane_offset(i, kOuts));
      }
    }
  }

  // The offset of vector i, counted over rows, weight rows and parts.
  static constexpr int64_t lane_offset(int i, int outs) {
    return (i / kParts / outs * kTileOuts + i / kParts % outs) * kLanes + i % kParts * kPartLanes;
  }

  template <int kRows, int kOuts>
  SPECDEC_LINEAR_INLINE static void begin(bool is_first, const float* lanes,
                                          Sums<kRows, kOuts>& sums) {
    if (is_first) return clear_block<F, kRows, kOuts>(sums);
    SPECDEC_UNROLL for (int i = 0; i < kRows * kOuts * kParts; ++i) {
      sums[i / kParts / kOuts][i / kParts % kOuts][i % kParts] =
          F::load_lanes(lanes + lane_offset(i, kOuts));
    }
  }

  // Multiplies `count` elements, kStep or the last few.
  template <int kRows, int kOuts>
  SPECDEC_LINEAR_INLINE static void step(const Element* inputs, const Element* const* weights,
                                         int64_t k, int64_t count, Sums<kRows, kOuts>& sums) {
    SPECDEC_UNROLL for (int part = 0; part < kParts; ++part) {
      const int64_t left = count - part * kPart;
      Operand w[kOuts];
      SPECDEC_UNROLL for (int i = 0; i < kOuts; ++i) {
        const Element* p = weights[i] + k + part * kPart;
        w[i] = left >= kPart ? F::load(p) : F::load_first(p, std::max<int64_t>(left, 0));
      }
      SPECDEC_UNROLL for (int r = 0; r < kRows; ++r) {
        Operand x = F::load(inputs + r * kStep + part * kPart);
        F::keep(x);  // otherwise compilers load it again for every multiply_add
        SPECDEC_UNROLL for (int i = 0; i < kOuts; ++i) F::multiply_add(sums[r][i][part], w[i], x);
      }
    }
  }
};

}  // namespace specdec::cpu
