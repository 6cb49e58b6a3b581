// The loops of `linear` for many input rows, written once and compiled for each instruction set.
// They use the formats of linear_kernel.h, and from each also
//
//   kManyRows                                   number of input rows in a register block
//   multiply_add_all(vector, weights, p)        multiply_add with broadcast(p) (panel_kernel.h)
//   add(vector, vector)
//   transpose(rows, column, out, stride)        out[j * stride + i] = rows[i][column + j] for i and
//                                               j below kTransposed
//   transpose_split(rows, column, out, stride)  the same for pairs of bfloat16, of which the second
//                                               becomes the float32 in row 2 j, the first in 2 j + 1
//
// Inputs and weights are rows of words of four bytes: a float32 or two bfloat16. What is multiplied
// are words, or the two bfloat16 of a word as float32 if the format does not multiply pairs. Codes
// (codes_kernel.h) become weights of the inputs' type first, columns and their inputs float32.
//
// Loops, outermost first: groups of kGroupOuts weight rows, blocks of in_features (linear.h), panels
// of kOuts weight rows, blocks of input rows. A panel's block of in_features is transposed into L1
// (16 or 32 KiB), where all input rows use it. The block of all inputs stays in L2 while the group's
// panels use it. While a panel is multiplied, the weights of the next one are prefetched into L2, some
// lines at a time, and in the last block the lines of the outputs, which are stored row by row when the
// group is complete. Columns are copied into L1. With few input rows, columns_kernel.h reads them where
// they are.
#pragma once

#include "columns_kernel.h"
#include "integers_kernel.h"
#include "panel_codes_kernel.h"

namespace specdec::cpu {

// `Source` is the type of weights and packed inputs, `Stored` that of inputs, biases and outputs. `Decoder` is
// the format that expands codes.
template <class F, class Source, class Stored, ProductKind kKind, class Decoder = F>
class ManyRowsKernel {
 public:
  // Whole register blocks, of about kTransposed rows.
  static constexpr int64_t kPackedRows =
      (kTransposed + F::kManyRows - 1) / F::kManyRows * F::kManyRows;

  static int64_t packed_size(const LinearParams& params, int64_t rows) {
    return (num_words(params.in_features) + kWords - 1) / kWords * rows * kUnits;
  }

  // Packed inputs are [blocks of in_features][blocks of block_rows(rows) rows][kUnits][rows of the
  // block], so that a register block reads them in the order of memory.
  SPECDEC_LINEAR_TARGET static void pack_inputs(const LinearParams& params, int64_t first_row,
                                                int64_t rows, int64_t begin, int64_t end,
                                                float* packed) {
    const int64_t words = num_words(params.in_features);
    for (int64_t row = begin; row < end; row += block_rows(rows)) {
      const int64_t count = std::min(block_rows(rows), end - row);
      for (int64_t first = 0; first < words; first += kWords) {
        float* block = packed + first * kWordUnits * rows + row * kUnits;
        pack_block(params, first_row + row, count, first, std::min(kWords, words - first), block);
      }
    }
  }

  SPECDEC_LINEAR_TARGET static void run(const ManyRowsPass& pass, int64_t first_out,
                                        int64_t end_out) {
    if constexpr (kKind == ProductKind::kColumns) {
      if (has_few_rows(pass.rows)) return ColumnsKernel<F, Stored>::run(pass, first_out, end_out);
    }
    alignas(64) float sums[kManyPassRows * kGroupOuts];
    const int64_t words = num_words(pass.params.in_features);
    for (int64_t out = first_out; out < end_out; out += kGroupOuts) {
      const int64_t end = std::min(end_out, out + kGroupOuts);
      for (int64_t first = 0; first == 0 || first < words; first += kWords) {
        const bool is_last = first + kWords >= words;
        const Place next = is_last ? Place{end, 0} : Place{out, first + kWords};
        add_block(pass, out, end, first, std::min(kWords, words - first), next, sums);
      }
      finish(pass, out, end, sums);
    }
  }

