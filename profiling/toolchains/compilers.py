"""Install CUDA compilers from the package index.

For CUDA 12 the index has only ptxas (``nvidia-cuda-nvcc-cu12``), for CUDA 13 all of nvcc
(``nvidia-cuda-nvcc`` and its dependencies). A ptxas of CUDA 12 compiles the PTX of an nvcc 13 whose
``.version`` line is replaced by the version that this ptxas reads; a feature that the ptxas does not have
is then an error.
"""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

# CUDA release -> the PTX version that its ptxas reads, from the release notes of the PTX manual.
PTX_VERSIONS = {"12.4": "8.4", "12.6": "8.5", "12.8": "8.7", "12.9": "8.8"}
PTXAS_RELEASES = ("12.4.131", "12.6.85", "12.8.93", "12.9.86")
# nvcc -> the release of its C++ headers, which have other version numbers from 13.3 on.
NVCC_RELEASES = {"13.0.88": "13.0.*", "13.5.37": "13.3.5.0.6"}
DISASSEMBLER_RELEASE = "13.5.37"


@dataclass(frozen=True)
class Compiler:
    """A compiler of machine code.

    Attributes:
        release: CUDA release, such as "12.4.131".
        ptxas: path of ptxas.
        nvcc: path of nvcc, or None if there is only ptxas.
        ptx_version: version for the ``.version`` line of its input; None: unchanged.
    """

    release: str
    ptxas: Path
    nvcc: Path | None = None
    ptx_version: str | None = None

    def architectures(self) -> set[int]:
        """The compute capabilities that it supports, 8.0 as 80."""
        return read_architectures(answer(self.ptxas, "--help"))


def read_architectures(text: str) -> set[int]:
    """The ``sm_`` targets in the output of ``ptxas --help``, without those that have a suffix."""
    return {int(number) for number in re.findall(r"'sm_(\d+)'", text)}


def answer(program: Path, *arguments: str) -> str:
    return subprocess.run(
        [str(program), *arguments], capture_output=True, text=True, check=True
    ).stdout


def with_ptx_version(ptx: str, version: str | None) -> str:
    """Return PTX with this version in its header."""
    if version is None:
        return ptx
    changed, count = re.subn(r"^\.version .*$", f".version {version}", ptx, flags=re.MULTILINE)
    if count != 1:
        raise ValueError(f"expected one .version line in the PTX, found {count}")
    return changed


def installed(folder: Path, *requirements: str) -> Path:
    """Install these packages in ``folder`` unless they are there already; returns the folder."""
    stamp = folder / ".installed"
    wanted = "\n".join(requirements)
    if not stamp.exists() or stamp.read_text() != wanted:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder)]
        subprocess.run([*command, "--upgrade", "--no-deps", *requirements], check=True)
        stamp.write_text(wanted)
    return folder


def program(folder: Path, name: str) -> Path:
    """Find the program of this name below ``folder``."""
    found = [path for path in folder.rglob(name) if path.is_file() and path.parent.name == "bin"]
    if len(found) != 1:
        raise FileNotFoundError(f"expected one bin/{name} below {folder}, found {len(found)}")
    found[0].chmod(0o755)
    return found[0]


def install_ptxas(folder: Path, release: str) -> Compiler:
    place = installed(folder / f"ptxas-{release}", f"nvidia-cuda-nvcc-cu12=={release}")
    version = PTX_VERSIONS[release.rpartition(".")[0]]
    return Compiler(release, program(place, "ptxas"), ptx_version=version)


def install_nvcc(folder: Path, release: str) -> Compiler:
    """Install everything that ``nvcc -cubin`` needs: front end, optimiser, assembler and headers."""
    minor = release.rpartition(".")[0]
    parts = ("nvidia-cuda-crt", "nvidia-nvvm", "nvidia-cuda-runtime")
    place = installed(
        folder / f"nvcc-{release}",
        f"nvidia-cuda-nvcc=={release}",
        *(f"{part}=={minor}.*" for part in parts),
        f"nvidia-cuda-cccl=={NVCC_RELEASES[release]}",
    )
    nvcc = program(place, "nvcc")
    for path in (*nvcc.parent.iterdir(), *place.rglob("cicc")):
        if path.is_file():
            path.chmod(0o755)
    return Compiler(release, program(place, "ptxas"), nvcc)


def install_disassembler(folder: Path) -> Path:
    """Install nvdisasm, which reads the machine code of every architecture that the compilers know."""
    requirement = f"nvidia-cuda-nvdisasm=={DISASSEMBLER_RELEASE}"
    return program(installed(folder / "nvdisasm", requirement), "nvdisasm")
