"""Coupled drafts: heads that share the noise of the verification.

A head that knows the target's distribution is always right. Other heads are right as often as the exact
expectation says, and dynamic trees are the best ones for the scores of their nodes.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import math

import pytest
import torch
from helpers.drafters.head_cases import head_of
from helpers.drafters.medusa_cases import random_heads
from helpers.models.tiny import model_without_layers, prompts
from helpers.ops.op_cases import generator
from transformers import PreTrainedModel

import specdec_ext
from specdec_ext import Drafter, HeadDrafter, MedusaDrafter, TreeConfig, assets, ops
from specdec_ext.drafters.heads.bound_head import BoundHead
from specdec_ext.heads.config import DraftHead
from specdec_ext.heads.medusa import MedusaHeads
from specdec_ext.ops import DraftNoise
from specdec_ext.reference.couple_logits import couple_logits
from specdec_ext.verify.sampler import DRAFT_TEMPERATURES

TREES = {
    "chain": TreeConfig(depth=3),
    "static": TreeConfig(choices=((0,), (1,), (0, 0), (1, 0), (0, 0, 0))),
    "dynamic": TreeConfig(depth=3, top_k=2, num_nodes=6),
}


@functools.cache
def constant_model() -> PreTrainedModel:
    """A Llama that has the same distribution after every text."""
    model = model_without_layers()
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(model.model.embed_tokens.weight[:1].clone())
    return model


def knowing_head() -> DraftHead:
    """An EAGLE-1 head whose output is the target's last hidden state."""
    head = head_of("eagle1")
    tensors = {name: torch.zeros_like(tensor) for name, tensor in head.tensors.items()}
    hidden = head.config.hidden_size
    tensors["fc.weight"][:, hidden:] = torch.eye(hidden)  # the feature, without the embedding
    return DraftHead(head.config, tensors)


def knowing_medusa() -> MedusaHeads:
    """Heads with the target's lm_head."""
    heads = random_heads(num_heads=3)
    tensors = {name: torch.zeros_like(tensor) for name, tensor in heads.tensors.items()}
    for i in range(3):
        tensors[f"lm_heads.{i}.weight"] = constant_model().lm_head.weight.detach().clone()
    return MedusaHeads(heads.config, tensors)


def knowing_drafter(kind: str, tree: TreeConfig, temperature: float) -> Drafter:
    if kind == "medusa":
        return MedusaDrafter(knowing_medusa(), tree, temperature)
    return HeadDrafter(knowing_head(), tree, temperature=temperature)


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("kind", ["head", "medusa"])
def test_drafts_with_the_targets_distribution_are_all_accepted(kind, tree):
    """In ragged rows of several streams, after some rows have ended, and with seeds of their own."""
    ids, mask = prompts((5, 9, 3))
    kwargs = dict(attention_mask=mask, do_sample=True, temperature=1.3, top_k=0, max_new_tokens=40)
    kwargs |= dict(eos_token_id=7, pad_token_id=0, return_dict_in_generate=True)
    for seed in (11, [3, 2**62, 5]):
        texts = [specdec_ext.generate(constant_model(), ids, drafter=None, seed=seed, **kwargs)]
        accepted = []
        for temperature in (1 / DRAFT_TEMPERATURES[False], 0.0):
            drafter = knowing_drafter(kind, TREES[tree], temperature)
            output = specdec_ext.generate(
                constant_model(), ids, drafter=drafter, seed=seed, speculation="fixed", **kwargs
            )
            stats = output.speculation_stats
            accepted.append(stats.accepted_per_position[0] / stats.proposed_per_position[0])
            texts.append(output)
        assert accepted[0] == 1 and accepted[1] < 0.9
        for output in texts[1:]:
            assert torch.equal(output.sequences, texts[0].sequences)


def test_greedy_drafts_have_no_noise():
    """The first children of a greedy draft are the head's most probable tokens."""
    ids, mask = prompts((5, 9))
    for kind in ("head", "medusa"):
        drafter = knowing_drafter(kind, TREES["chain"], 1.0)
        output = specdec_ext.generate(
            constant_model(), ids, attention_mask=mask, drafter=drafter, do_sample=False,
            max_new_tokens=12, speculation="fixed", return_dict_in_generate=True,
        )  # fmt: skip
        assert output.speculation_stats.acceptance_rate == 1


