"""What steps cost, measured while they are done: seconds by size, robust against outliers.

A :class:`Curve` knows what a step of some size takes: the lower median of the last few times. What was not
measured is told from the sizes beside it, else from a curve of another batch or context length.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque

from specdec_ext.schedule.acceptance import CHAIN

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
        elsewhere: a curve of other measurements, which shapes the guesses, or None.
        ratio: the size there that stands for size 1 here.
    """

    def __init__(self, elsewhere: Curve | None = None, ratio: float = 1.0):
        self._elsewhere, self._ratio = elsewhere, ratio
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
        if not self._is_known(size):
            # The farthest curve first, without recursion: rows that end one after the other leave a chain of
            # curves that may be longer than Python's stack is deep.
            chain, sizes = [(self, {size})], self._asked_elsewhere({size})
            while sizes:
                elsewhere = chain[-1][0]._elsewhere
                assert elsewhere is not None
                chain.append((elsewhere, sizes))
                sizes = elsewhere._asked_elsewhere(sizes)
            for curve, sizes in reversed(chain):
                unknown = [each for each in sizes if not curve._is_known(each)]
                curve._estimates |= {each: curve._estimate(each) for each in unknown}
        return self._known(size)

    def _is_known(self, size: int) -> bool:
        """Whether it was measured often enough, or estimated since."""
        return len(self._times.get(size, ())) >= TRUSTED or size in self._estimates

    def _known(self, size: int) -> float | None:
        trusted = len(self._times.get(size, ())) >= TRUSTED
        return self._median(size) if trusted else self._estimates[size]

    def _told(self, size: int) -> float | None:
        """What the other curve knows of this size."""
        return None if self._elsewhere is None else self._elsewhere._known(self._there(size))

    def _asked_elsewhere(self, sizes: set[int]) -> set[int]:
        """The sizes of the other curve that estimates of ``sizes`` need."""
        asked: set[int] = set()
        for size in sizes:
            below, above = self._beside(size)
            if self._elsewhere is not None and not (self._is_known(size) or (below and above)):
                asked |= {self._there(each) for each in (size, *below[-1:], *above[:1])}
        return asked

    def _there(self, size: int) -> int:
        """The size of the other curve that stands for this one."""
        return max(1, round(size * self._ratio))

    def _beside(self, size: int) -> tuple[list[int], list[int]]:
        """Smaller and larger sizes that were measured."""
        sizes = self._sizes
        return sizes[: bisect_left(sizes, size)], sizes[bisect_right(sizes, size) :]

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
        below, above = self._beside(size)
        if below and above:
            first, last = below[-1], above[0]
            share = (size - first) / (last - first)
            line = self._median(first) * (1 - share) + self._median(last) * share
            # A wide pass may be dear from some width on: what holds below is tried first.
            return min(line, self._beyond(below, size)) if len(below) > 1 else line
        if not below and not above:
            return self._told(size)
        beside = below or above[::-1]
        near = beside[-1]
        here, there = self._told(size), self._told(near)
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
            self.curves[key] = self._beginning(*key)
        return self.curves[key]

    def _beginning(self, rows: int, scale: int) -> Curve:
        """A curve that leans on the nearest context length of as many rows; else on another batch, at as
        many tokens in all."""
        known = [key for key, curve in self.curves.items() if curve.sizes]
        if not known:
            return Curve()
        key = min(known, key=lambda key: (abs(key[0] - rows), abs(key[1] - scale)))
        return Curve(self.curves[key], rows / key[0])


class DraftCosts:
    """Seconds of a drafter's ``propose``, by rows and what it was asked for.

    Attributes:
        curves: (rows, family of shapes) -> curve by levels.
        after_pause: of drafts after steps without, in which the drafter reads what it has missed: by the
            tokens that it reads.
    """

    def __init__(self) -> None:
        self.curves: dict[tuple[int, str], Curve] = {}
        self.after_pause = Curve()

    def curve(self, rows: int, family: str) -> Curve:
        """By levels, for one family of shapes; of a new one as the chain's."""
        key = rows, family
        if key not in self.curves:
            chain = None if family == CHAIN else self.curves.get((rows, CHAIN))
            self.curves[key] = Curve(chain)
        return self.curves[key]
