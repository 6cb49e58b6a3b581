// Groups of kGroupOuts weight rows as tiles of matrix units, for matrix_units_kernel.h. A group is made
// of the weight rows [first_out, end_out) or the first kGroupOuts of them.
//
//   RowsGroup      rows of weights: where they are, or a copy that is padded with zeros to whole tiles
//   RoundedGroup   codes, expanded to weights that are rounded
//
// Functions that no template parameter of an instruction set marks are inlined, so that linkers do not
// take those of another one.
#pragma once

#include <vector>

#include "codes_kernel.h"

namespace specdec::cpu {

// The bytes [next, end) of weights that are multiplied later. In each of some steps, lines of them are
// prefetched into L2, in the order of memory, in which hardware prefetchers follow.
struct LaterLines {
  SPECDEC_LINEAR_INLINE void set(const void* first, const void* last, int64_t size, int64_t steps) {
    next = static_cast<const std::byte*>(first);
    end = static_cast<const std::byte*>(last);
    size_of_step = (size / std::max<int64_t>(1, steps * kStepBytes) + 1) * kStepBytes;
  }

  SPECDEC_LINEAR_INLINE void prefetch() {
    const std::byte* last = end - next > size_of_step ? next + size_of_step : end;
#pragma GCC unroll 4
    for (; next < last; next += kStepBytes) __builtin_prefetch(next, 0, 2);
  }

  const std::byte* next = nullptr;
  const std::byte* end = nullptr;
  int64_t size_of_step = 0;
};

struct UnitGroup {
  static constexpr int64_t kTile = 16;  // rows, or words of a row
  static constexpr int64_t kStep = 2 * kTile;
  static constexpr int64_t kGroupTiles = 4;
  static constexpr int64_t kGroupOuts = kGroupTiles * kTile;

  struct alignas(kStepBytes) Line {
    std::byte bytes[kStepBytes];
  };

  static int64_t num_steps(int64_t ins) { return (ins + kStep - 1) / kStep; }

  static const BFloat16* weight_row(const LinearParams& params, int64_t out) {
    return static_cast<const BFloat16*>(params.weight) + out * params.weight_stride;
  }

  SPECDEC_LINEAR_INLINE UnitGroup(const LinearParams& own, int64_t step_ins, int64_t first_out,
                                  int64_t end_out)
      : params(own),
        out(first_out),
        outs(std::min(kGroupOuts, end_out - first_out)),
        steps((own.in_features + step_ins - 1) / step_ins) {
    for (int64_t i = 0; params.bias && i < outs; ++i) {
      bias[i] = to_float(static_cast<const BFloat16*>(params.bias)[out + i]);
    }
  }

  // Rows are `row_stride` bytes apart.
  SPECDEC_LINEAR_INLINE void set_tiles(const void* rows, int64_t row_stride) {
    stride = row_stride;
    for (int64_t i = 0; i < kGroupTiles; ++i) {
      // A tile that is not used is a copy of the first.
      tiles[i] = static_cast<const std::byte*>(rows) + (i * kTile < outs ? i * kTile : 0) * stride;
    }
  }

  SPECDEC_LINEAR_INLINE const std::byte* tile(int64_t i, int64_t step) const {
    return tiles[i] + step * kStepBytes;
  }

  // Makes `count` lines of this thread the copy of the group.
  template <class Element>
  SPECDEC_LINEAR_INLINE Element* make_copy(int64_t count) {
    thread_local std::vector<Line> lines;
    lines.resize(std::max<size_t>(lines.size(), count));
    return reinterpret_cast<Element*>(lines.data()->bytes);
  }

  // Copies the rows of a group, padded with zeros to whole steps and tiles.
  template <class Element>
  SPECDEC_LINEAR_INLINE void copy_rows(const Element* rows, int64_t row_stride) {
    const int64_t width = steps * kStepBytes, bytes = params.in_features * sizeof(Element);
    std::byte* copy = make_copy<std::byte>(kGroupOuts * steps);
    set_tiles(copy, width);
    for (int64_t i = 0; i < outs; ++i, copy += width) {
      std::memcpy(copy, rows + i * row_stride, bytes);
      std::memset(copy + bytes, 0, width - bytes);
    }
  }

  // Called for each step while it is multiplied: reads what is multiplied later.
  SPECDEC_LINEAR_INLINE void prepare_next(int64_t /*step*/) {}

