"""The two families of GPUs of which the kernels have PTX: where one of them is enough."""

from __future__ import annotations

import pytest
from helpers.ops import emulation

pytestmark = [pytest.mark.emulated, pytest.mark.ptx]


def instructions(path) -> list[str]:
    """The lines of a PTX file without comments and without the name of the family."""
    lines = path.read_text().splitlines()
    return [line for line in lines if not line.startswith(("//", ".target"))]


def test_only_draft_head_has_other_ptx_below_sm_90():
    """So the tests of all other kernels leave out one of the families (``emulation.PARAMS``)."""
    if not emulation.has_ptx():
        pytest.skip("PTX needs nvcc, which the build has not found")
    older, newer = (emulation.BUILD / name for name in emulation.PTX)
    files = {path.relative_to(newer) for path in newer.rglob("*.ptx")}
    assert files == {path.relative_to(older) for path in older.rglob("*.ptx")}
    different = {
        path.stem for path in files if instructions(older / path) != instructions(newer / path)
    }
    heads = {path.stem for path in files if path.stem.startswith("draft_head_")}
    assert different == heads and len(files) > len(heads) > 0
