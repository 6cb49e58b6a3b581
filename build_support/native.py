"""The ninja build of the native libraries, in build/native.

- ``_ops.abi3.so``: kernels, CPU ops and glue on torch's stable ABI, for torch >= 2.10 with and without CUDA.
- ``_host.abi3.so``: the module for state on the host, on the limited API of Python 3.10.
- On demand (``ninja -C build/native emulated``, or ``emulated-sanitized`` with AddressSanitizer and UBSan):
  the ops for CPU tensors, computed by the CUDA kernels, which are compiled for the host
  (csrc/testing/emulation).
- On demand (``ninja -C build/native ptx-sm_90``): the kernels once more, as nvcc's PTX, translated to C++
  (build_support/ptx). The emulated ops run them in place of the host's kernels.

No command depends on torch, on the environment of the build, or on the location of the source tree. Builds
with and without isolation therefore share their object files, and a copy of the tree can reuse its build
folder.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from build_support.toolchain import Cuda, Toolchain

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "native"
TO_ROOT = os.path.relpath(ROOT, BUILD)
LIBRARIES = ("_ops", "_host")

# -ffp-contract=off: the noise must have the same bits everywhere (csrc/include/specdec/core/platform.h).
# The two flags after it change no result; without them loops over float expressions do not vectorise.
CXX_FLAGS = (
    "-std=c++20 -O3 -fPIC -fvisibility=hidden -Wall -Wextra -DNDEBUG "
    "-ffp-contract=off -fno-trapping-math -fno-math-errno"
)
NVCC_FLAGS = (
    "-std=c++20 -O3 -lineinfo -DNDEBUG --expt-relaxed-constexpr "
    "-Xcompiler=-fPIC,-fvisibility=hidden,-ffp-contract=off"
)
# With SPECDEC_STRICT=1, as in CI, a kernel that spills registers or needs a stack frame fails the build.
# By default it does not: such a kernel is only slower, and whether it spills depends on the installed ptxas.
STRICT_NVCC_FLAGS = "-Xptxas=--warn-on-spills,--warn-on-local-memory-usage,--warning-as-error"
# Emulated kernels: -Og, because the sources have many templates and only tests run them.
EMULATED_FLAGS = "-Og -g1 -DSPECDEC_EMULATED -DSPECDEC_WITH_CUDA -Wno-unknown-pragmas"
SANITIZE_FLAGS = "-fsanitize=address,undefined -fno-sanitize-recover=all"
# The emulator takes most of the time, and three times as long if sanitizers look at it, too. They look at the
# kernels; the emulator moves tensors with memcpy only, which AddressSanitizer checks in any code.
EMULATOR_FLAGS = f"{EMULATED_FLAGS} -O2"
# Translated PTX: integers wrap around. The files are large, -O1 would take three times as long, and their
# warnings mean nothing.
PTX_FLAGS = "-Og -g0 -w -fwrapv"
PTX_ARCHITECTURES = (80, 90)
# torch's functions are resolved when the library is loaded. The library is linked with an empty library of
# the same name, so that the loader knows in which library to find them.
TORCH_STUB = "torch_stub/libtorch_cpu.so"
LINK_TORCH = "-Ltorch_stub -Xlinker --no-as-needed -ltorch_cpu"

# CPU seconds of a clean build, measured on one machine: for the CPU ops, and for each GPU architecture.
CPU_SECONDS = 100
ARCHITECTURE_SECONDS = 80


def include_flags(root: str | Path = ROOT) -> str:
    """The include path: public headers as ``specdec/...``, others by their path below csrc."""
    return f"-I{root}/csrc/include -I{root}/csrc"


def kernel_sources() -> list[Path]:
    """Every file of CUDA kernels."""
    return sorted((ROOT / "csrc" / "kernels").rglob("*.cu"))


def nvcc_command(cuda: Cuda, cxx: str) -> str:
    """Start of a command that compiles a .cu file for all architectures, without includes and files."""
    flags = [cuda.nvcc, "-ccbin", cxx, NVCC_FLAGS]
    if os.environ.get("SPECDEC_STRICT") == "1":
        flags.append(STRICT_NVCC_FLAGS)
    if os.environ.get("SPECDEC_WATCHDOG") == "1":
        flags.append("-DSPECDEC_WATCHDOG")
    return " ".join([*flags, *map(shlex.quote, cuda.architectures.nvcc_flags())])


class NinjaFile:
    """Collects the lines of build.ninja; every path is relative to the build folder."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def rule(
        self, name: str, command: str, finds_headers: bool = False, restat: bool = False
    ) -> None:
        """Add a rule; with ``restat`` a command may leave its output as it is if nothing has changed."""
        self._lines += [f"rule {name}", f"  command = {command}", "  description = $out"]
        if finds_headers:
            self._lines += ["  deps = gcc", "  depfile = $out.d"]
        if restat:
            self._lines += ["  restat = 1"]

    def build(self, target: str, rule: str, sources: str = "", flags: str = "") -> None:
        self._lines += [
            f"build {target}: {rule} {sources}",
            *([f"  flags = {flags}"] if flags else []),
        ]

    def compile_all(self, pattern: str, rule: str, flags: str = "", folder: str = "") -> list[str]:
        """Add build statements for all sources in csrc that match ``pattern``; returns the object files."""
        objects = []
        for path in sorted((ROOT / "csrc").glob(pattern)):
            source = path.relative_to(ROOT / "csrc")
            objects.append(f"{Path(folder, source)}.o")
            self.build(objects[-1], rule, f"{TO_ROOT}/csrc/{source}", flags)
        return objects

    def link(self, library: str, objects: list[str], flags: str) -> None:
        self.build(library, "link", f"{' '.join(objects)} | {TORCH_STUB}", flags)

    def text(self) -> str:
        return "\n".join(self._lines) + "\n"


