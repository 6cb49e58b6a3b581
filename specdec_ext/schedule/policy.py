"""``Policy``: whether a step drafts, in which shape, and how much of the draft is verified.

The loop asks before it drafts and after, and tells how it went. The class here drafts in every step; it is
``speculation="fixed"``. ``"auto"`` is :mod:`specdec_ext.schedule.controller`. No policy can change what is
emitted under the match rule.
"""

from __future__ import annotations

from collections.abc import Sequence

from specdec_ext.context import Context
from specdec_ext.drafters.base import Drafter
from specdec_ext.stats import SpeculationStats
from specdec_ext.tree.config import FOUND, Shape, TreeConfig
from specdec_ext.tree.draft_tree import DraftTree
from specdec_ext.verify.sampler import Accepted


class Policy:
    """Every step drafts, and all of the draft is verified.

    Args:
        drafter: of the call.
        shape: what it is to draft; None for what it drafts by itself.
    """

    def __init__(self, drafter: Drafter, shape: TreeConfig | None = None):
        self._drafter, self._shape = drafter, shape

    def begin(self, context: Context, stats: SpeculationStats) -> None:
        """A call begins: the prompt has been read, the drafter has started.

        Raises:
            ValueError: if shapes are pinned that the drafter can't be asked for.
        """
        if self._shape is not None:
            offered(self._drafter, context, [self._shape])
        context.shape = self._shape

    def choose(self, context: Context) -> bool:
        """A step begins: whether it drafts. What it drafts goes into ``context.shape``."""
        return True

    def cut(self, tree: DraftTree, context: Context) -> DraftTree:
        """The part of a proposal that is verified; it keeps its node numbers."""
        return tree

    def learn(self, accepted: Accepted, context: Context, nodes: int) -> None:
        """The step is over, the drafter told.

        Args:
            accepted: what was emitted.
            context: the text.
            nodes: of the tree that was scored, also if nothing could be accepted of it.
        """

    def end(self) -> None:
        """The call is over."""


def offered(
    drafter: Drafter, context: Context, pinned: Sequence[TreeConfig] | None
) -> Sequence[Shape]:
    """What the drafter may be asked for; of shapes only those that are pinned, if any are.

    Raises:
        ValueError: if they are, and the drafter takes none.
    """
    shapes = drafter.shapes(context)
    if pinned is None:
        return shapes
    if all(shape == FOUND for shape in shapes):
        raise ValueError(
            f"speculation pins shapes, and {type(drafter).__name__} proposes what it finds; leave shapes out "
            "(max_nodes bounds what is verified), or shape the drafter by its own arguments"
        )
    return [*(shape for shape in shapes if shape == FOUND), *pinned]