 private:
  using Element = typename F::Element;
  using Vector = typename F::Vector;
  using Operand = typename F::Operand;
  using BlockFunction = void (*)(const float* panel, const float* inputs, int64_t units,
                                 bool is_first, float* sums);

  // A panel's block of weights: its first row and word.
  struct Place {
    int64_t out;
    int64_t word;
  };

  static constexpr int kVectors = 2;
  static constexpr int64_t kVectorOuts = kLanes / F::kParts;
  static constexpr int64_t kOuts = kVectors * kVectorOuts;
  static constexpr int64_t kGroupOuts = 128;
  static constexpr int64_t kPerWord = 4 / sizeof(Source);                // elements
  static constexpr int64_t kWordUnits = kPerWord * sizeof(Element) / 4;  // multiplied one by one
  static constexpr int64_t kWords = kManyBlock / kPerWord;
  static constexpr int64_t kLineWords = kStepBytes / 4;
  static constexpr int64_t kUnits = kWords * kWordUnits;
  static constexpr int64_t kAhead = 16;  // columns that are prefetched
  static_assert(kManyOuts % kOuts == 0 && kGroupOuts % kOuts == 0 && kWords % kTransposed == 0);

  // Whether columns_kernel.h multiplies so many rows, whose inputs are packed one by one.
  static constexpr bool has_few_rows(int64_t rows) {
    return kKind == ProductKind::kColumns && rows <= kPassRows;
  }
  static constexpr int64_t block_rows(int64_t rows) {
    return has_few_rows(rows) ? 1 : F::kManyRows;
  }
  static int64_t num_words(int64_t ins) { return (ins + kPerWord - 1) / kPerWord; }

  // Copies words [first, first + kWords) of a row; zeros follow its last element.
  template <class T>
  SPECDEC_LINEAR_INLINE static void copy_words(const T* row, int64_t ins, int64_t first,
                                               float* words) {
    const int64_t begin = first * kPerWord, count = std::min(kManyBlock, ins - begin);
    const int64_t bytes = count * sizeof(Source);
    if constexpr (std::is_same_v<T, Source>) {
      std::memcpy(words, row + begin, bytes);
    } else {
      for (int64_t i = 0; i < count; ++i) words[i] = to_float(row[begin + i]);
    }
    std::memset(reinterpret_cast<std::byte*>(words) + bytes, 0, kWords * sizeof(float) - bytes);
  }

  // Returns `words` words of a row from `first` on, and zeros up to a multiple of kTransposed: where
  // they are, or a copy.
  template <class T>
  SPECDEC_LINEAR_INLINE static const float* words_of(const T* row, int64_t ins, int64_t first,
                                                     int64_t words, float* copy) {
    if constexpr (std::is_same_v<T, Source>) {
      if (words % kTransposed == 0 && (first + words) * kPerWord <= ins) {
        return reinterpret_cast<const float*>(row + first * kPerWord);
      }
    }
    copy_words(row, ins, first, copy);
    return copy;
  }

  // Stores words of kTransposed rows as [units][stride].
  SPECDEC_LINEAR_INLINE static void transpose(const float* const* rows, int64_t word, float* units,
                                              int64_t stride) {
    if constexpr (kWordUnits == 1) {
      F::transpose(rows, word, units, stride);
    } else {
      F::transpose_split(rows, word, units, stride);
    }
  }

