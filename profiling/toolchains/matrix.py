"""Compile every kernel for every architecture with every compiler, and read the results."""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from cuda_kernels.kernel_report import demangle, parse_ptxas
from text_table import format_markdown

from build_support.architectures import family_of
from build_support.native import NVCC_FLAGS, ROOT, include_flags
from toolchains import sass
from toolchains.compilers import Compiler, with_ptx_version

# One architecture of each kind since 8.0, without embedded ones.
ARCHITECTURES = (80, 86, 89, 90, 100, 103, 110, 120, 121)


@dataclass(frozen=True)
class Outcome:
    """One source file, compiled by one compiler for one architecture.

    Attributes:
        release: release of the compiler.
        arch: compute capability, 9.0 as 90.
        source: file name.
        kernels: number of kernels.
        error: message of the compiler if it failed.
        spills: names of kernels that use local memory.
        findings: violations of the rules of :mod:`toolchains.sass`.
        wide_loads: 128-bit global loads.
        global_loads: all global loads.
        commit: the last commit that changed csrc, with a + if files there were changed since.
    """

    release: str
    arch: int
    source: str
    kernels: int = 0
    error: str = ""
    spills: tuple[str, ...] = ()
    findings: tuple[str, ...] = ()
    wide_loads: int = 0
    global_loads: int = 0
    commit: str = ""

    @property
    def is_clean(self) -> bool:
        return not (self.error or self.spills or self.findings)

    @property
    def key(self) -> tuple[tuple[int, ...], str, int]:
        """Compiler, source and architecture: unique, and the order of the results."""
        return tuple(map(int, self.release.split("."))), self.source, self.arch


def run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True)


def make_ptx(compiler: Compiler, source: Path, family: int, folder: Path) -> Path:
    """Make the PTX of a source file for a family of architectures with the nvcc of a compiler.

    Raises:
        RuntimeError: if nvcc failed, with its message.
    """
    own = folder / compiler.release
    own.mkdir(parents=True, exist_ok=True)
    target = own / f"{source.stem}.compute_{family}.ptx"
    arch = f"-arch=compute_{family}"
    flags = [*NVCC_FLAGS.split(), *include_flags().split(), arch]
    done = run([str(compiler.nvcc), *flags, "-ptx", str(source), "-o", str(target)])
    if done.returncode != 0:
        raise RuntimeError(done.stderr.strip())
    return target


def assemble(compiler: Compiler, ptx: Path, source: str, arch: int, nvdisasm: Path) -> Outcome:
    """Make machine code from PTX and check it."""
    text = ptx.with_name(f"{ptx.stem}.{compiler.release}.sm_{arch}.ptx")
    text.write_text(with_ptx_version(ptx.read_text(), compiler.ptx_version))
    cubin = text.with_suffix(".cubin")
    command = [str(compiler.ptxas), "-v", "-O3", f"-arch=sm_{arch}", str(text), "-o", str(cubin)]
    done = run(command)
    if done.returncode != 0:
        return Outcome(compiler.release, arch, source, error=done.stderr.strip())
    entries = parse_ptxas(done.stderr)
    listing = run([str(nvdisasm), "-c", str(cubin)])
    if listing.returncode != 0:
        return Outcome(compiler.release, arch, source, error=listing.stderr.strip())
    functions = sass.parse(listing.stdout)
    if {each.name for each in functions} < {each.symbol for each in entries}:
        raise ValueError(
            f"{cubin.name}: the output of nvdisasm has changed; adapt toolchains.sass.parse"
        )
    names = demangle({entry.symbol for entry in entries})
    loads = [sass.count_loads(each) for each in functions]
    for path in (text, cubin):
        path.unlink()
    return Outcome(
        compiler.release,
        arch,
        source,
        kernels=len(entries),
        spills=tuple(names[each.symbol] for each in entries if each.touches_local_memory),
        findings=tuple(findings(functions, names)),
        wide_loads=sum(wide for wide, _ in loads),
        global_loads=sum(every for _, every in loads),
    )


def findings(functions: Iterable[sass.Function], names: dict[str, str]) -> list[str]:
    """One line for each rule that a kernel breaks, such as "name: 3 x local memory: LDL at 0x10"."""
    lines = []
    for function in functions:
        found = sass.check(function)
        for rule, count in Counter(each.rule for each in found).items():
            first = next(each for each in found if each.rule == rule)
            name = names.get(function.name, function.name)
            lines.append(f"{name}: {count} x {first}")
    return lines


