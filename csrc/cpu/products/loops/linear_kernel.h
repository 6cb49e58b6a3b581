// The loops of `linear`, written once and compiled for each instruction set. The including file
// defines SPECDEC_LINEAR_TARGET, a target attribute or nothing, and formats: the vector code of one
// element type on one instruction set. A format has
//
//   Element      storage type; 64 bytes of it are a step, one or two elements for each of 16 lanes
//   Vector       16 / kParts lanes in a register; kParts of them are the sums of an output element
//   Operand      the part of a step for one Vector
//   kHalves      1, or 2 if what `load` returns has two Operands, which are Vectors: half<0>(loaded) has the
//                odd elements of the lanes, half<1>(loaded) the even ones. Then inputs are packed as halves
//   kMaxRows     largest number of input rows in a register block
//   kSpreadRows  largest number of input rows for which its weight rows are far apart in memory
//   num_outs(r)  weight rows in a register block of r input rows
//   load(p), load_first(p, count)             the part at p; its first elements, then zeros
//   keep(operand)                             keeps it in a register, see step()
//   multiply_add(vector, weights, inputs)
//   zero(), load_lanes(p), store_lanes(v, p)
//   total(four elements' vectors, out)        the sums over the lanes
//
// Loops, outermost first: tiles of up to kTileOuts weight rows, chunks of in_features, blocks of input
// rows, blocks of weight rows. A block's chunk of inputs stays in L1 while it is multiplied with the
// tile's weights (kInputBytes), which stay in L2 until the other blocks of input rows have used them.
// Between chunks the lanes are stored in memory, which does not change their bits.
//
// With few input rows, reading the weights is most of the time. The memory serves several sequential
// streams in different pages faster than one: on AMD EPYC (Milan), two threads read 55 GB/s in four
// streams each, and 39 in one. So the weight rows of a spread block are as far apart as the thread's
// part of the matrix allows, and the next block has the row after each. Blocks of neighbouring rows
// prefetch the next block, because the hardware prefetcher restarts with each of their rows. With AVX-512,
// this is faster for many rows, whose arithmetic leaves the prefetched lines the time to arrive: one thread of an
// AMD EPYC (Zen 4) reads 19 GB/s of bfloat16 for four rows if the blocks are spread and 15 if they prefetch,
// but 11 and 15 for eight.
//
// With more input rows in spread blocks, the first block of them would wait for the tile's weights, and the
// memory would wait for the others. So all of them prefetch the next tile, an equal share in each step.
#pragma once

#include <array>
#include <cstring>
#include <utility>

#include "cpu/products/products.h"

#define SPECDEC_LINEAR_INLINE inline __attribute__((always_inline)) SPECDEC_LINEAR_TARGET
#define SPECDEC_UNROLL _Pragma("GCC unroll 32")

namespace specdec::cpu {

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

// The weight rows of a register block: `first`, first + spacing, ...
struct OutBlock {
  int64_t first;
  int64_t spacing;

  int64_t at(int64_t i) const { return first + i * spacing; }
};

// `count` register blocks. Their first weight rows are `step` apart.
struct OutTile {
  OutBlock first;
  int64_t step;
  int64_t count;

  OutBlock block(int64_t i) const { return {first.first + i * step, first.spacing}; }
};

// Calls run.template operator()<n>(tile) for tiles of register blocks of n weight rows, kOuts or the last
// ones, which cover [first, end).
template <bool kIsSpread, int kOuts, typename Run>
void for_each_tile(int64_t first, int64_t end, const Run& run) {
  constexpr int64_t most = kTileOuts / kOuts;
  const int64_t count = (end - first) / kOuts;
  const int64_t step = kIsSpread ? 1 : kOuts, spacing = kIsSpread ? count : 1;
  for (int64_t i = 0; i < count; i += most) {
    run.template operator()<kOuts>(
        OutTile{{first + i * step, spacing}, step, std::min(most, count - i)});
  }
  const int64_t rest = first + count * kOuts;
  if (rest < end) run.template operator()<1>(OutTile{{rest, 1}, 1, end - rest});
}

// Calls run.template operator()<n>(row) for blocks of n input rows from `row` on: kRows, or one less.
template <int kRows, typename Run>
void for_each_row_block(const RowBlocks& blocks, const Run& run) {
  for (int64_t i = 0; i < blocks.count; ++i) {
    if (blocks.size(i) == kRows) {
      run.template operator()<kRows>(blocks.begin(i));
    } else if constexpr (kRows > 1) {
      run.template operator()<kRows - 1>(blocks.begin(i));
    }
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

// Writes the outputs of a register block, whose first input row is `row`. `Stored` is the type of biases
// and outputs.
template <class F, class Stored, int kRows, int kOuts>
SPECDEC_LINEAR_INLINE void finish_block(const LinearParams& params, int64_t row,
                                        const OutBlock& outs,
                                        const BlockSums<F, kRows, kOuts>& sums) {
  const Stored* bias = static_cast<const Stored*>(params.bias);
  Stored* output = static_cast<Stored*>(params.output) + row * params.output_stride;
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
      const int r = (first + i) / kOuts;
      const int64_t out = outs.at((first + i) % kOuts);
      from_float(bias ? totals[i] + to_float(bias[out]) : totals[i],
                 output + r * params.output_stride + out);
    }
  }
}

// What a register block prefetches while it is multiplied.
enum class Prefetch { kNothing, kNextBlock, kNextTile };

template <class F>
class LinearKernel {
 public:
  static constexpr int64_t kMaxRows = F::kMaxRows;

