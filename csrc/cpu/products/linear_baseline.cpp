// linear in plain C++ for compilers to vectorise. A baseline without fused multiply-add (x86-64)
// rounds twice, so it gives other bits, which are the same for every number of rows.
#include <cstring>

#include "cpu/runtime/emulated_tiles.h"

#define SPECDEC_LINEAR_TARGET
#include "loops/many_rows_kernel.h"
#include "loops/matrix_units_kernel.h"

namespace specdec::cpu {
namespace {

struct Lanes {
  float value[kLanes];
};

SPECDEC_LINEAR_INLINE void multiply_add_lane(float& sum, float w, float x) {
#ifdef __FP_FAST_FMAF
  sum = exact_fma(w, x, sum);
#else
  sum = exact_add(sum, exact_mul(w, x));
#endif
}

template <class T>
struct Portable {
  using Element = T;
  static constexpr int kHalves = 1;
  using Vector = Lanes;
  static constexpr int kParts = 1;
  static constexpr int kMaxRows = 2;
  static constexpr int kSpreadRows = kPassRows;
  static constexpr int kPanelRows = 2;
  static constexpr int kManyRows = 2;
  static constexpr int num_outs(int) { return 2; }
  struct Operand {
    T element[kStepBytes / sizeof(T)];
  };

  SPECDEC_LINEAR_INLINE static Operand load(const T* p) {
    Operand operand;
    std::memcpy(&operand, p, sizeof(operand));
    return operand;
  }
  SPECDEC_LINEAR_INLINE static Operand load_first(const T* p, int64_t count) {
    Operand operand = {};
    std::memcpy(&operand, p, count * sizeof(T));
    return operand;
  }
  SPECDEC_LINEAR_INLINE static Operand broadcast(const T* p) {
    Operand operand;
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      std::memcpy(operand.element + lane * (kStepBytes / sizeof(T) / kLanes), p, kPanelUnitBytes);
    }
    return operand;
  }
  SPECDEC_LINEAR_INLINE static void keep(Operand&) {}
  SPECDEC_LINEAR_INLINE static void multiply_add(Vector& sums, const Operand& w, const Operand& x) {
    constexpr int64_t kPerLane = kStepBytes / sizeof(T) / kLanes;
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      for (int64_t i = (lane + 1) * kPerLane; i-- > lane * kPerLane;) {
        multiply_add_lane(sums.value[lane], to_float(w.element[i]), to_float(x.element[i]));
      }
    }
  }
  SPECDEC_LINEAR_INLINE static void multiply_add_all(Vector& sums, const Operand& w, const T* p) {
    multiply_add(sums, w, broadcast(p));
  }

