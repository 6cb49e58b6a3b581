// linear with AVX-512; bfloat16 with matrix units (AMX) or vdpbf16ps if the processor has them.
#include "specdec/cpu/isa.h"

#ifdef SPECDEC_X86

#include <immintrin.h>

#include <cstring>

// GCC 12 warns about its own intrinsics (bug 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

#define SPECDEC_LINEAR_TARGET SPECDEC_TARGET_AMX
#include "cpu/runtime/amx_tiles.h"
#include "loops/many_rows_kernel.h"
#include "loops/matrix_units_kernel.h"
#include "loops/pack_integers.h"
#include "loops/transpose.h"

namespace specdec::cpu {
namespace {

// At most 24 of the 32 registers hold sums.
struct Avx512 : Transposes {
  using Vector = __m512;
  static constexpr int kParts = 1;
  static constexpr int kHalves = 1;
  static constexpr int kMaxRows = 8;
  static constexpr int kSpreadRows = 4;
  static constexpr int kPanelRows = 8;
  static constexpr int kManyRows = 12;
  static constexpr int num_outs(int rows) {
    return rows <= 2 ? 8 : rows == 3 ? 6 : rows <= 6 ? 4 : 3;
  }

  SPECDEC_LINEAR_INLINE static Vector zero() { return _mm512_setzero_ps(); }
  SPECDEC_LINEAR_INLINE static Vector load_lanes(const float* p) { return _mm512_load_ps(p); }
  SPECDEC_LINEAR_INLINE static void store_lanes(Vector v, float* p) { _mm512_store_ps(p, v); }

  SPECDEC_LINEAR_INLINE static Vector add(Vector a, Vector b) { return _mm512_add_ps(a, b); }

  SPECDEC_LINEAR_INLINE static void total(const Vector (&four)[4][1], float* out) {
    const __m512 a = four[0][0], b = four[1][0], c = four[2][0], d = four[3][0];
    const __m512 ab =
        _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xEE));
    const __m512 cd =
        _mm512_add_ps(_mm512_shuffle_f32x4(c, d, 0x44), _mm512_shuffle_f32x4(c, d, 0xEE));
    // Four lanes of each element in its quarter of the vector.
    const __m512 by4 =
        _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xDD));
    const __m512 by2 = _mm512_add_ps(by4, _mm512_permute_ps(by4, 0x4E));
    const __m512 sums = _mm512_add_ps(by2, _mm512_permute_ps(by2, 0xB1));
    _mm_storeu_ps(out, _mm512_castps512_ps128(_mm512_maskz_compress_ps(0x1111, sums)));
  }
};

SPECDEC_LINEAR_INLINE __m512i broadcast_four_bytes(const void* p) {
  int32_t bytes;
  std::memcpy(&bytes, p, sizeof(bytes));
  return _mm512_set1_epi32(bytes);
}

struct Float32 : Avx512, IntegerPacking {
  using Element = float;
  using Operand = __m512;
  SPECDEC_LINEAR_INLINE static Operand load(const float* p) { return _mm512_loadu_ps(p); }
  SPECDEC_LINEAR_INLINE static Operand load_first(const float* p, int64_t count) {
    return _mm512_maskz_loadu_ps((1u << count) - 1, p);
  }
  SPECDEC_LINEAR_INLINE static Operand broadcast(const float* p) { return _mm512_set1_ps(*p); }
  SPECDEC_LINEAR_INLINE static void keep(Operand& x) { asm("" : "+v"(x)); }
  SPECDEC_LINEAR_INLINE static void multiply_add(Vector& sums, Operand w, Operand x) {
    sums = _mm512_fmadd_ps(w, x, sums);
  }
  // One instruction, where compilers would load the number for several vectors with another one.
  SPECDEC_LINEAR_INLINE static void multiply_add_all(Vector& sums, Operand w, const float* p) {
    asm("vfmadd231ps %2%{1to16%}, %1, %0" : "+v"(sums) : "v"(w), "m"(*p));
  }