@pytest.mark.parametrize("count", [1, 3])
def test_acceptance_is_the_exact_expectation(count):
    """P(arg-max of log p + g is among the best ``count`` of log q + g), for one token by formula, else by
    integration over the noise with another generator.

    The formula is that of Daliri et al. 2024, "Coupling without communication and drafter-invariant
    speculative decoding".
    """
    vocab, samples = 6, 40_000
    logits = torch.randn(2, vocab, generator=generator(2)) * 1.5
    p, q = logits.double().softmax(dim=-1)
    if count == 1:
        expected = agreement(p, q)
        ratios = [torch.maximum(p / p[i], q / q[i]).sum() for i in range(vocab)]
        assert expected == pytest.approx(float(sum(1 / ratio for ratio in ratios)))
    else:
        noise = -torch.rand(1_000_000, vocab, generator=generator(5)).double().log().neg().log()
        drawn = (p.log() + noise).argmax(dim=1)
        drafts = (q.log() + noise).topk(count, dim=1).indices
        expected = float((drafts == drawn[:, None]).any(dim=1).double().mean())
    rows = torch.arange(samples)
    noise_of_rows = DraftNoise(torch.ones(samples), rows % 7, rows // 7)
    positions = 100 + rows % 13
    target, draft = (
        ops.couple_logits(each.log().float().expand(samples, -1).contiguous(), noise_of_rows, positions)
        for each in (p, q)
    )  # fmt: skip
    hits = (draft.topk(count, dim=1).indices == target.argmax(dim=1)[:, None]).any(dim=1)
    rate, deviation = float(hits.double().mean()), math.sqrt(expected * (1 - expected) / samples)
    assert abs(rate - expected) < 4 * deviation


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*drafts in PyTorch")
@pytest.mark.parametrize("temperature", [0.8, 1.0])
def test_acceptance_of_the_bundled_head_is_the_exact_expectation(temperature, monkeypatch):
    """Each draft of one token is right with the probability of the formula, given the text before it.

    The specification drafts, because it shows the head's logits.
    """
    target, head, tokenizer = assets.load_target(), assets.load_head(), assets.load_tokenizer()
    noted: dict[int, torch.Tensor] = {}  # position -> the distribution of the draft

    def couple(logits, noise, positions, ids):
        q = torch.zeros(target.config.vocab_size, dtype=torch.float64)
        q[ids] = (logits[0].double() / noise.temperatures[0]).softmax(dim=0)
        noted[int(positions)] = q
        return couple_logits(logits, noise, positions, ids)

    specification = importlib.import_module("specdec_ext.reference.draft_head")
    monkeypatch.setattr(specification, "couple_logits", couple)
    monkeypatch.setattr(BoundHead, "refusal", lambda *_: "it shows no logits")
    right, expected = 0, []
    for seed, prompt in enumerate(assets.held_out_prompts()):
        ids = tokenizer(prompt["prompt"], return_tensors="pt")["input_ids"]
        noted.clear()
        output = specdec_ext.generate(
            target, ids, drafter=HeadDrafter(head, TreeConfig(depth=1), "same"),
            speculation="fixed", do_sample=True, temperature=temperature, top_k=0, seed=seed,
            max_new_tokens=64, return_dict_in_generate=True,
        )  # fmt: skip
        right += output.speculation_stats.accepted_per_position[0]
        assert len(noted) == output.speculation_stats.proposed_per_position[0]
        with torch.no_grad():
            logits = target(output.sequences).logits[0].double()
        for position, q in noted.items():
            expected.append(agreement((logits[position - 1] / temperature).softmax(dim=0), q))
    deviation = math.sqrt(sum(each * (1 - each) for each in expected))
    assert len(expected) > 400 and abs(right - sum(expected)) < 4 * deviation


def agreement(p: torch.Tensor, q: torch.Tensor) -> float:
    """P(arg-max of log p + g is that of log q + g): the sum over i of 1 / sum_j max(p_j / p_i, q_j / q_i)."""
    both = (p > 0) & (q > 0)
    order = (q / p)[both].argsort(descending=True)
    p, q, left = p[both][order], q[both][order], (1 - q[both].sum(), 1 - p[both].sum())
    # Tokens before i have the larger ratio for q, and those after it for p.
    of_q = (left[0] + q.cumsum(dim=0)) / q
    of_p = (left[1] + p.sum() - p.cumsum(dim=0)) / p
    return float((1 / (of_q + of_p)).sum())


def test_scores_are_probabilities_of_acceptance():
    """If log p is log q plus Gumbel errors, the target draws token i with probability softmax(log q + g)_i.

    The integral over the error of the largest token is exact up to its steps.
    """
    coupled = torch.tensor([0.3, 1.7, -0.4, 1.1], dtype=torch.float64)
    x = torch.linspace(-30, 40, 400_001, dtype=torch.float64)
    step = float(x[1] - x[0])
    for i in range(len(coupled)):
        density = (-(x - coupled[i]) - (-(x - coupled[i])).exp()).exp()
        others = [j for j in range(len(coupled)) if j != i]
        below = torch.stack([(-(-(x - coupled[j])).exp()).exp() for j in others]).prod(dim=0)
        probability = float((density * below).sum()) * step
        assert probability == pytest.approx(float(coupled.softmax(dim=0)[i]), abs=1e-9)


def test_dynamic_trees_have_the_most_expected_tokens():
    """Among all trees of as many nodes, by enumeration. Nodes are the paths over a vocabulary of 3."""
    vocab, depth, nodes = 3, 2, 5
    score: dict[tuple[int, ...], float] = {(): 0.0}
    rng = generator(8)
    for level in range(depth):
        for path in [path for path in score if len(path) == level]:
            coupled = torch.randn(vocab, generator=rng).double().log_softmax(dim=0)
            score |= {(*path, token): score[path] + float(coupled[token]) for token in range(vocab)}
    paths = [path for path in score if path]
    best = max(
        sum(math.exp(score[path]) for path in chosen)
        for chosen in itertools.combinations(paths, nodes - 1)
        if all(path[:-1] in chosen for path in chosen if len(path) > 1)
    )
    order = {path: i for i, path in enumerate(paths)}
    parents = [order[path[:-1]] if len(path) > 1 else -1 for path in paths]
    tree = ops.build_dynamic_tree(
        torch.tensor([[score[path] for path in paths]], dtype=torch.float32),
        torch.tensor([[path[-1] for path in paths]]),
        torch.tensor([parents]),
        torch.tensor([0]),
        nodes,
    )
    chosen = [paths[i] for i in tree.selected[0, 1:].tolist()]
    assert sum(math.exp(score[path]) for path in chosen) == pytest.approx(best)


@pytest.mark.parametrize("temperature", [-0.1, math.nan, math.inf])
@pytest.mark.parametrize("kind", ["head", "medusa"])
def test_temperatures_out_of_range_are_refused(kind, temperature):
    with pytest.raises(
        ValueError, match="temperature is relative to the one that the call suggests"
    ):
        knowing_drafter(kind, TREES["chain"], temperature)
