"""``Traffic``: kinds of text with their shares of the tokens, and how far drafts are accepted in each."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

# How far the shares of all kinds may be from 1.
_ROUNDING = 1e-6


def ahead(acceptance: Sequence[float], length: int) -> list[float]:
    """Expected accepted tokens of drafts of 0, 1, ..., ``length`` tokens.

    Args:
        acceptance: conditional acceptance of positions 1, 2, ...; the last one holds for later positions.
        length: the largest draft length.
    """
    missing = max(0, length - len(acceptance))
    rates = [*acceptance, *([acceptance[-1]] * missing)][:length]
    return list(accumulate(accumulate(rates, operator.mul), initial=0.0))


def conditional(shares: Sequence[float]) -> list[float]:
    """Conditional acceptance from the shares of drafts that were accepted up to positions 1, 2, ...

    vLLM and ``SpeculationStats.acceptance_per_position`` count such shares.

    Raises:
        ValueError: for shares that rise or lie outside [0, 1].
    """
    all_shares = [1.0, *shares]
    if not shares or any(after > before or after < 0 for before, after in pairwise(all_shares)):
        raise ValueError(
            f"the shares {list(shares)} of drafts that were accepted up to each position must be in [0, 1] "
            "and can't rise; if each is given that the position before was accepted, they are no such shares"
        )
    return [after / before if before else 0.0 for before, after in pairwise(all_shares)]


@dataclass(frozen=True)
class TextKind:
    """One kind of text.

    Attributes:
        share: its share of the emitted tokens.
        acceptance: conditional acceptance of positions 1, 2, ...; the last one holds for later positions.

    Raises:
        ValueError: for a number outside [0, 1], or no position.
    """

    share: float
    acceptance: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.acceptance or not all(0 <= each <= 1 for each in self.acceptance):
            raise ValueError(
                f"acceptance={list(self.acceptance)}; expected a probability in [0, 1] for each position"
            )
        if not 0 < self.share <= 1:
            raise ValueError(
                f"share={self.share}; expected a share of the tokens, above 0, at most 1"
            )


@dataclass(frozen=True)
class Traffic:
    """Text of one or several kinds.

    Attributes:
        kinds: the kinds; their shares add up to 1.

    Raises:
        ValueError: if they do not.
    """

    kinds: tuple[TextKind, ...]

    def __post_init__(self) -> None:
        total = sum(kind.share for kind in self.kinds)
        if abs(total - 1) > _ROUNDING:
            raise ValueError(
                f"the shares of all kinds of text add up to {total:g}; expected 1, because they are shares "
                "of the tokens"
            )

    @classmethod
    def uniform(cls, acceptance: Sequence[float]) -> Traffic:
        """Traffic of one kind with this conditional acceptance of positions 1, 2, ..."""
        return cls((TextKind(1.0, tuple(acceptance)),))

    def acceptance_length(self, length: int) -> float:
        """Mean tokens per draft of this length, with the bonus or correction token.

        Shares of tokens are blended as times are: each token of a kind takes 1 / (tokens per draft) steps, so
        this is the harmonic mean. The mean of the acceptance rates would be too high.
        """
        return 1 / sum(kind.share / (1 + ahead(kind.acceptance, length)[-1]) for kind in self.kinds)
