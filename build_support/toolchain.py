"""Find and check the compilers and tools of a build before it starts; each problem is one sentence."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from build_support import BuildError
from build_support.architectures import (
    VARIABLE,
    Architectures,
    choose,
    read_nvcc_list,
    visible_gpus,
)

OLDEST_NVCC = (12, 0)  # the first version with C++20
OLDEST_TORCH = (2, 10)  # the first version with the stable ABI that csrc/ops/torch_abi declares
# Headers that the host code needs from the standard library, and the kernels from the CUDA toolkit.
CXX_PROBE = "#include <source_location>\n#include <span>\n"
CUDA_PROBE = "#include <cuda_bf16.h>\n#include <cuda_fp16.h>\n#include <cuda_runtime.h>\n"


@dataclass(frozen=True)
class Cuda:
    """A CUDA toolkit that works with the C++ compiler.

    Attributes:
        nvcc: path of nvcc.
        name: name and version of nvcc, for the user.
        includes: flags with which the C++ compiler finds the toolkit's headers.
        runtime: flags that link the CUDA runtime.
        architectures: GPU architectures to compile for.
    """

    nvcc: str
    name: str
    includes: tuple[str, ...]
    runtime: tuple[str, ...]
    architectures: Architectures


@dataclass(frozen=True)
class Toolchain:
    """The tools of a build.

    Attributes:
        cxx: command of the C++ compiler.
        ninja: path of ninja.
        python_include: folder of Python.h.
        cuda: CUDA toolkit; None for a build without CUDA kernels.
        why_no_cuda: reason for a build without CUDA kernels, for the user.
    """

    cxx: str
    ninja: str
    python_include: str
    cuda: Cuda | None
    why_no_cuda: str


def find_toolchain() -> Toolchain:
    """Find and check all tools.

    Raises:
        BuildError: if a tool is missing or does not work.
    """
    check_torch()
    cxx = find_cxx()
    cuda, why_no_cuda = find_cuda(cxx)
    return Toolchain(cxx, find_ninja(), find_python_include(), cuda, why_no_cuda)


def check_torch() -> None:
    """Refuse an installed torch that is too old to load the library; the build itself needs no torch."""
    try:
        installed = version("torch")
    except PackageNotFoundError:
        return
    if tuple(map(int, re.findall(r"\d+", installed)[:2])) < OLDEST_TORCH:
        raise BuildError(
            f"specdec_ext needs torch >= 2.10, but this environment has {installed}: "
            "pip install --upgrade torch"
        )


def find_cxx() -> str:
    cxx = os.environ.get("CXX") or "c++"
    if shutil.which(shlex.split(cxx)[0]) is None:
        raise BuildError(
            f"specdec_ext needs a C++20 compiler, but {cxx} is not in PATH: "
            "install g++ >= 11 or clang++ >= 16, or set CXX to your compiler"
        )
    done = run([*shlex.split(cxx), "-std=c++20", "-x", "c++", "-fsyntax-only", "-"], CXX_PROBE)
    if done.returncode != 0:
        raise BuildError(
            f"specdec_ext needs a C++20 compiler, but {cxx} can't compile C++20 "
            f"({first_error(done)}): install g++ >= 11 or clang++ >= 16, or set CXX to your compiler"
        )
    return cxx


def find_ninja() -> str:
    found = None
    if importlib.util.find_spec("ninja"):
        import ninja

        found = shutil.which("ninja", path=ninja.BIN_DIR or None)
    found = found or shutil.which("ninja")
    if found is None:
        raise BuildError("specdec_ext needs ninja to build: pip install ninja")
    return found


def find_python_include() -> str:
    folder = sysconfig.get_path("include")
    if not Path(folder, "Python.h").exists():
        raise BuildError(
            f"specdec_ext needs Python's headers, but {folder} has no Python.h: "
            "install python3-dev (Debian, Ubuntu) or python3-devel (Fedora)"
        )
    return folder


def find_cuda(cxx: str) -> tuple[Cuda | None, str]:
    """The toolkit to use according to SPECDEC_CUDA, or None and the reason."""
    mode = os.environ.get("SPECDEC_CUDA", "auto")
    if mode not in ("auto", "0", "1"):
        raise BuildError(f"SPECDEC_CUDA={mode!r}; expected auto, 0 or 1")
    if mode == "0":
        return None, "SPECDEC_CUDA=0"
    nvcc = find_nvcc()
    if nvcc is not None:
        return read_cuda(nvcc, cxx), ""
    if mode == "1":
        raise BuildError(
            "SPECDEC_CUDA=1, but nvcc was not found: install it, add it to PATH, or set NVCC or CUDA_HOME "
            "(default: /usr/local/cuda)"
        )
    return None, "nvcc not found; add it to PATH to build the CUDA kernels"


def find_nvcc() -> str | None:
    named = os.environ.get("NVCC")
    if named:
        if shutil.which(named) is None:
            raise BuildError(f"NVCC={named} is not a program: correct or unset it")
        return named
    home = os.environ.get("CUDA_HOME") or "/usr/local/cuda"
    return shutil.which("nvcc") or shutil.which("nvcc", path=os.path.join(home, "bin"))


def read_cuda(nvcc: str, cxx: str) -> Cuda:
    """Ask nvcc for its version, its toolkit and its architectures, and test that it can compile."""
    release = re.search(r"release (\d+)\.(\d+)", answer(nvcc, "--version"))
    if release is None:
        raise BuildError(
            f"{nvcc} --version prints no release: set NVCC to the right program, or SPECDEC_CUDA=0 to build "
            "without CUDA kernels"
        )
    name = f"nvcc {release[1]}.{release[2]}"
    if (int(release[1]), int(release[2])) < OLDEST_NVCC:
        raise BuildError(
            f"the CUDA kernels need nvcc 12.0 or later, but {nvcc} is {name}: "
            "put a newer one first in PATH, or set SPECDEC_CUDA=0 to build without CUDA kernels"
        )
    with tempfile.TemporaryDirectory() as folder:
        probe = Path(folder, "probe.cu")
        probe.write_text(CUDA_PROBE)
        done = run([nvcc, "-ccbin", cxx, "-std=c++20", "-E", "-o", os.devnull, str(probe)])
    if done.returncode != 0:
        raise BuildError(
            f"{nvcc} can't compile with {cxx} ({first_error(done)}): complete the toolkit, set CXX to "
            "another compiler, or set SPECDEC_CUDA=0 to build without CUDA kernels"
        )
    # nvcc is asked for the folders of its toolkit, because it may be a wrapper or a link.
    plan = run([nvcc, "--dryrun", "-x", "cu", os.devnull]).stderr
    variables = dict(re.findall(r"^#\$ (\w+)=(.*)$", plan, re.MULTILINE))
    headers = shlex.split(variables.get("INCLUDES", "") + variables.get("SYSTEM_INCLUDES", ""))
    folders = [word.removeprefix("-I") for word in headers if word != "-isystem"]
    libraries = [word.removeprefix("-L") for word in shlex.split(variables.get("LIBRARIES", ""))]
    return Cuda(
        nvcc=nvcc,
        name=name,
        includes=tuple(f"-isystem {os.path.realpath(folder)}" for folder in folders),
        runtime=find_cuda_runtime(map(Path, libraries), cxx),
        architectures=choose(
            os.environ.get(VARIABLE),
            read_nvcc_list(answer(nvcc, "--list-gpu-code")),
            visible_gpus(),
            name,
        ),
    )


def find_cuda_runtime(folders: Iterable[Path], cxx: str) -> tuple[str, ...]:
    """Flags that link the CUDA runtime: the static library if there is one, else the shared one.

    Toolkits of conda and pip may have only the shared library, and without the file name that -lcudart needs.
    """
    default = run([*shlex.split(cxx), "-print-file-name=libcudart_static.a"]).stdout.strip()
    places = [Path(os.path.realpath(folder)) for folder in [*folders, Path(default).parent]]
    for folder in places:
        if (folder / "libcudart_static.a").exists():
            return (str(folder / "libcudart_static.a"), "-ldl", "-lrt", "-lpthread")
    for folder in places:
        for library in sorted(folder.glob("libcudart.so.1[0-9]")):
            return (str(library), f"-Xlinker -rpath={folder}", "-ldl")
    raise BuildError(
        "the CUDA toolkit has no runtime library to link: install nvidia-cuda-runtime (pip) or "
        "cuda-cudart-dev (conda), or set SPECDEC_CUDA=0 to build without CUDA kernels"
    )


def run(command: list[str], text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, input=text, capture_output=True, text=True)


def answer(nvcc: str, question: str) -> str:
    done = run([nvcc, question])
    if done.returncode != 0:
        raise BuildError(
            f"{nvcc} {question} failed ({first_error(done)}): repair the toolkit, or set SPECDEC_CUDA=0 "
            "to build without CUDA kernels"
        )
    return done.stdout


def first_error(done: subprocess.CompletedProcess[str]) -> str:
    """The most informative line of a failed command's output: the first error, or else the first line."""
    lines = [line.strip() for line in (done.stderr + done.stdout).splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines or [f"exit status {done.returncode}"])[0]
