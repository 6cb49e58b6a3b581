"""Matrices of ``draft_head`` in tiles, of which the kernel copies a slice as one piece of memory."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from cuda_kernels.draft_schedule import Matrix, matrices, phases
from helpers.drafters.head_cases import elements, head_of
from helpers.ops import emulation
from helpers.ops.head_op_cases import OpRun, some_emulated
from helpers.ops.op_cases import DEVICES

from specdec_ext import ops
from specdec_ext.heads.config import DraftHead
from specdec_ext.ops import _library, packed_head
from specdec_ext.tree.config import TreeConfig

CHAIN = TreeConfig(2)
KERNELS = [*emulation.DRAFT_HEAD_PARAMS, *(device for device in DEVICES if device == "cuda")]
# A head, its dtype, and the format of its weights. Sizes are not whole units, slices and tiles.
HEADS: dict[str, tuple[DraftHead, str]] = {
    "float32": (head_of("qk-norm-window", hidden_size=20, intermediate_size=52), "same"),
    "bfloat16": (head_of("eagle3.1", 0, torch.bfloat16, hidden_size=264, intermediate_size=40), "same"),
    "float16": (head_of("no-fc", 0, torch.float16, own_lm_head=True), "same"),
    "int8": (head_of("mtp", 0, torch.bfloat16, hidden_size=272, target_hidden_size=272), "int8"),
    "float8": (head_of("p-eagle", 0, torch.float16, intermediate_size=80), "float8"),
}  # fmt: skip


TILED = packed_head._in_tiles


def in_rows(weight: torch.Tensor, is_paired: bool) -> torch.Tensor:
    """In place of ``packed_head._in_tiles``."""
    return weight


def in_poisoned_tiles(weight: torch.Tensor, is_paired: bool) -> torch.Tensor:
    """Tiles with NaN where there is no weight; int8 has none, and gets -1."""
    tiles = TILED(weight, is_paired).view(torch.uint8)
    used = TILED(torch.ones_like(weight.view(torch.uint8)), is_paired)
    return tiles.masked_fill(used.view(tiles.shape) == 0, 0xFF).view(weight.dtype)


def drafted(name: str, form: Any, device: str, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Two drafts of two rows, with the cache that they leave.

    The first pass over the new elements has none that is the last of its row: it needs no queries.
    """
    head, weights = HEADS[name]
    monkeypatch.setattr(packed_head, "_in_tiles", form)
    run = OpRun.start(head, 2, device=device, weights=weights)
    assert {tensor.ndim for tensor in run.packed.weights} == (
        {1, 2} if form is in_rows else {1, 2, 4}
    )
    results = []
    for new, counts in ((35, [35, 1]), (2, [2, 0])):
        results += run.draft(CHAIN, *elements(head, 2, new), torch.tensor(counts))
    return [*results, run.keys.cpu(), run.values.cpu()]


@pytest.mark.parametrize("device", KERNELS, indirect=True)
@pytest.mark.parametrize("name", some_emulated(HEADS, {"float32", "bfloat16", "int8"}))
def test_tiles_have_the_bits_of_rows(name, device, monkeypatch):
    """Whatever is in the bytes of a tile that hold no weight."""
    expected = drafted(name, in_rows, device, monkeypatch)
    assert expected[2].isfinite().any()
    for ours, theirs in zip(
        drafted(name, in_poisoned_tiles, device, monkeypatch), expected, strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("device", emulation.DRAFT_HEAD_PARAMS, indirect=True)
@pytest.mark.parametrize("form", [TILED, in_rows], ids=["tiles", "rows"])
def test_one_bulk_copy_for_each_stage(form, device, monkeypatch):
    """In rows, each stage takes as many as its tile has rows. Below sm_90 there are none."""
    head, weights = HEADS["bfloat16"]
    monkeypatch.setattr(packed_head, "_in_tiles", form)
    run = OpRun.start(head, 1, device=device, weights=weights)
    before = emulation.num_bulk_copies()
    run.draft(CHAIN, *elements(head, 1, 1))
    copied = emulation.num_bulk_copies() - before

    def copies(matrix: Matrix) -> int:
        return matrix.stages() if form is TILED else matrix.outs * matrix.slices()

    found = matrices(head.config)
    one_launch = sum(
        copies(found[phase.op, phase.layer])
        for phase in phases(head.config, CHAIN, num_new=1)
        if (phase.op, phase.layer) in found
    )
    # "emulated" copies in bulk in two of the three orders of threads.
    launches = {"emulated": 2, "ptx-sm_80": 0, "ptx-sm_90": 3}
    (name,) = [name for name, known in emulation.OPS.items() if known is _library.native]
    assert one_launch > 100 and copied == launches[name] * one_launch


@pytest.mark.parametrize(
    ("outs", "ins", "dtype", "is_paired"),
    [
        (17, 33, torch.float32, False),
        (24, 40, torch.bfloat16, True),
        (20, 8, torch.float16, True),
        (8, 64, torch.int8, False),
        (9, 80, torch.float8_e4m3fn, False),
    ],
    ids=str,
)
def test_place_of_each_weight(outs, ins, dtype, is_paired):
    """Tile, unit, output, element; tiles of gate and up alternate, and zeros fill what is no weight."""
    weight = torch.randint(1, 100, (outs, ins)).to(dtype)
    tiles = packed_head._in_tiles(weight, is_paired)
    unit, part = 64 // dtype.itemsize, outs // 2 if is_paired else outs
    num_tiles = -(-part // 8) * (outs // part)
    assert tiles.shape == (num_tiles, -(-ins // unit), 8, unit) and tiles.is_contiguous()
    tiles, weight = tiles.float(), weight.float()
    for out, k in itertools.product(range(outs), range(ins)):
        tile = out % part // 8 * (outs // part) + out // part
        assert tiles[tile, k // unit, out % part % 8, k % unit] == weight[out, k], (out, k)
    assert tiles.count_nonzero() == weight.count_nonzero() == outs * ins


def test_the_targets_lm_head_stays_in_place(monkeypatch):
    """Its copy would be the largest of all. In 8 bits it is a copy anyway."""
    monkeypatch.setattr(packed_head, "reads_panels", lambda _: False)
    head = head_of("eagle1", dtype=torch.bfloat16)
    lm_head = torch.zeros(97, 32, dtype=torch.bfloat16)
    packed = ops.PackedHead.pack(head, torch.zeros_like(lm_head), lm_head)
    assert packed.weights[1].data_ptr() == lm_head.data_ptr()
    own = head_of("eagle1", dtype=torch.bfloat16, own_lm_head=True)
    packed = ops.PackedHead.pack(own, torch.zeros_like(lm_head))
    assert packed.weights[1].shape == (13, 1, 8, 32)
    small = ops.PackedHead.pack(head, torch.zeros_like(lm_head), lm_head, "int8")
    assert small.weights[1].shape == (13, 1, 8, 64)
