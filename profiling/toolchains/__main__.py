"""Compile every kernel with every compiler: ``python profiling/toolchains`` (``make toolchains``).

    python profiling/toolchains --source verify_sampled.cu --add    # measure one file again

Installs the compilers in build/toolchains (a gigabyte), then takes about half an hour on two cores. The exit
code is 1 if a kernel does not compile, spills registers or breaks a rule of toolchains/sass.py.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

PROFILING = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(PROFILING), str(PROFILING.parent)]

from text_table import format_table  # noqa: E402

from build_support.native import ROOT, kernel_sources  # noqa: E402
from toolchains import matrix  # noqa: E402
from toolchains.compilers import (  # noqa: E402
    NVCC_RELEASES,
    PTXAS_RELEASES,
    install_disassembler,
    install_nvcc,
    install_ptxas,
)

RELEASES = (*PTXAS_RELEASES, *NVCC_RELEASES)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="toolchains", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--release", action="append", choices=RELEASES, help="only this compiler; may be repeated"
    )
    parser.add_argument("--source", action="append", help="only this .cu file; may be repeated")
    results = PROFILING / "results" / "kernels" / "toolchains"
    parser.add_argument("--out", type=Path, default=results, help="write OUT.json and OUT.md")
    parser.add_argument(
        "--add",
        action="store_true",
        help="keep the results in OUT.json that this run does not measure",
    )
    given = parser.parse_args()
    folder = ROOT / "build" / "toolchains"
    folder.mkdir(parents=True, exist_ok=True)
    wanted = given.release or RELEASES
    front_end = install_nvcc(folder, next(iter(NVCC_RELEASES)))
    compilers = [install_ptxas(folder, each) for each in PTXAS_RELEASES if each in wanted]
    compilers += [install_nvcc(folder, each) for each in NVCC_RELEASES if each in wanted]
    sources = kernel_sources()
    if given.source:
        sources = [path for path in sources if path.name in given.source]
    if not sources:
        parser.error(f"--source names no file of csrc/kernels: {given.source}")
    outcomes = matrix.compile_all(
        compilers, front_end, install_disassembler(folder), sources, folder / "made"
    )
    kept = matrix.read(given.out) if given.add else []
    matrix.write(matrix.merge(kept, outcomes), given.out, front_end.release)
    header = ["CUDA", *(f"sm_{arch}" for arch in matrix.ARCHITECTURES)]
    print(format_table(header, matrix.summary(outcomes), left=("CUDA",)))
    bad = [each for each in outcomes if not each.is_clean]
    for each in bad:
        print(f"CUDA {each.release}, sm_{each.arch}, {each.source}:")
        for line in (
            *each.error.splitlines()[:5],
            *(f"{name} spills" for name in each.spills),
            *each.findings,
        ):
            print(f"  {line}")
    print(f"{len(outcomes)} files compiled, {len(bad)} with problems")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
