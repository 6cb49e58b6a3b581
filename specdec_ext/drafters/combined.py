"""``CombinedDrafter``: copy where the text repeats itself, ask a model where it is new.

A copy costs microseconds and behind a long match is rarely wrong; a model drafts anything and has to run. So
the retrieval drafter is asked first and takes over the rows in which it has a long match. Only if a row is
left does the model-based one draft; it reads what was emitted meanwhile when it is asked again.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from transformers import PreTrainedModel

from specdec_ext.context import Context
from specdec_ext.drafters.base import Drafter
from specdec_ext.drafters.lookahead import LookaheadDrafter
from specdec_ext.drafters.retrieval import RetrievalDrafter
from specdec_ext.models import TargetOutput
from specdec_ext.tree.config import FOUND, Shape
from specdec_ext.tree.draft_tree import INACTIVE, DraftTree
from specdec_ext.verify.sampler import Accepted


class CombinedDrafter(Drafter):
    """Proposes what ``retrieval`` does behind a long match, else what ``model_based`` does.

    The trees of both become one, whose nodes are numbered anew: of the target's output ``model_based`` may
    read the accepted path alone, as draft heads and draft models do.

    Args:
        retrieval: an ``NgramDrafter`` or a ``SuffixDrafter``.
        model_based: a head's drafter, a ``DraftModelDrafter`` or any other.
        min_match: tokens that must match for ``retrieval`` to take a row over.
        max_nodes: of a row, the root included. Where the tree of ``model_based`` leaves room, what
            ``retrieval`` has behind a shorter match is added to it. None adds nothing.

    Raises:
        TypeError: if ``retrieval`` does not tell its match lengths.
        ValueError: for an argument out of its range, or a drafter that needs the nodes it proposed.
    """

    def __init__(
        self,
        retrieval: RetrievalDrafter,
        model_based: Drafter,
        min_match: int = 3,
        max_nodes: int | None = None,
    ):
        if not isinstance(retrieval, RetrievalDrafter):
            raise TypeError(
                f"retrieval is a {type(retrieval).__name__}; expected a drafter that tells how long its "
                "matches are: NgramDrafter, SuffixDrafter or another RetrievalDrafter"
            )
        if isinstance(model_based, LookaheadDrafter):
            raise ValueError(
                "LookaheadDrafter goes on from the target's logits at the nodes that it proposed, which are "
                "numbered anew here; use it alone"
            )
        if not 1 <= min_match <= retrieval.longest_match:
            raise ValueError(
                f"min_match must be in [1, {retrieval.longest_match}], the longest match that this "
                f"{type(retrieval).__name__} looks for, got {min_match}"
            )
        if max_nodes is not None and max_nodes < 2:
            raise ValueError(
                f"max_nodes counts the root and must be at least 2, got {max_nodes}; None adds no nodes to "
                "the tree of model_based"
            )
        self.retrieval, self.model_based = retrieval, model_based
        self.min_match, self.max_nodes = min_match, max_nodes
        self.dead_draft_advice = model_based.dead_draft_advice
        self.whole = model_based.whole

    def feature_layers(self, model: PreTrainedModel) -> tuple[int, ...]:
        return self.model_based.feature_layers(model)

    def shapes(self, context: Context) -> Sequence[Shape]:
        """``FOUND`` are copies alone, if the model-based one can be told what to draft."""
        return [FOUND, *(each for each in self.model_based.shapes(context) if each != FOUND)]

    @property
    def kinds(self) -> Sequence[str]:
        return self._kinds

    @property
    def identity(self) -> Hashable:
        return super().identity, self.retrieval.identity, self.model_based.identity

    def start(self, context: Context, model: PreTrainedModel, output: TargetOutput) -> None:
        self.retrieval.start(context, model, output)
        self.model_based.start(context, model, output)
        self._separable = FOUND not in self.model_based.shapes(context)

    def propose(self, context: Context) -> DraftTree:
        copied = self.retrieval.propose(context)
        taken = [length >= self.min_match for length in self.retrieval.match_lengths]
        self._kinds = list(self.retrieval.kinds)
        if all(taken) or (context.shape == FOUND and self._separable):
            return copied
        self._kinds = [
            "" if not each else kind for each, kind in zip(taken, self._kinds, strict=True)
        ]
        drafted = self.model_based.propose(context)
        if self.max_nodes is None and not any(taken):
            return DraftTree(drafted.tokens, drafted.parents)
        left = [not each for each in taken]
        own_rows = _only(drafted, left)
        if self.max_nodes is None:
            return DraftTree.merged([own_rows, _only(copied, taken)])
        # A row that was taken over keeps its whole tree, the others are filled up.
        filled = DraftTree.merged(
            [own_rows, _only(copied, left)], max(self.max_nodes, drafted.num_nodes)
        )
        return DraftTree.merged([filled, _only(copied, taken)])

    def commit(self, context: Context, accepted: Accepted, output: TargetOutput) -> None:
        self.retrieval.commit(context, accepted, output)
        self.model_based.commit(context, accepted, output)


def _only(tree: DraftTree, rows: Sequence[bool]) -> DraftTree:
    """The trees of these rows; of the others their roots."""
    parents = [
        row if kept else [row[0], *[INACTIVE] * (len(row) - 1)]
        for row, kept in zip(tree.parent_lists, rows, strict=True)
    ]
    return DraftTree.of_lists(tree.token_lists, parents)
