"""The kernel report: parsers of compiler output, occupancy, and one kernel that spills.

Occupancy is compared with NVIDIA's own calculator.
"""

from __future__ import annotations

import itertools
import shutil
import subprocess

import pytest
from cuda_kernels.kernel_report import (
    Kernel,
    PtxasEntry,
    compile_kernels,
    demangle,
    markdown,
    parse_ptx,
    parse_ptxas,
    parse_sass,
    ptx_target,
    short_name,
)
from cuda_kernels.occupancy import LIMITS, blocks_per_sm, most_shared_bytes, occupancy

NVCC = shutil.which("nvcc")
PICK = "_ZN7specdec12_GLOBAL__N_111pick_kernelI6__halfEEvNS_17VerifyMatchParamsEPmlb"
WALK = "_ZN7specdec12_GLOBAL__N_111walk_kernelENS_17VerifyMatchParamsEPKml"

PTXAS = f"""\
ptxas warning : Local memory used for function '{WALK}', size of stack frame: 208 bytes
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '{PICK}' for 'sm_80'
ptxas info    : Function properties for {PICK}
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 72 bytes smem, 569 bytes cmem[0]
ptxas info    : Compile time = 46.017 ms
ptxas info    : Compiling entry function '{WALK}' for 'sm_90a'
ptxas info    : Function properties for {WALK}
    208 bytes stack frame, 216 bytes spill stores, 220 bytes spill loads
ptxas info    : Used 64 registers, used 1 barriers, 208 bytes cumulative stack size
ptxas info    : Compile time = 8.271 ms
"""


def test_ptxas_output_becomes_one_entry_per_kernel_and_architecture():
    assert parse_ptxas(PTXAS) == [
        PtxasEntry(PICK, "sm_80", 40, 72, 0, 0, 0),
        PtxasEntry(WALK, "sm_90a", 64, 0, 208, 216, 220),
    ]


def test_machine_code_is_made_from_the_newest_ptx_that_is_not_newer():
    targets = ["sm_80", "sm_90", "sm_120"]
    found = [ptx_target(arch, targets) for arch in ("sm_89", "sm_90a", "sm_100", "sm_120")]
    assert found == ["sm_80", "sm_90", "sm_90", "sm_120"]


def test_ptxas_output_that_is_not_understood_is_an_error():
    with pytest.raises(ValueError, match="announced 2 kernels, but 1 reports were understood"):
        parse_ptxas(PTXAS.replace("bytes spill stores", "bytes of spills", 1))


PTX = """\
.version 9.0
.target sm_90
.address_size 64
.extern .shared .align 128 .b8 bytes[];

.entry with_bounds(
	.param .u64 with_bounds_param_0
)
.maxntid 64, 2, 1
{
	mov.u32 	%r3, bytes;
	ret;
}
.visible .entry without_bounds(
	.param .u64 without_bounds_param_0
)
{
	mov.u32 	%r3, kilobytes;
	ret;
}
"""


def test_ptx_gives_block_size_and_use_of_dynamic_shared_memory():
    assert parse_ptx(PTX) == {"with_bounds": (128, True), "without_bounds": (None, False)}


SASS = """\
Fatbin elf code:
================
arch = sm_80
code version = [1,7]
host = linux
compile_size = 64bit

	code for sm_80
		Function : first
	.headerflags	@"EF_CUDA_TEXMODE_UNIFIED EF_CUDA_64BIT_ADDRESS EF_CUDA_SM80"
        /*0000*/                   MOV R1, c[0x0][0x28] ;                     /* 0x00000a0000017a02 */
        /*0050*/                   LDG.E.128.CONSTANT R4, [R2.64] ;           /* 0x0000000402047981 */
        /*0060*/              @!P0 LDG.E R8, [R2.64+0x10] ;                   /* 0x0000100402088981 */
        /*0070*/                   LDGSTS.E.BYPASS.128 [R9], [R2.64] ;        /* 0x0000000002097fae */
        /*0080*/                   LDS.128 R12, [R9] ;                        /* 0x00000000090c7984 */
		Function : second
        /*0000*/                   STG.E.128 [R2.64], R4 ;                    /* 0x0000000402007986 */

	code for sm_90
		Function : first
        /*0050*/                   LDG.E.64 R4, desc[UR4][R2.64] ;            /* 0x0000000402047981 */
"""


