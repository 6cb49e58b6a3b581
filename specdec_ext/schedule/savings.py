"""How much time the tokens of drafts save a batch: estimated in each step, corrected after each call.

A step values a token at its share of a plain step. This is too much for rows that advance at different paces:
they end one after another, and a row that ends early saves only the time that it adds to a pass. The real
saving is known when the call ends. Its ratio to the estimates scales the estimates of later calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

# Weight of all earlier calls relative to the latest one.
KEPT = 0.8


@dataclass
class RealisedSavings:
    """Estimated and real savings of steps with several rows, over calls. Older calls fade.

    Attributes:
        estimated: plain steps that these steps were estimated to save.
        saved: plain steps that they saved.
    """

    estimated: float = 4.0
    saved: float = 4.0

    def add(self, estimated: float, saved: float) -> None:
        """Add a call."""
        self.estimated = KEPT * self.estimated + estimated
        self.saved = KEPT * self.saved + saved

    @property
    def share(self) -> float:
        """Real saving over estimate, limited to [0, 1]."""
        return min(max(self.saved / self.estimated, 0.0), 1.0) if self.estimated > 0 else 1.0


class CallSavings:
    """The savings of one call.

    Args:
        realised: the savings of earlier calls, which :meth:`end` updates.
    """

    def __init__(self, realised: RealisedSavings):
        self._realised = realised
        self._plain_step: dict[int, float] = {}  # rows -> latest known seconds of a plain step
        self._steps = 0.0  # seconds of as many plain steps as there were steps
        # Seconds that the additional tokens were estimated to save, with several rows and with one.
        self._estimated = self._saved_alone = 0.0

    def plain_time(self, emitted: int, rows: int, plain_step: float, steps: int = 1) -> float:
        """Seconds that plain decoding would need for the tokens of some steps.

        Args:
            emitted: number of tokens that the steps emitted, over all rows.
            rows: number of active rows.
            plain_step: seconds of a plain step with these rows.
            steps: number of steps.
        """
        plain = steps * plain_step
        added = emitted * plain_step / rows - plain
        self._plain_step[rows] = plain_step
        self._steps += plain
        if rows == 1:
            self._saved_alone += added
            return plain + added
        self._estimated += added
        return plain + added * self._realised.share

    def end(self, lengths: Sequence[int]) -> None:
        """Compare the estimates with the time that plain decoding of the whole call would take.

        Args:
            lengths: number of tokens that each row emitted.
        """
        lengths = sorted(lengths)
        plain_step = self._plain_step.get(len(lengths), 0.0)
        if not plain_step or not self._estimated:
            return
        cost, whole = plain_step, 0.0
        for ended, (before, length) in enumerate(pairwise([0, *lengths])):
            cost = self._plain_step.get(len(lengths) - ended, cost)
            whole += (length - before) * cost
        saved = whole - self._steps - self._saved_alone
        self._realised.add(self._estimated / plain_step, saved / plain_step)
