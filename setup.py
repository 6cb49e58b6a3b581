"""Native part of the build: the op library and the host module, compiled by ninja.

    pip install --no-build-isolation .        # or -e .; the build folder build/native is incremental

Two shared libraries come out of ``csrc/``:

- ``specdec_ext/_ops.abi3.so``: kernels, CPU ops and glue on torch's stable ABI (one binary for
  torch >= 2.10, with and without CUDA, and for every Python), loaded by ``specdec_ext.ops``;
- ``specdec_ext/_host.*.so``: the pybind11 module for host-side state.

A third one is not part of the package and built on demand (``ninja -C build/native emulated``, or
``emulated-sanitized`` with AddressSanitizer and UBSan): the ops with CPU tensors in and out, computed by
the CUDA kernels compiled for the host (``csrc/emulation``). The tests use it.

torch's own BuildExtension is not used because it refuses ``.cu`` files under a torch without CUDA.

Environment: ``SPECDEC_CUDA=auto|0|1`` (auto: nvcc is found), ``TORCH_CUDA_ARCH_LIST``, ``CXX``,
``NVCC``, ``MAX_JOBS``, ``SPECDEC_WATCHDOG=1`` for CUDA kernels that fail where they would hang.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from glob import glob
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
BUILD = ROOT / "build" / "native"
# Emulated kernels: -O1, because the sources are templates over templates and only tests run them.
EMULATED_FLAGS = "-O1 -g1 -DSPECDEC_EMULATED -DSPECDEC_WITH_CUDA -Wno-unknown-pragmas"
SANITIZE_FLAGS = "-fsanitize=address,undefined -fno-sanitize-recover=all"
DEFAULT_CUDA_ARCHS = "8.0;8.9;9.0;10.0;12.0"
TORCH_TARGET_VERSION = "0x020a000000000000"  # the stable ABI of torch 2.10

# -ffp-contract=off: the noise must have the same bits everywhere (csrc/include/specdec/platform.h).
# The two flags after it change no result; without them loops over float expressions do not vectorise.
CXX_FLAGS = (
    "-std=c++20 -O3 -fPIC -fvisibility=hidden -Wall -Wextra -DNDEBUG "
    "-ffp-contract=off -fno-trapping-math -fno-math-errno"
)
# A kernel that spills registers or needs a stack frame fails the build.
NVCC_FLAGS = (
    "-std=c++20 -O3 -lineinfo -DNDEBUG --expt-relaxed-constexpr "
    "-Xcompiler=-fPIC,-fvisibility=hidden,-ffp-contract=off "
    "-Xptxas=-v,--warn-on-spills,--warn-on-local-memory-usage,--warning-as-error"
)


def package_dir(package: str) -> Path:
    """Where a package is installed, without importing it."""
    spec = importlib.util.find_spec(package)
    if spec is None:
        sys.exit(f"specdec_ext needs {package} to build: install it and use --no-build-isolation")
    return Path(spec.submodule_search_locations[0])


def find_nvcc() -> str | None:
    """nvcc, or None for a CPU build, as SPECDEC_CUDA asks."""
    mode = os.environ.get("SPECDEC_CUDA", "auto")
    if mode not in ("auto", "0", "1"):
        sys.exit(f"SPECDEC_CUDA must be auto, 0 or 1, got {mode!r}")
    nvcc = os.environ.get("NVCC") or shutil.which("nvcc")
    if nvcc is None and "CUDA_HOME" in os.environ:
        nvcc = shutil.which("nvcc", path=os.path.join(os.environ["CUDA_HOME"], "bin"))
    if mode == "1" and nvcc is None:
        sys.exit("SPECDEC_CUDA=1, but nvcc is neither in PATH nor in CUDA_HOME/bin nor in NVCC")
    if mode == "auto" and nvcc is None:
        print("specdec_ext: nvcc not found, building for the CPU only; add nvcc to PATH for CUDA")
    return None if mode == "0" else nvcc


def cuda_include(nvcc: str) -> str:
    """The toolkit's include flags; nvcc itself is asked, because it may be a wrapper or a link."""
    dry_run = subprocess.run(
        [nvcc, "--dryrun", "-x", "cu", os.devnull], capture_output=True, text=True, check=True
    ).stderr
    (line,) = [line for line in dry_run.splitlines() if line.startswith("#$ INCLUDES=")]
    return line.removeprefix("#$ INCLUDES=").replace('"', "").strip().replace("-I", "-isystem ")


def gencode_flags() -> str:
    """Machine code for every architecture, from one run of the compiler's front end for those below 9.0
    and one for those from there on: no kernel tells more of them apart.
    """
    codes: dict[str, list[str]] = {}
    archs = os.environ.get("TORCH_CUDA_ARCH_LIST") or DEFAULT_CUDA_ARCHS
    for arch in archs.replace(" ", ";").split(";"):
        number = arch.removesuffix("+PTX").replace(".", "")
        family = number
        if number.isdigit() and int(number) >= 80:
            family = "90" if int(number) >= 90 else "80"
        codes.setdefault(family, []).append(f"sm_{number}")
        if arch.endswith("+PTX"):
            codes.setdefault(number, []).append(f"compute_{number}")
    return " ".join(
        f"'-gencode=arch=compute_{family},code=[{','.join(targets)}]'"
        for family, targets in codes.items()
    )