  SPECDEC_LINEAR_INLINE static Vector widen(const float* p) { return _mm512_loadu_ps(p); }
  SPECDEC_LINEAR_INLINE static Vector widen(const BFloat16* p) {
    const __m256i stored = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(stored), 16));
  }

  static constexpr int kMaxCodeRows = 12;
  static constexpr int kSpreadCodeRows = 1;
  static constexpr int num_code_outs(int rows) { return rows > 8 ? 2 : num_outs(rows); }
  SPECDEC_LINEAR_INLINE static __m128i load_bytes(const void* codes) {
    return _mm_loadu_si128(static_cast<const __m128i*>(codes));
  }
  SPECDEC_LINEAR_INLINE static Vector weights_of(__m512 numbers, float scale, float offset) {
    return _mm512_fmadd_ps(numbers, _mm512_set1_ps(scale), _mm512_set1_ps(offset));
  }
  template <int kHalf>
  SPECDEC_LINEAR_INLINE static void decode_bytes(const uint8_t* codes, float scale, float offset,
                                                 Vector (&weights)[1]) {
    const __m512i wide = _mm512_cvtepi8_epi32(load_bytes(codes + kLanes * kHalf));
    weights[0] = weights_of(_mm512_cvtepi32_ps(wide), scale, offset);
  }
  template <int kHalf>
  SPECDEC_LINEAR_INLINE static void decode_nibbles(const uint8_t* codes, float scale, float offset,
                                                   Vector (&weights)[1]) {
    const __m512i wide = _mm512_cvtepu8_epi32(load_bytes(codes));
    const __m512i numbers =
        kHalf == 0 ? _mm512_and_si512(wide, _mm512_set1_epi32(15)) : _mm512_srli_epi32(wide, 4);
    weights[0] = weights_of(_mm512_cvtepi32_ps(numbers), scale, offset);
  }
  // permutexvar reads the low four bits of each index.
  template <int kHalf>
  SPECDEC_LINEAR_INLINE static void decode_levels(const uint8_t* codes, const float* levels,
                                                  float scale, float offset, Vector (&weights)[1]) {
    const __m512i wide = _mm512_cvtepu8_epi32(load_bytes(codes));
    const __m512i indices = kHalf == 0 ? wide : _mm512_srli_epi32(wide, 4);
    weights[0] = weights_of(_mm512_permutexvar_ps(indices, _mm512_loadu_ps(levels)), scale, offset);
  }

  using Words = __m512i;
  using Integers = __m512i;
  static constexpr int kMaxIntegerRows = 8;
  static constexpr int num_integer_outs(int rows) { return rows <= 2 ? 8 : rows <= 4 ? 4 : 2; }
  SPECDEC_LINEAR_INLINE static Integers zero_integers() { return _mm512_setzero_si512(); }
  SPECDEC_LINEAR_INLINE static Words load_words(const int16_t* p) { return _mm512_loadu_si512(p); }
  SPECDEC_LINEAR_INLINE static Integers load_integers(const int32_t* p) {
    return _mm512_loadu_si512(p);
  }
  SPECDEC_LINEAR_INLINE static Words even_bytes(__m512i pairs) {
    return _mm512_srai_epi16(_mm512_slli_epi16(pairs, 8), 8);
  }
  SPECDEC_LINEAR_INLINE static Words odd_bytes(__m512i pairs) {
    return _mm512_srai_epi16(pairs, 8);
  }
  SPECDEC_LINEAR_INLINE static void split_bytes(const uint8_t* codes, Words (&split)[4]) {
    const __m512i a = _mm512_loadu_si512(codes), b = _mm512_loadu_si512(codes + 64);
    const __m512i halves[2] = {_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xDD)};
    SPECDEC_UNROLL for (int half = 0; half < 2; ++half) {
      split[half] = even_bytes(halves[half]);
      split[2 + half] = odd_bytes(halves[half]);
    }
  }
  SPECDEC_LINEAR_INLINE static void split_nibbles(const uint8_t* codes, Words (&split)[4]) {
    const __m512i all = _mm512_loadu_si512(codes), low = _mm512_set1_epi16(15);
    split[0] = _mm512_and_si512(all, low);
    split[1] = _mm512_and_si512(_mm512_srli_epi16(all, 4), low);
    split[2] = _mm512_and_si512(_mm512_srli_epi16(all, 8), low);
    split[3] = _mm512_srli_epi16(all, 12);
  }
  SPECDEC_LINEAR_INLINE static void split_units(const int8_t* codes, Words (&split)[2]) {
    const __m512i all = _mm512_loadu_si512(codes);
    split[0] = even_bytes(all);
    split[1] = odd_bytes(all);
  }
  SPECDEC_LINEAR_INLINE static void add_pair_products(Integers& sums, Words a, const int16_t* p) {
    add_products(sums, a, broadcast_four_bytes(p));
  }
  SPECDEC_LINEAR_INLINE static void add_products(Integers& sums, Words a, Words b) {
    sums = _mm512_add_epi32(sums, _mm512_madd_epi16(a, b));
  }
  SPECDEC_LINEAR_INLINE static Integers add_integers(Integers a, Integers b) {
    return _mm512_add_epi32(a, b);
  }
  SPECDEC_LINEAR_INLINE static Vector to_floats(Integers integers) {
    return _mm512_cvtepi32_ps(integers);
  }
  SPECDEC_LINEAR_INLINE static Vector spread(const float* p) {
    return _mm512_permutexvar_ps(_mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3),
                                 _mm512_broadcast_f32x4(_mm_loadu_ps(p)));
  }
  SPECDEC_LINEAR_INLINE static Vector multiply(Vector a, Vector b) { return _mm512_mul_ps(a, b); }
};

