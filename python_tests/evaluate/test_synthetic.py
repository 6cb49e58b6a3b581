"""``SyntheticDrafter``: acceptance is as prescribed, the text is unchanged, the wrapped drafter is called."""

from __future__ import annotations

import pytest
import torch
from helpers.models.tiny import VOCAB, prompts, tiny_model

import specdec_ext
from specdec_ext import DraftTree
from specdec_ext.drafters.base import Drafter
from specdec_ext.evaluate.synthetic import SyntheticDrafter, constant_acceptance


class Chains(Drafter):
    """Proposes chains of zeros with a fixed length, and records its calls."""

    def __init__(self, depth):
        self.depth, self.asked = depth, []

    def feature_layers(self, model):
        return (1,)

    def start(self, context, model, output):
        self.asked.append(("start", output.features.shape[1]))

    def propose(self, context):
        self.asked.append(("propose", len(context.rows)))
        return DraftTree.from_paths(context.roots, [[[0] * self.depth] for _ in context.rows])

    def commit(self, context, accepted, output):
        self.asked.append(("commit", output.features.shape[1]))


def generate(drafter, lengths=(6,), max_new_tokens=24, **kwargs):
    ids, mask = prompts(lengths)
    output = specdec_ext.generate(
        tiny_model("llama"),
        ids,
        attention_mask=mask,
        drafter=drafter,
        speculation="fixed",
        max_new_tokens=max_new_tokens,
        return_dict_in_generate=True,
        **kwargs,
    )
    return output.sequences[:, ids.shape[1] :].tolist(), output.speculation_stats


@pytest.mark.parametrize(
    "lengths, kwargs", [((6,), {}), ((3, 9, 5), {"do_sample": True, "seed": 3})], ids=str
)
def test_text_is_that_of_plain_decoding_and_rates_are_as_prescribed(lengths, kwargs):
    """Every share is within four standard errors of the prescribed one."""
    acceptance = [0.9, 0.5, 0.8, 0.0]
    tokens = 220
    plain, _ = generate(None, lengths, tokens, **kwargs)
    drafter = SyntheticDrafter(Chains(5), plain, acceptance, VOCAB)
    texts, speculation = generate(drafter, lengths, tokens, **kwargs)
    assert texts == plain
    counted = zip(
        speculation.conditional_acceptance[:4],
        speculation.reached_per_position[:4],
        acceptance,
        strict=True,
    )
    for share, drafts, asked in counted:
        assert drafts > 15
        assert share == pytest.approx(asked, abs=4 * (asked * (1 - asked) / drafts) ** 0.5)
    assert speculation.accepted_per_position[3:] == [0, 0]


@pytest.mark.parametrize("share, length", [(0.0, 1.0), (1.0, 6.0)])
def test_drafts_may_never_or_always_be_right(share, length):
    plain, _ = generate(None)
    texts, speculation = generate(SyntheticDrafter(Chains(5), plain, [share] * 5, VOCAB))
    assert texts == plain
    # Behind the last draft the text may end.
    assert speculation.mean_acceptance_length == pytest.approx(length, abs=0.5 * (length > 1))
    assert speculation.accepted_per_position[0] == (speculation.drafts if share else 0)


def test_drafts_depend_on_the_seed():
    plain, _ = generate(None)

    def accepted(seed):
        drafter = SyntheticDrafter(Chains(3), plain, [0.5] * 3, VOCAB, seed)
        return [generate(drafter)[1].accepted_per_position for _ in range(2)]

    assert accepted(0)[0] == accepted(0)[1]
    assert len({tuple(accepted(seed)[0]) for seed in range(4)}) > 1


def test_wrapped_drafter_is_called_in_every_step():
    plain, _ = generate(None)
    chains = Chains(2)
    _, speculation = generate(SyntheticDrafter(chains, plain, [0.5] * 2, VOCAB))
    assert chains.asked[0] == ("start", 6)
    assert [name for name, _ in chains.asked[1:3]] == ["propose", "commit"]
    assert chains.asked.count(("propose", 1)) == speculation.steps


def test_trees_are_refused():
    class Branches(Chains):
        def propose(self, context):
            return DraftTree.from_paths(context.roots, [[[1], [2]] for _ in context.rows])

    with pytest.raises(ValueError, match="Branches proposed a tree, but synthetic acceptance is"):
        generate(SyntheticDrafter(Branches(2), [[1] * 24], [0.5], VOCAB))


@pytest.mark.parametrize("length, depth", [(3.5, 7), (1.0, 4), (5.0, 4), (1.01, 1)])
def test_constant_acceptance_gives_the_length(length, depth):
    shares = torch.tensor(constant_acceptance(length, depth), dtype=torch.float64)
    assert len(shares) == depth
    assert 1 + shares.cumprod(0).sum().item() == pytest.approx(length)


@pytest.mark.parametrize("length", [0.9, 5.1])
def test_impossible_lengths_are_refused(length):
    message = f"mean_acceptance_length={length}; expected 1 to 5 for chains of 4 tokens"
    with pytest.raises(ValueError, match=message):
        constant_acceptance(length, 4)


def test_invalid_arguments_are_refused():
    with pytest.raises(ValueError, match=r"acceptance=\[0\.5, 1\.2\]; expected probabilities"):
        SyntheticDrafter(Chains(2), [], [0.5, 1.2], VOCAB)
    with pytest.raises(ValueError, match="vocab_size=1 has no wrong token"):
        SyntheticDrafter(Chains(2), [], [0.5], 1)
