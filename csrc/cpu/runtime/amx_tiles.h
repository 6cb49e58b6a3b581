// The tile registers of AMX, the matrix units of some x86 processors, for products of bfloat16 and of
// bytes.
//
// A tile is 16 rows of 64 bytes. Registers 0 to 3 are sums, 4 and 5 hold the left factors of products
// and 6 and 7 the right ones. Rows of sums and right factors may be shorter: `columns` words of four
// bytes. emulated_tiles.h has the same functions.
#pragma once

#include "specdec/cpu/isa.h"

#ifdef SPECDEC_X86

#include <immintrin.h>

#include <cstdint>

#include "specdec/core/float_types.h"

namespace specdec::cpu {

#define SPECDEC_AMX_INLINE inline __attribute__((always_inline)) SPECDEC_TARGET_AMX

// The registers of the calling thread. Compilers do not keep values in them.
class AmxTiles {
 public:
  explicit AmxTiles(int64_t /*columns*/) {}

  // Prepares the registers of the calling thread.
  SPECDEC_TARGET_AMX static void begin(int64_t columns) {
    struct alignas(64) Config {  // operand of ldtilecfg (Intel's manual, volume 1, 18.2)
      uint8_t palette;
      uint8_t start_row;
      uint8_t reserved[14];
      uint16_t row_bytes[16];
      uint8_t rows[16];
    };
    Config config = {};
    config.palette = 1;
    for (int tile = 0; tile < 8; ++tile) {
      const bool is_left = tile == 4 || tile == 5;
      config.rows[tile] = 16;
      config.row_bytes[tile] = static_cast<uint16_t>(is_left ? 64 : 4 * columns);
    }
    asm volatile("ldtilecfg %0" ::"m"(config));
  }
  // Gives the registers up; otherwise every switch to another thread would save them.
  SPECDEC_TARGET_AMX static void end() { asm volatile("tilerelease"); }

  template <int kTile>
  SPECDEC_AMX_INLINE void clear() {
    asm volatile("tilezero %%tmm%c0" ::"i"(kTile));
  }
  // Rows are `stride` bytes apart.
  template <int kTile>
  SPECDEC_AMX_INLINE void load(const void* p, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(kTile) : "memory");
  }
  template <int kTile>
  SPECDEC_AMX_INLINE void store(void* p, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(stride), "i"(kTile) : "memory");
  }
  // sums[m][n] += left[m] . right[n], where word [k][n] of `right` is pair k of its row n: the first
  // elements of 16 pairs are summed, the second elements are summed, both sums are added, and then
  // to sums[m][n]. Subnormal numbers and sums are zero.
  template <int kSums, int kLeft, int kRight>
  SPECDEC_AMX_INLINE void multiply_add() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSums), "i"(kLeft), "i"(kRight));
  }
  // The same for signed bytes, with words of four bytes and exact sums of int32.
  template <int kSums, int kLeft, int kRight>
  SPECDEC_AMX_INLINE void add_bytes() {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSums), "i"(kLeft), "i"(kRight));
  }
  // Rounds 32 numbers.
  SPECDEC_AMX_INLINE static void round(const float* numbers, BFloat16* rounded) {
    const __m512bh both =
        _mm512_cvtne2ps_pbh(_mm512_loadu_ps(numbers + 16), _mm512_loadu_ps(numbers));
    _mm512_storeu_si512(rounded, (__m512i)both);
  }
};

#undef SPECDEC_AMX_INLINE

}  // namespace specdec::cpu

#endif
