"""A token scored in a tree has the bits of plain decoding of its row.

On the CPU the target's linear layers and its attention accumulate in an order that depends only on a token
and the tokens before it, not on the size of the batch or of the tree. So verification makes the comparisons
of plain decoding, also in bfloat16, and near-ties between two tokens have the same result.

This is true for models whose matrix products are ``nn.Linear`` and whose attention is sdpa, and for those
that one op runs, without paddings between tokens.
"""

import pytest
import torch
from helpers.models.tiny import DECODERS, VOCAB, ScriptedDrafter, generated, prompts, tiny_model
from torch import Tensor

import specdec_ext
from specdec_ext import DraftTree
from specdec_ext.models import Target, make_target

LENGTHS = (11, 4, 7)
SLOTS = 64
# Two levels of branches with a chain below, and one more child of the root.
PARENTS = [-1, 0, 0, 1, 1, 3, 5, 2, 0]


def path_to(node: int) -> list[int]:
    return [] if node == -1 else [*path_to(PARENTS[node]), node]


def started(model) -> Target:
    target = make_target(model, SLOTS)
    target.prefill(*prompts(LENGTHS))
    return target


def step(target: Target, tokens: Tensor) -> Tensor:
    """Plain decoding of one token per row; ``[rows, vocab]``."""
    logits = target.forward(DraftTree.root(tokens)).logits[:, 0]
    zeros = torch.zeros(len(tokens), dtype=torch.long)
    target.commit(zeros[:, None], zeros)
    return logits


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def dtype(request):
    return request.param


NAMES = ["llama", "qwen3", "mistral-window", "phi", "gemma2-window", "gemma3-window", *DECODERS]


@pytest.fixture(params=NAMES)
def model(request, dtype):
    return tiny_model(request.param, dtype=dtype)


@pytest.fixture
def tree():
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, VOCAB, (len(LENGTHS), len(PARENTS)), generator=generator)
    return DraftTree(tokens, torch.tensor([PARENTS] * len(LENGTHS)))


def assert_same_bits(ours: Tensor, theirs: Tensor) -> None:
    assert torch.isfinite(ours).all()
    assert torch.equal(ours, theirs), f"largest difference {(ours - theirs).abs().max()}"


def test_nodes_of_a_tree_have_the_bits_of_plain_decoding(model, tree):
    scored = started(model).forward(tree).logits
    for node in range(len(PARENTS)):
        target = started(model)
        for visited in path_to(node):
            logits = step(target, tree.tokens[:, visited])
        assert_same_bits(scored[:, node], logits)


def test_token_after_different_accepted_paths_has_the_bits_of_plain_decoding(model, tree):
    paths = [path_to(6), path_to(0), path_to(7)]
    longest = max(map(len, paths))
    accepted = torch.tensor([len(path) - 1 for path in paths])
    padded = torch.tensor([path + [-1] * (len(PARENTS) - len(path)) for path in paths])
    target = started(model)
    target.forward(tree)
    target.commit(padded, accepted)
    following = torch.tensor([5, 6, 7])
    ours = step(target, following)

    plain = started(model)
    for depth in range(longest):  # rows with shorter paths decode tokens that are rolled back
        visited = padded[:, depth].clamp(min=0)
        step(plain, tree.tokens.gather(1, visited[:, None])[:, 0])
    plain.rewind((longest - 1 - accepted).tolist())
    assert_same_bits(ours, step(plain, following))


def test_rows_have_the_same_bits_after_others_have_finished(model, tree):
    target, alone = started(model), started(model)
    alone.reorder([2, 0, 1], active=1)
    one = DraftTree(tree.tokens[2:], tree.parents[2:])
    assert_same_bits(target.forward(tree).logits[2:], alone.forward(one).logits)


# 60 branches, 59 of three nodes and one of four.
WIDE = [-1, *[0] * 60, *range(1, 61), *range(61, 121), 121]


def test_nodes_of_a_large_tree_have_the_bits_of_plain_decoding(model):
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(1, VOCAB, (len(LENGTHS), len(WIDE)), generator=generator)
    scored = started(model).forward(DraftTree(tokens, torch.tensor([WIDE] * len(LENGTHS)))).logits
    assert len(WIDE) > 128
    for path in ([0, 1, 61, 121, 181], [0, 37, 97, 157], [0, 60, 120, 180]):
        target = started(model)
        for node in path:
            assert_same_bits(scored[:, node], step(target, tokens[:, node]))


def siblings(right, rng):
    """The right chain and, at each of its levels, wrong tokens."""
    chain = right[:6]
    wrong = [
        [*chain[:level], (token + other) % VOCAB]
        for level, token in enumerate(chain)
        for other in range(1, 25)
    ]
    return [chain, *wrong]


def chain_of_seven(right, rng):
    return [[*right[:6], 0]]


@pytest.mark.parametrize("decoding", [{"do_sample": False}, {"do_sample": True, "seed": 5}])
@pytest.mark.parametrize(
    ("rows", "shape"), [(17, chain_of_seven), (64, chain_of_seven), (2, siblings)]
)
def test_large_passes_have_the_bits_of_plain_decoding(model, rows, shape, decoding):
    """In passes of up to 512 tokens torch's own products have other bits than in small ones."""
    ids, mask = prompts((7,) * rows)
    kwargs = dict(attention_mask=mask, max_new_tokens=20, **decoding)
    kwargs |= dict(return_dict_in_generate=True, output_logits=True)
    plain = specdec_ext.generate(model, ids, drafter=None, **kwargs)
    drafter = ScriptedDrafter(generated(plain.sequences, 7), shape)
    ours = specdec_ext.generate(model, ids, drafter=drafter, speculation="fixed", **kwargs)
    assert torch.equal(ours.sequences, plain.sequences)
    assert_same_bits(torch.stack(ours.logits), torch.stack(plain.logits))
    assert ours.speculation_stats.mean_acceptance_length > 4
