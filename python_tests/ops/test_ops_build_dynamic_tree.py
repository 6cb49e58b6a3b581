"""``build_dynamic_tree``: the op equals its specification on every device, and EAGLE-2's selection."""

import itertools

import pytest
import torch
from helpers.ops.op_cases import DEVICES, assert_same, check_rows_alone, generator, strided, to

from specdec_ext import ops
from specdec_ext.reference.build_dynamic_tree import build_dynamic_tree as reference

NAMES = list(ops.DynamicTree._fields)

CASES = {  # name: (batch, candidates, nodes)
    "no-candidates": (2, 0, 5),
    "one-candidate": (3, 1, 2),
    "root-only": (2, 20, 1),
    "fewer-candidates-than-nodes": (3, 7, 20),
    "warp-127": (2, 127, 30),
    "warp-128": (2, 128, 30),
    "warp-129": (2, 129, 130),
    "eagle-default": (4, 710, 60),
    "most-nodes": (1, 1300, ops.MAX_NODES),
    "most-candidates": (1, ops.MAX_CANDIDATES, 64),
    "many-rows": (40, 12, 6),
    "empty-batch": (0, 10, 4),
}


def random_arguments(batch, candidates, *, kind="draft", seed=0):
    """Candidates with the scores of a draft (sums of log-probabilities), with many ties, or hostile: better
    than their parents, NaN or infinite, with illegal links; some rows are inactive."""
    rng = generator(seed)
    index = torch.arange(candidates)
    parents = (torch.rand(batch, candidates, generator=rng) * (index + 1)).long() - 1
    steps = -torch.rand(batch, candidates, generator=rng)
    if kind == "ties":
        steps = (steps * 2).round()
    scores = steps.clone()
    for i in range(candidates):
        above = scores.gather(1, parents[:, i : i + 1].clamp(min=0))[:, 0]
        scores[:, i] += torch.where(parents[:, i] >= 0, above, 0)
    roots = torch.randint(1000, (batch,), generator=rng)
    if kind == "hostile":
        nan, inf = torch.nan, torch.inf
        special = torch.tensor([nan, -nan, -inf, inf, 0.0, -0.0, -1e-40, 5.0])
        chosen = special[torch.randint(len(special), scores.shape, generator=rng)]
        scores = torch.where(torch.rand(scores.shape, generator=rng) < 0.3, chosen, scores)
        absent, far = torch.full_like(index, -2), torch.full_like(index, -(2**40))
        wrong = torch.stack([absent, index, index + 1, far])
        links = wrong[torch.randint(len(wrong), parents.shape, generator=rng), index]
        parents = torch.where(torch.rand(scores.shape, generator=rng) < 0.1, links, parents)
        roots[torch.rand(batch, generator=rng) < 0.3] = -1
    tokens = torch.randint(2**40, (batch, candidates), generator=rng)
    return scores, tokens, parents, roots


def assert_legal_trees(result, arguments, nodes):
    scores, tokens, parents, roots = arguments
    for row in range(len(scores)):
        if roots[row] < 0:
            assert (result.parents[row] == -2).all() and (result.selected[row] == -1).all()
            continue
        chosen = result.selected[row][result.selected[row] >= 0].tolist()
        assert chosen == sorted(set(chosen)) and len(chosen) < nodes
        for node, candidate in enumerate(chosen, start=1):
            parent = int(parents[row, candidate])
            assert scores[row, candidate] > -torch.inf
            assert result.parents[row, node] == (0 if parent == -1 else 1 + chosen.index(parent))
            assert result.tokens[row, node] == tokens[row, candidate]


@pytest.mark.parametrize("kind", ["draft", "ties", "hostile"])
@pytest.mark.parametrize("case", CASES)
def test_equals_reference(case, kind, device):
    batch, candidates, nodes = CASES[case]
    arguments = random_arguments(batch, candidates, kind=kind, seed=len(case))
    actual = ops.build_dynamic_tree(*to(device, arguments), nodes)
    assert_same(actual, reference(*arguments, nodes), NAMES)
    assert_legal_trees(actual, arguments, nodes)