// With AVX-512 VNNI. The instruction is assembly, because a compiler that knows it could use it in functions
// for processors without it.
struct Float32Dot : Float32 {
  SPECDEC_LINEAR_INLINE static void add_products(Integers& sums, Words a, const Words& b) {
    Integers added = sums;  // of a reference, compilers would keep the sums in memory
    asm("vpdpwssd %2, %1, %0" : "+v"(added) : "v"(a), "vm"(b));
    sums = added;
  }
  SPECDEC_LINEAR_INLINE static void add_pair_products(Integers& sums, Words a, const int16_t* p) {
    using Pair = int16_t[2];
    Integers added = sums;
    asm("vpdpwssd %2%{1to16%}, %1, %0"
        : "+v"(added)
        : "v"(a), "m"(*reinterpret_cast<const Pair*>(p)));
    sums = added;
  }
};

// vdpbf16ps is two fused multiply-adds, odd elements first, with subnormals treated as zero.
struct BFloat16Dot : Avx512 {
  using Element = BFloat16;
  using Operand = __m512i;
  SPECDEC_LINEAR_INLINE static Operand load(const BFloat16* p) { return _mm512_loadu_si512(p); }
  SPECDEC_LINEAR_INLINE static Operand load_first(const BFloat16* p, int64_t count) {
    return _mm512_maskz_loadu_epi16((1u << count) - 1, p);
  }
  SPECDEC_LINEAR_INLINE static Operand broadcast(const BFloat16* p) {
    return broadcast_four_bytes(p);
  }
  SPECDEC_LINEAR_INLINE static void keep(Operand& x) { asm("" : "+v"(x)); }
  SPECDEC_LINEAR_INLINE static void multiply_add(Vector& sums, Operand w, Operand x) {
    sums = _mm512_dpbf16_ps(sums, (__m512bh)w, (__m512bh)x);
  }
  SPECDEC_LINEAR_INLINE static void multiply_add_all(Vector& sums, Operand w, const BFloat16* p) {
    using Pair = BFloat16[2];
    asm("vdpbf16ps %2%{1to16%}, %1, %0"
        : "+v"(sums)
        : "v"(w), "m"(*reinterpret_cast<const Pair*>(p)));
  }
};

