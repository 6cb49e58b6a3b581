"""profiling/toolchains: machine code is parsed correctly, each rule detects a violation, tables show it."""

from pathlib import Path

import pytest
from toolchains import matrix, sass
from toolchains.compilers import Compiler, read_architectures, with_ptx_version
from toolchains.matrix import Outcome


def listing(*instructions: str) -> str:
    """The output of nvdisasm for one kernel."""
    lines = ["//--------------------- .text.kernel --------", "kernel:", ".L_x_0:"]
    lines += [f"        /*{16 * i:04x}*/   {each} ;" for i, each in enumerate(instructions)]
    return "\n".join(lines)


def broken_rules(*instructions: str) -> list[str]:
    (function,) = sass.parse(listing(*instructions))
    assert len(function.instructions) == len(instructions)
    return [finding.rule for finding in sass.check(function)]


FENCE = "MEMBAR.ALL.GPU"
ATOMIC = "ATOM.E.ADD.STRONG.GPU PT, R3, desc[UR10][R20.64], R25"
STRONG_LOAD = "@!P0 LD.E.STRONG.GPU R19, desc[UR10][R20.64]"
INVALIDATE = "CCTL.IVALL"


@pytest.mark.parametrize("instruction", ["@P0 LDL.LU R20, [R1+0x28]", "STL.64 [R1+0x20], R18"])
def test_local_memory(instruction: str) -> None:
    assert broken_rules("IADD3 R0, R1, R2, RZ", instruction) == ["local memory"]


def test_constant_loads_are_for_kernels_whose_blocks_do_not_wait_for_each_other() -> None:
    load = "LDG.E.128.CONSTANT R4, desc[UR4][R2.64]"
    assert broken_rules(load) == []
    assert broken_rules(load, FENCE) == ["constant load"]
    assert broken_rules(load, "MEMBAR.ALL.CTA") == []


def test_atomics_release_and_acquire() -> None:
    assert broken_rules(FENCE, "ERRBAR", ATOMIC, INVALIDATE) == []
    assert broken_rules("MEMBAR.ALL.CTA", ATOMIC, INVALIDATE) == ["release"]
    assert broken_rules(FENCE, ATOMIC, "EXIT") == ["acquire"]
    store, load = "STG.E [R2.64], R4", "LDG.E R4, [R2.64]"
    assert broken_rules(store, FENCE, ATOMIC, INVALIDATE, load) == []
    assert broken_rules(FENCE, store, ATOMIC, INVALIDATE, load) == ["release"]
    assert broken_rules(FENCE, ATOMIC, load, INVALIDATE) == ["acquire"]


def test_strong_loads_acquire() -> None:
    assert broken_rules(STRONG_LOAD, INVALIDATE) == []
    assert broken_rules(STRONG_LOAD, "EXIT") == ["acquire"]
    assert broken_rules("LD.E R19, desc[UR10][R20.64]") == []


def test_global_loads_are_counted() -> None:
    (function,) = sass.parse(
        listing(
            "LDG.E.128 R4, desc[UR4][R2.64]",
            "LDGSTS.E.BYPASS.128 [R5], desc[UR4][R2.64]",
            "LDG.E R4, desc[UR4][R2.64]",
            "LDS.128 R4, [R2]",
        )
    )
    assert sass.count_loads(function) == (2, 3)


def test_ptx_gets_the_version_that_a_compiler_reads() -> None:
    ptx = "//\n.version 9.0\n.target sm_80\n"
    assert with_ptx_version(ptx, "8.4") == "//\n.version 8.4\n.target sm_80\n"
    assert with_ptx_version(ptx, None) == ptx
    with pytest.raises(ValueError, match="found 0"):
        with_ptx_version(".target sm_80", "8.4")


def test_architectures_of_a_compiler() -> None:
    text = "Allowed values: 'compute_90','lto_90','sm_80',\n 'sm_90', 'sm_90a','sm_120f'."
    assert read_architectures(text) == {80, 90}


def test_the_table_tells_what_is_wrong(tmp_path: Path) -> None:
    outcomes = [
        Outcome("12.4.131", 80, "a.cu", kernels=3, spills=("walk",)),
        Outcome("12.4.131", 80, "b.cu", error="syntax"),
        Outcome("13.0.88", 120, "a.cu", kernels=2, findings=("walk: 2 x release",), wide_loads=1),
    ]
    matrix.write(outcomes, tmp_path / "out", "13.0.88")
    table = (tmp_path / "out.md").read_text()
    assert "| 12.4.131 | 3, 1 files failed, 1 spill |" in table
    assert "2, 1 findings" in table
    assert [each.is_clean for each in outcomes] == [False, False, False]
    assert Outcome("13.0.88", 90, "a.cu", kernels=2).is_clean


def test_a_run_in_parts_keeps_the_other_rows(tmp_path: Path) -> None:
    old = [
        Outcome("12.4.131", 80, "a.cu", kernels=3, spills=("walk",), commit="1111111"),
        Outcome("12.4.131", 80, "b.cu", kernels=1, commit="1111111"),
        Outcome("12.10.7", 80, "a.cu", kernels=3, commit="1111111"),
    ]
    matrix.write(old, tmp_path / "out", "13.0.88")
    new = Outcome("12.4.131", 80, "a.cu", kernels=3, commit="2222222")
    assert matrix.read(tmp_path / "missing") == []
    merged = matrix.merge(matrix.read(tmp_path / "out"), [new])
    assert merged == [new, old[1], old[2]]
    matrix.write(merged, tmp_path / "out", "13.0.88")
    table = (tmp_path / "out.md").read_text()
    assert "| a.cu | 2222222, 1111111 |" in table and "| b.cu | 1111111 |" in table


def program(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(("#!/bin/sh", *lines)))
    path.chmod(0o755)
    return path


def test_a_later_run_compiles_the_sources_as_they_are_then(tmp_path: Path) -> None:
    """PTX of an earlier run used to be compiled again by all compilers that have no nvcc."""
    nvcc = program(
        tmp_path / "nvcc",
        'while [ "$1" != -ptx ]; do shift; done',
        'if grep forbidden "$2" >&2; then exit 1; fi',
        '{ echo ".version 9.0"; cat "$2"; } > "$4"',
    )
    ptxas = program(
        tmp_path / "ptxas",
        """if [ "$1" = --help ]; then echo "'sm_80', 'sm_90'"; exit; fi""",
        'if grep unknown "$4" >&2; then exit 1; fi',
        'touch "$6"',
    )
    nvdisasm = program(tmp_path / "nvdisasm")
    front_end = Compiler("13.0.88", ptxas, nvcc)
    compilers = [Compiler("12.4.131", ptxas, ptx_version="8.4"), front_end]
    source = tmp_path / "kernel.cu"
    for text, error in (("good", ""), ("unknown", "unknown"), ("forbidden", "forbidden")):
        source.write_text(f"{text}\n")
        outcomes = matrix.compile_all(compilers, front_end, nvdisasm, [source], tmp_path / "made")
        assert [(each.release, each.arch, each.error) for each in outcomes] == [
            (release, arch, error) for release in ("12.4.131", "13.0.88") for arch in (80, 90)
        ]
        assert {each.commit for each in outcomes} == {matrix.csrc_commit()}
