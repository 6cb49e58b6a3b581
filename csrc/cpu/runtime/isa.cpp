#include "specdec/cpu/isa.h"

#include <algorithm>
#include <cstdlib>
#include <string_view>

#if defined(SPECDEC_X86) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

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

// Whether parts of AVX-512 may be used that not all processors with it have.
[[maybe_unused]] bool may_use_all_of_avx512() {
  return cpu_isa() == CpuIsa::kAvx512 && std::getenv("SPECDEC_CPU_ISA") == nullptr;
}

// Whether the processor has AMX for bfloat16 and bytes (and GFNI, as all of them have), and the system
// lets this process use its registers, which a process has to ask for.
bool has_amx() {
#if defined(SPECDEC_X86) && defined(__linux__)
  constexpr unsigned kAll = 1u << 24 | 1u << 22 | 1u << 25;  // tiles, bfloat16, bytes: edx, leaf 7
  constexpr unsigned kGfni = 1u << 8;                        // ecx
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // arch_prctl(2)
  unsigned eax, ebx, ecx, edx;
  return best_cpu_isa() == CpuIsa::kAvx512 && __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) &&
         (edx & kAll) == kAll && (ecx & kGfni) &&
         syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

MatrixUnits choose_matrix_units() {
  if (const char* wanted = std::getenv("SPECDEC_CPU_ISA")) {
    if (std::string_view(wanted) == "amx-emulated") return MatrixUnits::kEmulated;
    if (std::string_view(wanted) != "amx") return MatrixUnits::kNone;
  }
  return has_amx() ? MatrixUnits::kAmx : MatrixUnits::kNone;
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
  static const bool has = may_use_all_of_avx512() && __builtin_cpu_supports("avx512bf16");
  return has;
#else
  return false;
#endif
}

bool cpu_has_avx512_vnni() {
#ifdef SPECDEC_X86
  static const bool has = may_use_all_of_avx512() && __builtin_cpu_supports("avx512vnni");
  return has;
#else
  return false;
#endif
}

MatrixUnits matrix_units() {
  static const MatrixUnits units = choose_matrix_units();
  return units;
}

CpuIsa cpu_isa() {
  static const CpuIsa isa = choose();
  return isa;
}

}  // namespace specdec::cpu