struct BFloat16Split : Avx512 {
  using Element = BFloat16;
  struct Operand {
    __m512 odd, even;
  };
  static constexpr int num_outs(int rows) {
    return rows <= 2 ? 6 : rows <= 4 ? 4 : rows <= 6 ? 3 : 2;
  }

  SPECDEC_LINEAR_INLINE static Operand split(__m512i pairs) {
    return {_mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(-0x10000))),
            _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16))};
  }
  SPECDEC_LINEAR_INLINE static Operand load(const BFloat16* p) {
    return split(_mm512_loadu_si512(p));
  }
  SPECDEC_LINEAR_INLINE static Operand load_first(const BFloat16* p, int64_t count) {
    return split(_mm512_maskz_loadu_epi16((1u << count) - 1, p));
  }
  SPECDEC_LINEAR_INLINE static Operand broadcast(const BFloat16* p) {
    return split(broadcast_four_bytes(p));
  }
  SPECDEC_LINEAR_INLINE static void keep(Operand&) {}
  SPECDEC_LINEAR_INLINE static void multiply_add(Vector& sums, const Operand& w, const Operand& x) {
    sums = _mm512_fmadd_ps(w.odd, x.odd, sums);
    sums = _mm512_fmadd_ps(w.even, x.even, sums);
  }
};

struct AmxLinearTiles : AmxTiles, Transposes {
  using AmxTiles::AmxTiles;
  using Table = __m512i;  // 16 numbers, twice

