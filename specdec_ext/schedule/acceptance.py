"""Conditional acceptance by position, learnt from what is drafted and what the text turned out to be.

a_i is the probability that position i is accepted given that i - 1 was; the first i positions are accepted
with the product A_i, and a draft of d levels brings A_1 + ... + A_d tokens beside the one that every step
brings. Evidence is thin, so estimates lean on each other: position i of a row on what all rows and calls have
seen there, and that on position i - 1.
"""

from __future__ import annotations

from collections.abc import Sequence

# Assumed of a first position before anything was seen, and what that weighs, in observations.
FIRST = 0.6
LEAN_ON_BEFORE = 2.0
# What all rows and calls have seen weighs this many observations of a row.
LEAN_ON_ALL = 6.0
# Observations after which older ones have faded, of all rows and calls and of a row.
MEMORY_ALL, MEMORY_ROW = 200.0, 12.0
# A tree holds more guesses than a chain: of what the chain misses it is taken to find this share, until seen.
TREE_FINDS = 0.3
CHAIN = "chain"


class Positions:
    """Faded counts by position: judged, and of those accepted."""

    def __init__(self, memory: float):
        self._kept = 1 - 1 / memory
        self.judged: list[float] = []
        self.accepted: list[float] = []

    def add(self, matched: int, missed: bool) -> None:
        """The first ``matched`` positions were right; if ``missed``, the next was wrong."""
        reached = matched + missed
        while len(self.judged) < reached:
            self.judged.append(0.0)
            self.accepted.append(0.0)
        for i in range(reached):
            self.judged[i] = self.judged[i] * self._kept + 1
            self.accepted[i] = self.accepted[i] * self._kept + (i < matched)

    def at(self, position: int) -> tuple[float, float]:
        """(accepted, judged)."""
        if position >= len(self.judged):
            return 0.0, 0.0
        return self.accepted[position], self.judged[position]


class LearntAcceptance:
    """By kind of draft, over all rows and calls."""

    def __init__(self) -> None:
        self.kinds: dict[str, Positions] = {}

    def positions(self, kind: str) -> Positions:
        return self.kinds.setdefault(kind, Positions(MEMORY_ALL))

    def rates(self, kind: str, depth: int, is_tree: bool = False) -> list[float]:
        """a_1 ... a_depth."""
        chain = self.kinds.get(CHAIN) if is_tree else None
        positions, before, rates = self.positions(kind), FIRST, []
        for i in range(depth):
            if chain is not None and chain.at(i)[1] >= 1:
                accepted, judged = chain.at(i)
                before = 1 - (1 - accepted / judged) * (1 - TREE_FINDS)
            accepted, judged = positions.at(i)
            before = (accepted + LEAN_ON_BEFORE * before) / (judged + LEAN_ON_BEFORE)
            rates.append(before)
        return rates


class Acceptance:
    """Of one call: its rows, leaning on what was learnt over all.

    Args:
        learnt: shared by all calls with such a drafter on the model.
    """

    def __init__(self, learnt: LearntAcceptance):
        self.learnt = learnt
        self._rows: dict[tuple[int, str], Positions] = {}
        self._ahead: dict[tuple[int, str], list[float]] = {}

    def add(self, row: int, kind: str, matched: int, missed: bool) -> None:
        """What became of a draft of this row."""
        if matched or missed:
            own = self._rows.setdefault((row, kind), Positions(MEMORY_ROW))
            own.add(matched, missed)
            self.learnt.positions(kind).add(matched, missed)
            self._ahead.clear()

    def ahead(self, row: int, kind: str, depth: int, is_tree: bool = False) -> Sequence[float]:
        """Tokens to expect beside the certain one of a draft cut to 0, 1, ..., ``depth`` levels."""
        known = self._ahead.get((row, kind))
        if known is None or len(known) <= depth:
            own = self._rows.get((row, kind))
            known, product = [0.0], 1.0
            for i, rate in enumerate(self.learnt.rates(kind, depth, is_tree)):
                if own is not None:
                    accepted, judged = own.at(i)
                    rate = (accepted + LEAN_ON_ALL * rate) / (judged + LEAN_ON_ALL)
                product *= rate
                known.append(known[-1] + product)
            self._ahead[row, kind] = known
        return known