def test_sass_gives_wide_and_all_global_loads():
    assert parse_sass(SASS) == {
        ("first", "sm_80"): (2, 3),
        ("second", "sm_80"): (0, 0),
        ("first", "sm_90"): (0, 1),
    }


@pytest.mark.parametrize(
    "demangled, short",
    [
        (
            "void specdec::(anonymous namespace)::pick<__half>(specdec::Params, bool)",
            "pick<f16>",
        ),
        ("specdec::walk(specdec::Params)", "walk"),
        (
            "void specdec::attend<__nv_bfloat16, (int)128, (bool)1>(A<float>)",
            "attend<bf16, 128, 1>",
        ),
        ("void run<specdec::Tile<float, 4> >(int (*)(int))", "run<Tile<f32, 4> >"),
    ],
)
def test_short_names(demangled, short):
    assert short_name(demangled) == short


@pytest.mark.skipif(shutil.which("c++filt") is None, reason="c++filt is not installed")
def test_demangle():
    assert demangle([PICK, WALK]) == {PICK: "pick_kernel<f16>", WALK: "walk_kernel"}


def test_worked_examples_of_occupancy():
    # 46 registers: 1536 for a warp; 16384 // 1536 = 10 warps a partition, 40 an SM, 5 blocks of 8.
    assert blocks_per_sm("sm_90", 256, 46, 72) == 5
    assert occupancy("sm_90", 256, 46, 72) == 40 / 64
    # 16 KiB + 1 KiB a block: 100 // 17 = 5 blocks of 4 warps.
    assert occupancy("sm_120", 128, 36, 16384) == 20 / 48
    assert blocks_per_sm("sm_80", 1024, 65, 0) == 0


def test_occupancy_of_the_fused_draft():
    """A block of 8 warps, whose ring fills an SM, may use 255 registers per thread, the maximum.

    Registers of 9 warps are allocated as for 12, so at most 168 are available, not 65536 / 288 = 227.
    """
    for arch in LIMITS:
        ring = most_shared_bytes(arch)
        assert blocks_per_sm(arch, 256, 255, ring) == 1
        assert blocks_per_sm(arch, 256, 255, ring + 1) == 0
        assert blocks_per_sm(arch, 288, 168, 0) == 1
        assert blocks_per_sm(arch, 288, 169, 0) == 0
    assert most_shared_bytes("sm_90") == 227 * 1024
    assert occupancy("sm_90", 256, 255, 227 * 1024) == 8 / 64


CALCULATOR = """
#include <cuda_occupancy.h>
#include <cstdio>
int main() {
  int major, minor, warps, shared, block, registers, bytes;
  while (scanf("%d %d %d %d %d %d %d", &major, &minor, &warps, &shared, &block, &registers,
               &bytes) == 7) {
    cudaOccDeviceProp device;
    device.computeMajor = major, device.computeMinor = minor, device.warpSize = 32;
    device.maxThreadsPerBlock = 1024, device.maxThreadsPerMultiprocessor = 32 * warps;
    device.regsPerBlock = device.regsPerMultiprocessor = 65536;
    device.sharedMemPerBlock = 49152, device.sharedMemPerMultiprocessor = shared;
    device.sharedMemPerBlockOptin = shared - 1024, device.reservedSharedMemPerBlock = 1024;
    device.numSms = 1;
    cudaOccFuncAttributes kernel;
    kernel.maxThreadsPerBlock = 1024, kernel.numRegs = registers, kernel.sharedSizeBytes = 0;
    kernel.partitionedGCConfig = PARTITIONED_GC_OFF;
    kernel.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN;
    kernel.maxDynamicSharedSizeBytes = shared;
    kernel.numBlockBarriers = 1;
    cudaOccDeviceState state;
    cudaOccResult result;
    const int status = cudaOccMaxActiveBlocksPerMultiprocessor(&result, &device, &kernel, &state,
                                                               block, bytes);
    printf("%d\\n", status ? -status : result.activeBlocksPerMultiprocessor);
  }
}
"""


