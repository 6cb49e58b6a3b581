"""``judge``: verdicts on what a server counted: drafts, a dead head, drift, and whether speculation pays."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal

from specdec_ext.display.text import counted
from specdec_ext.serve import names
from specdec_ext.watch.history import Growth
from specdec_ext.watch.limits import LIMITS, Limits

State = Literal["well", "unknown", "warning", "critical"]


@dataclass(frozen=True)
class Verdict:
    """The result of a check.

    Attributes:
        check: ``"server"``, ``"pair"``, ``"drafts"``, ``"head"``, ``"drift"`` or ``"gain"``.
        state: ``"unknown"`` if there is too little to judge.
        reason: the numbers, as a clause.
    """

    check: str
    state: State
    reason: str


@dataclass(frozen=True)
class Reference:
    """The acceptance that is expected, as counts of drafts; those of a lock or of a server.

    Attributes:
        reached: drafts with a token at positions 1, 2, ... whose tokens before were all accepted.
        accepted: those of them whose token was accepted.
    """

    reached: Sequence[float]
    accepted: Sequence[float]


@dataclass(frozen=True)
class PositionAcceptance:
    """The acceptance of one position, given that the position before was accepted.

    Attributes:
        position: from 1 on.
        reached, accepted: numbers of drafts.
        reference: the expected acceptance; None if there is none.
        drop: estimate of how much lower the acceptance is than expected; None without a reference or drafts.
        error: the standard error of ``drop``.
    """

    position: int
    reached: float
    accepted: float
    reference: float | None = None
    drop: float | None = None
    error: float | None = None

    @property
    def acceptance(self) -> float | None:
        return self.accepted / self.reached if self.reached else None

    @property
    def change(self) -> float | None:
        """The acceptance minus the expected one."""
        if self.acceptance is None or self.reference is None:
            return None
        return self.acceptance - self.reference

    def drifts(self, limits: Limits) -> bool:
        """Whether the drop is larger than the tolerance and what chance explains."""
        if self.drop is None or self.error is None or self.reached < limits.drift_drafts:
            return False
        return self.drop - limits.drift_errors * self.error > limits.drift_tolerance


def acceptance(
    growth: Growth, reference: Reference | None, limits: Limits = LIMITS
) -> list[PositionAcceptance]:
    """The acceptance of each position beside the expected one.

    The acceptance given that the position before was accepted does not depend on the lengths of drafts, which
    a controller changes. A drop and its error are those of Agresti and Caffo's interval (The American
    Statistician 54, 2000): on either side, one more accepted and one more rejected draft is counted. Before
    that, the numbers of drafts are divided by the design effect.
    """
    now = zip_longest(growth.reached, growth.accepted, fillvalue=0.0)
    known = [] if reference is None else zip(reference.reached, reference.accepted, strict=True)
    pairs = zip_longest(now, known, fillvalue=(0.0, 0.0))
    return [_compared(*counts, limits.design_effect) for counts in enumerate(pairs, 1)]


def _compared(
    position: int, pair: tuple[tuple[float, float], tuple[float, float]], effect: float
) -> PositionAcceptance:
    (reached, accepted), (reached_then, accepted_then) = pair
    if not reached_then:
        return PositionAcceptance(position, reached, accepted)
    reference = accepted_then / reached_then
    if not reached:
        return PositionAcceptance(position, reached, accepted, reference)
    now, size = _share(reached, accepted, effect)
    then, size_then = _share(reached_then, accepted_then, effect)
    error = math.sqrt(now * (1 - now) / size + then * (1 - then) / size_then)
    return PositionAcceptance(position, reached, accepted, reference, then - now, error)


def judge(
    growth: Growth, positions: Sequence[PositionAcceptance], limits: Limits = LIMITS
) -> list[Verdict]:
    """All verdicts about a server that answers.

    Args:
        growth: what it counted.
        positions: of :func:`acceptance`.
        limits: when it is not well.
    """
    return [
        _drafts(growth, limits),
        _head_lives(growth, limits),
        _drift(positions, limits),
        _gain(growth, limits),
    ]


def _drafts(growth: Growth, limits: Limits) -> Verdict:
    drafts, tokens = growth.count(names.DRAFTS), growth.count(names.GENERATION_TOKENS)
    told = f"{counted(round(drafts), 'draft')} for {counted(round(tokens), 'token')}"
    if drafts:
        return Verdict("drafts", "well", told)
    if tokens < limits.undrafted_tokens:
        return Verdict("drafts", "unknown", told)
    if names.DRAFTS not in growth.counters:
        told += "; the server counts none: was it started without speculation?"
    return Verdict("drafts", "warning", told)


def _head_lives(growth: Growth, limits: Limits) -> Verdict:
    drafts = growth.count(names.DRAFTS)
    if drafts < limits.dead_head_drafts:
        return Verdict("head", "unknown", _too_few(drafts, limits.dead_head_drafts))
    # Without counts by position, all accepted tokens bound those of the first one.
    first = growth.accepted[0] if growth.accepted else growth.count(names.ACCEPTED_TOKENS)
    share = first / drafts
    told = f"{share:.1%} of first tokens accepted, of {counted(round(drafts), 'draft')}"
    if share < limits.dead_head_share:
        return Verdict("head", "critical", f"dead: {told}. Is it a head of another model?")
    return Verdict("head", "well", told)


def _drift(positions: Sequence[PositionAcceptance], limits: Limits) -> Verdict:
    known = [each for each in positions if each.reference is not None]
    if not known:
        return Verdict(
            "drift", "unknown", "no reference: pass --lock, or start the server with one"
        )
    drifting = [each for each in known if each.drifts(limits)]
    if drifting:
        return Verdict("drift", "warning", "; ".join(map(_dropped, drifting)))
    first = known[0]
    if first.reached < limits.drift_drafts:
        return Verdict("drift", "unknown", _too_few(first.reached, limits.drift_drafts))
    judged = sum(each.reached >= limits.drift_drafts for each in known)
    return Verdict("drift", "well", f"{counted(judged, 'position')} as in the reference")


def _dropped(each: PositionAcceptance) -> str:
    assert each.acceptance is not None and each.reference is not None
    return f"position {each.position} accepted {each.acceptance:.0%}, not {each.reference:.0%}"


def _gain(growth: Growth, limits: Limits) -> Verdict:
    seconds, gain = growth.count(names.TIMED_SECONDS), growth.gain
    if names.TIMED_SECONDS not in growth.counters:
        return Verdict("gain", "unknown", "the server times no steps; specdec serve does")
    if gain is None or seconds < limits.gain_seconds:
        told = f"{seconds:.1f} seconds of steps were timed, of {limits.gain_seconds:g}"
        return Verdict("gain", "unknown", f"{told}; speculation='fixed' times none")
    told = f"{gain:.2f}x the estimated speed of plain decoding"
    if gain < limits.least_gain:
        return Verdict("gain", "warning", f"speculation does not pay: {told}")
    return Verdict("gain", "well", told)


def _share(reached: float, accepted: float, effect: float) -> tuple[float, float]:
    """A share with one more accepted and one more rejected draft, and the number of drafts."""
    size = reached / effect + 2
    return (accepted / effect + 1) / size, size


def _too_few(drafts: float, wanted: float) -> str:
    return f"{counted(round(drafts), 'draft')}, too few to judge ({wanted:g})"


def worst(verdicts: Iterable[Verdict]) -> State:
    """``"critical"`` or ``"warning"`` if there is such a verdict, else ``"well"``."""
    states = {each.state for each in verdicts}
    for state in ("critical", "warning"):
        if state in states:
            return state
    return "well"
