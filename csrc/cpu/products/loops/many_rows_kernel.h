// The loops of `linear` for many input rows, written once and compiled for each instruction set.
// They use the formats of linear_kernel.h, and from each also
//
//   kManyRows                                   number of input rows in a register block
//   broadcast(p)                                see panel_kernel.h
//   add(vector, vector)
//   transpose(rows, column, out, stride)        out[j * stride + i] = rows[i][column + j] for i and
//                                               j below kTransposed
//   transpose_split(rows, column, out, stride)  the same for pairs of bfloat16, of which the second
//                                               becomes the float32 in row 2 j, the first in 2 j + 1
//
// Inputs and weights are rows of words of four bytes: a float32 or two bfloat16. What is multiplied
// are words, or the two bfloat16 of a word as float32 if the format does not multiply pairs. Codes
// (codes_kernel.h), columns, and their inputs become float32 first.
//
// Loops, outermost first: groups of kGroupOuts weight rows, blocks of in_features (linear.h), panels
// of kOuts weight rows, blocks of input rows. A panel's block of in_features is transposed into L1
// (16 or 32 KiB), where all input rows use it. The block of all inputs stays in L2 while the group's
// panels use it. While a panel is multiplied, the weights of the next one are prefetched into L2, some
// lines at a time. Columns are copied into L1. With few input rows, columns_kernel.h reads them where
// they are.
#pragma once

#include "columns_kernel.h"
#include "integers_kernel.h"
#include "panel_kernel.h"

namespace specdec::cpu {

constexpr int64_t kTransposed = 8;

// `Source` is the type of weights and packed inputs, `Stored` that of inputs, biases and outputs.
template <class F, class Source, class Stored, ProductKind kKind>
class ManyRowsKernel {
 public:
  static int64_t packed_size(const LinearParams& params, int64_t rows) {
    return (num_words(params.in_features) + kWords - 1) / kWords * rows * kUnits;
  }

  // Packed inputs are [blocks of in_features][rows][kUnits].
  SPECDEC_LINEAR_TARGET static void pack_inputs(const LinearParams& params, int64_t first_row,
                                                int64_t rows, int64_t begin, int64_t end,
                                                float* packed) {
    for (int64_t r = begin; r < end; ++r) {
      const Stored* input =
          static_cast<const Stored*>(params.input) + input_offset(params, first_row + r);
      for (int64_t first = 0; first < num_words(params.in_features); first += kWords) {
        float* units = packed + first * kWordUnits * rows + r * kUnits;
        if constexpr (kWordUnits == 1) {
          copy_words(input, params.in_features, first, units);
        } else {
          float words[kWords];
          copy_words(input, params.in_features, first, words);
          split_words(words, units);
        }
      }
    }
  }