def every_draft(candidates):
    """All trees with all scores out of three, also absent candidates, orphans and links to themselves."""
    links = [[-2, *range(-1, i + 1)] for i in range(candidates)]
    parents = torch.tensor(list(itertools.product(*links)))
    scores = torch.cartesian_prod(*[torch.tensor([-1.0, -2.0, torch.nan])] * candidates)
    batch = len(parents) * len(scores)
    scores, parents = scores.repeat(len(parents), 1), parents.repeat_interleave(len(scores), 0)
    return scores, parents + 10, parents, torch.arange(batch)


def test_every_draft_of_two(device):
    arguments = every_draft(2)
    actual = ops.build_dynamic_tree(*to(device, arguments), 2)
    assert_same(actual, reference(*arguments, 2), NAMES)


def test_every_draft_of_three(device, emulated):
    arguments = every_draft(3)
    if emulated:  # 7 and the 27 scores of a tree have no common divisor, so all scores occur
        arguments = tuple(argument[::7] for argument in arguments)
    actual = ops.build_dynamic_tree(*to(device, arguments), 3)
    assert_same(actual, reference(*arguments, 3), NAMES)


@pytest.mark.parametrize("device", DEVICES)  # too many for the emulated kernel
def test_every_draft_of_four(device):
    arguments = every_draft(4)
    for nodes in (3, 4):
        actual = ops.build_dynamic_tree(*to(device, arguments), nodes)
        assert_same(actual, reference(*arguments, nodes), NAMES)


def test_worked_example(device):
    """The example of the reference: candidate 4 is better than its parent and has the parent's rank."""
    arguments = (
        torch.tensor([[-0.5, -0.9, -0.5, -3.0, -0.1]]),
        torch.tensor([[10, 11, 12, 13, 14]]),
        torch.tensor([[-1, -1, 0, 0, 1]]),
        torch.tensor([7]),
    )
    tree = ops.build_dynamic_tree(*to(device, arguments), 4)
    assert tree.tokens.tolist() == [[7, 10, 11, 12]]
    assert tree.parents.tolist() == [[-1, 0, 0, 1]]
    assert tree.selected.tolist() == [[-1, 0, 1, 2]]
    tree = ops.build_dynamic_tree(*to(device, arguments), 5)
    assert tree.selected.tolist() == [[-1, 0, 1, 2, 4]]
    assert tree.parents.tolist() == [[-1, 0, 0, 1, 2]]


def test_parent_of_a_certain_token_is_selected(device):
    """Children of probability 1 tie with their parents, and the lower index is selected first."""
    candidates = 300
    scores = torch.zeros(1, candidates)
    scores[0, ::2] = -0.0
    parents = torch.arange(-1, candidates - 1)[None]
    arguments = scores, parents + 5, parents, torch.tensor([3])
    tree = ops.build_dynamic_tree(*to(device, arguments), 50)
    assert tree.selected.tolist() == [[-1, *range(49)]]
    assert tree.parents.tolist() == [list(range(-1, 49))]


def test_orphans_of_bad_candidates_are_never_selected(device):
    for bad in (torch.nan, -torch.nan, -torch.inf):
        scores = torch.tensor([[bad, -1.0, -0.1, -0.2]])
        parents = torch.tensor([[-1, -1, 0, 2]])
        arguments = scores, parents, parents, torch.tensor([0])
        tree = ops.build_dynamic_tree(*to(device, arguments), 4)
        assert tree.selected.tolist() == [[-1, 1, -1, -1]]
        assert tree.parents.tolist() == [[-1, 0, -2, -2]]


def eagle2_draft(top_k, depth, seed, vocab=60):
    """Flat scores, tokens and parents as EAGLE-2 drafts them, from random log-probabilities."""
    rng = generator(seed)

    def best(rows):
        return torch.randn(rows, vocab, generator=rng).double().log_softmax(-1).topk(top_k)

    values, ids = best(1)
    scores, tokens, parents = [values[0]], [ids[0]], [torch.full((top_k,), -1)]
    frontier, frontier_scores = torch.arange(top_k), values[0]
    size = top_k
    for _ in range(depth):
        values, ids = best(top_k)
        cumulative = (values + frontier_scores[:, None]).flatten()
        scores.append(cumulative)
        tokens.append(ids.flatten())
        parents.append(frontier.repeat_interleave(top_k))
        frontier_scores, places = cumulative.topk(top_k)
        frontier = size + places
        size += top_k * top_k
    return torch.cat(scores)[None].float(), torch.cat(tokens)[None], torch.cat(parents)[None]


