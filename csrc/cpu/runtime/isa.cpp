#include "specdec/cpu/isa.h"

#include <algorithm>
#include <cstdlib>
#include <string_view>

namespace specdec::cpu {
namespace {

CpuIsa choose() {
  const CpuIsa best = best_cpu_isa();
  if (const char* wanted = std::getenv("SPECDEC_CPU_ISA")) {
    for (CpuIsa isa : {CpuIsa::kBaseline, CpuIsa::kAvx2, CpuIsa::kAvx512}) {
      if (std::string_view(wanted) == cpu_isa_name(isa)) return std::min(isa, best);
    }
  }
  return best;
}

}  // namespace

const char* cpu_isa_name(CpuIsa isa) { return SPECDEC_FOR_ISA(isa, "baseline", "avx2", "avx512"); }

CpuIsa best_cpu_isa() {
#ifdef SPECDEC_X86
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    return avx512 ? CpuIsa::kAvx512 : CpuIsa::kAvx2;
  }
#endif
  return CpuIsa::kBaseline;
}

bool cpu_has_avx512_bf16() {
#ifdef SPECDEC_X86
  static const bool has = cpu_isa() == CpuIsa::kAvx512 &&
                          std::getenv("SPECDEC_CPU_ISA") == nullptr &&
                          __builtin_cpu_supports("avx512bf16");
  return has;
#else
  return false;
#endif
}

CpuIsa cpu_isa() {
  static const CpuIsa isa = choose();
  return isa;
}

}  // namespace specdec::cpu