  SPECDEC_LINEAR_TARGET static void run(const ManyRowsPass& pass, int64_t first_out,
                                        int64_t end_out) {
    if constexpr (kKind == ProductKind::kColumns) {
      if (pass.rows <= kPassRows) return ColumnsKernel<F, Stored>::run(pass, first_out, end_out);
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
  static constexpr int64_t kGroupOuts = 64;
  static constexpr int64_t kPerWord = 4 / sizeof(Source);                // elements
  static constexpr int64_t kWordUnits = kPerWord * sizeof(Element) / 4;  // multiplied one by one
  static constexpr int64_t kWords = kManyBlock / kPerWord;
  static constexpr int64_t kLineWords = kStepBytes / 4;
  static constexpr int64_t kUnits = kWords * kWordUnits;
  static constexpr int64_t kAhead = 16;  // columns that are prefetched
  static_assert(kManyOuts % kOuts == 0 && kGroupOuts % kOuts == 0 && kWords % kTransposed == 0);

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

  // The second bfloat16 of each word, then the first, as float32.
  SPECDEC_LINEAR_INLINE static void split_words(const float* words, float* units) {
    uint32_t pairs[kWords];
    uint64_t split[kWords];
    std::memcpy(pairs, words, sizeof(pairs));
    for (int64_t i = 0; i < kWords; ++i) {
      split[i] = (pairs[i] & 0xFFFF0000u) | uint64_t{pairs[i]} << 48;
    }
    std::memcpy(units, split, sizeof(split));
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

  // Multiplies a block of in_features: `words` words from `first` on. The block at `following` is
  // the next one.
  SPECDEC_LINEAR_TARGET static void add_block(const ManyRowsPass& pass, int64_t out, int64_t end,
                                              int64_t first, int64_t words, const Place& following,
                                              float* sums) {
    static constexpr auto kFunctions = functions_by_rows(std::make_index_sequence<F::kManyRows>());
    alignas(64) float panel[kUnits * kOuts];
    const float* inputs = pass.inputs + first * kWordUnits * pass.rows;
    const int64_t blocks = (pass.rows + F::kManyRows - 1) / F::kManyRows;
    for (int64_t panel_out = out; panel_out < end; panel_out += kOuts) {
      load_panel(pass.params, panel_out, std::min(end, panel_out + kOuts), first, words, panel);
      const Place next = panel_out + kOuts < end ? Place{panel_out + kOuts, first} : following;
      float* panel_sums = sums + (panel_out - out) * pass.rows;
      for (int64_t row = 0; row < pass.rows; row += F::kManyRows) {
        const int64_t rows = std::min<int64_t>(F::kManyRows, pass.rows - row);
        if constexpr (kKind == ProductKind::kRows) {
          prefetch(pass.params, next, row / F::kManyRows, blocks);
        }
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
    const bool is_whole =
        words % kTransposed == 0 && (first + words) * kPerWord <= params.in_features;
    for (int64_t i = 0; i < kOuts; i += kTransposed) {
      const float* rows[kTransposed];
      if constexpr (kHasCodes) {
        const int64_t outs = std::clamp<int64_t>(end - out - i, 0, kTransposed);
        std::fill_n(copied[outs], (kTransposed - outs) * kWords, 0.0f);
        expand_codes<F>({params, out + i, outs, first, words, kOuts * params.weight_stride},
                        copied[0], kWords);
      }
      for (int64_t j = 0; j < kTransposed; ++j) {
        const int64_t row_out = out + i + j;
        rows[j] = copied[j];
        if constexpr (kHasCodes) continue;
        const Source* row =
            static_cast<const Source*>(params.weight) + row_out * params.weight_stride;
        if (row_out >= end) {
          std::fill_n(copied[j], kWords, 0.0f);
        } else if (is_whole) {
          rows[j] = reinterpret_cast<const float*>(row + first * kPerWord);
        } else {
          copy_words(row, params.in_features, first, copied[j]);
        }
      }
      for (int64_t word = 0; word < words; word += kTransposed) {
        float* columns = panel + word * kWordUnits * kOuts + i;
        if constexpr (kWordUnits == 1) {
          F::transpose(rows, word, columns, kOuts);
        } else {
          F::transpose_split(rows, word, columns, kOuts);
        }
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
    for (int64_t unit = 0; unit < units; ++unit) {
      Operand w[kVectors];
      SPECDEC_UNROLL for (int i = 0; i < kVectors; ++i) {
        w[i] = F::load(elements(panel + unit * kOuts + i * kVectorOuts));
      }
      SPECDEC_UNROLL for (int r = 0; r < kRows; ++r) {
        const Operand x = F::broadcast(elements(inputs + r * kUnits + unit));
        SPECDEC_UNROLL for (int i = 0; i < kVectors; ++i) F::multiply_add(block[r][i], w[i], x);
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
    for (int64_t panel_out = out; panel_out < end; panel_out += kOuts) {
      const int64_t count = std::min(kOuts, end - panel_out);
      float bias[kOuts] = {};
      if (params.bias) {
        for (int64_t i = 0; i < count; ++i) {
          bias[i] = to_float(static_cast<const Stored*>(params.bias)[panel_out + i]);
        }
      }
      const float* panel_sums = sums + (panel_out - out) * pass.rows;
      for (int64_t r = 0; r < pass.rows; ++r) {
        Stored* output = static_cast<Stored*>(params.output) +
                         (pass.first_row + r) * params.output_stride + panel_out;
        Stored rounded[kOuts];
        for (int64_t i = 0; i < kOuts; ++i) {
          from_float(panel_sums[r * kOuts + i] + bias[i], rounded + i);
        }
        if (count == kOuts) {  // a size that compilers know takes no call
          std::memcpy(output, rounded, sizeof(rounded));
        } else {
          std::memcpy(output, rounded, count * sizeof(Stored));
        }
      }
    }
  }
};

// The products with the format F, and for many rows with the format Many, of the same elements.
template <class F, class Many>
Products products_with() {
  using Element = typename F::Element;
  using ManyRows = ManyRowsKernel<Many, Element, Element, ProductKind::kRows>;
  return {LinearKernel<F>::block_rows, nullptr, LinearKernel<F>::run, PanelKernel<F>::run,
          pass_products<ManyRows>(),   {}};
}

// The products of codes or columns with the format F of float32, for inputs and outputs of a type.
template <class F, class Stored>
Products wide_products(ProductKind kind) {
  if (kind == ProductKind::kColumns) {
    using ManyRows = ManyRowsKernel<F, float, Stored, ProductKind::kColumns>;
    const PassProducts all = pass_products<ManyRows>();
    return {nullptr, nullptr, nullptr, nullptr, all, all};
  }
  using ManyRows = ManyRowsKernel<F, float, Stored, ProductKind::kFloatCodes>;
  Products products{CodesKernel<F, Stored>::block_rows, nullptr,
                    CodesKernel<F, Stored>::run,        nullptr,
                    pass_products<ManyRows>(),          {}};
  if constexpr (std::is_same_v<Stored, BFloat16>) {
    if (are_integers(kind)) {
      products.block_rows = IntegersKernel<F, Stored>::block_rows;
      products.pack_integers = IntegersKernel<F, Stored>::pack;
      products.linear = IntegersKernel<F, Stored>::run;
    }
  }
  return products;
}

template <class F>
Products wide_products(FloatType type, ProductKind kind) {
  return type == FloatType::kFloat32 ? wide_products<F, float>(kind)
                                     : wide_products<F, BFloat16>(kind);
}

}  // namespace specdec::cpu
