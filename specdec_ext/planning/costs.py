"""``StepCosts``: the time of steps by rows and draft length, in the cost model of the controller.

A step with a draft of K tokens takes the time of the draft and of a pass over 1 + K nodes. Sizes that were
not measured are estimated as the controller estimates them (:mod:`specdec_ext.schedule.costs`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specdec_ext.heads.checkpoints.config.fields import shown
from specdec_ext.schedule.costs import SHORT_CONTEXT, DraftCosts, VerifyCosts
from specdec_ext.schedule.options import CHAIN
from specdec_ext.tree.config import MAX_NODES

SECONDS, PLAIN_STEPS = "seconds", "plain steps"
MAX_ROWS = 1 << 16
# Steps behind a given or measured time: more than one, so that the curves trust it.
_TRUSTED = 2

# (rows, nodes or draft length, time)
Time = tuple[int, int, float]


@dataclass(frozen=True)
class StepCosts:
    """The time of steps.

    Attributes:
        verify: time of a step without its draft.
        drafts: time of a draft.
        unit: ``SECONDS`` or ``PLAIN_STEPS``.
        origin: where the times come from, for people.
    """

    verify: VerifyCosts
    drafts: DraftCosts
    unit: str = SECONDS
    origin: str = "given"

    @classmethod
    def of(
        cls,
        verify: Iterable[Time],
        drafts: Iterable[Time],
        unit: str = SECONDS,
        origin: str = "given",
    ) -> StepCosts:
        """Costs from times.

        Args:
            verify: (rows, nodes per row, time of a step without its draft); 1 node is a plain step.
            drafts: (rows, draft length, time of the draft).
            unit, origin: see the class.

        Raises:
            ValueError: for numbers out of range, or without the time of any plain step.
        """
        costs = cls(VerifyCosts(), DraftCosts(), unit, origin)
        for rows, nodes, time in sorted(verify):
            _check(rows, nodes, time, "verify")
            if not time:
                raise ValueError(
                    f"verify has [{rows}, {nodes}, 0]; a pass of the target takes time"
                )
            costs.verify.curve(rows, SHORT_CONTEXT).add(nodes, time, _TRUSTED)
        for rows, length, time in sorted(drafts):
            _check(rows, length, time, "draft")
            costs.drafts.curve(rows, CHAIN).add(length, time, _TRUSTED)
        if not any(curve.count(1) for curve in costs.verify.curves.values()):
            raise ValueError(
                "verify has no time of a plain step, [rows, 1, time]; expected at least one"
            )
        return costs

    @classmethod
    def relative(
        cls, draft: float, node: float = 0.0, rows: Sequence[int] = (1,), longest: int = 16
    ) -> StepCosts:
        """Costs relative to a plain step, the same for all numbers of rows.

        Args:
            draft: time of each token of a draft; Leviathan et al. (2023) call this ratio c.
            node: time that each further node adds to the target's pass.
            rows: numbers of rows.
            longest: the longest draft.
        """
        lengths = range(1, longest + 1)
        return cls.of(
            [(each, 1 + length, 1 + node * length) for each in rows for length in (0, *lengths)],
            [(each, length, draft * length) for each in rows for length in lengths],
            PLAIN_STEPS,
            f"{draft:g} plain steps per draft token, {node:g} per further node",
        )

    @classmethod
    def from_record(cls, record: Mapping[str, Any], where: str) -> StepCosts:
        """Costs from the JSON object that :meth:`record` returns.

        Args:
            record: the object; it is not trusted.
            where: its name in messages.

        Raises:
            ValueError: for anything else; the message names the place.
        """
        if not isinstance(record, dict):
            raise ValueError(
                f"{where} holds {shown(record)}; expected an object with 'verify' and 'draft'"
            )
        unit = record.get("unit", SECONDS)
        if unit not in (SECONDS, PLAIN_STEPS):
            raise ValueError(
                f"{where}: unit is {shown(unit)}; expected {SECONDS!r} or {PLAIN_STEPS!r}"
            )
        verify, drafts = (
            _times(record.get(name), f"{where}: {name}") for name in ("verify", "draft")
        )
        return cls.of(verify, drafts, unit, where)

    def record(self) -> dict[str, Any]:
        """The known times, for JSON."""
        return {
            "unit": self.unit,
            "origin": self.origin,
            "verify": [
                [rows, nodes, curve(nodes)]
                for (rows, _), curve in sorted(self.verify.curves.items())
                for nodes in curve.sizes
            ],
            "draft": [
                [rows, length, curve(length)]
                for (rows, _), curve in self.drafts.curves.items()
                for length in curve.sizes
            ],
        }

    def plain(self, rows: int) -> float:
        """Time of a plain step."""
        return self._verify(rows, 1)

    def step(self, rows: int, length: int) -> float:
        """Time of a step with drafts of this length; 0 is a plain step."""
        return self._draft(rows, length) + self._verify(rows, 1 + length)

    def ratio(self, rows: int, length: int) -> float:
        """Time of a step in plain steps: the tokens that it must emit to be as fast as plain decoding."""
        return self.step(rows, length) / self.plain(rows)

    def _verify(self, rows: int, nodes: int) -> float:
        return self.verify.curve(rows, SHORT_CONTEXT)(nodes) or 0.0

    def _draft(self, rows: int, length: int) -> float:
        if not length or not self.drafts.curves:
            return 0.0
        known = min((each for each, _ in self.drafts.curves), key=lambda each: abs(each - rows))
        return self.drafts.curve(known, CHAIN)(length) or 0.0


def _check(rows: int, size: int, time: float, name: str) -> None:
    if not (1 <= rows <= MAX_ROWS and 1 <= size <= MAX_NODES and 0 <= time < float("inf")):
        raise ValueError(
            f"{name} has [{rows}, {size}, {time}]; expected [rows, nodes or draft length, time], with 1 to "
            f"{MAX_ROWS} rows, a size of 1 to {MAX_NODES} and a finite time"
        )


def _times(value: Any, where: str) -> list[Time]:
    def is_time(each: Any) -> bool:
        if not isinstance(each, list) or len(each) != 3:
            return False
        rows, size, time = each
        return type(rows) is type(size) is int and type(time) in (int, float)

    if not isinstance(value, list) or not all(map(is_time, value)):
        raise ValueError(f"{where} is {shown(value)}; expected a list of [rows, size, time]")
    return [tuple(each) for each in value]
