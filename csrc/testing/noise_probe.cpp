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

}  // namespace
}  // namespace specdec::cpu

// isa: a CpuIsa. Returns 0, or -1 if the processor does not have it.
extern "C" __attribute__((visibility("default"))) int specdec_probe_gumbel(int isa,
                                                                           const uint32_t* bits,
                                                                           float* noise,
                                                                           int64_t count) {
  using namespace specdec::cpu;
  if (isa < 0 || isa > static_cast<int>(best_cpu_isa())) return -1;
  build_for<fill_gumbel>(static_cast<CpuIsa>(isa))(bits, noise, count);
  return 0;
}
