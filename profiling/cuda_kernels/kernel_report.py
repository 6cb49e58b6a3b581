"""Report registers, shared memory, spills, occupancy and vector loads of every compiled kernel.

    make kernel-report                              # all of csrc/kernels, every default architecture
    TORCH_CUDA_ARCH_LIST=9.0 python profiling kernel-report

Compiles with the flags of build_support/native.py and reads the report of ptxas, the generated PTX (block
sizes) and, if cuobjdump is installed, the machine code (128-bit global loads). Needs nvcc but no GPU. Writes
``<out>.json`` and ``<out>.md``. The exit code is 1 if a kernel uses local memory, which means that it spills
registers or has a stack frame.

The table has one row per kernel and one column per architecture:

    source           kernel             block  shared  stack  spills    sm_80      sm_89      sm_90  ...
    verify_match.cu  pick_kernel<bf16>    256      72      0       0  40 75% -  40 100% -  46 62% -

- Below an architecture: registers per thread, theoretical occupancy, 128-bit global loads / all of them.
- ``stack`` and ``spills`` must be 0: local memory is device memory, and a kernel that uses it inside its loop
  pays for every access. The build fails on them as well.
- Occupancy counts static shared memory only; ``≤`` marks a kernel that asks for more at launch (``+`` in
  ``shared``). Half is enough for a kernel that keeps many loads in flight; a low number explains bandwidth
  that is not reached. ``draft_head_kernel`` asks for all shared memory: one block of 256 threads per SM, 12 %
  on sm_90 (8 of 64 warps), is intended, and up to 255 registers per thread cost it nothing. Beside 47 KiB for
  the rest, its ring has 21 stages of 8.5 KiB on sm_90 and sm_100, 13 on sm_80 and 6 on sm_89 and sm_120.
- The loads come from the machine code (cuobjdump, part of the CUDA toolkit); ``-`` where it is not installed.
  A kernel that streams memory should load mostly 128 bits at once: ``4/6``, not ``0/24``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from text_table import format_markdown, format_table

from build_support import BuildError
from build_support.architectures import VARIABLE
from build_support.native import ROOT, include_flags, kernel_sources, nvcc_command
from build_support.toolchain import find_cxx, find_nvcc, read_cuda
from cuda_kernels.occupancy import occupancy

NO_DISASSEMBLER = "128-bit loads: not counted, because cuobjdump is not installed."


@dataclass(frozen=True)
class PtxasEntry:
    """ptxas' report on one kernel and architecture; sizes in bytes, registers per thread."""

    symbol: str
    arch: str
    registers: int
    shared: int
    stack: int
    spill_stores: int
    spill_loads: int

    @property
    def touches_local_memory(self) -> bool:
        return bool(self.stack or self.spill_stores or self.spill_loads)


@dataclass(frozen=True)
class Kernel(PtxasEntry):
    """One kernel on one architecture.

    Attributes:
        source: file name.
        name: short demangled name.
        block: threads per block from ``__launch_bounds__``, or None.
        dynamic_shared: whether it uses dynamic shared memory, whose size is known only at a launch.
        occupancy: theoretical occupancy without dynamic shared memory; None without ``block``.
        wide_loads: 128-bit global loads in the machine code, cp.async included; None if not disassembled.
        global_loads: all global loads; None if not disassembled.
    """

    source: str
    name: str
    block: int | None
    dynamic_shared: bool
    occupancy: float | None
    wide_loads: int | None
    global_loads: int | None


def parse_ptxas(text: str) -> list[PtxasEntry]:
    """The entry functions in the output of ``ptxas -v``.

    Raises:
        ValueError: if a function could not be read.
    """
    pattern = re.compile(
        r"Compiling entry function '(?P<symbol>\w+)' for '(?P<arch>sm_\w+)'\n"
        r".*Function properties for (?P=symbol)\n"
        r" *(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
        r"(?P<loads>\d+) bytes spill loads\n"
        r".*Used (?P<registers>\d+) registers(?P<rest>.*)"
    )
    entries = []
    for match in pattern.finditer(text):
        shared = re.search(r"(\d+) bytes smem", match["rest"])
        entries.append(
            PtxasEntry(
                symbol=match["symbol"],
                arch=match["arch"],
                registers=int(match["registers"]),
                shared=int(shared[1]) if shared else 0,
                stack=int(match["stack"]),
                spill_stores=int(match["stores"]),
                spill_loads=int(match["loads"]),
            )
        )
    announced = text.count("Compiling entry function")
    if len(entries) != announced:
        raise ValueError(
            f"ptxas announced {announced} kernels, but {len(entries)} reports were understood: "
            "the output of ptxas has changed; adapt parse_ptxas"
        )
    return entries


