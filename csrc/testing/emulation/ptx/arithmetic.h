// The arithmetic of PTX where C++ has no operator for it.
#pragma once

#include <bit>
#include <limits>
#include <type_traits>

#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include "thread.h"

namespace specdec::ptx {

inline float as_float(uint32_t bits) { return std::bit_cast<float>(bits); }
inline uint32_t as_bits(float value) { return std::bit_cast<uint32_t>(value); }

template <typename T>
constexpr uint32_t kBits = 8 * sizeof(T);

template <typename T>
using Wide = std::conditional_t<
    sizeof(T) == 2, std::conditional_t<std::is_signed_v<T>, int32_t, uint32_t>,
    std::conditional_t<sizeof(T) == 4, std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>,
                       std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>>>;

// The product modulo 2^bits.
template <typename T>
T multiply(T a, T b) {
  return static_cast<T>(uint64_t{a} * uint64_t{b});
}
template <typename T>
Wide<T> multiply_wide(T a, T b) {
  return static_cast<Wide<T>>(a) * static_cast<Wide<T>>(b);
}
template <typename T>
T multiply_high(T a, T b) {
  return static_cast<T>(multiply_wide(a, b) >> kBits<T>);
}

// The result of a division by zero is unspecified; GPUs return a number with all bits set.
template <typename T>
T divide(T a, T b) {
  if (b == 0) return static_cast<T>(-1);
  if (std::is_signed_v<T> && b == static_cast<T>(-1)) return static_cast<T>(0 - Wide<T>{a});
  return static_cast<T>(a / b);
}
template <typename T>
T remainder(T a, T b) {
  if (b == 0) return a;
  if (std::is_signed_v<T> && b == static_cast<T>(-1)) return 0;
  return static_cast<T>(a % b);
}

// Shifts by more than the width count as shifts by the width.
template <typename T>
T shift_left(T a, uint32_t count) {
  return count >= kBits<T> ? T{0} : static_cast<T>(a << count);
}
template <typename T>
T shift_right(T a, uint32_t count) {
  if (count >= kBits<T>) return a < 0 ? static_cast<T>(-1) : T{0};
  return static_cast<T>(a >> count);
}

template <typename T>
uint32_t popcount(T a) {
  return static_cast<uint32_t>(std::popcount(a));
}
template <typename T>
uint32_t leading_zeros(T a) {
  return static_cast<uint32_t>(std::countl_zero(a));
}
inline uint32_t reverse_bits(uint32_t a) {
  uint32_t reversed = 0;
  for (uint32_t i = 0; i < 32; ++i) reversed |= (a >> i & 1) << (31 - i);
  return reversed;
}
// b with its bits from `first` on replaced by the lowest `count` bits of a.
template <typename T>
T insert_bits(T a, T b, uint32_t first, uint32_t count) {
  first &= 0xFF, count &= 0xFF;
  if (first >= kBits<T>) return b;
  const T ones = count >= kBits<T> ? static_cast<T>(-1) : static_cast<T>((T{1} << count) - 1);
  const T mask = static_cast<T>(ones << first);
  return static_cast<T>((b & ~mask) | (static_cast<T>(a << first) & mask));
}
// Byte i of the result is the byte of {b, a} that digit i of `selector` names; with the digit's top
// bit, the byte's sign in all bits.
inline uint32_t permute_bytes(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t source = uint64_t{b} << 32 | a;
  uint32_t result = 0;
  for (uint32_t i = 0; i < 4; ++i) {
    const uint32_t digit = selector >> 4 * i & 15;
    uint32_t byte = source >> 8 * (digit & 7) & 0xFF;
    if (digit & 8) byte = byte & 0x80 ? 0xFF : 0;
    result |= byte << 8 * i;
  }
  return result;
}

inline bool unordered(float a, float b) { return a != a || b != b; }
// The other operand if one is NaN; -0 is less than 0.
inline float minimum(float a, float b) {
  if (unordered(a, b)) return a != a ? b : a;
  return a < b || (a == b && std::bit_cast<int32_t>(a) < 0) ? a : b;
}
inline float maximum(float a, float b) {
  if (unordered(a, b)) return a != a ? b : a;
  return a > b || (a == b && std::bit_cast<int32_t>(b) < 0) ? a : b;
}
inline float maximum_or_nan(float a, float b) {
  return unordered(a, b) ? as_float(0x7FFFFFFF) : maximum(a, b);
}

// Rounds towards zero; numbers out of range become the nearest one, NaN becomes 0.
template <typename T>
T truncate(float a) {
  using Limits = std::numeric_limits<T>;
  if (a != a) return 0;
  if (a <= static_cast<float>(Limits::min())) return Limits::min();
  if (a >= static_cast<float>(Limits::max())) return Limits::max();
  return static_cast<T>(a);
}

inline uint16_t to_f16(float a) { return __float2half_rn(a).bits; }
inline uint16_t to_bf16(float a) { return __float2bfloat16_rn(a).bits; }
inline float from_f16(uint16_t bits) { return __half2float({bits}); }
inline float from_bf16(uint16_t bits) { return __bfloat162float({bits}); }

// For redux.sync.
template <typename T>
uint32_t sum_of(uint32_t a, uint32_t b) {
  return a + b;
}
template <typename T>
uint32_t minimum_of(uint32_t a, uint32_t b) {
  return static_cast<T>(b) < static_cast<T>(a) ? b : a;
}
template <typename T>
uint32_t maximum_of(uint32_t a, uint32_t b) {
  return static_cast<T>(b) > static_cast<T>(a) ? b : a;
}

}  // namespace specdec::ptx