  // Stores a block of `count` input rows as [units][count].
  SPECDEC_LINEAR_TARGET static void pack_block(const LinearParams& params, int64_t first_row,
                                               int64_t count, int64_t first, int64_t words,
                                               float* packed) {
    const Stored* inputs = static_cast<const Stored*>(params.input);
    if constexpr (kWordUnits == 1) {
      if (count == 1) {
        return copy_words(inputs + input_offset(params, first_row), params.in_features, first,
                          packed);
      }
    }
    alignas(64) float copied[kTransposed][kWords];
    for (int64_t i = 0; i < count; i += kTransposed) {
      // The last rows are packed with some before them again, to be kTransposed.
      const int64_t begin = std::max<int64_t>(0, std::min(i, count - kTransposed));
      const int64_t some = std::min(count, kTransposed);
      const float* rows[kTransposed];
      for (int64_t j = 0; j < kTransposed; ++j) {
        const int64_t row = first_row + begin + std::min(j, some - 1);
        rows[j] = words_of(inputs + input_offset(params, row), params.in_features, first, words,
                           copied[j]);
      }
      for (int64_t word = 0; word < words; word += kTransposed) {
        float* own = packed + word * kWordUnits * count + begin;
        if (some == kTransposed) {
          transpose(rows, word, own, count);
        } else {
          alignas(64) float units[kTransposed * kWordUnits][kTransposed];
          transpose(rows, word, units[0], kTransposed);
          for (const auto& unit : units) {
            copy_first<std::min<int64_t>(F::kManyRows, kTransposed)>(unit, some, own);
            own += count;
          }
        }
      }
    }
  }

  // Prefetches one of `parts` parts of the block at `place`. All of it at once would wait for the
  // memory, instead of arriving beside the arithmetic. The hardware prefetcher restarts with each
  // weight row.
  SPECDEC_LINEAR_INLINE static void prefetch(const LinearParams& params, const Place& place,
                                             int64_t part, int64_t parts) {
    const int64_t words = std::min(kWords, num_words(params.in_features) - place.word);
    const int64_t lines = kOuts * ((words + kLineWords - 1) / kLineWords);
    const Source* block = static_cast<const Source*>(params.weight) +
                          place.out * params.weight_stride + place.word * kPerWord;
    for (int64_t line = part * lines / parts; line < (part + 1) * lines / parts; ++line) {
      __builtin_prefetch(
          block + line % kOuts * params.weight_stride + line / kOuts * kLineWords * kPerWord, 0, 2);
    }
  }

  SPECDEC_LINEAR_INLINE static void prefetch_outputs(const ManyRowsPass& pass, int64_t row,
                                                     int64_t rows, int64_t out) {
    const Stored* outputs = static_cast<const Stored*>(pass.params.output) +
                            (pass.first_row + row) * pass.params.output_stride + out;
    for (int64_t r = 0; r < rows; ++r, outputs += pass.params.output_stride) {
      for (int64_t i = 0; i < kOuts; i += kStepBytes / sizeof(Stored)) {
        __builtin_prefetch(outputs + i, 1, 2);
      }
    }
  }

  // Multiplies a block of in_features: `words` words from `first` on. The block at `following` is
  // the next one.
  SPECDEC_LINEAR_TARGET static void add_block(const ManyRowsPass& pass, int64_t out, int64_t end,
                                              int64_t first, int64_t words, const Place& following,
                                              float* sums) {
    static constexpr auto kFunctions = functions_by_rows(std::make_index_sequence<F::kManyRows>());
    alignas(64) float panel[kUnits * kOuts];
    const float* inputs = pass.inputs + first * kWordUnits * pass.rows;
    const int64_t blocks = (pass.rows + F::kManyRows - 1) / F::kManyRows;
    const bool is_last = first + words == num_words(pass.params.in_features);
    for (int64_t panel_out = out; panel_out < end; panel_out += kOuts) {
      load_panel(pass.params, panel_out, std::min(end, panel_out + kOuts), first, words, panel);
      const Place next = panel_out + kOuts < end ? Place{panel_out + kOuts, first} : following;
      float* panel_sums = sums + (panel_out - out) * pass.rows;
      for (int64_t row = 0; row < pass.rows; row += F::kManyRows) {
        const int64_t rows = std::min<int64_t>(F::kManyRows, pass.rows - row);
        if constexpr (kKind == ProductKind::kRows) {
          prefetch(pass.params, next, row / F::kManyRows, blocks);
        }
        if (is_last) prefetch_outputs(pass, row, rows, panel_out);
        kFunctions[rows - 1](panel, inputs + row * kUnits, words * kWordUnits, first == 0,
                             panel_sums + row * kOuts);
      }
    }
  }

