"""The measured time of steps: seconds by size, robust against outliers.

A :class:`Curve` gives the seconds of a step of some size: the lower median of the last few times. A size that
was not measured is estimated from the neighbouring sizes, else from a curve of another batch or context
length. So is a size whose times are old: it may have been slow because the machine was busy, and a size that
seems slow is not used, so it would not be measured again.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque
from dataclasses import dataclass

from specdec_ext.schedule.options import CHAIN, Kind

# Times kept per size.
WINDOW = 9
# With fewer times than this, the estimate from other sizes counts as one more: a first time is often an
# outlier.
TRUSTED = 3
# Number of new times after which estimates from other sizes are computed again.
REFRESHED = 8
# Assumed cost of a further node relative to the first one, before anything is known. It is low, so that
# larger sizes are tried.
FIRST_SLOPE = 0.03
# Context lengths up to this one share a curve, and so do those up to twice, four times, ... this length.
SHORT_CONTEXT = 512
# The times of a size are old after this many times as long, at first and at most. The number doubles when a
# new time confirms old ones, which it does if it is at most ``CONFIRMING`` times as long.
FIRST_VALID, LAST_VALID, CONFIRMING = 100, 800, 2.0


@dataclass
class Elapsed:
    """Seconds of all steps so far, by which measured times become old."""

    seconds: float = 0.0


class Curve:
    """Seconds by size.

    Args:
        elsewhere: a curve of another batch or context length, on which estimates are based; None for none.
        ratio: the size on that curve that corresponds to size 1 on this one.
        elapsed: the time by which times become old. A step of such a curve takes no longer than a larger one,
            or than several smaller ones of this size in sum; if times contradict that, later ones count. None
            for a curve without these properties.
    """

    def __init__(
        self, elsewhere: Curve | None = None, ratio: float = 1.0, elapsed: Elapsed | None = None
    ):
        self._elsewhere, self._ratio, self._elapsed = elsewhere, ratio, elapsed
        self._times: dict[int, deque[float]] = {}
        self._sizes: list[int] = []
        self._medians: dict[int, float] = {}
        # What was computed since the last refresh: medians that other sizes limit, and answers.
        self._limited: dict[int, float] = {}
        self._answers: dict[int, float | None] = {}
        self._age = 0  # number of times added since then
        # Size -> elapsed seconds at its last time, in the order of last times.
        self._measured: dict[int, float] = {}
        self._valid: dict[int, int] = {}  # size -> its times are old after this many times as long

    def add(self, size: int, seconds: float, steps: int = 1) -> None:
        """Add a measured time, or the mean of several ``steps``, which is as good as ``TRUSTED`` times."""
        if size not in self._times:
            self._times[size], self._valid[size] = deque(maxlen=WINDOW), FIRST_VALID
            insort(self._sizes, size)
        is_old = self._is_old(size)
        if self._times[size] and seconds > CONFIRMING * self._median_of(size):
            self._valid[size] = FIRST_VALID
        elif is_old:
            self._valid[size] = min(2 * self._valid[size], LAST_VALID)
        if is_old:
            self._times[size].clear()
        self._times[size].extend([seconds] * (TRUSTED if steps > 1 else 1))
        for known in (self._medians, self._limited, self._answers):
            known.pop(size, None)
        if self._elapsed is not None:
            self._measured.pop(size, None)
            self._measured[size] = self._elapsed.seconds
        self._age += 1
        # During several steps, other sizes may have become old.
        if self._age >= REFRESHED or steps > 1 or len(self._times[size]) <= TRUSTED:
            self._limited.clear()
            self._answers.clear()
            self._age = 0

    def count(self, size: int) -> int:
        """Number of times kept for exactly this size, at most ``WINDOW``."""
        return len(self._times.get(size, ()))

    @property
    def sizes(self) -> list[int]:
        """The sizes that were measured, in ascending order."""
        return list(self._sizes)

    def __call__(self, size: int) -> float | None:
        """Seconds of a step of this size, or None if this curve and the one it is based on are empty."""
        if size not in self._answers:
            # Compute on the farthest curve first, without recursion: each number of rows has a curve based
            # on that of the next, and this chain may be longer than Python's recursion limit.
            chain, sizes = [(self, {size})], self._sizes_elsewhere({size})
            while sizes:
                elsewhere = chain[-1][0]._elsewhere
                assert elsewhere is not None
                chain.append((elsewhere, sizes))
                sizes = elsewhere._sizes_elsewhere(sizes)
            for curve, sizes in reversed(chain):
                missing = sizes - curve._answers.keys()
                curve._answers |= {each: curve._computed(each) for each in missing}
        return self._answers[size]

    def _computed(self, size: int) -> float | None:
        """Seconds of a step of this size, if the other curve has the answers that are needed."""
        return self._median(size) if self._is_trusted(size) else self._estimate(size)

    def _is_trusted(self, size: int) -> bool:
        """Whether this size was measured often enough, and not too long ago."""
        return len(self._times.get(size, ())) >= TRUSTED and not self._is_old(size)

    def _is_old(self, size: int) -> bool:
        """Whether the times of this size are old. The smallest size, on which others are based, is never."""
        if self._elapsed is None or size not in self._measured or size == self._sizes[0]:
            return False
        age = self._elapsed.seconds - self._measured[size]
        return age > self._valid[size] * self._median(size)

    def _seconds_elsewhere(self, size: int) -> float | None:
        """The seconds that the other curve gives for this size."""
        if self._elsewhere is None:
            return None
        return self._elsewhere._answers[self._size_elsewhere(size)]

    def _sizes_elsewhere(self, sizes: set[int]) -> set[int]:
        """The sizes on the other curve that are needed to estimate ``sizes`` on this one."""
        asked: set[int] = set()
        if self._elsewhere is None:
            return asked
        for size in sizes:
            if size in self._answers or self._is_trusted(size):
                continue
            below, above = self._neighbours(size)
            if not (below and above):
                asked |= {self._size_elsewhere(each) for each in (size, *below[-1:], *above[:1])}
        return asked

    def _size_elsewhere(self, size: int) -> int:
        """The size on the other curve that corresponds to this one."""
        return max(1, round(size * self._ratio))

    def _neighbours(self, size: int) -> tuple[list[int], list[int]]:
        """The smaller and the larger sizes that were measured."""
        sizes = [each for each in self._sizes if not self._is_old(each)]
        return sizes[: bisect_left(sizes, size)], sizes[bisect_right(sizes, size) :]

    def spread(self, size: int) -> float:
        """Standard error of the mean of this size's times, in seconds; 0 for fewer than two times."""
        times = self._times.get(size, ())
        if len(times) < 2:
            return 0.0
        mean = sum(times) / len(times)
        variance = sum((time - mean) ** 2 for time in times) / (len(times) - 1)
        return float((variance / len(times)) ** 0.5)

    def _median(self, size: int) -> float:
        """The median of this size's times, unless later times of other sizes contradict it."""
        if size not in self._limited:
            self._limited[size] = self._limit(size, self._median_of(size))
        return self._limited[size]

    def _limit(self, size: int, seconds: float) -> float:
        """The seconds of this size, limited by later times of other sizes."""
        for other in reversed(self._measured):
            if other == size:
                break
            seconds = min(seconds, -(-size // other) * self._median_of(other))
        return seconds

    def _median_of(self, size: int) -> float:
        """The lower median of this size's times."""
        if size not in self._medians:
            times = sorted(self._times[size])
            self._medians[size] = times[(len(times) - 1) // 2]
        return self._medians[size]

    def _estimate(self, size: int) -> float | None:
        times = sorted(self._times.get(size, ()))
        if times and self._is_old(size):
            times = [self._median(size)]
        if (guess := self._from_neighbours(size)) is not None:
            insort(times, guess)
        return self._limit(size, times[(len(times) - 1) // 2]) if times else None

    def _from_neighbours(self, size: int) -> float | None:
        """Interpolate between the neighbouring sizes, or extrapolate in the proportion of the other curve."""
        below, above = self._neighbours(size)
        if below and above:
            first, last = below[-1], above[0]
            share = (size - first) / (last - first)
            line = self._median(first) * (1 - share) + self._median(last) * share
            # Cost may jump at some width. The slope of the smaller sizes is assumed until larger ones are
            # tried.
            return min(line, self._extrapolated(below, size)) if len(below) > 1 else line
        if not below and not above:
            return self._seconds_elsewhere(size)
        beside = below or above[::-1]
        near = beside[-1]
        here, there = self._seconds_elsewhere(size), self._seconds_elsewhere(near)
        if here is not None and there:
            return self._median(near) * here / there
        if len(beside) > 1:
            return self._extrapolated(beside, size)
        return self._median(near) * (1 + FIRST_SLOPE * (size - 1)) / (1 + FIRST_SLOPE * (near - 1))

    def _extrapolated(self, beside: list[int], size: int) -> float:
        """Extrapolate the line through the last two of these sizes."""
        other, near = beside[-2:]
        slope = max(0.0, (self._median(near) - self._median(other)) / (near - other))
        return max(0.0, self._median(near) + slope * (size - near))


class VerifyCosts:
    """Seconds of a step without its draft: the target pass and everything else.

    Args:
        elapsed: the time by which measured times become old; None if they do not.

    Attributes:
        curves: (rows, class of context lengths) -> curve by nodes per row.
    """

    def __init__(self, elapsed: Elapsed | None = None):
        self.curves: dict[tuple[int, int], Curve] = {}
        self._elapsed = elapsed

    def curve(self, rows: int, context_length: int) -> Curve:
        """The curve by nodes per row for this number of rows and about this context length."""
        key = rows, (max(0, context_length - 1) // SHORT_CONTEXT).bit_length()
        if key not in self.curves:
            self.curves[key] = self._new_curve(*key)
        return self.curves[key]

    def _new_curve(self, rows: int, scale: int) -> Curve:
        """A new curve, based on the nearest context length of the nearest number of rows.

        On the curve of another number of rows, sizes correspond if the whole batch has as many tokens.
        """
        known = [key for key, curve in self.curves.items() if curve.sizes]
        if not known:
            return Curve(elapsed=self._elapsed)
        key = min(known, key=lambda key: (abs(key[0] - rows), abs(key[1] - scale)))
        return Curve(self.curves[key], rows / key[0], self._elapsed)


class DraftCosts:
    """Seconds of a drafter's ``propose``.

    Args:
        elapsed: the time by which measured times become old; None if they do not.

    Attributes:
        curves: (rows, kind of drafts) -> curve by levels.
        after_pause: curve of drafts after a pause, in which the drafter first reads the new tokens; by the
            number of tokens that it reads.
    """

    def __init__(self, elapsed: Elapsed | None = None):
        self.curves: dict[tuple[int, Kind], Curve] = {}
        self._elapsed = elapsed
        self.after_pause = Curve()

    def curve(self, rows: int, kind: Kind) -> Curve:
        """The curve by levels for one kind of drafts; a new one is based on that of chains."""
        key = rows, kind
        if key not in self.curves:
            chain = None if kind == CHAIN else self.curves.get((rows, CHAIN))
            self.curves[key] = Curve(chain, elapsed=self._elapsed)
        return self.curves[key]
