"""The specification of ``draft_head`` has the drafts of the heads' authors, and each option has an effect."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from helpers.drafters.golden_cases import CHAINS
from helpers.drafters.golden_cases import TREES as GOLDEN_TREES
from helpers.drafters.head_cases import (
    KINDS,
    TREES,
    Run,
    check_golden_chain,
    check_golden_trees,
    elements,
    golden_run,
    head_of,
)

from specdec_ext.tree.config import TreeConfig
from specdec_ext.tree.draft_tree import INACTIVE

DTYPES = [torch.float32, torch.float64]
CHAIN, STATIC, DYNAMIC = TREES["chain"], TREES["static"], TREES["dynamic"]
CLOSE = {"rtol": 1e-9, "atol": 1e-9}


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "float64"])
@pytest.mark.parametrize("case", GOLDEN_TREES)
def test_trees_are_those_of_the_eagle_authors(case, dtype):
    check_golden_trees(golden_run(Run, case, dtype), case)


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "float64"])
@pytest.mark.parametrize("case", CHAINS)
def test_chains_are_those_of_speculators(case, dtype):
    check_golden_chain(golden_run(Run, case, dtype), case)


def drafted(head, tree, rows=1, new=9, counts=None, first_position=0):
    run = Run.start(head, rows, first_position=first_position)
    return run.draft(tree, *elements(head, rows, new), counts)


def assert_same(given, expected):
    for ours, theirs in zip(given[:2], expected[:2], strict=True):
        assert torch.equal(ours, theirs)
    torch.testing.assert_close(given[2], expected[2], **CLOSE)


def double(kind, **options):
    return head_of(kind, dtype=torch.float64, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_every_tensor_changes_the_scores(kind):
    head = double(kind)
    scores = drafted(head, DYNAMIC)[2]
    for name, tensor in head.tensors.items():
        other = tensor + 0.1 * tensor.flip(0)
        if name == "draft_to_target":  # other ids, ascending as well
            other = head.config.vocab_size - 1 - tensor.flip(0)
        tensors = {**head.tensors, name: other}
        changed = drafted(dataclasses.replace(head, tensors=tensors), DYNAMIC)
        assert not torch.equal(changed[2], scores), name


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("eagle3", {"norm_output": True}),
        ("eagle3", {"norm_before_residual": True}),
        ("eagle3", {"logit_scale": 2.0}),
        ("eagle3", {"sliding_windows": (4,)}),
        ("eagle3", {"rms_norm_eps": 0.1}),
        ("eagle3", {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}),
        ("qk-norm-window", {"sliding_windows": (None, 5)}),
        ("p-eagle", {"mask_token_id": 4}),
    ],
    ids=str,
)
def test_every_option_without_a_tensor_changes_the_scores(kind, options):
    scores = drafted(double(kind, **options), CHAIN)[2]
    assert not torch.equal(scores, drafted(double(kind), CHAIN)[2])


@pytest.mark.parametrize("kind", KINDS)
def test_elements_in_several_calls_equal_one_call(kind, monkeypatch):
    """Also with drafts between the calls and with other chunks."""
    head = double(kind)
    tokens, features = elements(head, 2, 9)
    expected = Run.start(head, 2).draft(DYNAMIC, tokens, features)
    parts = Run.start(head, 2)
    for part in (slice(0, 4), slice(4, 5), slice(5, 9)):
        given = parts.draft(DYNAMIC, tokens[:, part], features[:, part])
    assert_same(given, expected)
    monkeypatch.setattr("specdec_ext.reference.draft_head.CHUNK", 2)
    assert_same(Run.start(head, 2).draft(DYNAMIC, tokens, features), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_trees_contain_the_chain(kind):
    head = double(kind)
    tokens, _, scores = drafted(head, CHAIN)
    one_branch = TreeConfig(choices=tuple((0,) * depth for depth in range(1, 5)))
    assert_same(drafted(head, one_branch), (tokens, drafted(head, CHAIN)[1], scores))
    # The best path of a static tree is the chain, and its first level the best tokens.
    static = drafted(head, STATIC)
    best = [0, *(1 + STATIC.choices.index((0,) * depth) for depth in (1, 2, 3))]
    assert torch.equal(static[0][:, best], tokens[:, :4])
    torch.testing.assert_close(static[2][:, best], scores[:, :4], **CLOSE)
    wide = drafted(head, TreeConfig(depth=1, top_k=3))
    assert torch.equal(wide[0], static[0][:, :4])
    assert torch.equal(static[1][0], torch.tensor([-1, 0, 0, 0, 1, 1, 2, 4]))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "p-eagle"])
def test_siblings_do_not_change_a_path(kind):
    """Each path of a static tree is drafted again in a tree of its own."""
    head = double(kind)
    tokens, _, scores = drafted(head, STATIC)
    for leaf in ((1, 0), (0, 0, 0), (0, 1)):
        path = [leaf[:depth] for depth in range(1, len(leaf) + 1)]
        # A tree with a rank also needs the better ranks, which have no children here.
        siblings = [(*prefix[:-1], rank) for prefix in path for rank in range(prefix[-1])]
        alone = TreeConfig(choices=tuple(path + siblings))
        alone_tokens, _, alone_scores = drafted(head, alone)
        for prefix in path:
            here, there = (1 + tree.choices.index(prefix) for tree in (STATIC, alone))
            assert tokens[0, here] == alone_tokens[0, there]
            torch.testing.assert_close(scores[0, here], alone_scores[0, there], **CLOSE)


def test_p_eagle_levels_do_not_depend_on_nodes():
    head = double("p-eagle")
    two = tuple((first, second) for first in range(3) for second in range(3))
    tree = TreeConfig(choices=((0,), (1,), (2,), *two))
    tokens, _, scores = drafted(head, tree)
    children = tokens[0, 4:].view(3, 3)
    assert (children == children[0]).all()
    steps = scores[0, 4:].view(3, 3) - scores[0, 1:4, None]
    torch.testing.assert_close(steps, steps[:1].expand(3, 3), **CLOSE)


@pytest.mark.parametrize("window", [3, 5])
def test_elements_outside_the_window_do_not_matter(window):
    """The last element sees ``window`` elements, itself included; a drafted node at depth d sees d fewer."""
    head = double("eagle3", sliding_windows=(window,))
    tokens, features = elements(head, 1, 9)
    expected = Run.start(head, 1).draft(CHAIN, tokens, features)[2]
    for back in range(1, 9):
        changed = features.clone()
        changed[0, 8 - back] += 1
        scores = Run.start(head, 1).draft(CHAIN, tokens, changed)[2]
        # In a single layer, other elements have an effect only through keys and values.
        assert torch.equal(scores, expected) == (back >= window)


def test_window_counts_positions_not_slots():
    """Drafted siblings have slots of their own, but the same position."""
    head = double("eagle3", sliding_windows=(2,))
    chain = drafted(head, TreeConfig(depth=5))
    longest = tuple((0,) * depth for depth in range(1, 6))
    bushy = TreeConfig(choices=(*longest, (1,), (2,), (1, 0), (2, 0), (1, 0, 0), (2, 0, 0)))
    nodes = [0, *(1 + bushy.choices.index(path) for path in longest)]
    tokens, _, scores = drafted(head, bushy)
    assert torch.equal(tokens[:, nodes], chain[0])
    torch.testing.assert_close(scores[:, nodes], chain[2], **CLOSE)


def test_ties_go_to_the_lower_id():
    head = double("eagle1")
    run = Run.start(head, 1)
    run.lm_head = torch.zeros_like(run.lm_head)
    tokens, parents, scores = run.draft(TreeConfig(3, 4, 12), *elements(head, 1, 4))
    assert tokens[0, 1:].tolist() == [0, 1, 2, 3] * 2 + [0, 1, 2]
    assert parents[0].tolist() == [-1, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2]
    step = -torch.tensor(97.0, dtype=torch.float64).log()
    torch.testing.assert_close(scores[0], step * torch.tensor([0] + [1] * 4 + [2] * 7))


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("eagle3", {"sliding_windows": (0,)}, r"sliding_windows=\(0,\) must be positive"),
        ("eagle3", {"rope_parameters": {"rope_type": "default"}}, "must have a rope_theta"),
        ("p-eagle", {"mask_token_id": -1}, "mask_token_id=-1 must be in"),
        ("eagle3", {"sliding_windows": (None, 4)}, r"sliding_windows=\(None, 4\).*num_layers=1"),
        ("eagle3", {"feature_layers": (1, 2)}, r"feature_layers=\(1, 2\).*num_features=3"),
        ("eagle3", {"num_kv_heads": 3}, "num_heads=4 must be a multiple of num_kv_heads=3"),
        ("eagle1", {"has_fc": False}, "an EAGLE-1 head has an fc"),
        ("mtp", {"has_fc": False}, "an MTP head has an fc"),
        ("mtp", {"norm_output": False}, "an MTP head feeds its normed output back"),
        ("eagle1", {"hidden_size": 40}, "target_hidden_size=32 must equal hidden_size=40"),
        ("no-fc", {"hidden_size": 40}, "target_hidden_size=32 must equal hidden_size=40"),
    ],
    ids=str,
)
def test_contradictory_configs_are_refused(kind, options, message):
    with pytest.raises(ValueError, match=message):
        head_of(kind, **options)


@pytest.mark.parametrize("wrong", [-1, 97])
def test_draft_ids_outside_the_vocabulary_are_refused(wrong):
    head = head_of("eagle3")
    targets = head.tensors["draft_to_target"].clone()
    targets[0 if wrong < 0 else -1] = wrong
    with pytest.raises(ValueError, match=rf"draft_to_target holds ids .*{wrong}.*\[0, 97\)"):
        dataclasses.replace(head, tensors={**head.tensors, "draft_to_target": targets})


def test_default_feature_layers_depend_on_the_kind():
    layers = {
        kind: head_of(kind, feature_layers=None).config.resolved_feature_layers(32)
        for kind in ("eagle1", "mtp", "eagle3", "no-fc")
    }
    assert layers == {"eagle1": (-1,), "mtp": (-1,), "eagle3": (2, 16, 29), "no-fc": (-1,)}


@pytest.mark.parametrize("tree", [TreeConfig(3, 8, 20), TreeConfig(choices=((0,), (7,), (0, 2)))])
def test_children_beyond_the_vocabulary_are_inactive(tree):
    head = double("eagle3", draft_vocab_size=3)
    tokens, parents, scores = drafted(head, tree)
    absent = parents[0] == INACTIVE
    assert (tokens[0][absent] == 0).all() and (scores[0][absent] == -torch.inf).all()
    assert (parents[0] == 0).sum() == (3 if tree.choices is None else 1)


def test_nan_affects_only_its_row_and_token():
    head = head_of("eagle3")
    tokens, features = elements(head, 2, 5)
    expected = Run.start(head, 2).draft(DYNAMIC, tokens, features)
    poisoned = features.clone()
    poisoned[0, 2] = torch.nan
    given = Run.start(head, 2).draft(DYNAMIC, tokens, poisoned)
    assert (given[1][0, 1:] == INACTIVE).all()
    for ours, theirs in zip(given, expected, strict=True):
        assert torch.equal(ours[1], theirs[1])
    # With NaN in a row of lm_head, all other tokens are drafted.
    lm_head = head.tensors["lm_head.weight"].clone()
    best = (head.tensors["draft_to_target"] == expected[0][0, 1]).nonzero().item()
    lm_head[best] = torch.nan
    tensors = {**head.tensors, "lm_head.weight": lm_head}
    without = Run.start(dataclasses.replace(head, tensors=tensors), 2)
    tokens = without.draft(DYNAMIC, tokens, features)[0]
    assert tokens[0, 1] == expected[0][0, 2] and not (tokens == expected[0][0, 1]).any()


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_is_near_float64(kind):
    head = head_of(kind, dtype=torch.bfloat16)
    tokens, features = elements(head, 1, 9)
    run, exact = Run.start(head, 1), Run.start(head.to("cpu", torch.float64), 1)
    exact.embedding, exact.lm_head = run.embedding.double(), run.lm_head.double()
    given = run.draft(TreeConfig(1), tokens, features)[2]
    expected = exact.draft(TreeConfig(1), tokens, features.double())[2]
    assert given.dtype == torch.float32
    torch.testing.assert_close(given.double(), expected, rtol=0, atol=0.1)