def parse_ptx(text: str) -> dict[str, tuple[int | None, bool]]:
    """Kernels of a PTX file: symbol -> (threads per block if declared, uses dynamic shared memory)."""
    dynamic = re.findall(r"^\.extern \.shared .*?(\w+)\[\];", text, re.MULTILINE)
    kernels = {}
    for match in re.finditer(r"\.entry (\w+)\((.*?)^\}", text, re.MULTILINE | re.DOTALL):
        bounds = re.search(r"^\.(?:max|req)ntid (\d+)(?:, (\d+), (\d+))?", match[2], re.MULTILINE)
        block = None
        if bounds:
            x, y, z = (int(size or 1) for size in bounds.groups())
            block = x * y * z
        uses_dynamic = any(re.search(rf"\b{name}\b", match[2]) for name in dynamic)
        kernels[match[1]] = (block, uses_dynamic)
    return kernels


def parse_sass(text: str) -> dict[tuple[str, str], tuple[int, int]]:
    """``cuobjdump --dump-sass``: (symbol, architecture) -> 128-bit global loads, all global loads."""
    counts: dict[tuple[str, str], Counter[bool]] = {}
    arch, current = "", Counter[bool]()
    for line in text.splitlines():
        if found := re.match(r"\s*code for (sm_\w+)", line):
            arch = found[1]
        elif found := re.match(r"\s*Function : (\w+)", line):
            current = counts.setdefault((found[1], arch), Counter())
        elif found := re.search(r"\bLDG(?:STS)?\.([\w.]+)", line):
            current["128" in found[1].split(".")] += 1
    return {key: (count[True], count.total()) for key, count in counts.items()}


def ptx_target(arch: str, targets: Iterable[str]) -> str:
    """The PTX from which the code for ``arch`` is made: the newest that is not newer than ``arch``."""
    return max((each for each in targets if number(each) <= number(arch)), key=number)


def number(arch: str) -> int:
    """``sm_90`` -> 90."""
    return int(arch.removeprefix("sm_").rstrip("af"))


def short_name(demangled: str) -> str:
    """``void specdec::(anonymous namespace)::pick<__half>(Params, bool)`` -> ``pick<f16>``."""
    name = re.sub(r"(\w+|\(anonymous namespace\))::", "", demangled.removeprefix("void "))
    depth = 0
    for end, letter in enumerate(name):
        depth += (letter == "<") - (letter == ">")
        if letter == "(" and depth == 0:
            name = name[:end]
            break
    for long, short in (("__nv_bfloat16", "bf16"), ("__half", "f16"), ("float", "f32")):
        name = re.sub(rf"\b{long}\b", short, name)
    return re.sub(r"\(\w+\)(?=-?\d)", "", name)  # the type of a constant: (int)4, (bool)1


def demangle(symbols: Iterable[str]) -> dict[str, str]:
    names = list(symbols)
    done = run(["c++filt"], input="\n".join(names))
    return dict(zip(names, map(short_name, done.stdout.splitlines()), strict=True))


def run(command: list[str], **kwargs: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, capture_output=True, text=True, **kwargs)
    if done.returncode != 0:
        sys.exit(f"{shlex.join(command)} failed:\n{done.stdout}{done.stderr}")
    return done


def compile_kernels(source: Path, nvcc_command: list[str], cuobjdump: str | None) -> list[Kernel]:
    """Compile one file for all architectures of the command and read the results."""
    with tempfile.TemporaryDirectory() as folder:
        outputs = ["--keep", "--keep-dir", folder, "-o", f"{folder}/kernels.o"]
        report = run([*nvcc_command, "-c", str(source), *outputs]).stderr
        ptx = {}
        for path in Path(folder).glob("*.ptx"):
            text = path.read_text()
            (target,) = re.findall(r"^\.target (sm_\w+)", text, re.MULTILINE)
            ptx[target] = parse_ptx(text)
        sass = {}
        if cuobjdump:
            sass = parse_sass(run([cuobjdump, "--dump-sass", f"{folder}/kernels.o"]).stdout)
    entries = parse_ptxas(report)
    names = demangle({entry.symbol for entry in entries})
    kernels = []
    for entry in entries:
        block, dynamic_shared = ptx[ptx_target(entry.arch, ptx)][entry.symbol]
        wide_loads, global_loads = sass.get((entry.symbol, entry.arch), (None, None))
        share = None
        if block:
            share = occupancy(entry.arch, block, entry.registers, entry.shared)
        kernels.append(
            Kernel(
                **asdict(entry),
                source=source.name,
                name=names[entry.symbol],
                block=block,
                dynamic_shared=dynamic_shared,
                occupancy=share,
                wide_loads=wide_loads,
                global_loads=global_loads,
            )
        )
    return kernels


