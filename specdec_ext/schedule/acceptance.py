"""Conditional acceptance by position, learnt by comparing drafts with the text that followed.

a_i is the probability that position i is accepted given that position i - 1 was. All of the first i positions
are accepted with probability A_i = a_1 * ... * a_i. A draft of d levels is expected to bring A_1 + ... + A_d
tokens in addition to the one that every step emits.

There are few observations, so each estimate is shrunk towards a broader one: position i of a row towards
position i over all rows and calls, and that towards position i - 1.
"""

from __future__ import annotations

from collections.abc import Sequence

from specdec_ext.schedule.options import CHAIN, Kind

# The estimate for a first position without observations.
FIRST = 0.6
# Weight, in observations, of the position before, and of all rows and calls in the estimate for one row.
WEIGHT_BEFORE, WEIGHT_ALL = 2.0, 6.0
# Observations fade exponentially. About this many recent ones count: over all rows and calls, and of one row.
MEMORY_ALL, MEMORY_ROW = 200.0, 12.0
# A tree holds more guesses than a chain. Without observations it is assumed to contain the right token in
# this share of the cases in which the chain does not.
TREE_FINDS = 0.3


class Positions:
    """Counts of observations and acceptances by position, in which older ones fade.

    Args:
        memory: about how many recent observations count.

    Attributes:
        judged: observations of each position.
        accepted: those in which the position was right.
    """

    def __init__(self, memory: float):
        self._kept = 1 - 1 / memory
        self.judged: list[float] = []
        self.accepted: list[float] = []

    def add(self, matched: int, missed: bool) -> None:
        """Add a draft whose first ``matched`` positions were right and, if ``missed``, the next one wrong."""
        reached = matched + missed
        while len(self.judged) < reached:
            self.judged.append(0.0)
            self.accepted.append(0.0)
        for i in range(reached):
            self.judged[i] = self.judged[i] * self._kept + 1
            self.accepted[i] = self.accepted[i] * self._kept + (i < matched)

    def at(self, position: int) -> tuple[float, float]:
        """``(accepted, judged)`` of a position, counted from 0."""
        if position >= len(self.judged):
            return 0.0, 0.0
        return self.accepted[position], self.judged[position]


class LearntAcceptance:
    """Acceptance by kind of draft, over all rows and calls."""

    def __init__(self) -> None:
        self.kinds: dict[Kind, Positions] = {}

    def positions(self, kind: Kind) -> Positions:
        return self.kinds.setdefault(kind, Positions(MEMORY_ALL))

    def rates(self, kind: Kind, depth: int, is_tree: bool = False) -> list[float]:
        """The estimates a_1, ..., a_depth."""
        chain = self.kinds.get(CHAIN) if is_tree else None
        positions, before, rates = self.positions(kind), FIRST, []
        for i in range(depth):
            if chain is not None and chain.at(i)[1] >= 1:
                accepted, judged = chain.at(i)
                before = 1 - (1 - accepted / judged) * (1 - TREE_FINDS)
            accepted, judged = positions.at(i)
            before = (accepted + WEIGHT_BEFORE * before) / (judged + WEIGHT_BEFORE)
            rates.append(before)
        return rates


class Acceptance:
    """Acceptance of the rows of one call, shrunk towards that over all rows and calls.

    Args:
        learnt: acceptance over all calls with such a drafter on the model.
    """

    def __init__(self, learnt: LearntAcceptance):
        self.learnt = learnt
        self._rows: dict[tuple[int, Kind], Positions] = {}
        self._ahead: dict[tuple[int, Kind], list[float]] = {}

    def add(self, row: int, kind: Kind, matched: int, missed: bool) -> None:
        """Add a draft of this row, as in :meth:`Positions.add`."""
        if matched or missed:
            own = self._rows.setdefault((row, kind), Positions(MEMORY_ROW))
            own.add(matched, missed)
            self.learnt.positions(kind).add(matched, missed)
            self._ahead.clear()

    def forget(self, rows: Sequence[int]) -> None:
        """Forget these rows, but not what was learnt from them for all rows."""
        for kept in (self._rows, self._ahead):
            for key in [key for key in kept if key[0] in rows]:
                del kept[key]

    def ahead(self, row: int, kind: Kind, depth: int, is_tree: bool = False) -> Sequence[float]:
        """Expected accepted tokens of a draft that is cut to 0, 1, ..., ``depth`` levels."""
        known = self._ahead.get((row, kind))
        if known is None or len(known) <= depth:
            own = self._rows.get((row, kind))
            known, product = [0.0], 1.0
            for i, rate in enumerate(self.learnt.rates(kind, depth, is_tree)):
                if own is not None:
                    accepted, judged = own.at(i)
                    rate = (accepted + WEIGHT_ALL * rate) / (judged + WEIGHT_ALL)
                product *= rate
                known.append(known[-1] + product)
            self._ahead[row, kind] = known
        return known


def judged(
    tokens: Sequence[int], parents: Sequence[int], emitted: Sequence[int]
) -> tuple[int, bool]:
    """Compare a proposal with the text: ``(levels that match, whether the next level is wrong)``.

    The next level is wrong if the text has another token than those proposed. It also counts as wrong if the
    matching branch ends there but other branches are longer: acceptance is measured for levels of a whole
    proposal.

    Args:
        tokens: of each node of the proposal.
        parents: of each node.
        emitted: the tokens that the step emitted.
    """
    node, depths = 0, [0] * len(parents)
    for child in range(1, len(parents)):
        depths[child] = depths[parents[child]] + 1 if parents[child] >= 0 else 0
    deepest = max(depths)
    for level, token in enumerate(emitted):
        children = [child for child in range(node + 1, len(parents)) if parents[child] == node]
        if not children:
            return level, level < deepest
        taken = [child for child in children if tokens[child] == token]
        if not taken:
            return level, True
        node = taken[0]
    return len(emitted), False