def nvcc_command(nvcc: str) -> str:
    """Compiles a .cu file for all architectures; sources and outputs are to follow."""
    cxx = os.environ.get("CXX", "c++")
    watchdog = "-DSPECDEC_WATCHDOG" if os.environ.get("SPECDEC_WATCHDOG") == "1" else ""
    return f"{nvcc} -ccbin {cxx} {NVCC_FLAGS} {watchdog} {gencode_flags()} -I{ROOT}/csrc/include"


def write_ninja(nvcc: str | None, libraries: dict[str, Path]) -> Path:
    """build.ninja for `libraries` (extension name -> shared library)."""
    torch = package_dir("torch")
    cxx = os.environ.get("CXX", "c++")
    include = f"-I{ROOT}/csrc/include"
    stable_abi = f"-isystem {torch}/include -DTORCH_TARGET_VERSION={TORCH_TARGET_VERSION}"
    ops_flags = f"{include} {stable_abi}"
    if nvcc:
        ops_flags += f" -DSPECDEC_WITH_CUDA {cuda_include(nvcc)}"
    host_flags = (
        f"{include} -I{ROOT}/csrc -isystem {sysconfig.get_path('include')} "
        f"-isystem {package_dir('pybind11')}/include"
    )
    lines = [
        "rule cxx",
        f"  command = {cxx} {CXX_FLAGS} $flags -MD -MF $out.d -c $in -o $out",
        "  deps = gcc",
        "  depfile = $out.d",
        "rule link",
        f"  command = {cxx} -shared $in -o $out $flags",
    ]
    if nvcc:
        lines += [
            "rule link_cuda",
            f"  command = {nvcc} -ccbin {cxx} -cudart static -shared $in -o $out $flags",
            "rule nvcc",
            f"  command = {nvcc_command(nvcc)} -MD -MF $out.d -c $in -o $out",
            "  deps = gcc",
            "  depfile = $out.d",
        ]

    def compile_all(pattern: str, rule: str, flags: str = "", folder: str = "") -> list[str]:
        objects = []
        for source in sorted(glob(str(ROOT / "csrc" / pattern))):
            objects.append(os.path.join(folder, os.path.relpath(source, ROOT / "csrc") + ".o"))
            lines.extend([f"build {objects[-1]}: {rule} {source}", f"  flags = {flags}"])
        return objects

    def link(library: Path, objects: list[str], rule: str = "link", flags: str = "") -> None:
        lines.extend([f"build {library}: {rule} {' '.join(objects)}", f"  flags = {flags}"])

    ops = compile_all("cpu/*.cpp", "cxx", include) + compile_all("ops/*.cpp", "cxx", ops_flags)
    link_rule, link_flags = "link", f"-L{torch}/lib -ltorch_cpu"
    if nvcc:
        ops += compile_all("kernels/*.cu", "nvcc")
        link_rule, link_flags = "link_cuda", f"{link_flags} -ldl -Xlinker --exclude-libs,ALL"
    link(libraries["specdec_ext._ops"], ops, link_rule, link_flags)
    host = compile_all("bindings/*.cpp", "cxx", host_flags) + compile_all(
        "host/*.cpp", "cxx", include
    )
    link(libraries["specdec_ext._host"], host)
    lines.append(f"default {' '.join(map(str, libraries.values()))}")

    for target, sanitize in (("emulated", ""), ("emulated-sanitized", SANITIZE_FLAGS)):
        flags = f"-I{ROOT}/csrc/emulation {include} {stable_abi} {EMULATED_FLAGS} {sanitize}"
        objects = [
            *compile_all("ops/*.cpp", "cxx", flags, target),
            *compile_all("emulation/*.cpp", "cxx", f"{flags} -O2", target),
            *compile_all("kernels/*.cu", "cxx", f"-x c++ {flags}", target),
        ]
        library = BUILD / f"lib{target}.so"
        link(library, objects, flags=f"{sanitize} -L{torch}/lib -ltorch_cpu")
        lines.append(f"build {target}: phony {library}")

    path = BUILD / "build.ninja"
    BUILD.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    return path


def ninja_command() -> str:
    if importlib.util.find_spec("ninja"):
        import ninja

        return os.path.join(ninja.BIN_DIR, "ninja")
    return shutil.which("ninja") or sys.exit("specdec_ext needs ninja to build: pip install ninja")


class NinjaBuild(build_ext):
    """Builds both libraries incrementally in build/native and copies them to where they belong."""

    def build_extensions(self) -> None:
        libraries = {
            extension.name: BUILD / os.path.basename(self.get_ext_filename(extension.name))
            for extension in self.extensions
        }
        command = [
            ninja_command(),
            "-f",
            str(write_ninja(find_nvcc(), libraries)),
            "-C",
            str(BUILD),
        ]
        if "MAX_JOBS" in os.environ:
            command += ["-j", os.environ["MAX_JOBS"]]
        subprocess.run(command, check=True)
        for name, library in libraries.items():
            target = Path(self.get_ext_fullpath(name))
            target.parent.mkdir(parents=True, exist_ok=True)
            # A new file instead of new contents: a process may have the old one mapped.
            target.unlink(missing_ok=True)
            shutil.copyfile(library, target)


if __name__ == "__main__":
    setup(
        ext_modules=[
            Extension("specdec_ext._ops", sources=[], py_limited_api=True),
            Extension("specdec_ext._host", sources=[]),
        ],
        cmdclass={"build_ext": NinjaBuild},
    )