@pytest.mark.skipif(NVCC is None, reason="needs the CUDA toolkit's cuda_occupancy.h")
def test_occupancy_equals_nvidias_calculator(tmp_path):
    source, program = tmp_path / "calculator.cpp", tmp_path / "calculator"
    source.write_text(CALCULATOR)
    subprocess.run([NVCC, "-O0", "-cudart", "none", source, "-o", program], check=True)
    sizes = [32, 96, 128, 160, 256, 288, 384, 512, 1000, 1024]
    registers = [16, 24, 32, 33, 40, 46, 64, 65, 96, 128, 168, 224, 255]
    shared = [0, 72, 8192, 16384, 33000, 90000, 150000, 227 * 1024, 227 * 1024 + 1]
    cases = list(itertools.product(LIMITS, sizes, registers, shared))
    lines = []
    for arch, *launch in cases:
        number, limits = arch.removeprefix("sm_"), LIMITS[arch]
        device = (number[:-1], number[-1], limits.warps, limits.shared_bytes)
        lines.append(" ".join(map(str, (*device, *launch))))
    done = subprocess.run(
        [program], input="\n".join(lines), capture_output=True, text=True, check=True
    )
    theirs = dict(zip(cases, map(int, done.stdout.split()), strict=True))
    assert {case: blocks_per_sm(*case) for case in cases} == theirs


SPILLS = """
extern __shared__ double dynamic[];
__global__ void __launch_bounds__(1024) spills(double* data) {
  double values[80];
#pragma unroll
  for (int i = 0; i < 80; ++i) values[i] = data[i * 1024 + threadIdx.x];
  dynamic[threadIdx.x] = values[0];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 80; ++i) data[i * 1024 + threadIdx.x] = values[79 - i] * values[i] + dynamic[i];
}
"""


@pytest.mark.skipif(NVCC is None, reason="needs nvcc")
def test_a_kernel_that_spills_is_seen(tmp_path):
    source = tmp_path / "spills.cu"
    source.write_text(SPILLS)
    command = [NVCC, "-gencode", "arch=compute_90,code=sm_90", "-Xptxas=-v"]
    (kernel,) = compile_kernels(source, command, cuobjdump=None)
    assert (kernel.name, kernel.arch, kernel.block) == ("spills", "sm_90", 1024)
    assert kernel.spill_stores > 0 and kernel.touches_local_memory
    assert kernel.dynamic_shared and kernel.wide_loads is None


def test_the_table_has_a_row_per_kernel_and_a_column_per_architecture():
    common = dict(symbol="s", source="a.cu", name="k", stack=0, spill_stores=0, spill_loads=0)
    kernels = [
        Kernel(
            **common, arch="sm_80", registers=40, shared=72, block=256, dynamic_shared=False,
            occupancy=0.75, wide_loads=4, global_loads=6,
        ),
        Kernel(
            **common, arch="sm_90", registers=46, shared=80, block=256, dynamic_shared=True,
            occupancy=0.625, wide_loads=None, global_loads=None,
        ),
    ]  # fmt: skip
    lines = markdown(kernels, ["sm_80", "sm_90"], "nvcc 13.0", []).splitlines()
    assert lines[-1] == "| a.cu | k | 256 | 72-80+ | 0 | 0 | 40 75% 4/6 | 46 ≤62% - |"
