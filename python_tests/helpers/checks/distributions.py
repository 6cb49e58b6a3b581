"""Helpers of the distribution tests: random targets, exact distributions of texts, and a chi-square test."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from fractions import Fraction

import torch

Text = tuple[int, ...]
Distribution = dict[Text, Fraction]
Target = Callable[[Text], list[Fraction]]  # prefix -> probabilities


def continued(emitted: Iterator, target: Target, length: int) -> Distribution:
    """The distribution of the first ``length`` tokens when the target continues the emitted ones."""
    distribution: Distribution = Counter()
    pending = list(emitted)
    while pending:
        text, weight = pending.pop()
        if len(text) >= length:
            distribution[text[:length]] += weight
            continue
        for token, probability in enumerate(target(text)):
            if probability:
                pending.append(((*text, token), weight * probability))
    return dict(distribution)


def random_target(vocab: int, rng: random.Random) -> Target:
    """Random rational distributions, including zeros, for every prefix."""
    table: dict[Text, list[Fraction]] = {}

    def target(prefix: Text) -> list[Fraction]:
        if prefix not in table:
            weights = [rng.randint(0, 5) for _ in range(vocab)]
            weights[rng.randrange(vocab)] += 1
            table[prefix] = [Fraction(weight, sum(weights)) for weight in weights]
        return table[prefix]

    return target


def chi_square_excess(counts: torch.Tensor, distribution: torch.Tensor) -> float:
    """The chi-square statistic over its critical value at four standard deviations (p = 3e-5).

    Cells with an expected count below 5 are pooled. A result above 1 refutes the distribution.
    """
    assert (counts[distribution == 0] == 0).all(), "a token of probability zero was emitted"
    expected = distribution * counts.sum()
    rare = expected < 5
    observed = torch.cat([counts[~rare], counts[rare].sum()[None]]).double()
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    kept = expected > 0
    statistic = ((observed - expected)[kept] ** 2 / expected[kept]).sum().item()
    freedom = int(kept.sum()) - 1
    if freedom == 0:
        return 0.0
    # Wilson and Hilferty: the cube root of chi-square / freedom is nearly normal.
    variance = 2 / (9 * freedom)
    return statistic / (freedom * (1 - variance + 4 * variance**0.5) ** 3)
