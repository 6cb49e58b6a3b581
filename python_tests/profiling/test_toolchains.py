"""profiling/toolchains: machine code is parsed correctly, each rule detects a violation, tables show it."""

from pathlib import Path

import pytest
from toolchains import matrix, sass
from toolchains.compilers import read_architectures, with_ptx_version
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
