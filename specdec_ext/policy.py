"""``Policy``: whether a step drafts, in which shape, and how much of the draft is verified.

The loop asks before it drafts and after, and tells how it went. This base class is ``speculation="fixed"``;
:mod:`specdec_ext.controller` is ``"auto"``. No policy can change what is emitted under the match rule.
"""

from __future__ import annotations

from specdec_ext.context import Context
from specdec_ext.drafters.base import Drafter
from specdec_ext.sampler import Accepted
from specdec_ext.speculation import Speculation
from specdec_ext.stats import SpeculationStats
from specdec_ext.target import Target
from specdec_ext.tree import DraftTree


class Policy:
    """Every step drafts what the drafter drafts by itself, and all of it is verified."""

    def begin(self, context: Context, stats: SpeculationStats) -> None:
        """A call begins: the prompt has been read, the drafter has started."""

    def choose(self, context: Context) -> bool:
        """A step begins: whether it drafts. What it drafts goes into ``context.shape``."""
        return True

    def cut(self, tree: DraftTree, context: Context) -> DraftTree:
        """The part of a proposal that is verified; it keeps its node numbers."""
        return tree

    def learn(self, accepted: Accepted, context: Context) -> None:
        """The step is over, the drafter told."""

    def end(self) -> None:
        """The call is over."""


def make_policy(
    speculation: Speculation | None, drafter: Drafter | None, target: Target, draws_count: bool
) -> Policy:
    """The policy of one call.

    Args:
        speculation: None for "fixed".
        draws_count: whether the text depends on what is drafted (every rule but "match").
    """
    return Policy()