@pytest.mark.parametrize(
    ("top_k", "depth", "total"), [(3, 1, 6), (4, 3, 20), (8, 5, 59), (10, 7, 59)]
)
def test_equals_eagle2(top_k, depth, total, device):
    """Selection, parents and ancestor mask of the published algorithm: top-k, sort, searchsorted."""
    for seed in range(3):
        scores, tokens, parents = eagle2_draft(top_k, depth, seed)
        assert len(scores[0].unique()) == scores.shape[1]  # EAGLE-2 defines no order of ties
        index = scores[0].topk(total).indices.sort().values
        links = parents[0, index]
        tree_parents = torch.where(links < 0, 0, torch.searchsorted(index, links) + 1)
        mask = torch.eye(total + 1, dtype=torch.bool)
        mask[:, 0] = True
        for node, parent in enumerate(tree_parents.tolist(), start=1):
            mask[node] |= mask[parent]

        arguments = scores, tokens, parents, torch.tensor([1])
        tree = ops.build_dynamic_tree(*to(device, arguments), total + 1)
        assert tree.selected[0, 1:].tolist() == index.tolist()
        assert tree.tokens[0, 1:].tolist() == tokens[0, index].tolist()
        assert tree.parents[0, 1:].tolist() == tree_parents.tolist()
        bits = ops.tree_mask(tree.parents, tree.parents[:, 0]).ancestors[0, :, 0].cpu()
        assert torch.equal((bits[:, None] >> torch.arange(total + 1)) & 1 == 1, mask)


def test_strided_inputs_equal_reference(device):
    arguments = random_arguments(3, 50, kind="ties", seed=1)
    actual = ops.build_dynamic_tree(*(strided(each, device, 0) for each in arguments), 9)
    assert_same(actual, reference(*arguments, 9), NAMES)


def test_a_row_does_not_depend_on_the_others(device):
    arguments = to(device, random_arguments(5, 200, kind="hostile", seed=2))
    check_rows_alone(lambda *given: ops.build_dynamic_tree(*given, 40), arguments, NAMES)


@pytest.mark.parametrize("shape", [(2, 30), (0, 3), (1, 0)])
def test_opcheck(shape, device):
    arguments = to(device, random_arguments(*shape))
    torch.library.opcheck(torch.ops.specdec.build_dynamic_tree, (*arguments, 6))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("scores", lambda t: t.double(), r"must be torch.float32, got torch.float64; convert"),
        ("scores", lambda t: t[0], r"must be \[batch, candidates\], got shape \[9\]"),
        ("scores", lambda t: t.repeat(1, 500), r"must have at most 4096 candidates .* got 4500; keep"),
        ("tokens", lambda t: t[:, 1:], r"must be \[batch, candidates\] = \[1, 9\], got shape \[1, 8\]"),
        ("parents", lambda t: t.int(), r"must be torch.int64, got torch.int32; convert"),
        ("root_tokens", lambda t: t[None], r"must be \[batch\] = \[1\], got shape \[1, 1\]"),
        ("nodes", lambda n: 0, r"must be 1 to 1024 \(node 0 is the root\), got 0"),
        ("nodes", lambda n: 1025, r"must be 1 to 1024 \(node 0 is the root\), got 1025"),
    ],
)  # fmt: skip
def test_rejects(name, change, message):
    names = ["scores", "tokens", "parents", "root_tokens", "nodes"]
    arguments = dict(zip(names, (*random_arguments(1, 9), 4), strict=True))
    arguments[name] = change(arguments[name])
    with pytest.raises(ValueError, match=rf"::build_dynamic_tree: argument {name} {message}"):
        ops.build_dynamic_tree(**arguments)
