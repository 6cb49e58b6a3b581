"""The order of work of the fused draft_head is complete, minimal and balanced for heads of published sizes.

``csrc/testing/selftest/draft_head/plan.cpp`` tests the sequences.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from baselines.heads import HEADS
from cuda_kernels.draft_schedule import (
    Matrix,
    Phase,
    levels,
    matrices,
    needed_bytes,
    phases,
    widths,
)

from specdec_ext import _host
from specdec_ext.tree.config import TreeConfig

CHAIN = TreeConfig(depth=5)
TREE = TreeConfig(depth=8, top_k=5, num_nodes=60)
# Number of blocks -> limit of the largest load of a block over the mean in a level. The remainders of all
# matrices go to the same blocks, which has the largest effect with 142 blocks.
BALANCE = {132: 1.05, 114: 1.05, 108: 1.05, 142: 1.065}


def streamed(config, level: list[Phase], num_blocks: int) -> np.ndarray:
    """The bytes of 16-bit weights that each block streams in the phases of a level."""
    found = matrices(config)
    total = np.zeros(num_blocks)
    for phase in level:
        if matrix := found.get((phase.op, phase.layer)):
            total += matrix.rows(num_blocks) * matrix.ins * 2
    return total


def test_phases_of_a_chain_are_in_order():
    order = phases(HEADS["8b"], TreeConfig(depth=2), num_new=3)
    assert order[:4] == [
        Phase("new", 0, "fc", 0, 0, 3),
        Phase("new", 0, "projections", 0, 0, 3),
        Phase("new", 0, "rotate", 0, 0, 3),
        Phase("kept", 0, "attend", 0, 0, 1),
    ]
    last = ["projections", "rotate", "attend", "output", "gate_up", "down", "logits", "grow"]
    assert order[-8:] == [Phase("frontier", 1, op, 0, 0, 1) for op in last]
    assert len(order) == 3 + 6 + 8


def test_widths_are_those_of_the_levels():
    assert widths(CHAIN) == [1] * 5
    assert widths(TREE) == [1] + [5] * 7
    assert widths(TreeConfig(choices=((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 1, 0)))) == [1, 2, 1]
    assert widths(TreeConfig(depth=6, num_nodes=3)) == [1, 1]


def test_matrices_are_those_of_the_head():
    for config in HEADS.values():
        shapes = config.tensor_shapes()
        expected = sum(a * b for a, b in (shape for shape in shapes.values() if len(shape) == 2))
        assert sum(matrix.outs * matrix.ins for matrix in matrices(config).values()) == expected
    eagle1 = replace(HEADS["8b"], kind="eagle1", num_features=1)
    assert matrices(eagle1)["fc", 0] == Matrix(4096, 8192)
    assert matrices(eagle1)["projections", 0] == Matrix(6144, 4096)


@pytest.mark.parametrize("tree", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("name", HEADS)
def test_level_streams_every_row_once(name, tree):
    config = HEADS[name]
    found = matrices(config)
    for number, level in enumerate(levels(phases(config, tree, num_new=6))):
        products = [(phase.op, phase.layer) for phase in level if (phase.op, phase.layer) in found]
        wanted = set(found) if number == 0 else set(found) - {("fc", 0)}
        assert sorted(products) == sorted(wanted)
    for matrix in found.values():
        seen = np.zeros(matrix.outs, dtype=int)
        for _, first, rows in matrix.tiles(132):
            seen[first : first + rows] += 1
        assert (seen == 1).all()


@pytest.mark.parametrize("tree", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("name", HEADS)
def test_draft_streams_no_more_than_it_needs(name, tree):
    config = HEADS[name]
    order = phases(config, tree, num_new=6)
    total = sum(streamed(config, level, 132).sum() for level in levels(order))
    assert 1 <= total / needed_bytes(config, tree) <= 1.01
    # 40 new elements need two passes through fc and projections, and one through all others.
    more = sum(
        streamed(config, level, 132).sum() for level in levels(phases(config, tree, num_new=40))
    )
    again = matrices(config)
    assert more - total == again["fc", 0].size() + again["projections", 0].size()


@pytest.mark.parametrize("num_blocks", BALANCE)
@pytest.mark.parametrize("name", HEADS)
def test_blocks_are_balanced(name, num_blocks):
    config = HEADS[name]
    _, level = levels(phases(config, TreeConfig(depth=2), num_new=3))
    each = streamed(config, level, num_blocks)
    assert each.max() <= BALANCE[num_blocks] * each.mean()


def test_panels_of_a_worked_example():
    """14 pairs are 28 tiles, which read the inputs four times, as 13 pairs do."""
    matrix = Matrix(2 * 27 * 8, 64, is_paired=True)
    assert matrix.rows(2).tolist() == [13 * 16, 14 * 16]
    assert matrix.panels(2) == 8
    assert Matrix(8 * 8, 64).panels(1) == 1
    assert Matrix(8 * 9, 64).panels(1) == 2


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: _host.draft_phases(9, [1], 1), r"num_layers must be in \[1, 8\], got 9"),
        (lambda: _host.draft_phases(1, [], 1), r"len\(widths\) must be in \[1, 64\], got 0"),
        (lambda: _host.draft_phases(1, [1, 0], 1), r"widths must be in \[1, 32767\], got 0"),
        (lambda: _host.draft_phases(1, [1], 0), r"num_new must be in \[1, 2147483647\], got 0"),
        (lambda: _host.draft_phases(1, [1], 1, batch=129), r"batch must be in \[1, 128\], got 129"),
        (lambda: _host.draft_tiles(0, 1), r"outs must be in \[1, 2147483647\], got 0"),
        (lambda: _host.draft_tiles(8, 0), r"num_blocks must be in \[1, 32767\], got 0"),
        (lambda: _host.draft_tiles(9, 2, is_paired=True), "outs of a pair must be even, got 9"),
    ],
)
def test_numbers_out_of_range_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