  // Stores a block of weight rows [out, end) as [units][kOuts]; zeros where there is no row.
  SPECDEC_LINEAR_TARGET static void load_panel(const LinearParams& params, int64_t out, int64_t end,
                                               int64_t first, int64_t words, float* panel) {
    if constexpr (kKind == ProductKind::kColumns) {
      copy_panel(params, out, end, first, words, panel);
    } else {
      transpose_panel(params, out, end, first, words, panel);
    }
  }

  SPECDEC_LINEAR_TARGET static void copy_panel(const LinearParams& params, int64_t out, int64_t end,
                                               int64_t first, int64_t words, float* panel) {
    const int64_t stride = params.weight_stride, count = end - out;
    const Stored* column = static_cast<const Stored*>(params.weight) + first * stride + out;
    for (int64_t word = 0; word < words; ++word, column += stride) {
      __builtin_prefetch(column + kAhead * stride, 0, 2);
      const Stored* whole = column;
      Stored padded[kOuts] = {};
      if (count < kOuts) {
        std::memcpy(padded, column, count * sizeof(Stored));
        whole = padded;
      }
      SPECDEC_UNROLL for (int i = 0; i < kVectors; ++i) {
        F::store_lanes(F::widen(whole + i * kVectorOuts), panel + word * kOuts + i * kVectorOuts);
      }
    }
  }

  SPECDEC_LINEAR_TARGET static void transpose_panel(const LinearParams& params, int64_t out,
                                                    int64_t end, int64_t first, int64_t words,
                                                    float* panel) {
    constexpr bool kHasCodes = kKind == ProductKind::kFloatCodes;
    alignas(64) float copied[kTransposed][kWords];
    for (int64_t i = 0; i < kOuts; i += kTransposed) {
      const float* rows[kTransposed];
      if constexpr (kHasCodes) {
        const int64_t outs = std::clamp<int64_t>(end - out - i, 0, kTransposed);
        std::fill_n(copied[outs], (kTransposed - outs) * kWords, 0.0f);
        const int64_t in = first * kPerWord, ins = std::min(kManyBlock, params.in_features - in);
        expand({params, out + i, outs, in, ins, kOuts * params.weight_stride}, copied[0]);
      }
      for (int64_t j = 0; j < kTransposed; ++j) {
        const int64_t row_out = out + i + j;
        rows[j] = copied[j];
        if constexpr (kHasCodes) continue;
        const Source* row =
            static_cast<const Source*>(params.weight) + row_out * params.weight_stride;
        if (row_out >= end) {
          std::fill_n(copied[j], kWords, 0.0f);
        } else {
          rows[j] = words_of(row, params.in_features, first, words, copied[j]);
        }
      }
      for (int64_t word = 0; word < words; word += kTransposed) {
        transpose(rows, word, panel + word * kWordUnits * kOuts + i, kOuts);
      }
    }
  }

  // Writes the weights of each output to kWords words.
  SPECDEC_LINEAR_TARGET static void expand(const CodeBlock& block, float* words) {
    if constexpr (std::is_same_v<Source, float>) {
      expand_codes<Decoder>(block, words, kWords);
    } else {
      float weights[kTransposed * kManyBlock];
      expand_codes<Decoder>(block, weights, kManyBlock);
      const int64_t whole = (block.num_ins + kCodeBlock - 1) / kCodeBlock * kCodeBlock;
      for (int64_t i = 0; i < block.num_outs; ++i) {
        Source* rounded = reinterpret_cast<Source*>(words + i * kWords);
        for (int64_t j = 0; j < whole; ++j) from_float(weights[i * kManyBlock + j], rounded + j);
      }
    }
  }

  template <size_t... kIndex>
  static constexpr auto functions_by_rows(std::index_sequence<kIndex...>) {
    return std::array<BlockFunction, sizeof...(kIndex)>{run_block<kIndex + 1>...};
  }

