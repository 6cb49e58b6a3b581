"""Rules 2, 3 and 4 are lossless: the emitted tokens have the distribution of the target.

Exact test: every draft, every decision and every last token of the specification is enumerated in rational
arithmetic. Statistical test: chi-square on over 1e6 draws of the compiled ops with fixed seeds. Typical
faults of such code fail both tests.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from fractions import Fraction

import pytest
import torch
from helpers.checks.distributions import Target, Text, chi_square_excess, continued, random_target
from helpers.ops.op_cases import DEVICES, generator

from specdec_ext import ops
from specdec_ext.reference import verify_sampled as reference

RULES = {rule: getattr(reference, rule) for rule in ("rejection", "recursive", "block")}

# Exact distributions


def prefix_of(node: int, tokens: list[int], parents: list[int]) -> Text:
    """The draft tokens on the path from the root to a node, without the root's."""
    return () if node == 0 else (*prefix_of(parents[node], tokens, parents), tokens[node])


def drafts(parents: list[int], draft: Target) -> Iterator[tuple[list[int], Fraction]]:
    """(tokens, probability) of a tree whose siblings are drawn without replacement, in order."""
    pending: list[tuple[list[int], Fraction]] = [([-1], Fraction(1))]
    while pending:
        tokens, weight = pending.pop()
        node = len(tokens)
        if node == len(parents):
            yield tokens, weight
            continue
        if parents[node] < 0:
            pending.append(([*tokens, 0], weight))
            continue
        probs = draft(prefix_of(parents[node], tokens, parents))
        siblings = [tokens[i] for i in range(1, node) if parents[i] == parents[node]]
        rest = [0 if token in siblings else p for token, p in enumerate(probs)]
        if sum(rest) == 0:
            pending.append(([*tokens, -1], weight))  # nothing is left to draw
        for token, probability in enumerate(rest):
            if probability:
                pending.append(([*tokens, token], weight * probability / sum(rest)))


class _MoreDecisions(Exception):
    """Raised when the walk needs a further decision; its argument is the probability of accepting."""


def enumerate_walks(
    rule: Callable, parents: list[int], target: Target, draft: Target, draw: Callable = drafts
) -> Iterator[tuple[Text, Fraction, int]]:
    """(emitted tokens, probability, accepted tokens) of all drafts, decisions and last tokens."""
    for tokens, draft_weight in draw(parents, draft):
        pending: list[tuple[tuple[bool, ...], Fraction]] = [((), draft_weight)]
        while pending:
            decisions, weight = pending.pop()
            made = iter(decisions)

            def accept(depth, ordinal, t, d, made=made):
                if t <= 0 or t >= d:  # u * d < t for no u or for all
                    return t > 0
                decision = next(made, None)
                if decision is None:
                    raise _MoreDecisions(Fraction(t) / d)
                return decision

            def at_node(model, tokens=tokens):
                return lambda node: model(prefix_of(node, tokens, parents))

            try:
                path, last = rule(tokens, parents, at_node(target), at_node(draft), accept)
            except _MoreDecisions as request:
                (probability,) = request.args
                pending.append(((*decisions, True), weight * probability))
                pending.append(((*decisions, False), weight * (1 - probability)))
                continue
            text = prefix_of(path[-1], tokens, parents)
            for token, probability in enumerate(last):
                if probability:
                    yield (*text, token), weight * probability, len(path) - 1


def emitted(walks: Iterator) -> Iterator[tuple[Text, Fraction]]:
    return ((text, weight) for text, weight, _ in walks)


def plain(target: Target, length: int):
    return continued(iter([((), Fraction(1))]), target, length)


