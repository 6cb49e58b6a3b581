// The x86 instruction sets that hot CPU loops are compiled for, and the choice for this machine.
// Other processors have one build, because their baseline already has fused multiply-add.
#pragma once

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define SPECDEC_X86
#define SPECDEC_TARGET_AVX2 __attribute__((target("avx2,fma")))
#define SPECDEC_TARGET_AVX512 \
  __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,prefer-vector-width=512")))
#define SPECDEC_TARGET_AMX                                    \
  __attribute__((                                             \
      target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16," \
             "avx2,fma,prefer-vector-width=512,gfni,amx-tile,amx-bf16,amx-int8")))
#endif

namespace specdec::cpu {

enum class CpuIsa { kBaseline, kAvx2, kAvx512 };

const char* cpu_isa_name(CpuIsa isa);

// The best instruction set that the processor has.
CpuIsa best_cpu_isa();

// The instruction set to use: the best one, or the one that SPECDEC_CPU_ISA names if the processor
// has it. The variable is read once per process.
CpuIsa cpu_isa();

// Whether to use AVX-512's bfloat16 products: the processor has them, cpu_isa() is AVX-512, and
// SPECDEC_CPU_ISA is not set.
bool cpu_has_avx512_bf16();

// Whether to use AVX-512's products of integers (VNNI), on the same conditions.
bool cpu_has_avx512_vnni();

// What multiplies tiles of bfloat16: nothing, the matrix units of the processor (AMX), or plain code
// with the same bits, which is slow.
enum class MatrixUnits { kNone, kAmx, kEmulated };

// The matrix units to use: AMX if the processor and the system have it and SPECDEC_CPU_ISA is not set
// or "amx"; emulated if it is "amx-emulated". The variable is read once per process.
MatrixUnits matrix_units();

// The one of three builds that is for `isa`. Other processors have the baseline's alone, so the
// names of the others need not exist there.
#ifdef SPECDEC_X86
#define SPECDEC_FOR_ISA(isa, baseline, avx2, avx512)   \
  ((isa) == ::specdec::cpu::CpuIsa::kAvx512 ? (avx512) \
   : (isa) == ::specdec::cpu::CpuIsa::kAvx2 ? (avx2)   \
                                            : (baseline))
#else
#define SPECDEC_FOR_ISA(isa, baseline, avx2, avx512) (static_cast<void>(isa), (baseline))
#endif

template <auto function>
struct IsaBuilds;

template <typename Result, typename... Arguments, Result (*function)(Arguments...)>
struct IsaBuilds<function> {
  static Result baseline(Arguments... arguments) { return function(arguments...); }
#ifdef SPECDEC_X86
  SPECDEC_TARGET_AVX2 static Result avx2(Arguments... arguments) { return function(arguments...); }
  SPECDEC_TARGET_AVX512 static Result avx512(Arguments... arguments) {
    return function(arguments...);
  }
#endif
};

// Compiles a function that is inlined (SPECDEC_HOST_DEVICE) for every instruction set, and returns
// the build for `isa`.
template <auto function>
auto build_for(CpuIsa isa) {
  using Builds = IsaBuilds<function>;
  return SPECDEC_FOR_ISA(isa, &Builds::baseline, &Builds::avx2, &Builds::avx512);
}

}  // namespace specdec::cpu
