"""``merge_trees``: the op equals its specification on every device."""

import pytest
import torch
from helpers.ops.op_cases import all_parents, assert_same, generator, random_parents, strided, to

from specdec_ext import ops
from specdec_ext.reference.merge_trees import merge_trees as reference

NAMES = list(ops.MergedTrees._fields)

CASES = {  # name: (batch, nodes of the trees, nodes)
    "roots": (3, (1, 1), 1),
    "one-tree": (3, (9,), 9),
    "one-tree-of-duplicates": (3, (200,), 60),
    "room-for-all": (4, (7, 12), 18),
    "more-room-than-nodes": (2, (5, 4), 40),
    "no-room-for-the-second": (2, (9, 12), 5),
    "head-and-copy": (2, (60, 11), 64),
    "warp-32": (2, (32, 33), 64),
    "warp-33": (2, (33, 32, 31), 65),
    "most-trees": (3, (4, 9, 2, 7, 1, 33, 3, 5), 50),
    "most-nodes": (1, (ops.MAX_NODES, 70), ops.MAX_NODES),
    "many-rows": (40, (4, 3), 6),
    "empty-batch": (0, (4, 3), 6),
}


def random_trees(batch, sizes, *, words=3, illegal=0.0, seed=0):
    """Trees of few tokens, in which siblings may be equal; some links are illegal, some rows inactive."""
    rng = generator(seed)
    root = torch.randint(words, (batch, 1), generator=rng)
    tokens, parents = [], []
    for i, size in enumerate(sizes):
        drafts = torch.randint(words, (batch, size - 1), generator=rng)
        tokens.append(torch.cat([root, drafts], 1) + 2**33)
        parents.append(random_parents(batch, size, seed + i, illegal=illegal))
    return tokens, parents


def each_to(device, trees):
    return tuple(list(to(device, tensors)) for tensors in trees)


@pytest.mark.parametrize("words", [1, 2, 50])
@pytest.mark.parametrize("illegal", [0.0, 0.2])
@pytest.mark.parametrize("case", CASES)
def test_equals_reference(case, illegal, words, device):
    batch, sizes, nodes = CASES[case]
    trees = random_trees(batch, sizes, words=words, illegal=illegal, seed=len(case))
    actual = ops.merge_trees(*each_to(device, trees), nodes)
    assert_same(actual, reference(*trees, nodes), NAMES)


def test_every_pair_of_small_trees(device):
    """All trees of three nodes, legal or not, merged with all others, for all tokens out of two."""
    parents = all_parents(3)
    tokens = torch.cartesian_prod(torch.tensor([0, 1]), torch.tensor([0, 1]))
    every = len(parents) * len(tokens)
    parents, drafts = parents.repeat(len(tokens), 1), tokens.repeat_interleave(len(parents), 0)
    roots = torch.full((every * every, 1), 9)
    both = [
        (torch.cat([roots, drafts[order]], 1), parents[order])
        for order in (
            torch.arange(every).repeat(every),
            torch.arange(every).repeat_interleave(every),
        )
    ]
    trees = tuple(map(list, zip(*both, strict=True)))
    for nodes in (2, 3, 5):
        actual = ops.merge_trees(*each_to(device, trees), nodes)
        assert_same(actual, reference(*trees, nodes), NAMES)


def test_worked_example(device):
    """The example of the reference."""
    tokens = [torch.tensor([[7, 1, 2]]), torch.tensor([[7, 1, 3, 5, 6]])]
    parents = [torch.tensor([[-1, 0, 1]]), torch.tensor([[-1, 0, 1, 0, 3]])]
    merged = ops.merge_trees(*each_to(device, (tokens, parents)), 4)
    assert merged.tokens.tolist() == [[7, 1, 2, 3]]
    assert merged.parents.tolist() == [[-1, 0, 1, 1]]


def test_another_root(device, kernel):
    """An error on the CPU; a kernel can't raise and leaves the tree out."""
    tokens = [torch.tensor([[7, 1], [8, 1]]), torch.tensor([[7, 2], [9, 2]])]
    parents = [torch.tensor([[-1, 0], [-1, 0]])] * 2
    trees = each_to(device, (tokens, parents))
    if not kernel:
        with pytest.raises(ValueError, match=r"tokens\[1\] has the root 9 in row 1; expected 8"):
            ops.merge_trees(*trees, 3)
        return
    merged = ops.merge_trees(*trees, 3)
    assert merged.tokens.tolist() == [[7, 1, 2], [8, 1, 0]]
    assert merged.parents.tolist() == [[-1, 0, 0], [-1, 0, -2]]


def test_inactive_rows(device):
    tokens = [torch.tensor([[7, 1], [8, 1]]), torch.tensor([[7, 2], [9, 2]])]
    parents = [torch.tensor([[-2, 0], [-1, 0]]), torch.tensor([[-1, 0], [-2, 0]])]
    merged = ops.merge_trees(*each_to(device, (tokens, parents)), 3)
    assert merged.tokens.tolist() == [[0, 0, 0], [8, 1, 0]]
    assert merged.parents.tolist() == [[-2, -2, -2], [-1, 0, -2]]


def test_strided_inputs_equal_reference(device):
    trees = random_trees(4, (9, 40), illegal=0.1, seed=1)
    given = ([strided(each, device, 5) for each in tensors] for tensors in trees)
    assert_same(ops.merge_trees(*given, 30), reference(*trees, 30), NAMES)


def test_a_row_does_not_depend_on_the_others(device):
    trees = each_to(device, random_trees(5, (20, 30), illegal=0.1, seed=2))
    together = ops.merge_trees(*trees, 25)
    for row in range(5):
        alone = ops.merge_trees(*([each[row : row + 1] for each in part] for part in trees), 25)
        assert_same(alone, (part[row : row + 1] for part in together), NAMES)


@pytest.mark.parametrize("shape", [(2, (4, 7)), (0, (3, 2))])
def test_opcheck(shape, device):
    trees = each_to(device, random_trees(*shape))
    torch.library.opcheck(torch.ops.specdec.merge_trees, (*trees, 6))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t, p: (t * 5, p * 5, 4), r"tokens must be a list of 1 to 8 trees, got 10"),
        (lambda t, p: (t, p[:1], 4), r"parents must have one tensor per tree, 2, got 1"),
        (lambda t, p: (t, p, 0), r"nodes must be 1 to 1024 \(node 0 is the root\), got 0"),
        (lambda t, p: ([t[0], t[1].int()], p, 4), r"tokens\[1\] must be torch.int64, got torch.int32"),
        (lambda t, p: (t, [p[0], p[1].int()], 4), r"parents\[1\] must be torch.int64"),
        (lambda t, p: ([t[0][0], t[1]], p, 4), r"tokens\[0\] must be \[batch, nodes\], got"),
        (lambda t, p: ([t[0], t[1][:1]], p, 4), r"tokens\[1\] must be \[batch, nodes\] = \[2, 5\], got"),
        (lambda t, p: (t, [p[0], p[1][:, :2]], 4), r"parents\[1\] must be \[batch, nodes\] = \[2, 5\]"),
        (lambda t, p: ([t[0], t[1][:, :0]], [p[0], p[1][:, :0]], 4), r"tokens\[1\] must have 1 to 1024"),
    ],
)  # fmt: skip
def test_rejects(change, message):
    with pytest.raises(ValueError, match=rf"::merge_trees: argument {message}"):
        ops.merge_trees(*change(*random_trees(2, (3, 5))))