HEADER = ["source", "kernel", "block", "shared", "stack", "spills"]


def table_rows(kernels: list[Kernel], archs: list[str]) -> list[list[str]]:
    """One row per kernel: properties over all architectures as ranges, then one cell per architecture."""
    grouped: dict[tuple[str, str], dict[str, Kernel]] = {}
    for kernel in kernels:
        grouped.setdefault((kernel.source, kernel.name), {})[kernel.arch] = kernel
    return [
        [
            source,
            name,
            span(kernel.block for kernel in each.values()),
            span(kernel.shared for kernel in each.values())
            + ("+" if any(kernel.dynamic_shared for kernel in each.values()) else ""),
            span(kernel.stack for kernel in each.values()),
            span(kernel.spill_stores + kernel.spill_loads for kernel in each.values()),
            *(cell(each[arch]) if arch in each else "" for arch in archs),
        ]
        for (source, name), each in sorted(grouped.items())
    ]


def span(values: Iterable[int | None]) -> str:
    known = sorted({value for value in values if value is not None})
    if not known:
        return "-"
    return str(known[0]) if len(known) == 1 else f"{known[0]}-{known[-1]}"


def cell(kernel: Kernel) -> str:
    """Registers, occupancy, 128-bit global loads / all global loads."""
    share = "-" if kernel.occupancy is None else f"{kernel.occupancy:.0%}"
    if kernel.dynamic_shared:
        share = f"≤{share}"
    loads = "-" if kernel.wide_loads is None else f"{kernel.wide_loads}/{kernel.global_loads}"
    return f"{kernel.registers} {share} {loads}"


def markdown(kernels: list[Kernel], archs: list[str], compiler: str, notes: list[str]) -> str:
    return "\n".join(
        [
            "# Kernels as compiled",
            "",
            f"Made by `make kernel-report` with {compiler}. The columns of the architectures show registers",
            "per thread, theoretical occupancy, and 128-bit global loads / all global loads. Shared memory",
            "(static; +: also dynamic), stack frame and spills are in bytes.",
            *notes,
            "",
            format_markdown([*HEADER, *archs], table_rows(kernels, archs)),
            "",
        ]
    )


def compile_all(command: list[str]) -> list[Kernel]:
    cuobjdump = shutil.which("cuobjdump")
    sources = kernel_sources()
    jobs = int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)
    with ThreadPoolExecutor(jobs) as pool:
        compiled = pool.map(lambda source: compile_kernels(source, command, cuobjdump), sources)
        return [kernel for each in compiled for kernel in each]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = ROOT / "profiling" / "results" / "kernels" / "kernels"
    parser.add_argument("--out", type=Path, default=default, help="write OUT.json and OUT.md")
    out = parser.parse_args().out
    nvcc = find_nvcc()
    if nvcc is None:
        print("kernel_report needs nvcc (12.8 or later for all architectures); no GPU is needed")
        return 2
    os.environ.setdefault(VARIABLE, "all")
    os.environ.pop("SPECDEC_STRICT", None)  # spills are to be reported, not to stop the compiler
    try:
        cxx = find_cxx()
        cuda = read_cuda(nvcc, cxx)
    except BuildError as error:
        print(error)
        return 2
    command = shlex.split(f"{nvcc_command(cuda, cxx)} {include_flags()} -Xptxas=-v")
    kernels = compile_all(command)
    archs = sorted({kernel.arch for kernel in kernels}, key=number)
    version = run([nvcc, "--version"]).stdout.splitlines()[-2].split(", V")[-1]
    notes = [] if kernels[0].wide_loads is not None else [NO_DISASSEMBLER]
    print(format_table([*HEADER, *archs], table_rows(kernels, archs), left=("source", "kernel")))
    print(
        "columns of architectures: registers, occupancy, 128-bit global loads / all global loads",
        *notes,
        sep="\n",
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".md").write_text(markdown(kernels, archs, f"nvcc {version}", notes))
    # Symbols contain a hash of the build folder.
    values = [{k: v for k, v in asdict(each).items() if k != "symbol"} for each in kernels]
    report = {"nvcc": version, "archs": archs, "kernels": values}
    out.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    bad = [kernel for kernel in kernels if kernel.touches_local_memory]
    for kernel in bad:
        print(f"{kernel.source}: {kernel.name} uses local memory on {kernel.arch}")
    print(f"{len(kernels)} kernels on {', '.join(archs)}: {len(bad)} use local memory")
    return 1 if bad else 0
