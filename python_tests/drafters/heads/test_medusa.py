"""``MedusaDrafter``: guesses, static, dynamic and chain trees, the default tree, and lossless text.

All guesses of ``counting_heads`` are right for the counting model.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from helpers.checks.lossless import check_same_text, every_decoding
from helpers.drafters.drafting_contexts import context_of
from helpers.drafters.medusa_cases import HIDDEN, random_heads
from helpers.models.tiny import VOCAB, counting_model, every_batch, tiny_model

import specdec_ext
from specdec_ext import MedusaDrafter, MedusaHeads, TreeConfig
from specdec_ext.context import Context
from specdec_ext.drafters.heads.medusa import default_tree
from specdec_ext.heads.medusa import likely_choices
from specdec_ext.models import TargetOutput
from specdec_ext.verify.sampler import Accepted

CHAIN = TreeConfig(depth=3)
STATIC = TreeConfig(choices=((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)))
DYNAMIC = TreeConfig(depth=3, top_k=4, num_nodes=9)
TREES = {"chain": CHAIN, "static": STATIC, "dynamic": DYNAMIC, "default": None}


def counting_heads(num_heads: int = 3) -> MedusaHeads:
    """Heads that name t + 2 + i: their blocks do nothing, and their lm_heads are the model's, rolled by 1 +
    i."""
    heads = random_heads(num_heads=num_heads)
    lm_head = counting_model().lm_head.weight.detach()
    tensors = {name: torch.zeros_like(tensor) for name, tensor in heads.tensors.items()}
    for i in range(num_heads):
        tensors[f"lm_heads.{i}.weight"] = lm_head.roll(1 + i, dims=0)
    return MedusaHeads(heads.config, tensors)


def proposed(heads: MedusaHeads, tree: TreeConfig, states: torch.Tensor):
    """The tree for rows with the last hidden states ``states [rows, hidden]`` and the roots 0, 1, ..."""
    context = context_of([[0, 0, row] for row in range(len(states))])
    drafter = MedusaDrafter(heads, tree)
    features = torch.stack([torch.full_like(states, 9.0), states], dim=1)
    drafter.feature_layers(tiny_model("llama"))
    drafter.start(context, tiny_model("llama"), TargetOutput(None, (features,)))
    return drafter.propose(context)


def ranked(heads: MedusaHeads, state: torch.Tensor) -> list[list[tuple[float, int]]]:
    """(log-probability, target id) of all guesses of each head in float64, the best first."""
    config, found = heads.config, []
    tensors = {name: tensor.double() for name, tensor in heads.tensors.items()}
    for head in range(config.num_heads):
        x = state.double()
        for layer in range(config.num_layers):
            block = f"blocks.{head}.{layer}"
            y = tensors[f"{block}.weight"] @ x + tensors.get(f"{block}.bias", 0.0)
            x = x + y * torch.sigmoid(y)
        lm_head = tensors[f"lm_heads.{0 if config.shared_lm_head else head}.weight"]
        scores = (lm_head @ x).log_softmax(dim=0)
        order = scores.argsort(descending=True).tolist()
        ids = tensors.get("draft_to_target", torch.arange(len(order)))
        found.append([(float(scores[i]), int(ids[i])) for i in order])
    return found


# ---------------------------------------------------------------- trees

KINDS = {
    "one layer": {},
    "two layers": {"num_layers": 2},
    "no bias": {"bias": False},
    "one lm_head": {"shared_lm_head": True},
    "truncated": {"vocab_size": VOCAB, "draft_vocab_size": 11},
}


@pytest.mark.parametrize("kind", KINDS)
def test_static_trees_have_the_guesses_of_their_ranks(kind):
    heads = random_heads(**KINDS[kind])
    states = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(1))
    for config in (STATIC, CHAIN):
        tree = proposed(heads, config, states)
        paths = config.choices or ((0,), (0, 0), (0, 0, 0))
        number = {path: node for node, path in enumerate(((), *paths))}
        for row, state in enumerate(states):
            guesses = ranked(heads, state)
            tokens = [guesses[len(path) - 1][path[-1]][1] for path in paths]
            assert tree.tokens[row].tolist() == [row, *tokens]
            assert tree.parents[row].tolist() == [-1, *(number[path[:-1]] for path in paths)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_nodes", [2, 6, 20, 36])
def test_dynamic_trees_are_the_best_nodes(kind, num_nodes):
    """Each level expands its four best nodes by their four best tokens; the best of all nodes are kept."""
    heads = random_heads(**KINDS[kind])
    config = TreeConfig(depth=3, top_k=4, num_nodes=num_nodes)
    states = torch.randn(2, HIDDEN, generator=torch.Generator().manual_seed(2))
    tree = proposed(heads, config, states)
    for row, state in enumerate(states):
        guesses = ranked(heads, state)
        level, found = {(): 0.0}, {}
        for head in range(3):
            pairs = itertools.product(level.items(), guesses[head][:4])
            below = {(*path, token): score + own for (path, score), (own, token) in pairs}
            found |= below
            level = dict(sorted(below.items(), key=lambda item: -item[1])[:4])
        best = sorted(found, key=lambda path: -found[path])[: num_nodes - 1]
        paths: list[tuple[int, ...]] = [()]
        nodes = tree.tokens[row, 1:].tolist(), tree.parents[row, 1:].tolist()
        for token, parent in zip(*nodes, strict=True):
            paths.append((*paths[parent], token))
        assert sorted(paths[1:]) == sorted(best)


def test_ranks_beyond_the_vocabulary_are_inactive():
    heads = random_heads(vocab_size=VOCAB, draft_vocab_size=2)
    choices = ((0,), (1,), (2,), (2, 0), (0, 1))
    tree = proposed(heads, TreeConfig(choices=choices), torch.randn(1, HIDDEN))
    assert tree.parents.tolist() == [[-1, 0, 0, -2, 1, -2]]
    dynamic = proposed(heads, TreeConfig(depth=2, top_k=5, num_nodes=30), torch.randn(1, HIDDEN))
    assert (dynamic.parents[0] != -2).sum() == 1 + 2 + 4


def test_default_tree_depends_on_the_number_of_heads():
    tree = default_tree(torch.device("cpu"), 5)
    assert (tree.num_nodes, tree.depth) == (16, 4)
    assert default_tree(torch.device("cpu"), 1).choices == tuple((rank,) for rank in range(10))


def test_likely_choices_have_the_largest_products():
    """The products of the accuracies are 0.6, 0.3, 0.3, 0.24, 0.15, 0.12."""
    accuracies = [[0.6, 0.3], [0.5, 0.4]]
    order = [(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)]
    for count in range(1, 7):
        assert likely_choices(accuracies, 1 + count) == tuple(order[:count])
    assert likely_choices(accuracies, 100) == tuple(order)
    assert likely_choices([[0.5, 0.0], [0.0]], 100) == ((0,),)


@pytest.mark.parametrize(
    ("accuracies", "num_nodes", "message"),
    [
        ([[0.5, 0.6]], 5, r"accuracies\[0\] is \[0.5, 0.6\]; expected .* none larger than the one before"),
        ([[0.5], []], 5, r"accuracies\[1\] is \[\]"),
        ([[1.5]], 5, r"accuracies\[0\]"),
        ([[float("nan")]], 5, r"accuracies\[0\]"),
        ([], 5, "0 heads"),
        ([[0.0]], 5, "1 heads"),
        ([[0.5]], 1, "num_nodes=1"),
    ],
)  # fmt: skip
def test_accuracies_without_a_tree_are_refused(accuracies, num_nodes, message):
    with pytest.raises(ValueError, match=message):
        likely_choices(accuracies, num_nodes)


# ---------------------------------------------------------------- hidden states


def test_heads_read_the_hidden_state_of_the_last_committed_token():
    """The last token of a prompt that is no padding, or the end of the accepted path."""
    heads = counting_heads()
    embeddings = counting_model().model.norm(counting_model().model.embed_tokens.weight).detach()
    ids = torch.tensor([[5, 6, 7], [8, 9, 0]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    context = Context(ids, mask, 0, 50, draw=None, sample=None)
    context.generated = [[8], [10]]
    drafter = MedusaDrafter(heads, CHAIN)
    drafter.feature_layers(counting_model())
    drafter.start(context, counting_model(), TargetOutput(None, (embeddings[ids],)))
    tree = drafter.propose(context)
    assert tree.tokens.tolist() == [[8, 9, 10, 11], [10, 11, 12, 13]]

    context.generated = [[8, 9, 10], [10, 30]]
    path = torch.tensor([[0, 1, -1, -1], [0, -1, -1, -1]])
    accepted = Accepted(path, torch.tensor([1, 0]), [[9, 10], [30]], [1, 0], [False, False])
    drafter.commit(context, accepted, TargetOutput(None, (embeddings[tree.tokens],)))
    assert drafter.propose(context).tokens.tolist() == [[10, 11, 12, 13], [30, 12, 13, 14]]
    context.rows = [1]
    assert drafter.propose(context).tokens.tolist() == [[30, 12, 13, 14]]


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES.keys())
def test_right_guesses_are_accepted(tree):
    ids = torch.tensor([[0, 0, 3], [5, 6, 7], [0, 9, 4]])
    kwargs = dict(attention_mask=(ids != 0).long(), max_new_tokens=25, do_sample=False)
    kwargs |= dict(speculation="fixed", return_dict_in_generate=True)
    drafter = MedusaDrafter(counting_heads(), tree)
    output = specdec_ext.generate(counting_model(), ids, drafter=drafter, **kwargs)
    expected = [list(range(last + 1, last + 26)) for last in (3, 7, 4)]
    assert output.sequences[:, 3:].tolist() == expected
    assert output.speculation_stats.steps == 6 * 3  # four tokens in each step of a row


# ---------------------------------------------------------------- lossless


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES.keys())
@every_batch
@every_decoding
@pytest.mark.filterwarnings("ignore:MedusaDrafter. in the last")  # the heads are random
def test_text_is_that_of_plain_decoding(batch, decoding, tree):
    stats = check_same_text(MedusaDrafter(random_heads(num_layers=2), tree), batch, decoding)
    assert stats.draft_tokens > 0


def test_drafts_of_a_row_do_not_depend_on_the_others():
    heads = random_heads()
    states = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(3))
    for config in (CHAIN, STATIC, DYNAMIC):
        together = proposed(heads, config, states)
        for row in range(len(states)):
            alone = proposed(heads, config, states[row : row + 1])
            assert torch.equal(alone.tokens[0, 1:], together.tokens[row, 1:])
            assert torch.equal(alone.parents[0], together.parents[row])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_targets_may_have_half_precision(dtype):
    model = tiny_model("llama", dtype=dtype)
    ids = torch.tensor([[3, 4, 5]])
    drafter = MedusaDrafter(random_heads(), STATIC)
    kwargs = dict(max_new_tokens=8, return_dict_in_generate=True)
    output = specdec_ext.generate(model, ids, drafter=drafter, **kwargs)
    assert output.speculation_stats.draft_tokens > 0


# ---------------------------------------------------------------- messages


def test_heads_of_another_target_are_refused():
    for changes, message in (
        ({"hidden_size": 16}, "hidden states of width 16, but the target's have 32"),
        (
            {"vocab_size": 98, "draft_vocab_size": 98},
            "ids up to 97, but the target has only 97 tokens",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            check_same_text(MedusaDrafter(random_heads(**changes)), "one", "greedy")


def test_tree_deeper_than_the_number_of_heads_is_refused():
    with pytest.raises(ValueError, match="depth 4, but heads made in memory has 3 heads"):
        MedusaDrafter(random_heads(), TreeConfig(depth=4))


def test_tensors_must_fit_the_config():
    heads = random_heads()
    tensors = dict(heads.tensors)
    del tensors["blocks.1.0.bias"]
    with pytest.raises(ValueError, match=r"missing tensors \['blocks.1.0.bias'\]"):
        MedusaHeads(heads.config, tensors)
    tensors["blocks.1.0.bias"] = torch.zeros(5)
    message = r"blocks.1.0.bias has shape \(5,\); its config requires \(32,\)"
    with pytest.raises(ValueError, match=message):
        MedusaHeads(heads.config, tensors)