  // Vectors of float32 are operands, too.
  SPECDEC_LINEAR_INLINE static void multiply_add(Vector& sums, const Vector& w, const Operand& x) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      multiply_add_lane(sums.value[lane], w.value[lane], to_float(x.element[lane]));
    }
  }

  template <class Stored>
  SPECDEC_LINEAR_INLINE static Vector widen(const Stored* p) {
    Vector v;
    for (int64_t lane = 0; lane < kLanes; ++lane) v.value[lane] = to_float(p[lane]);
    return v;
  }

  SPECDEC_LINEAR_INLINE static Vector zero() { return {}; }
  SPECDEC_LINEAR_INLINE static Vector load_lanes(const float* p) {
    Vector v;
    std::memcpy(&v, p, sizeof(v));
    return v;
  }
  SPECDEC_LINEAR_INLINE static void store_lanes(const Vector& v, float* p) {
    std::memcpy(p, &v, sizeof(v));
  }
  SPECDEC_LINEAR_INLINE static Vector add(const Vector& a, const Vector& b) {
    Vector sum;
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      sum.value[lane] = exact_add(a.value[lane], b.value[lane]);
    }
    return sum;
  }
  SPECDEC_LINEAR_INLINE static void transpose(const float* const* rows, int64_t column, float* out,
                                              int64_t stride) {
    for (int64_t i = 0; i < kTransposed; ++i) {
      for (int64_t j = 0; j < kTransposed; ++j) out[j * stride + i] = rows[i][column + j];
    }
  }
  SPECDEC_LINEAR_INLINE static void transpose_split(const float* const* rows, int64_t column,
                                                    float* out, int64_t stride) {
    for (int64_t i = 0; i < kTransposed; ++i) {
      for (int64_t j = 0; j < kTransposed; ++j) {
        BFloat16 pair[2];
        std::memcpy(pair, rows[i] + column + j, sizeof(pair));
        out[2 * j * stride + i] = to_float(pair[1]);
        out[(2 * j + 1) * stride + i] = to_float(pair[0]);
      }
    }
  }

  static constexpr int kMaxCodeRows = 2;
  static constexpr int kSpreadCodeRows = kPassRows;
  static constexpr int num_code_outs(int) { return 1; }
  template <int kHalf>
  SPECDEC_LINEAR_INLINE static void decode_bytes(const uint8_t* codes, float scale, float offset,
                                                 Vector (&weights)[1]) {
    for (int64_t i = 0; i < kLanes; ++i) {
      const auto code = static_cast<int8_t>(codes[kLanes * kHalf + i]);
      weights[0].value[i] = exact_fma(static_cast<float>(code), scale, offset);
    }
  }
  template <int kHalf>
  SPECDEC_LINEAR_INLINE static void decode_nibbles(const uint8_t* codes, float scale, float offset,
                                                   Vector (&weights)[1]) {
    for (int64_t i = 0; i < kLanes; ++i) {
      const float number = static_cast<float>(codes[i] >> 4 * kHalf & 15);
      weights[0].value[i] = exact_fma(number, scale, offset);
    }
  }
  template <int kHalf>
  SPECDEC_LINEAR_INLINE static void decode_levels(const uint8_t* codes, const float* levels,
                                                  float scale, float offset, Vector (&weights)[1]) {
    for (int64_t i = 0; i < kLanes; ++i) {
      weights[0].value[i] = exact_fma(levels[codes[i] >> 4 * kHalf & 15], scale, offset);
    }
  }

  struct Words {
    int16_t value[2 * kLanes];
  };
  struct Integers {
    int32_t value[kLanes];
  };
  SPECDEC_LINEAR_INLINE static int32_t largest_magnitude(const BFloat16* inputs) {
    int32_t largest = 0;
    for (int64_t i = 0; i < 64; ++i) largest = std::max(largest, (inputs[i].bits & 0x7FFF) << 16);
    return largest;
  }
  SPECDEC_LINEAR_INLINE static void pack_integers(const BFloat16* inputs, float up, int64_t half,
                                                  IntegerInputs& unit) {
    constexpr float kToInteger = 0x1.8p23f;  // a sum with it is rounded to an integer
    int32_t* sums = unit.sums + half * (kLanes / 2);
    std::fill_n(sums, kLanes / 2, 0);
    for (int64_t i = 0; i < 64; ++i) {
      const float shifted = exact_add(exact_mul(to_float(inputs[i]), up), kToInteger);
      const auto number = static_cast<int16_t>(float_to_bits(shifted) - float_to_bits(kToInteger));
      const int64_t row = i % 2 * 2 + i / 16 % 2;
      unit.numbers[row][16 * half + i / 32 * 8 + i % 16 / 2] = number;
      sums[i / 32 * 4 + i % 16 / 4] += number;
    }
  }
  static constexpr int kMaxIntegerRows = 2;
  static constexpr int num_integer_outs(int) { return 1; }
  SPECDEC_LINEAR_INLINE static Integers zero_integers() { return {}; }
  SPECDEC_LINEAR_INLINE static Words load_words(const int16_t* p) {
    Words words;
    std::memcpy(&words, p, sizeof(words));
    return words;
  }
  SPECDEC_LINEAR_INLINE static Integers load_integers(const int32_t* p) {
    Integers integers;
    std::memcpy(&integers, p, sizeof(integers));
    return integers;
  }
  SPECDEC_LINEAR_INLINE static void split_bytes(const uint8_t* codes, Words (&split)[4]) {
    for (int64_t half = 0; half < 2; ++half) {
      for (int64_t i = 0; i < 2 * kLanes; ++i) {
        const uint8_t* pair = codes + i / 8 * kCodeBlock + 16 * half + i % 8 * 2;
        split[half].value[i] = static_cast<int8_t>(pair[0]);
        split[2 + half].value[i] = static_cast<int8_t>(pair[1]);
      }
    }
  }
  SPECDEC_LINEAR_INLINE static void split_nibbles(const uint8_t* codes, Words (&split)[4]) {
    for (int64_t i = 0; i < 2 * kLanes; ++i) {
      split[0].value[i] = codes[2 * i] & 15;
      split[1].value[i] = codes[2 * i] >> 4;
      split[2].value[i] = codes[2 * i + 1] & 15;
      split[3].value[i] = codes[2 * i + 1] >> 4;
    }
  }
  SPECDEC_LINEAR_INLINE static void split_units(const int8_t* codes, Words (&split)[2]) {
    for (int64_t i = 0; i < 2 * kLanes; ++i) {
      split[0].value[i] = codes[2 * i];
      split[1].value[i] = codes[2 * i + 1];
    }
  }
  SPECDEC_LINEAR_INLINE static void add_products(Integers& sums, const Words& a, const Words& b) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      sums.value[lane] +=
          a.value[2 * lane] * b.value[2 * lane] + a.value[2 * lane + 1] * b.value[2 * lane + 1];
    }
  }
  SPECDEC_LINEAR_INLINE static void add_pair_products(Integers& sums, const Words& a,
                                                      const int16_t* p) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      sums.value[lane] += a.value[2 * lane] * p[0] + a.value[2 * lane + 1] * p[1];
    }
  }
  SPECDEC_LINEAR_INLINE static Integers add_integers(const Integers& a, const Integers& b) {
    Integers sums;
    for (int64_t lane = 0; lane < kLanes; ++lane) sums.value[lane] = a.value[lane] + b.value[lane];
    return sums;
  }
  SPECDEC_LINEAR_INLINE static Operand to_floats(const Integers& integers) {
    Operand floats;
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      floats.element[lane] = static_cast<float>(integers.value[lane]);
    }
    return floats;
  }
  SPECDEC_LINEAR_INLINE static Lanes spread(const float* p) {
    Lanes lanes;
    for (int64_t lane = 0; lane < kLanes; ++lane) lanes.value[lane] = p[lane / 4];
    return lanes;
  }
  SPECDEC_LINEAR_INLINE static Lanes multiply(const Lanes& a, const Lanes& b) {
    Lanes product;
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      product.value[lane] = exact_mul(a.value[lane], b.value[lane]);
    }
    return product;
  }

  SPECDEC_LINEAR_INLINE static void total(const Vector (&four)[4][1], float* out) {
    for (int i = 0; i < 4; ++i) {
      Vector v = four[i][0];
      for (int64_t distance = kLanes / 2; distance > 0; distance /= 2) {
        for (int64_t lane = 0; lane < distance; ++lane) v.value[lane] += v.value[lane + distance];
      }
      out[i] = v.value[0];
    }
  }
};

