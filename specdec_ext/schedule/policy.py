"""``Policy``: whether a step drafts, in which shape, and how much of the draft is verified.

The decoding loop calls the policy before each draft, after it and at the end of the step. The class here is
``speculation="fixed"``, which drafts in every step; ``"auto"`` is :mod:`specdec_ext.schedule.controller`.
Under the match rule, no policy can change what is emitted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from specdec_ext.context import Context
from specdec_ext.drafters.base import Drafter
from specdec_ext.report import Decision, Report
from specdec_ext.stats import SpeculationStats
from specdec_ext.tree.config import Lookup, Shape, TreeConfig
from specdec_ext.tree.draft_tree import DraftTree
from specdec_ext.verify.sampler import Accepted


class Policy:
    """Draft in every step and verify the whole draft.

    Args:
        drafter: the drafter of the call.
        shape: the shape to draft; None for the drafter's own choice.
    """

    def __init__(self, drafter: Drafter, shape: TreeConfig | None = None):
        self._drafter, self._shape = drafter, shape

    def drafter_of(self, rows: int, steps: int) -> Drafter | None:
        """The drafter of a call of ``rows`` rows and at most ``steps`` steps; asked first.

        It may be a part of the drafter that the caller gave. None means that no step will draft: such a call
        runs as plain decoding, and only :meth:`begin`, :meth:`end` and :meth:`report` of the policy are
        called.
        """
        return self._drafter

    def begin(self, context: Context, stats: SpeculationStats) -> None:
        """Begin a call, after the prompt pass and the drafter's ``start``.

        Raises:
            ValueError: if a shape is pinned and the drafter accepts none.
        """
        if self._shape is not None:
            offered(self._drafter, context, [self._shape])
        context.shape = self._shape

    def choose(self, context: Context) -> bool:
        """Begin a step. Returns whether it drafts, and sets ``context.shape`` to the shape to draft."""
        return True

    @property
    def decided(self) -> bool | None:
        """Whether the next step drafts, in the shape of this step.

        None if that depends on what this step shows. Asked before this step is learnt from.
        """
        return True

    def hurry(self) -> None:
        """Take note that the rows have waited for a long part of a prompt: the next step should be short."""

    def repeat(self) -> None:
        """Begin a step as it was ``decided`` in the last one, in place of :meth:`choose`."""

    def verified(
        self, tree: DraftTree, lookups: Callable[[], Sequence[Lookup | None]] | None
    ) -> None:
        """Take note of a draft that was verified before the policy has seen it, in place of :meth:`cut`.

        Args:
            tree: the draft, on the CPU.
            lookups: as in :class:`specdec_ext.drafters.base.DraftAhead`.
        """

    def cut(self, tree: DraftTree, context: Context) -> DraftTree:
        """Return the part of a proposal to verify. Node numbers stay the same."""
        return tree

    def learn(self, accepted: Accepted, context: Context, nodes: int) -> None:
        """End a step, after the drafter's ``commit``.

        Args:
            accepted: what was emitted. A row that had ended before a round ahead has emitted nothing.
            context: the text, the emitted tokens included.
            nodes: number of nodes per row that were scored.
        """

    def join(self, rows: Sequence[int]) -> None:
        """Take note of rows that have joined; each has the number of a row that has ended or never began."""

    def stop_clock(self) -> None:
        """Time is no part of a step from now on: the loop waits, or reads prompts of rows that will join."""

    def start_clock(self) -> None:
        """Time is a part of the next step again."""

    def end(self) -> None:
        """End the call."""

    def decision(self) -> Decision | None:
        """The last decision of the call; None if there was none. Any thread may call this."""
        return None

    def report(self) -> Report | None:
        """What was measured up to the end of the call; None if nothing was."""
        return None


def offered(
    drafter: Drafter, context: Context, pinned: Sequence[TreeConfig] | None
) -> Sequence[Shape]:
    """What the drafter may be asked for; with pinned shapes, these replace the shapes that it offers.

    Raises:
        ValueError: if shapes are pinned and the drafter accepts none.
    """
    shapes = drafter.shapes(context)
    if pinned is None:
        return shapes
    if all(isinstance(shape, Lookup) for shape in shapes):
        raise ValueError(
            f"speculation pins shapes, but {type(drafter).__name__} accepts none: the text decides what it "
            "proposes. Leave shapes out (max_nodes limits what is verified), or set the drafter's arguments"
        )
    return [*(shape for shape in shapes if isinstance(shape, Lookup)), *pinned]
