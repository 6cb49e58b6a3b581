// linear with AVX2 and FMA: the 16 lanes are two registers.
#include "specdec/cpu/isa.h"

#ifdef SPECDEC_X86

#include <immintrin.h>

#include <cstring>

#define SPECDEC_LINEAR_TARGET SPECDEC_TARGET_AVX2
#include "loops/many_rows_kernel.h"
#include "loops/pack_integers.h"
#include "loops/transpose.h"

namespace specdec::cpu {
namespace {

struct Avx2 : Transposes {
  using Vector = __m256;
  static constexpr int kParts = 2;
  static constexpr int kHalves = 1;
  static constexpr int kSpreadRows = kPassRows;
  static constexpr int kManyRows = 6;

  SPECDEC_LINEAR_INLINE static Vector zero() { return _mm256_setzero_ps(); }
  SPECDEC_LINEAR_INLINE static Vector load_lanes(const float* p) { return _mm256_load_ps(p); }
  SPECDEC_LINEAR_INLINE static void store_lanes(Vector v, float* p) { _mm256_store_ps(p, v); }

  SPECDEC_LINEAR_INLINE static Vector add(Vector a, Vector b) { return _mm256_add_ps(a, b); }

  SPECDEC_LINEAR_INLINE static void total(const Vector (&four)[4][2], float* out) {
    __m256 by8[4];
    SPECDEC_UNROLL for (int i = 0; i < 4; ++i) by8[i] = _mm256_add_ps(four[i][0], four[i][1]);
    // Four lanes of elements 0 and 1, and four of 2 and 3.
    const __m256 a = _mm256_add_ps(_mm256_permute2f128_ps(by8[0], by8[1], 0x20),
                                   _mm256_permute2f128_ps(by8[0], by8[1], 0x31));
    const __m256 b = _mm256_add_ps(_mm256_permute2f128_ps(by8[2], by8[3], 0x20),
                                   _mm256_permute2f128_ps(by8[2], by8[3], 0x31));
    // Two lanes of each: elements 0 and 2 in the lower half, 1 and 3 in the upper.
    const __m256 by2 = _mm256_add_ps(_mm256_shuffle_ps(a, b, 0x44), _mm256_shuffle_ps(a, b, 0xEE));
    const __m256 sums = _mm256_add_ps(by2, _mm256_permute_ps(by2, 0xB1));
    _mm_storeu_ps(out, _mm_unpacklo_ps(_mm_permute_ps(_mm256_castps256_ps128(sums), 0x08),
                                       _mm_permute_ps(_mm256_extractf128_ps(sums, 1), 0x08)));
  }
};

// Operands of one register leave 12 of the 16 for sums.
struct Floats : Avx2 {
  using Operand = __m256;
  static constexpr int kMaxRows = 3;
  static constexpr int num_outs(int rows) { return rows == 1 ? 4 : rows == 2 ? 3 : 2; }

  SPECDEC_LINEAR_INLINE static void keep(Operand& x) { asm("" : "+x"(x)); }
  SPECDEC_LINEAR_INLINE static void multiply_add(Vector& sums, Operand w, Operand x) {
    sums = _mm256_fmadd_ps(w, x, sums);
  }
};

SPECDEC_LINEAR_INLINE __m256i broadcast_four_bytes(const void* p) {
  int32_t bytes;
  std::memcpy(&bytes, p, sizeof(bytes));
  return _mm256_set1_epi32(bytes);
}

struct Float32 : Floats, IntegerPacking {
  using Element = float;
  static constexpr int kPanelRows = 3;

  SPECDEC_LINEAR_INLINE static Operand load(const float* p) { return _mm256_loadu_ps(p); }
  SPECDEC_LINEAR_INLINE static Operand load_first(const float* p, int64_t count) {
    alignas(32) float padded[8] = {};
    std::memcpy(padded, p, count * sizeof(float));
    return _mm256_load_ps(padded);
  }
  SPECDEC_LINEAR_INLINE static Operand broadcast(const float* p) { return _mm256_set1_ps(*p); }
  SPECDEC_LINEAR_INLINE static void multiply_add_all(Vector& sums, Operand w, const float* p) {
    multiply_add(sums, w, broadcast(p));
  }

  SPECDEC_LINEAR_INLINE static Vector widen(const float* p) { return _mm256_loadu_ps(p); }
  SPECDEC_LINEAR_INLINE static Vector widen(const BFloat16* p) {
    const __m128i stored = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(stored), 16));
  }

