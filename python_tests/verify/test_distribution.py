"""Rule 1 is lossless: the emitted tokens have the distribution of the target.

Exact test: the walk of the reference is enumerated over all picks with rational target probabilities.
Statistical test: chi-square on over 1e6 draws of the compiled op with fixed seeds, with logits processed by
transformers. Biased rules fail both tests.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from fractions import Fraction

import pytest
import torch
from helpers.checks.distributions import Target, Text, chi_square_excess, continued, random_target
from helpers.ops.op_cases import DEVICES, generator
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specdec_ext import ops
from specdec_ext.reference.verify_match import walk
from specdec_ext.verify.filters import fuse_filters

# Exact distributions


class _MorePicks(Exception):
    """Raised when the walk needs a further pick."""


def enumerate_walks(tokens: list[int], parents: list[int], target: Target) -> Iterator:
    """(emitted tokens, probability) of rule 1 for every sequence of picks with positive probability."""
    pending: list[tuple[Text, Fraction]] = [((), Fraction(1))]
    while pending:
        picks, weight = pending.pop()

        def pick(node: int, depth: int, picks: Text = picks) -> int:
            if depth == len(picks):
                raise _MorePicks
            return picks[depth]

        try:
            path, next_token = walk(tokens, parents, pick)
        except _MorePicks:
            for token, probability in enumerate(target(picks)):
                if probability:
                    pending.append(((*picks, token), weight * probability))
        else:
            yield (*(tokens[node] for node in path[1:]), next_token), weight


def random_tree(nodes: int, max_depth: int, vocab: int, rng: random.Random):
    tokens, parents, depths = [0], [-1], [0]
    while len(tokens) < nodes:
        parent = rng.choice([node for node in range(len(tokens)) if depths[node] < max_depth])
        tokens.append(rng.randrange(vocab))  # siblings may be equal
        parents.append(parent if rng.random() < 0.9 else -2)
        depths.append(depths[parent] + 1 if parents[-1] >= 0 else max_depth)
    return tokens, parents


@pytest.mark.parametrize("vocab", [1, 2, 3, 4, 6])
def test_walk_has_the_exact_distribution_of_the_target(vocab):
    rng = random.Random(vocab)
    for _ in range(15):
        target = random_target(vocab, rng)
        tokens, parents = random_tree(rng.randint(1, 9), 3, vocab, rng)
        length = 4 if vocab < 6 else 3
        emitted = continued(enumerate_walks(tokens, parents, target), target, length)
        assert emitted == continued(iter([((), Fraction(1))]), target, length)


def test_every_tree_of_three_nodes_has_the_exact_distribution():
    rng = random.Random(0)
    target = random_target(3, rng)
    plain = continued(iter([((), Fraction(1))]), target, 3)
    for parents in ([-1, 0, 0], [-1, 0, 1], [-1, -2, 0], [-1, 0, -2]):
        for drafts in itertools.product(range(3), repeat=2):
            walks = enumerate_walks([0, *drafts], parents, target)
            assert continued(walks, target, 3) == plain


def test_siblings_without_a_residual_fail_the_exact_test():
    target = random_target(3, random.Random(1))

    def one_by_one(children: list[int]) -> Iterator:
        root, rest = target(()), Fraction(1)
        for child in children:
            yield (child,), rest * root[child]
            rest *= 1 - root[child]
        for token, probability in enumerate(root):
            yield (token,), rest * probability

    plain = continued(iter([((), Fraction(1))]), target, 1)
    assert continued(one_by_one([0, 1]), target, 1) != plain


# Distributions of draws of the compiled op

NUM_DRAWS = 1 << 20
ROWS = 1 << 16
VOCAB = 12


class _Nothing(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores


PROCESSORS = {
    "plain": _Nothing(),
    "temperature-1.7": TemperatureLogitsWarper(1.7),
    "top-k-5": TopKLogitsWarper(5),
    "top-k-1": TopKLogitsWarper(1),
    "all": LogitsProcessorList(
        [
            RepetitionPenaltyLogitsProcessor(1.2),
            TemperatureLogitsWarper(0.9),
            TopKLogitsWarper(9),
            TopPLogitsWarper(0.95),
            MinPLogitsWarper(0.02),
        ]
    ),
}
PROCESSORS["all-fused"] = fuse_filters(PROCESSORS["all"], torch.device("cpu"))
DRAFTS = [4, 7, 4, 2]  # nodes 1 .. 4; node 3 is a child of node 1, the others of the root
PARENTS = [-1, 0, 0, 1, 0]


def node_logits(processor) -> torch.Tensor:
    """``[nodes, VOCAB]`` processed logits, each node with its own prefix."""
    raw = torch.randn(len(PARENTS), VOCAB, generator=generator(0)) * 1.5
    raw[0, DRAFTS[:2]] += 1.5  # likely children, so that drafts are accepted
    prefixes = [[1, 2], [1, 2, 4], [1, 2, 7], [1, 2, 4, 4], [1, 2, 2]]
    rows = [
        processor(torch.tensor([prefix]), scores[None].clone())[0]
        for prefix, scores in zip(prefixes, raw, strict=True)
    ]
    return torch.stack(rows)


def draw(logits: torch.Tensor, device: str = "cpu") -> torch.Tensor:
    """Counts ``[VOCAB, VOCAB + 1]`` of the first two emitted tokens; the last column has texts of one
    token."""
    counts = torch.zeros(VOCAB * (VOCAB + 1), dtype=torch.long)
    tokens = torch.tensor([0, *DRAFTS], device=device).expand(ROWS, -1)
    parents = torch.tensor(PARENTS, device=device).expand(ROWS, -1)
    row_ids = torch.arange(ROWS, device=device)
    for turn in range(NUM_DRAWS // ROWS):
        positions = torch.full((ROWS,), 10 * turn, device=device)
        seeds = torch.full((ROWS,), 1234 + turn // 4, device=device)
        stochastic = torch.ones(ROWS, dtype=torch.bool, device=device)
        rows = logits.to(device).expand(ROWS, -1, -1)
        result = ops.verify_match(rows, tokens, parents, positions, seeds, row_ids, stochastic)
        nodes = result.path[:, 1:3].clamp(min=0)
        emitted = torch.where(
            torch.arange(2, device=device) < result.num_accepted[:, None],
            tokens.gather(1, nodes),
            result.next_token[:, None],
        )
        first = emitted[:, 0]
        second = torch.where(result.num_accepted > 0, emitted[:, 1], VOCAB)
        cells = first * (VOCAB + 1) + second
        counts += torch.bincount(cells.cpu(), minlength=len(counts))
    return counts.view(VOCAB, VOCAB + 1)


def expected_cells(logits: torch.Tensor) -> torch.Tensor:
    """The probabilities of :func:`draw`'s cells under the target."""
    probabilities = logits.double().softmax(dim=-1)
    cells = torch.zeros(VOCAB, VOCAB + 1, dtype=torch.double)
    cells[:, VOCAB] = probabilities[0]
    for node in (4, 2, 1):  # the children of the root
        token = [0, *DRAFTS][node]
        cells[token, VOCAB] = 0
        cells[token, :VOCAB] = probabilities[0, token] * probabilities[node]
    return cells


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", PROCESSORS)
def test_op_has_the_distribution_of_the_target(name, device):
    logits = node_logits(PROCESSORS[name])
    assert chi_square_excess(draw(logits, device), expected_cells(logits)) < 1