def compile_all(
    compilers: Sequence[Compiler],
    front_end: Compiler,
    nvdisasm: Path,
    sources: Sequence[Path],
    folder: Path,
) -> list[Outcome]:
    """Compile every source with every compiler for every architecture that the compiler supports.

    Args:
        compilers: those that have an nvcc compile the sources, all others the PTX of ``front_end``.
        front_end: a compiler that has an nvcc.
        nvdisasm: the disassembler.
        sources: ``.cu`` files.
        folder: folder for intermediate files.
    """
    commit = csrc_commit()
    ptx: dict[tuple[Compiler, Path, int], Future[Path]] = {}
    outcomes: list[Future[Outcome]] = []

    def work(compiler: Compiler, source: Path, arch: int, made: Future[Path]) -> Outcome:
        try:
            path = made.result()
        except RuntimeError as error:
            return Outcome(compiler.release, arch, source.name, error=str(error))
        return assemble(compiler, path, source.name, arch, nvdisasm)

    # Every PTX is submitted before the work that waits for it, so the pool can't deadlock.
    with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)) as pool:
        for compiler in compilers:
            known = sorted(compiler.architectures() & set(ARCHITECTURES))
            maker = compiler if compiler.nvcc else front_end
            for source in sources:
                for arch in known:
                    job = (maker, source, family_of(arch))
                    if job not in ptx:
                        ptx[job] = pool.submit(make_ptx, *job, folder)
                    outcomes.append(pool.submit(work, compiler, source, arch, ptx[job]))
        return [replace(each.result(), commit=commit) for each in outcomes]


def csrc_commit() -> str:
    """Short hash of the last commit that changed csrc, with a + if files there were changed since."""
    if not (ROOT / ".git").exists():
        return "none"
    git = ["git", "-C", str(ROOT)]
    commit = run([*git, "log", "-1", "--format=%h", "--", "csrc"]).stdout.strip()
    changed = run([*git, "status", "--porcelain", "--", "csrc"]).stdout
    return f"{commit}+" if changed else commit


def merge(kept: Iterable[Outcome], new: Iterable[Outcome]) -> list[Outcome]:
    """Return both, sorted; a new outcome replaces the kept one that has the same key."""
    by_key = {each.key: each for each in (*kept, *new)}
    return [by_key[key] for key in sorted(by_key)]


def read(out: Path) -> list[Outcome]:
    """Read the results in ``out``.json; without that file there are none."""
    file = out.with_suffix(".json")
    rows = json.loads(file.read_text()) if file.exists() else []
    lists = ("spills", "findings")
    return [Outcome(**row | {name: tuple(row[name]) for name in lists}) for row in rows]


def summary(outcomes: Sequence[Outcome]) -> list[list[str]]:
    """One row per compiler, one cell per architecture: the number of kernels and their problems."""
    rows = []
    for release in dict.fromkeys(each.release for each in outcomes):
        row = [release]
        for arch in ARCHITECTURES:
            cell = [each for each in outcomes if (each.release, each.arch) == (release, arch)]
            row.append(describe(cell))
        rows.append(row)
    return rows


def describe(cell: Sequence[Outcome]) -> str:
    """Number of kernels and problems, such as "54, 1 files failed, 2 spill"; empty without outcomes."""
    if not cell:
        return ""
    parts = [str(sum(each.kernels for each in cell))]
    for count, what in (
        (sum(bool(each.error) for each in cell), "files failed"),
        (sum(len(each.spills) for each in cell), "spill"),
        (sum(len(each.findings) for each in cell), "findings"),
    ):
        if count:
            parts.append(f"{count} {what}")
    return ", ".join(parts)


def wide_load_shares(outcomes: Sequence[Outcome]) -> list[list[str]]:
    """One row per source: commits, then 128-bit global loads / all global loads of the newest compiler."""
    newest = outcomes[-1].release
    rows = []
    for source in sorted({each.source for each in outcomes}):
        commits = {each.commit: None for each in outcomes if each.source == source}
        row = [source, ", ".join(commits)]
        for arch in ARCHITECTURES:
            found = [
                each
                for each in outcomes
                if (each.release, each.arch, each.source) == (newest, arch, source)
            ]
            row.append(f"{found[0].wide_loads}/{found[0].global_loads}" if found else "")
        rows.append(row)
    return rows


def write(outcomes: Sequence[Outcome], out: Path, front_end: str) -> None:
    """Write the results to ``out``.md and ``out``.json."""
    header = [f"sm_{arch}" for arch in ARCHITECTURES]
    lines = [
        "# Kernels by compiler",
        "",
        f"Made by `make toolchains`; compilers of CUDA 12 compile the PTX of nvcc {front_end}. A cell shows",
        "the number of compiled kernels, of files that failed, of kernels that spill registers, and of",
        "findings, which are violations of the rules of `profiling/toolchains/sass.py`. Empty: the compiler",
        "does not support the GPU.",
        "",
        format_markdown(["CUDA", *header], summary(outcomes)),
        "",
        "128-bit global loads / all global loads, asynchronous copies included, by CUDA "
        f"{outcomes[-1].release}.",
        "`commit` is the last commit that had changed `csrc/` when the source was compiled.",
        "",
        format_markdown(["source", "commit", *header], wide_load_shares(outcomes)),
        "",
    ]
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".md").write_text("\n".join(lines))
    values = [asdict(each) for each in outcomes]
    out.with_suffix(".json").write_text(json.dumps(values, indent=1) + "\n")
