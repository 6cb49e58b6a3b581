"""``tree_mask``: the op equals its specification on every device.

``test_golden.py`` compares with the trees of the EAGLE authors' code.
"""

import pytest
import torch
from helpers.ops.op_cases import (
    DEVICES,
    all_parents,
    assert_same,
    random_parents,
    strided,
    two_threads,
)

from specdec_ext import ops
from specdec_ext.reference.tree_mask import tree_mask as tree_mask_reference

NAMES = list(ops.TreeMask._fields)

CASES = {  # name: (batch, nodes)
    "one-node": (3, 1),
    "two-nodes": (2, 2),
    "one-word": (2, 64),
    "two-words": (3, 65),
    "odd": (5, 19),
    "many-rows": (111, 7),
    "three-words": (2, 189),
    "max-nodes": (1, ops.MAX_NODES),
    "empty-batch": (0, 9),
}


@pytest.mark.parametrize("illegal", [0.0, 0.2], ids=["legal", "illegal-links"])
@pytest.mark.parametrize("case", CASES)
def test_equals_reference(case, illegal, device):
    batch, nodes = CASES[case]
    parents = random_parents(batch, nodes, seed=nodes, illegal=illegal).to(device)
    root_positions = torch.arange(batch, device=device) * 1000
    actual = ops.tree_mask(parents, root_positions)
    assert_same(actual, tree_mask_reference(parents.cpu(), root_positions.cpu()), NAMES)


@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 5])
def test_every_small_tree(nodes, device):
    parents = all_parents(nodes)
    root_positions = torch.arange(len(parents))
    actual = ops.tree_mask(parents.to(device), root_positions.to(device))
    assert_same(actual, tree_mask_reference(parents, root_positions), NAMES)


def test_chain_of_max_nodes_fills_all_words(device):
    parents = torch.arange(-1, ops.MAX_NODES - 1, device=device)[None]
    mask = ops.tree_mask(parents, torch.tensor([7], device=device))
    assert mask.depths[0, -1] == ops.MAX_NODES - 1
    assert (mask.ancestors[0, -1] == -1).all()  # all bits of all words
    assert torch.equal(mask.paths[0, -1], torch.arange(ops.MAX_NODES, device=device))


def test_worked_example(device):
    parents = torch.tensor([[-1, 0, 0, 1, 1, -2, 5], [-2, 0, 0, 1, 1, 2, 3]], device=device)
    mask = ops.tree_mask(parents, torch.tensor([10, 20], device=device))
    assert mask.depths.tolist() == [[0, 1, 1, 2, 2, -1, -1], [-1] * 7]
    assert mask.positions.tolist() == [[10, 11, 11, 12, 12, 10, 10], [20] * 7]
    assert mask.ancestors[0, :, 0].tolist() == [0b1, 0b11, 0b101, 0b1011, 0b10011, 0, 0]
    assert mask.ancestors[1].tolist() == [[0]] * 7
    assert mask.first_child.tolist() == [[1, 3, -1, -1, -1, -1, -1], [-1] * 7]
    assert mask.next_sibling.tolist() == [[-1, 2, -1, 4, -1, -1, -1], [-1] * 7]
    assert mask.paths[0, 4].tolist() == [0, 1, 4, -1, -1, -1, -1]
    assert mask.paths[0, 5].tolist() == [-1] * 7


def test_strided_inputs_equal_reference(device):
    parents = random_parents(6, 11, seed=1, illegal=0.1)
    root_positions = torch.arange(6) * 3
    actual = ops.tree_mask(strided(parents, device, 12345), strided(root_positions, device, 99))
    assert_same(actual, tree_mask_reference(parents, root_positions), NAMES)
    shared_position = torch.tensor(5, device=device).expand(6)
    actual = ops.tree_mask(parents.to(device), shared_position)
    assert_same(actual, tree_mask_reference(parents, torch.full((6,), 5)), NAMES)


def test_threads_do_not_change_the_result():
    parents = random_parents(64, 64, seed=3, illegal=0.05)
    root_positions = torch.arange(64)
    expected = ops.tree_mask(parents, root_positions)
    with two_threads():
        assert_same(ops.tree_mask(parents, root_positions), expected, NAMES)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(2, 5), (0, 3), (1, 70)])
def test_opcheck(shape, device):
    parents = random_parents(*shape, seed=0).to(device)
    arguments = (parents, torch.zeros(shape[0], dtype=torch.long, device=device))
    torch.library.opcheck(torch.ops.specdec.tree_mask, arguments)


ONES = torch.ones(2, dtype=torch.long)


@pytest.mark.parametrize(
    ("parents", "root_positions", "message"),
    [
        (ONES[None].int(), ONES[:1], r"parents must be torch.int64, got torch.int32; convert"),
        (ONES, ONES, r"parents must be \[batch, nodes\], got shape \[2\]"),
        (ONES.new_empty(1, 0), ONES[:1], r"parents must have 1 to 1024 nodes .* got 0"),
        (ONES.new_empty(1, 1025), ONES[:1], r"parents must have 1 to 1024 nodes .* got 1025"),
        (ONES[:, None], ONES[:1], r"root_positions must be \[batch\] = \[2\], got shape \[1\]"),
        (ONES[:, None], ONES.float(), r"root_positions must be torch.int64, got torch.float32"),
    ],
)
def test_rejects(parents, root_positions, message):
    with pytest.raises(ValueError, match=r"specdec::tree_mask: argument " + message):
        ops.tree_mask(parents, root_positions)