  static constexpr int kMaxCodeRows = 4;  // with more, compilers keep sums in memory
  static constexpr int kSpreadCodeRows = kPassRows;
  static constexpr int num_code_outs(int rows) { return rows == 1 ? 4 : rows == 2 ? 2 : 1; }
  SPECDEC_LINEAR_INLINE static __m128i load_bytes(const void* codes) {
    return _mm_loadl_epi64(static_cast<const __m128i*>(codes));
  }
  SPECDEC_LINEAR_INLINE static Vector weights_of(__m256 numbers, float scale, float offset) {
    return _mm256_fmadd_ps(numbers, _mm256_set1_ps(scale), _mm256_set1_ps(offset));
  }
  template <int kHalf>
  SPECDEC_LINEAR_INLINE static void decode_bytes(const uint8_t* codes, float scale, float offset,
                                                 Vector (&weights)[2]) {
    SPECDEC_UNROLL for (int part = 0; part < 2; ++part) {
      const __m256i wide = _mm256_cvtepi8_epi32(load_bytes(codes + 16 * kHalf + 8 * part));
      weights[part] = weights_of(_mm256_cvtepi32_ps(wide), scale, offset);
    }
  }
  template <int kHalf>
  SPECDEC_LINEAR_INLINE static void decode_nibbles(const uint8_t* codes, float scale, float offset,
                                                   Vector (&weights)[2]) {
    SPECDEC_UNROLL for (int part = 0; part < 2; ++part) {
      const __m256i wide = _mm256_cvtepu8_epi32(load_bytes(codes + 8 * part));
      const __m256i numbers =
          kHalf == 0 ? _mm256_and_si256(wide, _mm256_set1_epi32(15)) : _mm256_srli_epi32(wide, 4);
      weights[part] = weights_of(_mm256_cvtepi32_ps(numbers), scale, offset);
    }
  }
  // The low four bits of each index choose.
  SPECDEC_LINEAR_INLINE static __m256 look_up(const float* levels, __m256i indices) {
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(_mm256_loadu_ps(levels), indices),
                            _mm256_permutevar8x32_ps(_mm256_loadu_ps(levels + 8), indices),
                            _mm256_castsi256_ps(_mm256_slli_epi32(indices, 28)));
  }
  template <int kHalf>
  SPECDEC_LINEAR_INLINE static void decode_levels(const uint8_t* codes, const float* levels,
                                                  float scale, float offset, Vector (&weights)[2]) {
    SPECDEC_UNROLL for (int part = 0; part < 2; ++part) {
      const __m256i wide = _mm256_cvtepu8_epi32(load_bytes(codes + 8 * part));
      const __m256i indices = kHalf == 0 ? wide : _mm256_srli_epi32(wide, 4);
      weights[part] = weights_of(look_up(levels, indices), scale, offset);
    }
  }

  using Words = __m256i;
  using Integers = __m256i;
  static constexpr int kMaxIntegerRows = 4;
  static constexpr int num_integer_outs(int rows) { return num_code_outs(rows); }
  SPECDEC_LINEAR_INLINE static Integers zero_integers() { return _mm256_setzero_si256(); }
  SPECDEC_LINEAR_INLINE static __m256i load_vector(const void* p) {
    return _mm256_loadu_si256(static_cast<const __m256i*>(p));
  }
  SPECDEC_LINEAR_INLINE static Words load_words(const int16_t* p) { return load_vector(p); }
  SPECDEC_LINEAR_INLINE static Integers load_integers(const int32_t* p) { return load_vector(p); }
  SPECDEC_LINEAR_INLINE static Words even_bytes(__m256i pairs) {
    return _mm256_srai_epi16(_mm256_slli_epi16(pairs, 8), 8);
  }
  SPECDEC_LINEAR_INLINE static Words odd_bytes(__m256i pairs) {
    return _mm256_srai_epi16(pairs, 8);
  }
  SPECDEC_LINEAR_INLINE static void split_bytes(const uint8_t* codes, Words (&split)[4]) {
    SPECDEC_UNROLL for (int half = 0; half < 2; ++half) {
      const __m128i* first = reinterpret_cast<const __m128i*>(codes + 16 * half);
      const __m256i both = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128(first)),
                                                   _mm_loadu_si128(first + 2), 1);
      split[half] = even_bytes(both);
      split[2 + half] = odd_bytes(both);
    }
  }
  SPECDEC_LINEAR_INLINE static void split_nibbles(const uint8_t* codes, Words (&split)[4]) {
    const __m256i all = load_vector(codes), low = _mm256_set1_epi16(15);
    split[0] = _mm256_and_si256(all, low);
    split[1] = _mm256_and_si256(_mm256_srli_epi16(all, 4), low);
    split[2] = _mm256_and_si256(_mm256_srli_epi16(all, 8), low);
    split[3] = _mm256_srli_epi16(all, 12);
  }
  SPECDEC_LINEAR_INLINE static void split_units(const int8_t* codes, Words (&split)[2]) {
    const __m256i all = load_vector(codes);
    split[0] = even_bytes(all);
    split[1] = odd_bytes(all);
  }
  SPECDEC_LINEAR_INLINE static void add_products(Integers& sums, Words a, Words b) {
    sums = _mm256_add_epi32(sums, _mm256_madd_epi16(a, b));
  }
  SPECDEC_LINEAR_INLINE static void add_pair_products(Integers& sums, Words a, const int16_t* p) {
    add_products(sums, a, broadcast_four_bytes(p));
  }
  SPECDEC_LINEAR_INLINE static Integers add_integers(Integers a, Integers b) {
    return _mm256_add_epi32(a, b);
  }
  SPECDEC_LINEAR_INLINE static Vector to_floats(Integers integers) {
    return _mm256_cvtepi32_ps(integers);
  }
  SPECDEC_LINEAR_INLINE static Vector spread(const float* p) {
    const __m256 pairs = _mm256_castpd_ps(_mm256_broadcast_sd(reinterpret_cast<const double*>(p)));
    return _mm256_permutevar_ps(pairs, _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1));
  }
  SPECDEC_LINEAR_INLINE static Vector multiply(Vector a, Vector b) { return _mm256_mul_ps(a, b); }
};

