"""``Speculation``: what ``generate(speculation=...)`` leaves to the controller and what it pins.

``"auto"`` is ``Speculation()``: everything is measured and chosen (:mod:`specdec_ext.schedule.controller`).
``"fixed"`` drafts in every step what the drafter drafts by itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from specdec_ext.tree.config import TreeConfig


@dataclass(frozen=True)
class Speculation:
    """How the controller chooses what each step drafts.

    Attributes:
        shapes: choose among these alone; None for those that the drafter offers. A drafter that proposes what
            it finds (n-grams, suffixes, a drafter of your own) takes none.
        max_nodes: of a tree, the root included; larger ones are not asked for, or cut.
        may_rest: whether a step may be without a draft where drafting does not pay. False drafts in every
            step and cuts nothing: with one shape that is that shape, always.
        probing: share of the time that may be spent on trying what is not known to pay.
        hysteresis: by how much better another shape must promise to be before it replaces the one in use.
        clock: seconds, never going back.

    Raises:
        ValueError, TypeError: for a field out of its range, naming it.
    """

    shapes: Sequence[TreeConfig] | None = None
    max_nodes: int | None = None
    may_rest: bool = True
    probing: float = 0.005
    hysteresis: float = 0.02
    clock: Callable[[], float] = field(default=time.perf_counter, compare=False)

    def __post_init__(self) -> None:
        if self.shapes is not None:
            if not isinstance(self.shapes, (list, tuple)) or not self.shapes:
                raise ValueError(
                    f"shapes is {self.shapes!r}; expected a list of TreeConfig such as "
                    "[TreeConfig(depth=3)], or None for those that the drafter offers"
                )
            for shape in self.shapes:
                if not isinstance(shape, TreeConfig):
                    raise TypeError(
                        f"shapes has a {type(shape).__name__}; expected TreeConfig, such as "
                        "TreeConfig(depth=3)"
                    )
            object.__setattr__(self, "shapes", tuple(self.shapes))
        if self.max_nodes is not None and self.max_nodes < 2:
            raise ValueError(
                f"max_nodes counts the root and must be at least 2, got {self.max_nodes}; drafter=None "
                "drafts nothing"
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
                    f"max_nodes={self.max_nodes} leaves none of shapes={list(self.shapes)}; raise it, or pin "
                    "smaller shapes"
                )

    @property
    def is_fixed(self) -> bool:
        """Whether nothing is left to measurements."""
        return not self.may_rest and self.shapes is not None and len(self.shapes) == 1


# What "auto" stands for.
AUTO: Speculation | None = Speculation()


def resolve_speculation(given: Any) -> Speculation | None:
    """What ``generate(speculation=...)`` accepts -> what the controller is told, or None for "fixed".

    Raises:
        ValueError: for anything else.
    """
    if isinstance(given, Speculation):
        return given
    if isinstance(given, str) and given in ("auto", "fixed"):
        return AUTO if given == "auto" else None
    raise ValueError(
        f"speculation={given!r} is not known; expected 'auto' (drafts where it pays), 'fixed' (drafts in "
        "every step) or a specdec_ext.Speculation"
    )