def ninja_file(tools: Toolchain) -> str:
    """The text of build.ninja."""
    file, cuda, include = NinjaFile(), tools.cuda, include_flags(TO_ROOT)
    compiles = "-MD -MF $out.d -c $in -o $out"
    file.rule("cxx", f"{tools.cxx} {CXX_FLAGS} {include} $flags {compiles}", finds_headers=True)
    file.rule("link", f"{tools.cxx} -shared $in -o $out $flags")
    file.rule(
        "stub",
        f"{tools.cxx} -shared -x c++ {os.devnull} -Xlinker -soname={Path(TORCH_STUB).name} -o $out",
    )
    file.build(TORCH_STUB, "stub")
    ops, with_cuda, runtime = [], "", ""
    if cuda:
        file.rule(
            "nvcc", f"{nvcc_command(cuda, tools.cxx)} {include} {compiles}", finds_headers=True
        )
        ops += file.compile_all("kernels/**/*.cu", "nvcc")  # first, because they take the longest
        with_cuda = " ".join(["-DSPECDEC_WITH_CUDA", *cuda.includes])
        runtime = " ".join(["-Xlinker --exclude-libs=ALL", *cuda.runtime])
    ops += file.compile_all("cpu/**/*.cpp", "cxx")
    ops += file.compile_all("ops/**/*.cpp", "cxx", with_cuda)
    file.link("_ops.abi3.so", ops, f"{LINK_TORCH} {runtime}")
    host = file.compile_all("retrieval/*.cpp", "cxx")
    host += file.compile_all("bindings/*.cpp", "cxx", f"-isystem {tools.python_include}")
    file.link("_host.abi3.so", host, "")
    file.build("libraries", "phony", " ".join(f"{name}.abi3.so" for name in LIBRARIES))
    toolkit = f"-I{TO_ROOT}/csrc/testing/emulation/toolkit"
    for target, sanitize in (("emulated", ""), ("emulated-sanitized", SANITIZE_FLAGS)):
        flags = f"{toolkit} {EMULATED_FLAGS} {sanitize}"
        emulator = f"{toolkit} {EMULATOR_FLAGS}{' -DSPECDEC_ASAN' if sanitize else ''}"
        objects = [
            *file.compile_all("ops/**/*.cpp", "cxx", flags, target),
            *file.compile_all("cpu/runtime/*.cpp", "cxx", flags, target),  # threads of the glue
            *file.compile_all("kernels/**/*.cu", "cxx", f"-x c++ {flags}", target),
            # Last: of inline functions that both have, the linker takes the first.
            *file.compile_all("testing/emulation/**/*.cpp", "cxx", emulator, target),
        ]
        file.link(f"lib{target}.so", objects, f"{sanitize} {LINK_TORCH}")
        file.build(target, "phony", f"lib{target}.so")
    if cuda:
        add_ptx(file, cuda, tools.cxx, f"{toolkit} {PTX_FLAGS}")
    return file.text() + "default libraries\n"