struct EmulatedLinearTiles : EmulatedTiles {
  using EmulatedTiles::EmulatedTiles;
  struct Table {
    BFloat16 numbers[kLanes];
  };

  static Table table(const float* numbers) {
    Table table;
    for (int64_t i = 0; i < kLanes; ++i) from_float(flushed(numbers[i]), &table.numbers[i]);
    return table;
  }
  static void look_up(const Table& table, const uint8_t* block, BFloat16* numbers) {
    for (int64_t i = 0; i < kLanes; ++i) {
      numbers[i] = table.numbers[block[i] & 15];
      numbers[kLanes + i] = table.numbers[block[i] >> 4];
    }
  }
  static void split_integers(const BFloat16* inputs, float up, SplitIntegers& split) {
    int32_t sum = 0;
    for (int64_t i = 0; i < SplitIntegers::kInputs; ++i) {
      const auto integer = static_cast<int32_t>(std::nearbyint(to_float(inputs[i]) * up));
      const int32_t high = (integer + 128) >> 8;
      split.high[i] = static_cast<int8_t>(high);
      split.low[i] = static_cast<int8_t>(integer - 256 * high);
      sum += integer;
    }
    split.sum = static_cast<float>(sum);
  }
  template <bool kLessEight>
  static void expand_blocks(const uint8_t* blocks, uint8_t* bytes) {
    constexpr int kZero = kLessEight ? 8 : 0;
    for (int64_t i = 0; i < 2 * kLanes; ++i) {
      uint8_t* own = bytes + i / kLanes * kCodeBlock + i % kLanes;
      own[0] = static_cast<uint8_t>((blocks[i] & 15) - kZero);
      own[kLanes] = static_cast<uint8_t>((blocks[i] >> 4) - kZero);
    }
  }
  template <int64_t kRows>
  static void add_integers(const int32_t* sums, const float* scales, const float* units,
                           float* totals) {
    for (int64_t o = 0; o < kLanes; ++o) {
      const int32_t* own = sums + 2 * o * kRows;
      for (int64_t r = 0; r < kRows; ++r) {
        const auto integer = static_cast<float>(256 * own[r] + own[kRows + r]);
        float& total = totals[o * kRows + r];
        total = exact_fma(integer, exact_mul(scales[o], units[r]), total);
      }
    }
  }
  template <int64_t kRows>
  static void add_products(const float* scales, const float* units, const float* inputs,
                           float* totals) {
    for (int64_t i = 0; i < kLanes * kRows; ++i) {
      const float factor = exact_mul(scales[i / kRows], units[i % kRows]);
      totals[i] = exact_fma(inputs[i % kRows], factor, totals[i]);
    }
  }

  static void transpose(const float* const* rows, int64_t column, float* out, int64_t stride) {
    Portable<float>::transpose(rows, column, out, stride);
  }
  static void round_outputs(const float (*sums)[kLanes], const float* bias,
                            BFloat16 (*rows)[kLanes]) {
    for (int64_t row = 0; row < kLanes; ++row) {
      for (int64_t out = 0; out < kLanes; ++out) {
        from_float(flushed(sums[out][row] + bias[out]), &rows[row][out]);
      }
    }
  }
};

}  // namespace

void use_emulated_units(ProductKind kind, Products& products) {
  use_matrix_units<EmulatedLinearTiles, Portable<float>>(kind, products);
}

Products products_baseline(FloatType type, ProductKind kind) {
  if (kind != ProductKind::kRows) return wide_products<Portable<float>>(type, kind);
  return type == FloatType::kFloat32 ? products_with<Portable<float>, Portable<float>>()
                                     : products_with<Portable<BFloat16>, Portable<float>>();
}

}  // namespace specdec::cpu