  static constexpr Packing packing() {
    if constexpr (kHalves == 2) {
      return {kStep, kHalves, pack_halves};
    } else {
      return {kStep, kHalves, nullptr};
    }
  }

  static void run(const LinearPass& pass, int64_t first_out, int64_t end_out) {
    static constexpr auto kFunctions = functions_by_rows(std::make_index_sequence<F::kMaxRows>());
    kFunctions[pass.blocks.largest - 1](pass, first_out, end_out);
  }

 private:
  using Element = typename F::Element;
  using Input = std::conditional_t<F::kHalves == 2, float, Element>;
  using Vector = typename F::Vector;
  using Operand = typename F::Operand;
  using Loaded = decltype(F::load(static_cast<const Element*>(nullptr)));
  static constexpr int kParts = F::kParts, kHalves = F::kHalves;
  static constexpr int64_t kStep = kStepBytes / sizeof(Element);
  static constexpr int64_t kPart = kStep / kParts;
  static constexpr int64_t kPartLanes = kLanes / kParts;
  static constexpr int64_t kInputStep = kStep / kHalves;

  // Prefetches the next tile of spread blocks, whose rows follow those of this one.
  class NextTile {
   public:
    NextTile(const LinearPass& pass, const OutTile& tile)
        : at_(reinterpret_cast<const std::byte*>(static_cast<const Element*>(pass.params.weight) +
                                                 tile.block(tile.count).first *
                                                     pass.params.weight_stride)),
          spacing_(tile.first.spacing * pass.params.weight_stride * sizeof(Element)),
          share_(kStepBytes / pass.blocks.count) {}

    template <int kOuts>
    SPECDEC_LINEAR_INLINE void prefetch_share() {
      SPECDEC_UNROLL for (int i = 0; i < kOuts; ++i) {
        __builtin_prefetch(at_ + i * spacing_, 0, 2);
      }
      at_ += share_;
    }

   private:
    const std::byte* at_;
    int64_t spacing_;
    int64_t share_;  // bytes of a weight row
  };

  // A chunk of in_features.
  struct Chunk {
    const LinearParams& params;
    int64_t first;  // first element of in_features
    int64_t count;
    bool is_first;
    bool is_last;
  };

  using RowsFunction = void (*)(const LinearPass&, int64_t first_out, int64_t end_out);

  template <size_t... kIndex>
  static constexpr auto functions_by_rows(std::index_sequence<kIndex...>) {
    return std::array<RowsFunction, sizeof...(kIndex)>{run_rows<kIndex + 1>...};
  }

  // Multiplies blocks of kRows input rows, or one less, with weight rows [first_out, end_out).
  template <int kRows>
  static void run_rows(const LinearPass& pass, int64_t first_out, int64_t end_out) {
    for_each_tile<kRows <= F::kSpreadRows, F::num_outs(kRows)>(
        first_out, end_out,
        [&]<int kOuts>(const OutTile& tile) { run_tile<kRows, kOuts>(pass, tile); });
  }