  // A register block: kRows input rows x the outs of a panel.
  template <int kRows>
  SPECDEC_LINEAR_TARGET static void run_block(const float* panel, const float* inputs,
                                              int64_t units, bool is_first, float* sums) {
    Vector block[kRows][kVectors];
    SPECDEC_UNROLL for (int i = 0; i < kRows * kVectors; ++i) {
      block[i / kVectors][i % kVectors] = F::zero();
    }
#pragma GCC unroll 4
    for (int64_t unit = 0; unit < units; ++unit) {
      Operand w[kVectors];
      SPECDEC_UNROLL for (int i = 0; i < kVectors; ++i) {
        w[i] = F::load(elements(panel + unit * kOuts + i * kVectorOuts));
      }
      SPECDEC_UNROLL for (int r = 0; r < kRows; ++r) {
        const Element* x = elements(inputs + unit * kRows + r);
        SPECDEC_UNROLL for (int i = 0; i < kVectors; ++i) F::multiply_add_all(block[r][i], w[i], x);
      }
    }
    SPECDEC_UNROLL for (int i = 0; i < kRows * kVectors; ++i) {
      float* sum = sums + i * kVectorOuts;
      Vector& own = block[i / kVectors][i % kVectors];
      F::store_lanes(is_first ? own : F::add(F::load_lanes(sum), own), sum);
    }
  }

  static const Element* elements(const float* units) {
    return reinterpret_cast<const Element*>(units);
  }

  SPECDEC_LINEAR_TARGET static void finish(const ManyRowsPass& pass, int64_t out, int64_t end,
                                           const float* sums) {
    const LinearParams& params = pass.params;
    float bias[kGroupOuts] = {};
    if (params.bias) {
      for (int64_t i = out; i < end; ++i) {
        bias[i - out] = to_float(static_cast<const Stored*>(params.bias)[i]);
      }
    }
    for (int64_t r = 0; r < pass.rows; ++r) {
      Stored* output =
          static_cast<Stored*>(params.output) + (pass.first_row + r) * params.output_stride + out;
      for (int64_t first = 0; first < end - out; first += kOuts) {
        const float* row_sums = sums + first * pass.rows + r * kOuts;
        Stored rounded[kOuts];
        for (int64_t i = 0; i < kOuts; ++i) from_float(row_sums[i] + bias[first + i], rounded + i);
        copy_first<kOuts>(rounded, end - out - first, output + first);
      }
    }
  }
};

// The products with the format F, and for many rows with the format Many, of the same elements.
template <class F, class Many>
Products products_with() {
  using Element = typename F::Element;
  using ManyRows = ManyRowsKernel<Many, Element, Element, ProductKind::kRows>;
  return {
      linear_products<LinearKernel<F>>(), {}, PanelKernel<F>::run, pass_products<ManyRows>(), {}};
}

// The products of codes or columns with the format F of float32, for inputs and outputs of a type; those of
// integers with the format Integers, and those of many rows with codes with the format Many.
template <class F, class Integers, class Many, class Stored>
Products wide_products(ProductKind kind) {
  if (kind == ProductKind::kColumns) {
    using ManyRows = ManyRowsKernel<F, float, Stored, ProductKind::kColumns>;
    const PassProducts all = pass_products<ManyRows>();
    return {{}, {}, nullptr, all, all};
  }
  using ManyRows = ManyRowsKernel<Many, Stored, Stored, ProductKind::kFloatCodes, F>;
  LinearProducts linear = linear_products<CodesKernel<F, Stored>>();
  if constexpr (std::is_same_v<Stored, BFloat16>) {
    if (are_integers(kind)) linear = linear_products<IntegersKernel<Integers, Stored>>();
  }
  using PanelCodes = PanelCodesKernel<Integers, Stored>;
  return {linear, {}, PanelCodes::run, pass_products<ManyRows>(), {}, PanelCodes::pack};
}

// `Many` is a format of bfloat16, or that of float32.
template <class F, class Integers = F, class Many = F>
Products wide_products(FloatType type, ProductKind kind) {
  return type == FloatType::kFloat32 ? wide_products<F, Integers, F, float>(kind)
                                     : wide_products<F, Integers, Many, BFloat16>(kind);
}

}  // namespace specdec::cpu