TREES = {  # name: (parents, vocab, length of the compared texts)
    "root": ([-1], 3, 2),
    "chain-1": ([-1, 0], 6, 2),
    "chain-2": ([-1, 0, 1], 4, 3),
    "chain-3": ([-1, 0, 1, 2], 3, 4),
    "chain-3-vocab-2": ([-1, 0, 1, 2], 2, 4),
    "siblings-2": ([-1, 0, 0], 6, 1),
    "siblings-3": ([-1, 0, 0, 0], 5, 1),
    "more-siblings-than-tokens": ([-1, 0, 0, 0, 0], 3, 1),
    "binary": ([-1, 0, 0, 1, 1], 3, 3),
    "both-sides": ([-1, 0, 0, 1, 2], 3, 3),
    "deep": ([-1, 0, 1, 1, 2], 3, 4),
    "inactive-nodes": ([-1, -2, 0, 2, -2, 2], 3, 3),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("tree", TREES)
def test_rules_have_the_exact_distribution_of_the_target(tree, rule):
    parents, vocab, length = TREES[tree]
    rng = random.Random(len(tree))
    for _ in range(4):
        target, draft = random_target(vocab, rng), random_target(vocab, rng)
        walks = enumerate_walks(RULES[rule], parents, target, draft)
        assert continued(emitted(walks), target, length) == plain(target, length)


@pytest.mark.parametrize("rule", RULES)
def test_draft_that_equals_the_target_is_always_accepted(rule):
    target = random_target(3, random.Random(1))
    for _, _, accepted in enumerate_walks(RULES[rule], [-1, 0, 1], target, target):
        assert accepted == 2


def test_block_accepts_at_least_as_much_as_rejection():
    rng = random.Random(5)
    gains = []
    for parents, vocab in (([-1, 0], 4), ([-1, 0, 1], 3), ([-1, 0, 1, 2], 3)):
        for _ in range(5):
            target, draft = random_target(vocab, rng), random_target(vocab, rng)
            expected = {
                rule: sum(
                    weight * accepted
                    for _, weight, accepted in enumerate_walks(RULES[rule], parents, target, draft)
                )
                for rule in ("block", "rejection")
            }
            gains.append(expected["block"] - expected["rejection"])
    assert min(gains) == 0 and max(gains) > Fraction(1, 100)
    assert gains[:5] == [0] * 5  # one token: the two rules are the same


def test_more_siblings_accept_more():
    rng = random.Random(6)
    target, draft = random_target(4, rng), random_target(4, rng)

    def acceptance(parents):
        walks = enumerate_walks(reference.recursive, parents, target, draft)
        return sum(weight for _, weight, accepted in walks if accepted)

    assert acceptance([-1, 0]) < acceptance([-1, 0, 0]) < acceptance([-1, 0, 0, 0])


def is_lossless(rule: Callable, parents: list[int], draw: Callable = drafts) -> bool:
    rng = random.Random(11)
    for _ in range(5):
        target, draft = random_target(3, rng), random_target(3, rng)
        walks = enumerate_walks(rule, parents, target, draft, draw)
        if continued(emitted(walks), target, 2) != plain(target, 2):
            return False
    return True


def test_siblings_without_a_residual_fail_the_exact_test(monkeypatch):
    monkeypatch.setattr(reference, "_normalised_difference", lambda target, draft: target)
    assert not is_lossless(reference.recursive, [-1, 0, 0])


def test_correction_from_the_target_fails_the_exact_test(monkeypatch):
    monkeypatch.setattr(reference, "_normalised_difference", lambda target, draft: target)
    assert not is_lossless(reference.rejection, [-1, 0])


def test_drafts_with_replacement_fail_the_exact_test(monkeypatch):
    monkeypatch.setattr(reference, "_without", lambda draft, token: draft)
    assert not is_lossless(reference.recursive, [-1, 0, 0])
    assert is_lossless(reference.recursive, [-1, 0, 1])  # chains have no second sibling


def test_sorted_siblings_fail_the_exact_test():
    """They are not in the order of their draws."""

    def sorted_drafts(parents, draft):
        for (_, *siblings), weight in drafts(parents, draft):
            yield [-1, *sorted(siblings)], weight

    assert is_lossless(reference.recursive, [-1, 0, 0])
    assert not is_lossless(reference.recursive, [-1, 0, 0], sorted_drafts)


def test_deterministic_siblings_fail_the_exact_test():
    """The two most likely tokens are not drawn from the draft distribution."""

    def best_drafts(parents, draft):
        probs = draft(())
        yield [-1, *sorted(range(len(probs)), key=lambda token: -probs[token])[:2]], Fraction(1)

    assert not is_lossless(reference.recursive, [-1, 0, 0], best_drafts)


def test_block_residual_without_keep_fails_the_exact_test(monkeypatch):
    def difference(target, draft):
        return [max(t / sum(target) - d, 0) for t, d in zip(target, draft, strict=True)]

    assert is_lossless(reference.block, [-1, 0, 1])
    monkeypatch.setattr(reference, "_positive_difference", difference)
    assert not is_lossless(reference.block, [-1, 0, 1])


# Distributions of draws of the compiled ops

VOCAB = 5
LENGTH = 3  # of the compared texts
NUM_DRAWS = 1 << 20
ROWS = 1 << 18
TARGET = torch.randn(VOCAB, VOCAB, generator=generator(1)) * 1.5  # logits after each token
DRAFT = (TARGET + torch.randn(VOCAB, VOCAB, generator=generator(2))).softmax(dim=-1)
SHAPES = {
    "rejection": [-1, 0, 1, 2],
    "block": [-1, 0, 1, 2],
    "recursive": [-1, 0, 0, 0, 1, 1, 2],
}


def draw_tree(parents: list[int], roots: torch.Tensor, rng: torch.Generator) -> torch.Tensor:
    """Tokens ``[rows, nodes]`` whose siblings are drawn without replacement from DRAFT."""
    tokens = torch.zeros(len(roots), len(parents), dtype=torch.long)
    tokens[:, 0] = roots
    for node in range(len(parents)):
        children = [child for child, parent in enumerate(parents) if parent == node]
        if children:
            noise = torch.rand(len(roots), VOCAB, generator=rng, dtype=torch.double).log()
            order = (DRAFT[tokens[:, node]] / -noise).argsort(dim=-1, descending=True)
            tokens[:, children] = order[:, : len(children)]
    return tokens


def verify(rule, parents, tokens, positions, draft_probs, seed, device="cpu"):
    rows = len(tokens)
    arguments = (
        TARGET[tokens],
        draft_probs,
        tokens,
        torch.tensor(parents).expand(rows, -1),
        positions,
        torch.full((rows,), seed),
        torch.arange(rows),
    )
    result = getattr(ops, f"verify_{rule}")(*(argument.to(device) for argument in arguments))
    return ops.MatchResult(result.packed.cpu(), *result.path.shape)


def append(texts, lengths, tokens, result):
    """Append the emitted tokens of a round to the texts; return the new lengths."""
    rows = torch.arange(len(texts))
    for depth in range(tokens.shape[1]):
        accepted = depth < result.num_accepted
        node = result.path[:, depth + 1] if depth + 1 < tokens.shape[1] else result.path[:, 0]
        token = torch.where(accepted, tokens[rows, node.clamp(min=0)], result.next_token)
        places = (lengths + depth).clamp(max=texts.shape[1] - 1)
        texts[rows, places] = torch.where(depth <= result.num_accepted, token, texts[rows, places])
    return lengths + result.num_accepted + 1


def write(rule, rows, seed, *, rounds=1, keyed=True, draft_of=None, device="cpu") -> torch.Tensor:
    """Texts ``[rows, 1 + LENGTH]`` of ``rounds`` rounds, completed with draws from the target."""
    rng = generator(seed)
    parents = SHAPES[rule]
    texts = torch.zeros(rows, 1 + LENGTH + len(parents), dtype=torch.long)
    lengths = torch.ones(rows, dtype=torch.long)
    for _ in range(rounds):
        lengths = lengths.clamp(max=LENGTH + 1)
        tokens = draw_tree(parents, texts[torch.arange(rows), lengths - 1], rng)
        positions = lengths - 1 if keyed else torch.zeros_like(lengths)
        draft_probs = (DRAFT if draft_of is None else draft_of)[tokens]
        result = verify(rule, parents, tokens, positions, draft_probs, seed, device)
        lengths = append(texts, lengths, tokens, result)
    step = TARGET.double().softmax(dim=-1)
    for place in range(1, LENGTH + 1):
        drawn = torch.multinomial(step[texts[:, place - 1]], 1, generator=rng)[:, 0]
        texts[:, place] = torch.where(place < lengths, texts[:, place], drawn)
    return texts[:, : LENGTH + 1]


def excess(texts: torch.Tensor) -> float:
    """A chi-square statistic; above 1, the texts do not have the target's distribution."""
    step = TARGET.double().softmax(dim=-1)
    expected = step[0]
    for _ in range(LENGTH - 1):
        expected = (expected.view(-1, VOCAB, 1) * step).flatten()
    cells = texts[:, 1:] @ (VOCAB ** torch.arange(LENGTH - 1, -1, -1))
    return chi_square_excess(torch.bincount(cells, minlength=VOCAB**LENGTH), expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rule", SHAPES)
def test_op_has_the_distribution_of_the_target(rule, device):
    turns = 1 if rule == "rejection" else NUM_DRAWS // ROWS  # on a chain rejection equals recursive
    assert excess(torch.cat([write(rule, ROWS, turn, device=device) for turn in range(turns)])) < 1


def test_rounds_with_one_seed_have_the_distribution_of_the_target():
    """The noise of a round depends on the position of its root."""
    assert excess(write("block", ROWS // 4, 5, rounds=3)) < 1


def test_noise_used_in_two_rounds_fails_the_test():
    assert excess(write("block", ROWS // 4, 5, rounds=3, keyed=False)) > 1


@pytest.mark.parametrize("rule", SHAPES)
def test_wrong_draft_probabilities_fail_the_test(rule):
    """Drafts are verified with the probabilities of another temperature."""
    assert excess(write(rule, ROWS // 4, 6, draft_of=DRAFT**1.1)) > 1


def test_ordered_drafts_have_their_distribution():
    """draw_drafts draws without replacement."""
    rows, probs = 1 << 16, torch.tensor([0.5, 0.0, 0.3, 0.15, 0.05])
    zeros = torch.zeros(rows, dtype=torch.long)
    drawn = reference.draw_drafts(probs.expand(rows, -1), 3, 2, zeros, zeros, torch.arange(rows))
    triples = torch.zeros(5, 5, 5, dtype=torch.double)
    for a, b, c in itertools.permutations([0, 2, 3, 4], 3):
        triples[a, b, c] = (
            probs[a] * probs[b] / (1 - probs[a]) * probs[c] / (1 - probs[a] - probs[b])
        )
    counts = torch.bincount(drawn @ torch.tensor([25, 5, 1]), minlength=125)
    assert chi_square_excess(counts, triples.flatten()) < 1
    assert chi_square_excess(counts, triples.transpose(0, 1).flatten()) > 1


def test_drafts_end_when_no_token_is_left():
    probs = torch.tensor([[0.0, 2.0, torch.nan, -1.0], [0.0, 0.0, 0.0, 0.0]])
    zeros = torch.zeros(2, dtype=torch.long)
    drawn = reference.draw_drafts(probs, 3, 0, zeros, zeros, zeros)
    assert drawn.tolist() == [[1, -1, -1], [-1, -1, -1]]


def test_draft_noise_of_the_same_seed_is_independent():
    """Drafting, accepting and drawing use one seed, and the text has the target's distribution."""
    rows = 1 << 16
    zeros, row_ids = torch.zeros(rows, dtype=torch.long), torch.arange(rows)
    tokens = torch.zeros(rows, 3, dtype=torch.long)
    for depth in range(2):
        probs = DRAFT[tokens[:, depth]]
        tokens[:, depth + 1 :] = reference.draw_drafts(probs, 1, depth, zeros, zeros, row_ids)
    result = verify("rejection", [-1, 0, 1], tokens, zeros, DRAFT[tokens], 0)
    texts = torch.zeros(rows, 6, dtype=torch.long)
    append(texts, torch.ones(rows, dtype=torch.long), tokens, result)
    expected = TARGET[0].double().softmax(dim=-1)
    assert chi_square_excess(torch.bincount(texts[:, 1], minlength=VOCAB), expected) < 1
