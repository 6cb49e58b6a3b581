"""What steps cost, measured while they are done: seconds by size, robust against outliers.

A :class:`Curve` knows what a step of some size takes: the lower median of the last few times. What was not
measured is told from the sizes beside it, else from a curve of another batch or context length.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable

from specdec_ext.acceptance import CHAIN

# Times kept of each size.
WINDOW = 9
# With fewer of them the guess from other sizes counts as one, too: a first time is often an outlier.
TRUSTED = 3
# Times after which what was told from other sizes is told anew.
REFRESHED = 8
# What a further node is taken to add to the cost of one where nothing is known yet: little, so that more
# nodes are tried.
FIRST_SLOPE = 0.03
# Context lengths that share a curve: up to this, twice as much, four times as much, ...
SHORT_CONTEXT = 512


class Curve:
    """Seconds by size.

    Args:
        elsewhere: what is known of a size from other measurements, or None; shapes the guesses.
    """

    def __init__(self, elsewhere: Callable[[int], float | None] = lambda size: None):
        self._elsewhere = elsewhere
        self._times: dict[int, deque[float]] = {}
        self._sizes: list[int] = []
        self._medians: dict[int, float] = {}
        self._estimates: dict[int, float | None] = {}  # that depend on other sizes, too
        self._age = 0  # times added since those were made

    def add(self, size: int, seconds: float) -> None:
        if size not in self._times:
            self._times[size] = deque(maxlen=WINDOW)
            insort(self._sizes, size)
        self._times[size].append(seconds)
        self._medians.pop(size, None)
        self._age += 1
        if self._age >= REFRESHED or len(self._times[size]) <= TRUSTED:
            self._estimates.clear()
            self._age = 0

    def count(self, size: int) -> int:
        """Times known of this very size, ``WINDOW`` at most."""
        return len(self._times.get(size, ()))

    @property
    def sizes(self) -> list[int]:
        """What was measured."""
        return list(self._sizes)

    def __call__(self, size: int) -> float | None:
        """Seconds, or None where nothing at all is known."""
        if len(self._times.get(size, ())) >= TRUSTED:
            return self._median(size)
        if size not in self._estimates:
            self._estimates[size] = self._estimate(size)
        return self._estimates[size]

    def spread(self, size: int) -> float:
        """Standard error of the mean of the times known of this size, in seconds; 0 of fewer than two."""
        times = self._times.get(size, ())
        if len(times) < 2:
            return 0.0
        mean = sum(times) / len(times)
        variance = sum((time - mean) ** 2 for time in times) / (len(times) - 1)
        return float((variance / len(times)) ** 0.5)

    def _median(self, size: int) -> float:
        if size not in self._medians:
            times = sorted(self._times[size])
            self._medians[size] = times[(len(times) - 1) // 2]
        return self._medians[size]

    def _estimate(self, size: int) -> float | None:
        times = sorted(self._times.get(size, ()))
        if (guess := self._guess(size)) is not None:
            insort(times, guess)
        return times[(len(times) - 1) // 2] if times else None

    def _guess(self, size: int) -> float | None:
        """From the sizes beside this one: between two a line, beyond them what is known elsewhere."""
        place = bisect_left(self._sizes, size)
        below = self._sizes[:place]
        above = self._sizes[place + self._sizes[place : place + 1].count(size) :]
        if below and above:
            first, last = below[-1], above[0]
            share = (size - first) / (last - first)
            line = self._median(first) * (1 - share) + self._median(last) * share
            # A wide pass may be dear from some width on: what holds below is tried first.
            return min(line, self._beyond(below, size)) if len(below) > 1 else line
        if not below and not above:
            return self._elsewhere(size)
        beside = below or above[::-1]
        near = beside[-1]
        here, there = self._elsewhere(size), self._elsewhere(near)
        if here is not None and there:
            return self._median(near) * here / there
        if len(beside) > 1:
            return self._beyond(beside, size)
        return self._median(near) * (1 + FIRST_SLOPE * (size - 1)) / (1 + FIRST_SLOPE * (near - 1))

    def _beyond(self, beside: list[int], size: int) -> float:
        """On the line through the last two of these sizes."""
        other, near = beside[-2:]
        slope = max(0.0, (self._median(near) - self._median(other)) / (near - other))
        return max(0.0, self._median(near) + slope * (size - near))


class VerifyCosts:
    """Seconds of a target pass and all around it but the draft.

    Attributes:
        curves: (rows, scale of the context length) -> curve by nodes per row.
    """

    def __init__(self) -> None:
        self.curves: dict[tuple[int, int], Curve] = {}

    def curve(self, rows: int, context_length: int) -> Curve:
        """By nodes per row, for about this context length."""
        key = rows, (max(0, context_length - 1) // SHORT_CONTEXT).bit_length()
        if key not in self.curves:
            self.curves[key] = Curve(self._nearest(*key))
        return self.curves[key]

    def _nearest(self, rows: int, scale: int) -> Callable[[int], float | None]:
        """The nearest context length of as many rows; else another batch of as many tokens in all."""
        known = [key for key, curve in self.curves.items() if curve.sizes]
        if not known:
            return lambda size: None
        key = min(known, key=lambda key: (abs(key[0] - rows), abs(key[1] - scale)))
        curve, ratio = self.curves[key], rows / key[0]
        return lambda size: curve(max(1, round(size * ratio)))


class DraftCosts:
    """Seconds of a drafter's ``propose``, by rows and what it was asked for.

    Attributes:
        curves: (rows, family of shapes) -> curve by levels.
        after_pause: of drafts after steps without, in which the drafter reads what it has missed.
    """

    def __init__(self) -> None:
        self.curves: dict[tuple[int, str], Curve] = {}
        self.after_pause = Curve()

    def curve(self, rows: int, family: str) -> Curve:
        """By levels, for one family of shapes; of a new one as the chain's."""
        key = rows, family
        if key not in self.curves:
            chain = None if family == CHAIN else self.curves.get((rows, CHAIN))
            self.curves[key] = Curve() if chain is None else Curve(chain)
        return self.curves[key]