  SPECDEC_LINEAR_INLINE static Table table(const float* numbers) {
    return _mm512_broadcast_i64x4((__m256i)_mm512_cvtneps_pbh(_mm512_load_ps(numbers)));
  }
  // permutexvar reads the low five bits of each index, of which the table ignores the highest.
  SPECDEC_LINEAR_INLINE static void look_up(const Table& table, const uint8_t* block,
                                            BFloat16* numbers) {
    const __m512i twice =
        _mm512_cvtepu8_epi16(_mm256_broadcastsi128_si256(Float32::load_bytes(block)));
    const __m512i shifts = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(4), 1);
    _mm512_store_si512(numbers, _mm512_permutexvar_epi16(_mm512_srlv_epi16(twice, shifts), table));
  }

  SPECDEC_LINEAR_INLINE static void split_integers(const BFloat16* inputs, float up,
                                                   SplitIntegers& split) {
    __m512i sums = _mm512_setzero_si512();
    SPECDEC_UNROLL for (int i = 0; i < SplitIntegers::kInputs; i += 16) {
      const __m512i integers =
          _mm512_cvtps_epi32(_mm512_mul_ps(Float32::widen(inputs + i), _mm512_set1_ps(up)));
      const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(integers, _mm512_set1_epi32(128)), 8);
      store_bytes(_mm512_cvtepi32_epi8(high), split.high + i);
      store_bytes(_mm512_cvtepi32_epi8(integers), split.low + i);
      sums = _mm512_add_epi32(sums, integers);
    }
    split.sum = static_cast<float>(_mm512_reduce_add_epi32(sums));
  }
  // Each half of a byte is an affine function of the byte's bits: bits 0 to 2 are copied; bit 3 is, and
  // the others are zero, or, less eight, bits 3 to 7 are the inverse of bit 3.
  template <bool kLessEight>
  SPECDEC_LINEAR_INLINE static void expand_blocks(const uint8_t* blocks, uint8_t* bytes) {
    constexpr auto matrix =
        [](int first_bit) {  // byte 7 - i: the bits that bit i of the result adds
          int64_t rows = 0;
          for (int i = 0; i < (kLessEight ? 8 : 4); ++i) {
            rows |= int64_t{1} << (8 * (7 - i) + first_bit + std::min(i, 3));
          }
          return rows;
        };
    constexpr int64_t kLow = matrix(0), kHigh = matrix(4);
    const __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(blocks));
    const __m512i twice = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 1, 0, 1, 2, 3, 2, 3),
                                                   _mm512_castsi256_si512(codes));
    const __m512i halves = _mm512_setr_epi64(kLow, kLow, kHigh, kHigh, kLow, kLow, kHigh, kHigh);
    _mm512_store_si512(bytes, _mm512_gf2p8affine_epi64_epi8(twice, halves, kLessEight ? 0xF8 : 0));
  }
  template <int64_t kRows>
  SPECDEC_LINEAR_INLINE static void add_integers(const int32_t* sums, const float* scales,
                                                 const float* units, float* totals) {
    const __m512 own_units = repeat<kRows>(units);
    SPECDEC_UNROLL for (int64_t out = 0; out < 16; out += kLanes / kRows) {
      const __m512i integers = join<kRows>(sums + 2 * out * kRows);
      add_scaled(_mm512_cvtepi32_ps(integers),
                 _mm512_mul_ps(spread_rows<kRows>(scales + out), own_units), totals + out * kRows);
    }
  }
  template <int64_t kRows>
  SPECDEC_LINEAR_INLINE static void add_products(const float* scales, const float* units,
                                                 const float* inputs, float* totals) {
    const __m512 own_units = repeat<kRows>(units), own_inputs = repeat<kRows>(inputs);
    SPECDEC_UNROLL for (int64_t out = 0; out < 16; out += kLanes / kRows) {
      add_scaled(own_inputs, _mm512_mul_ps(spread_rows<kRows>(scales + out), own_units),
                 totals + out * kRows);
    }
  }

  // Outputs 2 p and 2 p + 1 are rounded into pairs of all rows, and words are transposed from then on.
  SPECDEC_LINEAR_INLINE static void round_outputs(const float (*sums)[16], const float* bias,
                                                  BFloat16 (*rows)[16]) {
    const __m512i row = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i interleaved =
        _mm512_add_epi32(row, _mm512_slli_epi32(_mm512_add_epi32(row, _mm512_set1_epi32(16)), 16));
    __m512i pairs[8];
    SPECDEC_UNROLL for (int i = 0; i < 8; ++i) {
      const auto first = _mm512_add_ps(_mm512_load_ps(sums[2 * i]), _mm512_set1_ps(bias[2 * i]));
      const auto second =
          _mm512_add_ps(_mm512_load_ps(sums[2 * i + 1]), _mm512_set1_ps(bias[2 * i + 1]));
      pairs[i] = _mm512_permutexvar_epi16(interleaved, (__m512i)_mm512_cvtne2ps_pbh(second, first));
    }
    __m512i fours[2][4];  // lane l of [h][k]: the pairs 4 h to 4 h + 3 of row 4 l + k
    SPECDEC_UNROLL for (int half = 0; half < 2; ++half) {
      const __m512i* own = pairs + 4 * half;
      const __m512i low01 = _mm512_unpacklo_epi32(own[0], own[1]);
      const __m512i low23 = _mm512_unpacklo_epi32(own[2], own[3]);
      const __m512i high01 = _mm512_unpackhi_epi32(own[0], own[1]);
      const __m512i high23 = _mm512_unpackhi_epi32(own[2], own[3]);
      fours[half][0] = _mm512_unpacklo_epi64(low01, low23);
      fours[half][1] = _mm512_unpackhi_epi64(low01, low23);
      fours[half][2] = _mm512_unpacklo_epi64(high01, high23);
      fours[half][3] = _mm512_unpackhi_epi64(high01, high23);
    }
    const __m512i lanes01 = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
    const __m512i lanes23 = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
    SPECDEC_UNROLL for (int k = 0; k < 4; ++k) {
      const __m512i low = _mm512_permutex2var_epi64(fours[0][k], lanes01, fours[1][k]);
      const __m512i high = _mm512_permutex2var_epi64(fours[0][k], lanes23, fours[1][k]);
      store_row(_mm512_castsi512_si256(low), rows[k]);
      store_row(_mm512_extracti64x4_epi64(low, 1), rows[4 + k]);
      store_row(_mm512_castsi512_si256(high), rows[8 + k]);
      store_row(_mm512_extracti64x4_epi64(high, 1), rows[12 + k]);
    }
  }

 private:
  SPECDEC_LINEAR_INLINE static void store_bytes(__m128i bytes, int8_t* p) {
    _mm_store_si128(reinterpret_cast<__m128i*>(p), bytes);
  }
  // p[0 : n] again and again.
  template <int64_t n>
  SPECDEC_LINEAR_INLINE static __m512 repeat(const float* p) {
    if constexpr (n == 1) return _mm512_set1_ps(*p);
    if constexpr (n == 8) return _mm512_broadcast_f32x8(_mm256_loadu_ps(p));
  }
  // p[0] n times, p[1] n times, ...
  template <int64_t n>
  SPECDEC_LINEAR_INLINE static __m512 spread_rows(const float* p) {
    if constexpr (n == 1) return _mm512_loadu_ps(p);
    if constexpr (n == 8) {
      return _mm512_mask_broadcastss_ps(_mm512_set1_ps(p[0]), 0xFF00, _mm_load_ss(p + 1));
    }
  }
  // The integers of 16 / kRows outputs from their sums of high and of low bytes.
  template <int64_t kRows>
  SPECDEC_LINEAR_INLINE static __m512i join(const int32_t* sums) {
    const __m512i a = _mm512_load_si512(sums), b = _mm512_load_si512(sums + 16);
    __m512i high, low;
    if constexpr (kRows == 1) {
      const __m512i even =
          _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
      const __m512i odd = _mm512_or_si512(even, _mm512_set1_epi32(1));
      high = _mm512_permutex2var_epi32(a, even, b);
      low = _mm512_permutex2var_epi32(a, odd, b);
    } else {
      static_assert(kRows == 8);
      high = _mm512_shuffle_i64x2(a, b, 0x44);
      low = _mm512_shuffle_i64x2(a, b, 0xEE);
    }
    return _mm512_add_epi32(_mm512_slli_epi32(high, 8), low);
  }
  SPECDEC_LINEAR_INLINE static void add_scaled(__m512 sums, __m512 scales, float* totals) {
    _mm512_store_ps(totals, _mm512_fmadd_ps(sums, scales, _mm512_load_ps(totals)));
  }
  SPECDEC_LINEAR_INLINE static void store_row(__m256i row, BFloat16* p) {
    _mm256_store_si256(reinterpret_cast<__m256i*>(p), row);
  }
};

Products vector_products(FloatType type, ProductKind kind) {
  if (kind != ProductKind::kRows) {
    if (!cpu_has_avx512_vnni()) return wide_products<Float32>(type, kind);
    return cpu_has_avx512_bf16() ? wide_products<Float32, Float32Dot, BFloat16Dot>(type, kind)
                                 : wide_products<Float32, Float32Dot>(type, kind);
  }
  if (type == FloatType::kFloat32) return products_with<Float32, Float32>();
  return cpu_has_avx512_bf16() ? products_with<BFloat16Dot, BFloat16Dot>()
                               : products_with<BFloat16Split, Float32>();
}

}  // namespace

Products products_avx512(FloatType type, ProductKind kind) {
  Products products = vector_products(type, kind);
  if (type == FloatType::kBFloat16 && matrix_units() == MatrixUnits::kAmx) {
    use_matrix_units<AmxLinearTiles, Float32>(kind, products);
  }
  return products;
}

}  // namespace specdec::cpu

#endif