struct BFloat16Halves : Floats {
  using Element = BFloat16;
  static constexpr int kHalves = 2;
  static constexpr int kMaxRows = 6;
  static constexpr int num_outs(int rows) { return rows == 1 ? 4 : rows == 2 ? 2 : 1; }

  SPECDEC_LINEAR_INLINE static __m256i load(const BFloat16* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  }
  SPECDEC_LINEAR_INLINE static __m256i load_first(const BFloat16* p, int64_t count) {
    alignas(32) BFloat16 padded[16] = {};
    std::memcpy(padded, p, count * sizeof(BFloat16));
    return load(padded);
  }
  template <int kHalf>
  SPECDEC_LINEAR_INLINE static __m256 half(__m256i pairs) {
    return _mm256_castsi256_ps(kHalf == 0 ? _mm256_and_si256(pairs, _mm256_set1_epi32(-0x10000))
                                          : _mm256_slli_epi32(pairs, 16));
  }
};

// An operand takes two registers, so 8 hold sums.
struct BFloat16Split : Avx2 {
  using Element = BFloat16;
  struct Operand {
    __m256 odd, even;
  };
  static constexpr int kPanelRows = 2;
  static constexpr int kMaxRows = 2;
  static constexpr int num_outs(int rows) { return rows == 1 ? 4 : 2; }

  SPECDEC_LINEAR_INLINE static Operand split(__m256i pairs) {
    return {BFloat16Halves::half<0>(pairs), BFloat16Halves::half<1>(pairs)};
  }
  SPECDEC_LINEAR_INLINE static Operand load(const BFloat16* p) {
    return split(BFloat16Halves::load(p));
  }
  SPECDEC_LINEAR_INLINE static Operand broadcast(const BFloat16* p) {
    return split(broadcast_four_bytes(p));
  }
  SPECDEC_LINEAR_INLINE static Operand load_first(const BFloat16* p, int64_t count) {
    return split(BFloat16Halves::load_first(p, count));
  }
  SPECDEC_LINEAR_INLINE static void keep(Operand&) {}
  SPECDEC_LINEAR_INLINE static void multiply_add(Vector& sums, const Operand& w, const Operand& x) {
    sums = _mm256_fmadd_ps(w.odd, x.odd, sums);
    sums = _mm256_fmadd_ps(w.even, x.even, sums);
  }
};

}  // namespace

Products products_avx2(FloatType type, ProductKind kind) {
  if (kind != ProductKind::kRows) return wide_products<Float32>(type, kind);
  if (type == FloatType::kFloat32) return products_with<Float32, Float32>();
  Products products = products_with<BFloat16Split, Float32>();
  products.halved = linear_products<LinearKernel<BFloat16Halves>>();
  return products;
}

}  // namespace specdec::cpu

#endif
