"""``History``: the latest snapshots of a server; ``Growth``: what was counted between two of them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from specdec_ext.serve import names
from specdec_ext.stats import reached_with_one_length
from specdec_ext.watch.snapshot import POSITION_COUNTERS, Snapshot, at


@dataclass(frozen=True)
class Growth:
    """What a server counted between two snapshots.

    Attributes:
        seconds: the time between them; None if it is not known, since the server began.
        counters, positions, histograms: as in :class:`Snapshot`.
    """

    seconds: float | None
    counters: Mapping[str, float]
    positions: Mapping[str, tuple[float, ...]]
    histograms: Mapping[str, Mapping[float, float]]

    @classmethod
    def between(cls, earlier: Snapshot | None, later: Snapshot) -> Growth:
        """The growth from ``earlier``, which ``later`` follows; None for the beginning of the server."""
        seconds = None if earlier is None else later.at - earlier.at
        before = earlier or Snapshot(0.0)
        return cls(
            seconds,
            {name: count - before.counters.get(name, 0) for name, count in later.counters.items()},
            {
                name: tuple(
                    count - at(before.positions.get(name, ()), i) for i, count in enumerate(counts)
                )
                for name, counts in later.positions.items()
                if name in POSITION_COUNTERS
            },
            {
                name: {
                    bound: count - before.histograms.get(name, {}).get(bound, 0)
                    for bound, count in counts.items()
                }
                for name, counts in later.histograms.items()
            },
        )

    def count(self, name: str) -> float:
        """The growth of a counter; 0 if the server has none of this name."""
        return self.counters.get(name, 0.0)

    def ratio(self, name: str, of: str) -> float | None:
        """The growth of one counter over that of another; None if the other has not grown."""
        whole = self.count(of)
        return self.count(name) / whole if whole else None

    @property
    def tokens_per_second(self) -> float | None:
        """New tokens of all requests over time."""
        return self.count(names.GENERATION_TOKENS) / self.seconds if self.seconds else None

    @property
    def acceptance_length(self) -> float | None:
        """Tokens per draft, with the bonus or correction token; None without drafts."""
        accepted = self.ratio(names.ACCEPTED_TOKENS, names.DRAFTS)
        return None if accepted is None else 1 + accepted

    @property
    def tokens_per_step(self) -> float | None:
        """Tokens per row and step, with and without drafts; None if the server does not count steps."""
        return self.ratio(names.STEP_TOKENS, names.STEPS)

    @property
    def gain(self) -> float | None:
        """The speed relative to plain decoding, as the controller estimates it; None if it timed nothing."""
        return self.ratio(names.PLAIN_SECONDS, names.TIMED_SECONDS)

    @property
    def accepted(self) -> tuple[float, ...]:
        """Drafts whose tokens up to positions 1, 2, ... were accepted."""
        return self.positions.get(names.ACCEPTED_PER_POSITION, ())

    @property
    def reached(self) -> tuple[float, ...]:
        """Drafts with a token at positions 1, 2, ... whose tokens before were all accepted.

        Of a server that does not count them, such as vLLM, as many as if all drafts had one length.
        """
        counted = self.positions.get(names.REACHED_PER_POSITION)
        if counted is not None:
            return counted
        return tuple(reached_with_one_length(self.count(names.DRAFTS), self.accepted))

    def quantile(self, name: str, share: float) -> float | None:
        """A quantile of a histogram, interpolated within its bucket, as Prometheus' ``histogram_quantile``.

        Args:
            name: name of the histogram.
            share: 0.5 for the median.

        Returns:
            Seconds; the last finite bound for values above it; None without values.
        """
        counts = self.histograms.get(name, {})
        total = counts.get(math.inf, 0.0)
        if not total:
            return None
        wanted = share * total
        below, before = 0.0, 0.0  # the lower bound, and the values up to it
        for bound, count in counts.items():
            if count >= wanted and count > before:
                if math.isinf(bound):
                    break
                return below + (bound - below) * (wanted - before) / (count - before)
            below, before = bound, count
        return below


class History:
    """The snapshots of a time span, since the server began.

    Args:
        seconds: the time span.
    """

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._snapshots: deque[Snapshot] = deque()
        self.restarts = 0

    def add(self, snapshot: Snapshot) -> None:
        """Add the latest snapshot; if the server was started again, the earlier ones are forgotten."""
        kept = self._snapshots
        if kept and not snapshot.follows(kept[-1]):
            kept.clear()
            self.restarts += 1
        kept.append(snapshot)
        # The oldest one is as old as the span, so that there is always one that spans it.
        while len(kept) > 2 and kept[1].at <= snapshot.at - self._seconds:
            kept.popleft()

    @property
    def growth(self) -> Growth | None:
        """What was counted in the span; None before there are two snapshots."""
        kept = self._snapshots
        return Growth.between(kept[0], kept[-1]) if len(kept) > 1 else None

    @property
    def recent(self) -> Growth | None:
        """What was counted since the snapshot before the last one; None if that is the first one."""
        kept = self._snapshots
        return Growth.between(kept[-2], kept[-1]) if len(kept) > 2 else None