  const LinearParams& params;
  int64_t out;
  int64_t outs;
  int64_t steps;
  int64_t stride = 0;  // of the rows of tiles, bytes
  const std::byte* tiles[kGroupTiles];
  alignas(kStepBytes) float bias[kGroupOuts] = {};
};

// Prefetches the next tile if there is one block of input rows, else the next group.
struct RowsGroup : UnitGroup {
  SPECDEC_LINEAR_INLINE RowsGroup(const ManyRowsPass& pass, int64_t first_out, int64_t end_out)
      : UnitGroup(pass.params, kStep, first_out, end_out) {
    if (params.in_features % kStep == 0 && outs % kTile == 0) {
      set_tiles(weight_row(params, out), params.weight_stride * sizeof(BFloat16));
    } else {
      copy_rows(weight_row(params, out), params.weight_stride);
    }
    // One block of input rows takes the tiles one by one; pairs of blocks take pairs of tiles.
    const bool is_block = pass.rows <= kTile;
    const int64_t next = out + (is_block ? kTile : outs);
    const int64_t sweeps = is_block ? kGroupTiles : pass.rows / kTile;
    later_.set(weight_row(params, next), weight_row(params, std::min(end_out, next + kGroupOuts)),
               kGroupOuts * params.weight_stride * sizeof(BFloat16), sweeps * steps);
  }

  SPECDEC_LINEAR_INLINE void prepare_next(int64_t) { later_.prefetch(); }

 private:
  LaterLines later_;
};

// Weights beyond in_features are those of any code.
template <class Tiles, class F>
struct RoundedGroup : UnitGroup {
  SPECDEC_LINEAR_TARGET RoundedGroup(const ManyRowsPass& pass, int64_t first_out, int64_t end_out)
      : UnitGroup(pass.params, kStep, first_out, end_out) {
    BFloat16* copy = make_copy<BFloat16>(kGroupOuts * steps);
    set_tiles(copy, steps * kStepBytes);
    with_code_kind(params.codes, [&]<CodeKind kCodes>() SPECDEC_LINEAR_TARGET {
      for (int64_t i = 0; i < outs; ++i) expand_row<kCodes>(out + i, copy + i * steps * kStep);
    });
  }

 private:
  template <CodeKind kCodes>
  SPECDEC_LINEAR_TARGET void expand_row(int64_t row, BFloat16* expanded) const {
    using Own = Codes<F, kCodes>;
    const WeightCodes& codes = params.codes;
    const uint8_t* blocks = Own::row(params, row);
    const int64_t each = codes.groups == 1 ? steps : codes.group_size / kStep;
    int64_t step = 0;
    for (int64_t group = 0; step < steps; ++group) {
      const CodeScale scale = Own::scale(codes, row * codes.groups + group);
      alignas(kStepBytes) float weights[kStep];
      typename Tiles::Table table;
      if constexpr (kCodes != CodeKind::kBytes) {
        static constexpr uint8_t kEach[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        Own::template store<0>(codes, kEach, scale, weights);
        table = Tiles::table(weights);
      }
      for (const int64_t end = std::min(step + each, steps); step < end; ++step) {
        const uint8_t* block = blocks + step * kStep * Own::kBits / 8;
        __builtin_prefetch(block + kGroupOuts * params.weight_stride, 0, 2);
        if constexpr (kCodes == CodeKind::kBytes) {
          uint8_t padded[kCodeBlock];
          block = Own::whole(block, params.in_features - step * kStep, padded);
          Own::template store<0>(codes, block, scale, weights);
          Own::template store<1>(codes, block, scale, weights + kLanes);
          Tiles::round(weights, expanded + step * kStep);
        } else {
          Tiles::look_up(table, block, expanded + step * kStep);
        }
      }
    }
  }
};

template <class Tiles>
SPECDEC_LINEAR_INLINE void clear_sums(Tiles& tiles) {
  tiles.template clear<0>();
  tiles.template clear<1>();
  tiles.template clear<2>();
  tiles.template clear<3>();
}

// Stores the four tiles of sums one after the other.
template <class Tiles>
SPECDEC_LINEAR_INLINE void store_tiles(Tiles& tiles, void* sums, int64_t row_bytes) {
  std::byte* own = static_cast<std::byte*>(sums);
  const int64_t size = UnitGroup::kTile * row_bytes;
  tiles.template store<0>(own, row_bytes);
  tiles.template store<1>(own + size, row_bytes);
  tiles.template store<2>(own + 2 * size, row_bytes);
  tiles.template store<3>(own + 3 * size, row_bytes);
}

// Writes the outputs of a tile of sums [outputs][input rows], from output `out` of the group and input row
// `row` on.
template <class Tiles>
SPECDEC_LINEAR_TARGET void write_outputs(const ManyRowsPass& pass, const UnitGroup& group,
                                         const float (*sums)[UnitGroup::kTile], int64_t out,
                                         int64_t row, int64_t rows) {
  constexpr int64_t kTile = UnitGroup::kTile;
  const int64_t outs = std::min(kTile, group.outs - out);
  if (outs <= 0) return;
  alignas(kStepBytes) BFloat16 rounded[kTile][kTile];
  Tiles::round_outputs(sums, group.bias + out, rounded);
  BFloat16* output = static_cast<BFloat16*>(pass.params.output) +
                     (pass.first_row + row) * pass.params.output_stride + group.out + out;
  for (int64_t r = 0; r < rows; ++r, output += pass.params.output_stride) {
    copy_first<kTile>(rounded[r], outs, output);
  }
}

}  // namespace specdec::cpu
