"""``Drafter``: how to plug in something that guesses what comes next.

A drafter may be wrong at no cost but time: nothing it returns can change what is emitted.
"""

from __future__ import annotations

from transformers import PreTrainedModel

from specdec_ext.context import Context
from specdec_ext.sampler import Accepted
from specdec_ext.tree import DraftTree


class Drafter:
    """Base class of all drafters. Only ``propose`` has to be written.

    One object may serve many calls one after the other; ``start`` begins each.
    """

    def start(self, context: Context, model: PreTrainedModel) -> None:
        """A call begins; ``context`` has the prompt and each row's first token, ``model`` is the target."""

    def propose(self, context: Context) -> DraftTree:
        """A tree for each active row, in the order of ``context.rows``; its roots are ``context.roots``.

        Rows with nothing to propose stay a root; depth beyond what a row may still emit is cut for you.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define propose(context) -> DraftTree"
        )

    def commit(self, context: Context, accepted: Accepted) -> None:
        """The step is over: what was emitted and which nodes were accepted, per active row."""
