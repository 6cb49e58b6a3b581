"""``break_even``: the speed-up by draft length and number of rows, and the acceptance from which drafts pay.

The speed-up of drafts of K tokens is the tokens that a step emits over the time that it takes, in plain
steps. Both are known before anything is deployed: costs from measured or assumed times, tokens from the
acceptance by position.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specdec_ext.display import Summarised, Table
from specdec_ext.display.text import counted
from specdec_ext.evaluate.synthetic import constant_acceptance
from specdec_ext.planning.costs import StepCosts
from specdec_ext.planning.simulation import Simulation, simulate
from specdec_ext.planning.traffic import Traffic
from specdec_ext.preflight.extras import require


@dataclass(frozen=True)
class Estimate:
    """Drafts of one length in batches of one size.

    Attributes:
        rows: number of rows.
        length: draft length.
        tokens: tokens that a step emits per row: the mean acceptance length.
        ratio: time of a step in plain steps; a step must emit more tokens than that.
        speed_up: speed relative to plain decoding.
        needed: speed-up -> conditional acceptance, equal at all positions, that gives it; None if none does.
            1 is break-even.
    """

    rows: int
    length: int
    tokens: float
    ratio: float
    speed_up: float
    needed: dict[float, float | None]


@dataclass(frozen=True, repr=False)
class BreakEven(Summarised):
    """The result of :func:`break_even`.

    Attributes:
        costs: the costs.
        traffic: the kinds of text.
        estimates: for each number of rows and draft length.
        simulations: for each number of rows, the latency with the best draft length, or with the shortest if
            none pays.
    """

    costs: StepCosts
    traffic: Traffic
    estimates: tuple[Estimate, ...]
    simulations: tuple[Simulation, ...]

    @property
    def rows(self) -> list[int]:
        """The numbers of rows, in ascending order."""
        return sorted({each.rows for each in self.estimates})

    def best(self, rows: int) -> Estimate | None:
        """The draft length with the highest speed-up; None if none pays."""
        best = max(self._of(rows), key=lambda each: each.speed_up)
        return best if best.speed_up > 1 else None

    def _of(self, rows: int) -> list[Estimate]:
        return [each for each in self.estimates if each.rows == rows]

    def _verdict(self, rows: int) -> str:
        best = self.best(rows)
        if best is None:
            return f"{counted(rows, 'row')}: does not pay"
        return f"{counted(rows, 'row')}: {best.speed_up:.2f}x with drafts of {best.length}"

    def summary(self) -> str:
        return "; ".join(map(self._verdict, self.rows))

    def sentences(self) -> Iterable[str]:
        yield f"{self.summary()}."
        yield f"Costs: {self.costs.origin}."
        for rows in self.rows:
            if self.best(rows) is None:
                needs = (
                    f"With {counted(rows, 'row')} speculation does not pay: {self._missing(rows)}"
                )
                yield f"{needs}."
        for each in self.simulations:
            yield from each.sentences()

    def _missing(self, rows: int) -> str:
        """What would have to be different for drafts to pay."""
        needed = [
            (acceptance, each.length)
            for each in self._of(rows)
            if (acceptance := each.needed[1.0]) is not None
        ]
        if not needed:
            return "no acceptance makes up for the time of a step"
        acceptance, length = min(needed)
        return (
            f"drafts of {length} would have to be accepted with probability {acceptance:.2f} at each "
            "position"
        )

    def tables(self) -> Iterable[Table]:
        speed_ups = list(self.estimates[0].needed)
        rows = [
            (
                str(each.rows),
                str(each.length),
                f"{each.tokens:.2f}",
                f"{each.ratio:.2f}",
                f"{each.speed_up:.2f}x",
                *("never" if a is None else f"{a:.2f}" for a in each.needed.values()),
            )
            for each in self.estimates
        ]
        best = [self.best(rows) for rows in self.rows]
        marked = [index for index, each in enumerate(self.estimates) if each in best]
        needs = [f"a, {speed_up:g}x" for speed_up in speed_ups]
        headings = ("rows", "length", "tokens", "break-even", "speed-up", *needs)
        title = (
            "tokens per step, break-even (time of a step in plain steps), speed-up, and a: the conditional "
            "acceptance, equal at all positions, that gives a speed-up"
        )
        yield Table(rows, headings, title, marked)
        for each in self.simulations:
            yield from each.tables()

    def record(self) -> dict[str, Any]:
        """Everything, for JSON; ``costs`` can be read again by :meth:`StepCosts.from_record`."""
        best = {rows: self.best(rows) for rows in self.rows}
        return {
            "costs": self.costs.record(),
            "traffic": [asdict(kind) for kind in self.traffic.kinds],
            "estimates": [asdict(each) for each in self.estimates],
            "best": {rows: None if each is None else each.length for rows, each in best.items()},
            "simulations": [each.record() for each in self.simulations],
        }

    def plot(self, path: str | Path) -> None:
        """Save the speed-up by draft length, and tokens per step beside break-even, as an image file.

        Raises:
            ImportError: matplotlib is not installed.
        """
        otherwise = "BreakEven.explain() shows the same as text"
        figures = require("matplotlib.figure", "BreakEven.plot", otherwise)
        figure = figures.Figure(figsize=(10, 4), layout="constrained")
        left, right = figure.subplots(1, 2)
        for rows in self.rows:
            each = self._of(rows)
            lengths = [one.length for one in each]
            name = counted(rows, "row")
            left.plot(lengths, [one.speed_up for one in each], marker=".", label=name)
            right.plot(lengths, [one.ratio for one in each], marker=".", label=name)
        left.axhline(1, color="grey", linewidth=1)
        left.set(xlabel="draft length", title="speed relative to plain decoding")
        tokens = {one.length: one.tokens for one in self.estimates}
        right.plot(
            *zip(*sorted(tokens.items()), strict=True), color="black", label="tokens per step"
        )
        right.set(xlabel="draft length", title="time of a step in plain steps (break-even)")
        for ax in (left, right):
            ax.legend(frameon=False)
        figure.savefig(path)


def break_even(
    costs: StepCosts,
    traffic: Traffic | Sequence[float],
    lengths: Sequence[int] = range(1, 9),
    rows: Sequence[int] = (1,),
    *,
    speed_ups: Sequence[float] = (),
    new_tokens: int = 256,
    seed: int = 0,
) -> BreakEven:
    """Estimate the speed-up of every draft length, and the acceptance that is needed.

    Args:
        costs: time of steps.
        traffic: kinds of text, or the conditional acceptance of positions 1, 2, ... of a single kind.
        lengths: draft lengths.
        rows: numbers of rows.
        speed_ups: speed-ups for which the needed acceptance is shown, besides break-even.
        new_tokens: tokens of each simulated request.
        seed: seed of the simulation.

    Raises:
        ValueError: for no length or no number of rows, or numbers that are too small.
    """
    if not isinstance(traffic, Traffic):
        traffic = Traffic.uniform(traffic)
    lengths, rows = sorted(set(lengths)), sorted(set(rows))
    if not lengths or not rows or lengths[0] < 1 or rows[0] < 1 or min([*speed_ups, 1]) <= 0:
        raise ValueError(
            f"lengths={lengths}, rows={rows}, speed_ups={list(speed_ups)}; expected at least one length and "
            "one number of rows, each at least 1, and speed-ups above 0"
        )
    estimates = [
        _estimate(costs, traffic, length, each, [1.0, *speed_ups])
        for each in rows
        for length in lengths
    ]
    found = BreakEven(costs, traffic, tuple(estimates), ())
    simulations = []
    for each in rows:
        best = found.best(each)
        length = lengths[0] if best is None else best.length
        simulations.append(simulate(costs, traffic, length, each, new_tokens=new_tokens, seed=seed))
    return BreakEven(costs, traffic, tuple(estimates), tuple(simulations))


def _estimate(
    costs: StepCosts, traffic: Traffic, length: int, rows: int, speed_ups: Sequence[float]
) -> Estimate:
    tokens, ratio = traffic.acceptance_length(length), costs.ratio(rows, length)
    needed = {each: needed_acceptance(each, length, ratio) for each in speed_ups}
    return Estimate(rows, length, tokens, ratio, tokens / ratio, needed)


def needed_acceptance(speed_up: float, length: int, ratio: float = 1.0) -> float | None:
    """The conditional acceptance, equal at all positions, that gives a speed-up; None if none does.

    Args:
        speed_up: speed relative to plain decoding.
        length: draft length K.
        ratio: time of a step in plain steps; 1 for drafts that cost nothing.
    """
    tokens = speed_up * ratio
    return None if tokens > length + 1 else constant_acceptance(max(1.0, tokens), length)[0]