def add_ptx(file: NinjaFile, cuda: Cuda, cxx: str, flags: str) -> None:
    """Add a library for each of PTX_ARCHITECTURES: PTX of every kernel file, its translation, its object."""
    nvcc = f"{cuda.nvcc} -ccbin {cxx} {NVCC_FLAGS} {include_flags(TO_ROOT)}"
    file.rule("ptx", f"{nvcc} $flags -ptx -MD -MF $out.d $in -o $out", finds_headers=True)
    python = f"PYTHONPATH={TO_ROOT} $${{PYTHON:-python3}}"
    file.rule("translate", f"{python} -m build_support.ptx $in $out", restat=True)
    translator = " ".join(
        f"{TO_ROOT}/build_support/ptx/{path.name}"
        for path in sorted((ROOT / "build_support" / "ptx").glob("*.py"))
    )
    for number in PTX_ARCHITECTURES:
        target, objects = f"ptx-sm_{number}", []
        for path in kernel_sources():
            source = path.relative_to(ROOT)
            stem = Path(target, source.relative_to("csrc/kernels").with_suffix(""))
            file.build(f"{stem}.ptx", "ptx", f"{TO_ROOT}/{source}", f"-arch=compute_{number}")
            file.build(f"{stem}.cpp", "translate", f"{stem}.ptx | {translator}")
            objects.append(f"{stem}.o")
            file.build(objects[-1], "cxx", f"{stem}.cpp", flags)
        file.link(f"lib{target}.so", objects, "")
        file.build(target, "phony", f"lib{target}.so")


def describe(tools: Toolchain, jobs: int) -> list[str]:
    """Sentences for the user: what is built, with which compilers, and how long a clean build takes."""
    seconds = CPU_SECONDS
    if tools.cuda is None:
        lines = [f"CPU only, with {tools.cxx} ({tools.why_no_cuda})"]
    else:
        chosen = tools.cuda.architectures
        seconds += ARCHITECTURE_SECONDS * len(chosen.machine_code)
        lines = [
            *chosen.notes,
            f"CPU, with {tools.cxx}, and CUDA, with {tools.cuda.name}, for {chosen} ({chosen.reason})",
        ]
    minutes = max(1, round(seconds / jobs / 60))
    return [
        *lines,
        f"a clean build takes about {minutes} min with {jobs} jobs on an idle machine",
    ]


def build(tools: Toolchain) -> Mapping[str, Path]:
    """Compile everything that is out of date and return the libraries by name; prints the progress.

    Raises:
        subprocess.CalledProcessError: if a compiler failed; ninja has printed its message.
    """
    jobs = int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)
    for line in describe(tools, jobs):
        print(f"specdec_ext: {line}", flush=True)
    BUILD.mkdir(parents=True, exist_ok=True)
    (BUILD / "build.ninja").write_text(ninja_file(tools))
    began = time.monotonic()
    subprocess.run(
        [tools.ninja, "-C", str(BUILD), "-j", str(jobs)],
        check=True,
        env={"NINJA_STATUS": "[%f of %t, %es] ", **os.environ},
    )
    print(f"specdec_ext: native libraries built in {time.monotonic() - began:.0f} s", flush=True)
    return {name: BUILD / f"{name}.abi3.so" for name in LIBRARIES}