  template <int kRows, int kOuts>
  SPECDEC_LINEAR_TARGET static void run_tile(const LinearPass& pass, const OutTile& tile) {
    alignas(64) float lanes[kPassRows * kTileOuts * kLanes];
    const LinearParams& params = pass.params;
    constexpr bool kIsSpread = kRows <= F::kSpreadRows;
    // Smaller blocks of input rows have no registers left for a part of the next tile.
    constexpr Prefetch kPrefetch = !kIsSpread                          ? Prefetch::kNextBlock
                                   : kOuts == F::num_outs(F::kMaxRows) ? Prefetch::kNextTile
                                                                       : Prefetch::kNothing;
    NextTile next(pass, tile);
    const int64_t steps = pass.steps / kHalves, end = steps * kStep;
    const int64_t chunk_size = even_part(steps, kInputBytes / kRows / kHalves / kStepBytes) * kStep;
    // Several streams that never turn back are read at an even pace by themselves.
    const bool paced = kIsSpread && pass.blocks.count == 1 && chunk_size >= end && kOuts > 1;
    for (int64_t first = 0; first < end; first += chunk_size) {
      const int64_t count = std::min(chunk_size, params.in_features - first);
      const Chunk chunk{params, first, count, first == 0, first + chunk_size >= end};
      for_each_row_block<kRows>(pass.blocks, [&]<int kOwnRows>(int64_t row) {
        const Input* inputs =
            reinterpret_cast<const Input*>(pass.inputs) + row * end + kOwnRows * first;
        float* own_lanes = lanes + row * kTileOuts * kLanes;
        if (paced) {
          run_block<kOwnRows, kOuts, Prefetch::kNothing>(chunk, tile, inputs, pass.first_row + row,
                                                         own_lanes, next);
        } else {
          run_block<kOwnRows, kOuts, kPrefetch>(chunk, tile, inputs, pass.first_row + row,
                                                own_lanes, next);
        }
      });
    }
  }

  // Multiplies a block of kRows input rows with a tile. A function of its own, because compilers keep sums
  // in memory where several such loops are in one function. `lanes` is [blocks of the tile][kRows, kOuts,
  // kLanes].
  template <int kRows, int kOuts, Prefetch kPrefetch>
  __attribute__((noinline)) SPECDEC_LINEAR_TARGET static void run_block(const Chunk& chunk,
                                                                        const OutTile& tile,
                                                                        const Input* inputs,
                                                                        int64_t row, float* lanes,
                                                                        NextTile& next) {
    NextTile own = next;  // in registers
    for (int64_t i = 0; i < tile.count; ++i, lanes += kRows * kOuts * kLanes) {
      multiply<kRows, kOuts, kPrefetch>(chunk, tile.block(i), inputs, row, lanes, own);
    }
    next = own;
  }

  template <int kRows, int kOuts>
  using Sums = BlockSums<F, kRows, kOuts>;

  // A register block: kRows input rows x kOuts weight rows. `lanes` is [kRows, kOuts, kLanes].
  template <int kRows, int kOuts, Prefetch kPrefetch>
  SPECDEC_LINEAR_INLINE static void multiply(const Chunk& chunk, const OutBlock& outs,
                                             const Input* inputs, int64_t row, float* lanes,
                                             NextTile& next_tile) {
    const Element* weights[kOuts];
    for (int i = 0; i < kOuts; ++i) {
      weights[i] = static_cast<const Element*>(chunk.params.weight) +
                   outs.at(i) * chunk.params.weight_stride + chunk.first;
    }
    Sums<kRows, kOuts> sums;
    begin<kRows, kOuts>(chunk.is_first, lanes, sums);
    const int64_t count = chunk.count, next = kOuts * chunk.params.weight_stride;
    int64_t k = 0;
    for (; k + kStep <= count; k += kStep) {
      if constexpr (kPrefetch == Prefetch::kNextTile) {
        next_tile.template prefetch_share<kOuts>();
      } else if constexpr (kPrefetch == Prefetch::kNextBlock && kOuts > 1) {
        SPECDEC_UNROLL for (int i = 0; i < kOuts; ++i) {
          __builtin_prefetch(weights[i] + k + next, 0, 2);
        }
      }
      step<kRows, kOuts>(inputs + kRows * k, weights, k, kStep, sums);
    }
    if (k < count) step<kRows, kOuts>(inputs + kRows * k, weights, k, count - k, sums);
    if (chunk.is_last) {
      finish_block<F, Element, kRows, kOuts>(chunk.params, row, outs, sums);
    } else {
      SPECDEC_UNROLL for (int i = 0; i < kRows * kOuts * kParts; ++i) {
        F::store_lanes(sums[i / kParts / kOuts][i / kParts % kOuts][i % kParts],
                       lanes + i * kPartLanes);
      }
    }
  }

