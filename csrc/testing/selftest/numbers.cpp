// Random bits, noise, exp and erf against published values and the C library.
#include <cmath>
#include <vector>

#include "check.h"
#include "cpu/math/philox.h"
#include "specdec/math/erf.h"
#include "specdec/math/exp.h"
#include "specdec/sampling/rng.h"

namespace specdec {
namespace {

void test_rng() {
  const auto words = [](Philox4 p) { return std::vector<uint32_t>(p.lane, p.lane + 4); };
  CHECK((words(philox4x32<10>({{0, 0, 0, 0}}, 0, 0)) ==
         std::vector<uint32_t>{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  CHECK(gumbel(0) < kMaxGumbel && gumbel(0) > 22.87f);
  for (uint64_t bits = 0; bits < uint64_t{1} << 32; bits += 9973) {
    const double v = std::min((static_cast<double>(bits) + 0.5) * 0x1p-32, 1 - 0x1p-24);
    const double exact = -std::log(-std::log1p(-v));
    const double error = std::abs(gumbel(static_cast<uint32_t>(bits)) - exact);
    CHECK(error < (exact > -1.5 ? 1.1e-6 : 0.025));
  }
}

// The bound holds, also for larger bits because it never rises, and is as tight as promised.
void test_gumbel_bound() {
  float last = kMaxGumbel;
  const auto check = [&](uint32_t bits) {
    const float bound = gumbel_bound(bits), noise = gumbel(bits);
    CHECK(noise <= bound && bound <= last);
    CHECK(noise < 5 || bound - noise < 0.07f);
    last = bound;
  };
  for (uint32_t bits = 0; bits < 100'000; ++bits) check(bits);
  for (uint64_t bits = 100'000; bits < uint64_t{1} << 32; bits += 4999) {
    check(static_cast<uint32_t>(bits));
  }
  check(UINT32_MAX);
}

void test_bulk_bits() {
  NoiseStream noise = NoiseStream::make(-0x123456789ABCDEF, 1LL << 31, (1LL << 32) - 2);
  noise.purpose = 0xFFFFFF03;
  for (int isa = 0; isa <= static_cast<int>(cpu::best_cpu_isa()); ++isa) {
    for (uint32_t first_group : {0u, 12345u, UINT32_MAX - 40}) {
      uint32_t bits[cpu::kBulkTokens];
      cpu::bulk_bits(static_cast<cpu::CpuIsa>(isa))(noise, first_group, bits);
      for (uint32_t i = 0; i < cpu::kBulkTokens; ++i) {
        CHECK(bits[i] == noise.group_bits(first_group + i / 4).lane[i % 4]);
      }
    }
  }
}

void test_exp() {
  CHECK(exp_nonpositive(0) == 1 && exp_nonpositive(-INFINITY) == 0 && exp_nonpositive(1) == 1);
  CHECK(std::isnan(exp_nonpositive(NAN)) && std::isnan(exp_nonpositive(bits_to_float(0x7FC001FF))));
  const int32_t end = float_to_bits(-88.0f);
  for (int64_t bits = float_to_bits(-0x1p-30f); bits < end; bits += 1009) {
    const float x = bits_to_float(static_cast<int32_t>(bits));
    const double exact = x < kSmallestExponent ? 0 : std::exp(static_cast<double>(x));
    CHECK(std::abs(exp_nonpositive(x) - exact) <= 8.1e-8 * exact);
    CHECK(exp_nonpositive(std::nextafter(x, -INFINITY)) <= exp_nonpositive(x));
  }
}

void test_erf() {
  CHECK(erf_approx(0) == 0 && erf_approx(INFINITY) == 1 && erf_approx(-INFINITY) == -1);
  CHECK(std::isnan(erf_approx(NAN)));
  const int32_t end = float_to_bits(5.0f);
  for (int64_t bits = float_to_bits(0x1p-30f); bits < end; bits += 1009) {
    const float x = bits_to_float(static_cast<int32_t>(bits));
    const double exact = std::erf(static_cast<double>(x));
    const double unit = std::ldexp(1.0, std::ilogb(exact) - 23);
    CHECK(std::abs(erf_approx(x) - exact) <= 1.2 * unit);
    CHECK(erf_approx(-x) == -erf_approx(x));
  }
}

}  // namespace

void test_numbers() {
  test_rng();
  test_gumbel_bound();
  test_bulk_bits();
  test_exp();
  test_erf();
}

}  // namespace specdec