def test_temperature_that_differs_by_two_percent_fails_the_test():
    logits = node_logits(PROCESSORS["plain"])
    assert chi_square_excess(draw(logits / 1.02), expected_cells(logits)) > 1


def test_noise_used_twice_fails_the_test():
    """The second token is drawn with the noise of the first one's position."""
    logits = node_logits(PROCESSORS["plain"])
    zeros = torch.zeros(ROWS, dtype=torch.long)
    row_ids, sampled = torch.arange(ROWS), torch.ones(ROWS, dtype=torch.bool)

    def pick(node):
        root = torch.zeros(ROWS, 1, dtype=torch.long)
        one = logits[node].expand(ROWS, 1, VOCAB)
        return ops.verify_match(one, root, root - 1, zeros, zeros, row_ids, sampled).next_token

    first = pick(0)
    seconds = torch.stack([pick(1), pick(2), pick(4)])
    second = torch.full((ROWS,), VOCAB)
    for index, token in enumerate((4, 7, 2)):
        second = torch.where(first == token, seconds[index], second)
    counts = torch.bincount(first * (VOCAB + 1) + second, minlength=VOCAB * (VOCAB + 1))
    counts = counts.view(VOCAB, VOCAB + 1)
    expected = expected_cells(logits)
    assert chi_square_excess(counts, expected) > 1
    # Each token alone has the right distribution, but the joint distribution is wrong.
    assert chi_square_excess(counts.sum(dim=1), expected.sum(dim=1)) < 1


def test_biased_acceptance_fails_the_test():
    """Each child is accepted with its own probability, without a residual."""
    logits = node_logits(PROCESSORS["plain"])
    probabilities = logits[0].double().softmax(dim=-1)
    rng = generator(3)
    drawn = torch.multinomial(probabilities, NUM_DRAWS, replacement=True, generator=rng)
    for child in reversed(DRAFTS[:2]):
        accepted = torch.rand(NUM_DRAWS, generator=rng) < probabilities[child]
        drawn = torch.where(accepted, child, drawn)
    assert chi_square_excess(torch.bincount(drawn, minlength=VOCAB), probabilities) > 1