  template <int kRows, int kOuts>
  SPECDEC_LINEAR_INLINE static void begin(bool is_first, const float* lanes,
                                          Sums<kRows, kOuts>& sums) {
    if (is_first) return clear_block<F, kRows, kOuts>(sums);
    SPECDEC_UNROLL for (int i = 0; i < kRows * kOuts * kParts; ++i) {
      sums[i / kParts / kOuts][i / kParts % kOuts][i % kParts] =
          F::load_lanes(lanes + i * kPartLanes);
    }
  }

  // Multiplies `count` elements, kStep or the last few.
  template <int kRows, int kOuts>
  SPECDEC_LINEAR_INLINE static void step(const Input* inputs, const Element* const* weights,
                                         int64_t k, int64_t count, Sums<kRows, kOuts>& sums) {
    SPECDEC_UNROLL for (int part = 0; part < kParts; ++part) {
      const int64_t at = k + part * kPart, left = count - part * kPart;
      add_half<kRows, kOuts, 0>(inputs, weights, at, left, part, sums);
      if constexpr (kHalves == 2) add_half<kRows, kOuts, 1>(inputs, weights, at, left, part, sums);
    }
  }

  // Multiplies a part of a step, or half of it, with the weights from `at` on, of which `left` exist. Each
  // half loads the weights, because no register is left to keep them.
  template <int kRows, int kOuts, int kHalf>
  SPECDEC_LINEAR_INLINE static void add_half(const Input* inputs, const Element* const* weights,
                                             int64_t at, int64_t left, int part,
                                             Sums<kRows, kOuts>& sums) {
    Operand w[kOuts];
    SPECDEC_UNROLL for (int i = 0; i < kOuts; ++i) {
      const Element* p = weights[i] + at;
      Operand loaded =
          operand<kHalf>(left >= kPart ? F::load(p) : F::load_first(p, std::max<int64_t>(left, 0)));
      // Otherwise compilers load it again for every row: two rows take 1.3 times as long with AVX2.
      if constexpr (kRows > 1 && kHalves == 1) F::keep(loaded);
      w[i] = loaded;
    }
    const Input* own = inputs + kHalf * kRows * kInputStep + part * (kInputStep / kParts);
    SPECDEC_UNROLL for (int r = 0; r < kRows; ++r) {
      Operand x = load_input(own + r * kInputStep);
      if constexpr (kOuts > 1) F::keep(x);
      SPECDEC_UNROLL for (int i = 0; i < kOuts; ++i) F::multiply_add(sums[r][i][part], w[i], x);
    }
  }

  SPECDEC_LINEAR_INLINE static Operand load_input(const Input* p) {
    if constexpr (kHalves == 1) {
      return F::load(p);
    } else {
      return F::load_lanes(p);
    }
  }

  template <int kHalf>
  SPECDEC_LINEAR_INLINE static Operand operand(const Loaded& loaded) {
    if constexpr (kHalves == 1) {
      return loaded;
    } else {
      return F::template half<kHalf>(loaded);
    }
  }

  // Packs each step of inputs as two of float32, first the odd ones, then the even ones.
  static void pack_halves(const LinearParams& params, int64_t first_row, const RowBlocks& blocks,
                          std::byte* packed) {
    const int64_t steps = packing().num_units(params.in_features);
    for_each_packed_row(blocks, [&](int64_t row, int64_t first, int64_t rows) {
      Input* target = reinterpret_cast<Input*>(packed) + first * steps * kStep;
      pack_row(params, first_row + row, steps, rows, target + (row - first) * kInputStep);
    });
  }

  // Packs a row of a block of `rows`.
  SPECDEC_LINEAR_TARGET static void pack_row(const LinearParams& params, int64_t row, int64_t steps,
                                             int64_t rows, Input* target) {
    const int64_t ins = params.in_features;
    const Element* input = static_cast<const Element*>(params.input) + input_offset(params, row);
    Element padded[kStep] = {};
    for (int64_t in = 0; in < steps * kStep; in += kStep, target += rows * kStep) {
      const Element* own = input + in;
      if (in + kStep > ins) {
        std::memcpy(padded, own, std::max<int64_t>(ins - in, 0) * sizeof(Element));
        own = padded;
      }
      SPECDEC_UNROLL for (int part = 0; part < kParts; ++part) {
        Input* of_part = target + part * kPartLanes;
        const Loaded loaded = F::load(own + part * kPart);
        F::store_lanes(operand<0>(loaded), of_part);
        F::store_lanes(operand<1>(loaded), of_part + rows * kInputStep);
      }
    }
  }
};

}  // namespace specdec::cpu
