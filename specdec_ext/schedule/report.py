"""``Gain``, the measured speed-up of a call, the report of what the controller knows, and its decisions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from specdec_ext.report import Decision, Estimate, Report
from specdec_ext.schedule.acceptance import LearntAcceptance
from specdec_ext.schedule.costs import Curve, DraftCosts, VerifyCosts
from specdec_ext.schedule.options import CHAIN, Option, name_of
from specdec_ext.stats import PLAIN_STEP
from specdec_ext.tree.config import TreeConfig

# Half the width of a 95 % interval of the normal distribution, in standard errors.
HALF_WIDTH = 1.96
POSITIONS_SHOWN = 8


@dataclass
class Gain:
    """The speed-up of a call: estimated time of plain decoding over time taken, each summed over steps.

    Attributes:
        plain: seconds that plain decoding would need. For a step without a draft this is the time that it
            took; for other steps, the time of plain steps for the same tokens.
        took: seconds that the steps took.
    """

    steps: int = 0
    plain: float = 0.0
    took: float = 0.0
    _squares: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])

    def add(self, took: float, plain: float) -> None:
        self.steps += 1
        self.plain += plain
        self.took += took
        for i, product in enumerate((plain * plain, plain * took, took * took)):
            self._squares[i] += product

    @property
    def ratio(self) -> float:
        return self.plain / self.took if self.took > 0 else 1.0

    def interval(self, reference_error: float = 0.0) -> tuple[float, float]:
        """The 95 % interval of the ratio, from the scatter of steps (delta method) and ``reference_error``.

        Args:
            reference_error: relative standard error of the plain step's time.
        """
        if self.steps < 2 or self.took <= 0:
            return 0.0, math.inf
        ratio = self.ratio
        residuals = self._squares[0] - 2 * ratio * self._squares[1] + ratio**2 * self._squares[2]
        scatter = max(residuals, 0.0) * self.steps / (self.steps - 1) / self.took**2
        error = math.sqrt(scatter + (ratio * reference_error) ** 2)
        return max(0.0, ratio - HALF_WIDTH * error), ratio + HALF_WIDTH * error


def report_of(
    verify: VerifyCosts, drafts: DraftCosts, acceptance: LearntAcceptance, gain: Gain
) -> Report:
    """The report of a call from the measured costs, acceptance and gain."""
    passes: dict[tuple[int, int], tuple[float, int]] = {}
    for (rows, _), curve in sorted(verify.curves.items()):
        for nodes in curve.sizes:  # the longest context comes last and stays
            passes[rows, nodes] = curve(nodes) or 0.0, curve.count(nodes)
    by_name = sorted(drafts.curves.items(), key=lambda known: (known[0][0], name_of(known[0][1])))
    low, high = gain.interval(_reference_error(list(verify.curves.values())))
    return Report(
        [(*key, *value) for key, value in sorted(passes.items())],
        [
            (
                rows,
                name_of(TreeConfig(depth=size) if kind == CHAIN else kind),
                curve(size) or 0.0,
                curve.count(size),
            )
            for (rows, kind), curve in by_name
            for size in curve.sizes
        ],
        [
            (
                name_of(kind),
                acceptance.rates(kind, min(len(positions.judged), POSITIONS_SHOWN)),
                positions.at(0)[1],
            )
            for kind, positions in acceptance.kinds.items()
            if positions.judged
        ],
        gain.ratio,
        low,
        high,
    )


def decision_of(
    rows: int,
    plain: float,
    pays: bool,
    options: Sequence[Option],
    rates: Sequence[float],
    best: Option,
) -> Decision:
    """A decision of the controller.

    Args:
        rows: number of active rows.
        plain: seconds of a plain step; 0 if it was not measured.
        pays: whether drafts may be chosen.
        options: what was compared.
        rates: tokens per second of each option.
        best: the option that was chosen.
    """

    def name(option: Option) -> str:
        return PLAIN_STEP if option.shape is None else name_of(option.shape)

    estimates = [
        Estimate(
            name(option),
            rows + option.tokens,
            plain + option.seconds if plain else None,
            rate if plain else None,
        )
        for option, rate in zip(options, rates, strict=True)
    ]
    return Decision(rows, name(best), pays, estimates)


def _reference_error(curves: list[Curve]) -> float:
    """Relative standard error of the plain step's time on the curve with most measurements of it."""
    known = max(curves, key=lambda curve: curve.count(1), default=None)
    if known is None or not known.count(1):
        return math.inf
    return known.spread(1) / max(known(1) or 0.0, 1e-12)
