"""``Drafter``: how to plug in something that guesses what comes next.

A drafter may be wrong at no cost but time: nothing it returns can change what is emitted.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from transformers import PreTrainedModel

from specdec_ext.context import Context
from specdec_ext.models import TargetOutput
from specdec_ext.tree.config import FOUND, Shape
from specdec_ext.tree.draft_tree import DraftTree
from specdec_ext.verify.sampler import Accepted


class Drafter:
    """Base class of all drafters. Only ``propose`` has to be written.

    One object may serve many calls one after the other; ``start`` begins each.

    Attributes:
        sampled: whether its trees hold ``draft_probs``, without which ``verification="match"`` is the only
            rule.
        dead_draft_advice: what to check when almost no draft is accepted; "" where that is nothing unusual,
            as in looking up repetitions.
        whole: whether its trees are verified whole or not at all; others may be cut to fewer levels.
    """

    sampled: bool = False
    dead_draft_advice: str = ""
    whole: bool = False

    def feature_layers(self, model: PreTrainedModel) -> tuple[int, ...]:
        """Hidden states of the target that ``TargetOutput.features`` is to hold, side by side.

        Indices into transformers' ``hidden_states``: 0 the embeddings, i the input of layer i, -1 the last
        hidden state, after the final norm; and of n layers n, the output of the last one, before that norm.
        None by default, which costs nothing. Asked before the prompt is run, once per call: the place to
        refuse a target, and to prepare what later calls can use again.
        """
        return ()

    def start(self, context: Context, model: PreTrainedModel, output: TargetOutput) -> None:
        """A call begins.

        Args:
            context: the prompt and each row's first token.
            model: the target.
            output: of the pass over the prompt; its rows and columns are those of ``context.input_ids``,
                without the columns that the caller's cache held already.
        """

    def shapes(self, context: Context) -> Sequence[Shape]:
        """What ``context.shape`` may ask for, once ``start`` has run.

        ``FOUND`` is whatever the drafter proposes by itself, which is not known before it is there; it must
        be cheap to ask for. Of several ``TreeConfig`` the controller chooses for each step.
        """
        return (FOUND,)

    @property
    def kinds(self) -> Sequence[str] | None:
        """Of the last ``propose``, what each row's proposal is like; "" or None: the shape asked for.

        Acceptance is learnt for each kind by itself, such as copies behind short and behind long matches.
        """
        return None

    @property
    def identity(self) -> Hashable:
        """What acceptance and costs are remembered under, for later calls on the same model."""
        return f"{type(self).__module__}.{type(self).__qualname__}"

    def propose(self, context: Context) -> DraftTree:
        """A tree for each active row, in the order of ``context.rows``; its roots are ``context.roots``.

        It is called in some steps only: where drafting does not pay, there are steps without. What is
        proposed may be verified in part or not at all (``accepted`` of :meth:`commit` tells). A drafter that
        offers shapes gives the tree that of ``context.shape``.

        Rows with nothing to propose stay a root; depth beyond what a row may still emit is cut for you.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define propose(context) -> DraftTree"
        )

    def commit(self, context: Context, accepted: Accepted, output: TargetOutput) -> None:
        """The step is over.

        Args:
            context: the text, what was emitted included.
            accepted: what was emitted and which nodes were accepted, per active row.
            output: of the pass over the tree, per node: ``accepted.path`` names the nodes that count.
        """
