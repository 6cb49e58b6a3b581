"""``SpeculationConfig``: the settings that ``generate(speculation=...)`` accepts.

``"auto"`` is ``SpeculationConfig()``: the controller (:mod:`specdec_ext.schedule.controller`) measures and
chooses everything. ``"fixed"`` drafts in every step, in the shape that is the drafter's default.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from specdec_ext.display import Summarised
from specdec_ext.tree.config import TreeConfig


@dataclass(frozen=True)
class SpeculationConfig(Summarised):
    """Settings of the controller, which chooses what each step drafts.

    Attributes:
        shapes: the only shapes to choose from; None for all shapes that the drafter offers. Drafters that
            offer no shapes (n-grams, suffixes, your own by default) accept none here.
        max_nodes: largest number of nodes of a tree, the root included. Larger shapes are not drafted, and
            larger proposals are cut.
        may_rest: whether steps may omit the draft where drafting does not pay. With False, every step drafts
            and proposals are cut only to ``max_nodes``; with a single shape, every step drafts that shape.
        probing: share of the time that may be spent on trying options that are not known to pay, 0 to 0.5.
        hysteresis: share by which another shape must promise to be better before it replaces the current
            one, 0 to 1.
        clock: returns seconds; must not go backwards.

    Raises:
        ValueError, TypeError: for a field out of its range; the message names the field.
    """

    shapes: Sequence[TreeConfig] | None = None
    max_nodes: int | None = None
    may_rest: bool = True
    probing: float = 0.005
    hysteresis: float = 0.02
    clock: Callable[[], float] = field(default=time.perf_counter, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.shapes is not None:
            if not isinstance(self.shapes, (list, tuple)) or not self.shapes:
                raise ValueError(
                    f"shapes is {self.shapes!r}; expected a list of TreeConfig such as "
                    "[TreeConfig(depth=3)], or None for the shapes that the drafter offers"
                )
            for shape in self.shapes:
                if not isinstance(shape, TreeConfig):
                    raise TypeError(
                        f"shapes contains a {type(shape).__name__}; expected TreeConfig, such as "
                        "TreeConfig(depth=3)"
                    )
            object.__setattr__(self, "shapes", tuple(self.shapes))
        if self.max_nodes is not None and self.max_nodes < 2:
            raise ValueError(
                f"max_nodes counts the root and must be at least 2, got {self.max_nodes}; for plain "
                "decoding pass drafter=None"
            )
        for name, most in (("probing", 0.5), ("hysteresis", 1.0)):
            if not 0 <= getattr(self, name) <= most:
                raise ValueError(
                    f"{name} is a share and must be in [0, {most}], got {getattr(self, name)}"
                )
        if self.max_nodes is not None and self.shapes is not None:
            fitting = [shape for shape in self.shapes if (shape.num_nodes or 0) <= self.max_nodes]
            if not fitting:
                raise ValueError(
                    f"max_nodes={self.max_nodes} excludes all of shapes={list(self.shapes)}; raise "
                    "max_nodes, or pin smaller shapes"
                )

    def summary(self) -> str:
        shapes = "any shape of the drafter"
        if self.shapes is not None:
            shapes = " or ".join(map(str, self.shapes))
        most = "" if self.max_nodes is None else f", at most {self.max_nodes} nodes"
        rests = "where it pays" if self.may_rest else "in every step"
        return f"drafts {rests}: {shapes}{most}"

    def sentences(self) -> Iterable[str]:
        yield f"It {self.summary()}."
        if self.is_fixed:
            yield "There is nothing to choose, so nothing is measured."
            return
        yield (
            "The costs of steps and the acceptance of drafts are measured while decoding. At most "
            f"{self.probing:.1%} of the time goes to trying what is not known to pay, and another shape must "
            f"promise {self.hysteresis:.0%} more speed to replace the current one."
        )
        yield "out.speculation_stats.explain() says after a call what was chosen and what it gained."

    @property
    def is_fixed(self) -> bool:
        """Whether there is nothing to choose: one pinned shape, drafted in every step."""
        return not self.may_rest and self.shapes is not None and len(self.shapes) == 1


# The meaning of "auto".
AUTO = SpeculationConfig()


def resolve_speculation(given: Any) -> SpeculationConfig | None:
    """Convert the argument of ``generate(speculation=...)`` to settings, or to None for "fixed".

    Raises:
        ValueError: for anything else.
    """
    if isinstance(given, SpeculationConfig):
        return given
    if isinstance(given, str) and given in ("auto", "fixed"):
        return AUTO if given == "auto" else None
    raise ValueError(
        f"speculation={given!r} is not known; expected 'auto' (drafts where it pays), 'fixed' (drafts in "
        "every step) or a specdec_ext.SpeculationConfig"
    )
