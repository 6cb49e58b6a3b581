// A C function for python_tests/verify/test_rng.py: the noise for given bits as each instruction
// set computes it, so that "the same bits everywhere" is checked on values and not only on
// arg-maxes.
#include <cstdint>

#include "specdec/cpu/isa.h"
#include "specdec/sampling/rng.h"

namespace specdec::cpu {
namespace {

SPECDEC_HOST_DEVICE void fill_gumbel(const uint32_t* bits, float* noise, int64_t count) {
  for (int64_t i = 0; i < count; ++i) noise[i] = gumbel(bits[i]);
}

void fill_baseline(const uint32_t* bits, float* noise, int64_t count) {
  fill_gumbel(bits, noise, count);
}

#ifdef SPECDEC_X86
SPECDEC_TARGET_AVX2 void fill_avx2(const uint32_t* bits, float* noise, int64_t count) {
  fill_gumbel(bits, noise, count);
}

SPECDEC_TARGET_AVX512 void fill_avx512(const uint32_t* bits, float* noise, int64_t count) {
  fill_gumbel(bits, noise, count);
}
#endif

}  // namespace
}  // namespace specdec::cpu

// isa: a CpuIsa. Returns 0, or -1 if the processor does not have it.
extern "C" __attribute__((visibility("default"))) int specdec_probe_gumbel(int isa,
                                                                           const uint32_t* bits,
                                                                           float* noise,
                                                                           int64_t count) {
  using namespace specdec::cpu;
  if (isa < 0 || isa > static_cast<int>(best_cpu_isa())) return -1;
#ifdef SPECDEC_X86
  if (isa == static_cast<int>(CpuIsa::kAvx512)) return fill_avx512(bits, noise, count), 0;
  if (isa == static_cast<int>(CpuIsa::kAvx2)) return fill_avx2(bits, noise, count), 0;
#endif
  return fill_baseline(bits, noise, count), 0;
}
