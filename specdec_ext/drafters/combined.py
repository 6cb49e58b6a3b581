"""``CombinedDrafter``: copies text where it repeats itself, and drafts with a model elsewhere.

A copy takes microseconds and is rarely wrong after a long match. A model can draft any text, but costs a
forward pass. So the retrieval drafter proposes first and serves the rows in which it has a long match. The
model-based drafter runs only if other rows remain; it then reads all tokens emitted since its last draft.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec_ext.context import Context
from specdec_ext.drafters.base import DraftAhead, Drafter
from specdec_ext.drafters.lookahead import LookaheadDrafter
from specdec_ext.drafters.lookup.retrieval import RetrievalDrafter
from specdec_ext.models import TargetOutput
from specdec_ext.models.base import CommittedRound, FixedDraft
from specdec_ext.tree.config import LOOKUP, Lookup, Shape
from specdec_ext.tree.draft_tree import INACTIVE, DraftTree
from specdec_ext.verify.sampler import Accepted


class CombinedDrafter(Drafter):
    """Proposes a copy from ``retrieval`` after a long match, else a draft of ``model_based``.

    The two trees are merged, which changes node numbers. So ``model_based`` may read the target's output only
    along the accepted path, as draft heads and draft models do.

    Args:
        retrieval: an ``NgramDrafter``, a ``SuffixDrafter`` or another ``RetrievalDrafter``.
        model_based: a ``HeadDrafter``, a ``MedusaDrafter``, a ``DraftModelDrafter`` or another drafter.
        min_match: number of matching tokens from which on ``retrieval`` serves a row.
        max_nodes: largest number of nodes per row, the root included. If the tree of ``model_based`` leaves
            room, copies after shorter matches are added to it. None adds nothing.

    Raises:
        TypeError: if ``retrieval`` is not a ``RetrievalDrafter``.
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
                f"retrieval is a {type(retrieval).__name__}; expected a drafter that reports its match "
                "lengths: NgramDrafter, SuffixDrafter or another RetrievalDrafter"
            )
        if isinstance(model_based, LookaheadDrafter):
            raise ValueError(
                "LookaheadDrafter reads the target's logits at the nodes that it proposed, but a combined "
                "tree has other node numbers; use it alone"
            )
        if not 1 <= min_match <= retrieval.longest_match:
            raise ValueError(
                f"min_match must be in [1, {retrieval.longest_match}], up to the longest match of this "
                f"{type(retrieval).__name__}, got {min_match}"
            )
        if max_nodes is not None and max_nodes < 2:
            raise ValueError(
                f"max_nodes counts the root and must be at least 2, got {max_nodes}; None adds no nodes to "
                "the tree of model_based"
            )
        self.retrieval, self.model_based = retrieval, model_based
        self.min_match, self.max_nodes = min_match, max_nodes
        self.low_acceptance_hint = model_based.low_acceptance_hint
        self.whole = model_based.whole
        self.joinable = retrieval.joinable and model_based.joinable
        self.keeps_outputs = retrieval.keeps_outputs or model_based.keeps_outputs

    def feature_layers(self, model: PreTrainedModel) -> tuple[int, ...]:
        return self.model_based.feature_layers(model)

    def shapes(self, context: Context) -> Sequence[Shape]:
        """``LOOKUP`` (copies only) and the shapes of the model-based drafter."""
        shapes = self.model_based.shapes(context)
        return [LOOKUP, *(each for each in shapes if not isinstance(each, Lookup))]

    @property
    def lookups(self) -> Sequence[Lookup | None]:
        return self._lookups

    @property
    def lookup_part(self) -> Drafter:
        return self.retrieval

    @property
    def identity(self) -> Hashable:
        return super().identity, self.retrieval.identity, self.model_based.identity

    def start(self, context: Context, model: PreTrainedModel, output: TargetOutput) -> None:
        self.retrieval.start(context, model, output)
        self.model_based.start(context, model, output)
        shapes = self.model_based.shapes(context)
        self._separable = not any(isinstance(each, Lookup) for each in shapes)

    def join(self, context: Context, rows: Sequence[int], output: TargetOutput) -> None:
        self.retrieval.join(context, rows, output)
        self.model_based.join(context, rows, output)

    def rest(self, resting: bool) -> None:
        self.model_based.rest(resting)

    def propose(self, context: Context) -> DraftTree:
        copied = self.retrieval.propose(context)
        taken = [length >= self.min_match for length in self.retrieval.match_lengths]
        lookups = self.retrieval.lookups
        if all(taken) or self._copies_only(context):
            self._lookups: Sequence[Lookup | None] = lookups
            return copied
        self._lookups = [
            lookup if each else None for lookup, each in zip(lookups, taken, strict=True)
        ]
        drafted = self.model_based.propose(context)
        if self.max_nodes is None and not any(taken):
            return DraftTree(drafted.tokens, drafted.parents)
        lengths = torch.tensor(self.retrieval.match_lengths, device="cpu")
        return self.combine(copied.on_host(), lengths, drafted.on_host())

    def _copies_only(self, context: Context) -> bool:
        return isinstance(context.shape, Lookup) and self._separable

    @property
    def waits_for_host(self) -> str:
        return self.retrieval.waits_for_host or self.model_based.waits_for_host

    def nodes_ahead(self, last: CommittedRound, context: Context) -> int | None:
        copied = self.retrieval.nodes_ahead(last, context)
        if copied is None or self._copies_only(context):
            return copied
        drafted = self.model_based.nodes_ahead(last, context)
        return None if drafted is None else max(copied, drafted, self.max_nodes or 0)

    def prepare_ahead(self, last: CommittedRound, context: Context) -> FixedDraft | str:
        copied = self.retrieval.prepare_ahead(last, context)
        if self._copies_only(context):
            return copied
        drafted = self.model_based.prepare_ahead(last, context)
        if isinstance(copied, str) or isinstance(drafted, str):
            return copied if isinstance(copied, str) else drafted
        key = CombinedDrafter, copied.key, drafted.key, self.min_match, self.max_nodes
        return FixedDraft(key, (*copied.memory, *drafted.memory))

    def draft_ahead(self, last: CommittedRound, context: Context) -> DraftAhead:
        copied = self.retrieval.draft_ahead(last, context)
        if self._copies_only(context):
            return copied
        drafted, lengths = self.model_based.draft_ahead(last, context), copied.match_lengths
        assert lengths is not None
        tree = self.combine(copied.tree, lengths, drafted.tree, is_cut=False)
        return DraftAhead(tree, lengths)

    def lookups_ahead(
        self, context: Context, match_lengths: Sequence[int]
    ) -> Sequence[Lookup | None]:
        lookups = self.retrieval.lookups_ahead(context, match_lengths)
        if self._copies_only(context):
            return lookups
        pairs = zip(lookups, match_lengths, strict=True)
        return [lookup if length >= self.min_match else None for lookup, length in pairs]

    def combine(
        self, copied: DraftTree, match_lengths: Tensor, drafted: DraftTree, is_cut: bool = True
    ) -> DraftTree:
        """Choose or merge the trees of both drafters. On CUDA the host neither reads nor waits.

        Args:
            copied: the copies.
            match_lengths: ``[rows]`` int64, the lengths of the matches before them.
            drafted: the trees of ``model_based``, on the same device.
            is_cut: see :meth:`DraftTree.merged`.
        """
        taken = match_lengths >= self.min_match
        left = ~taken
        tree, nodes = _only(drafted, left), drafted.num_nodes
        if self.max_nodes is not None:
            nodes = max(nodes, self.max_nodes)
            if nodes >= copied.num_nodes:  # every row has room for its copy
                return DraftTree.merged([tree, copied], nodes, is_cut)
            tree = DraftTree.merged([tree, _only(copied, left)], nodes, is_cut)
        # Rows that retrieval serves keep their whole tree.
        return DraftTree.merged([tree, _only(copied, taken)], max(nodes, copied.num_nodes), is_cut)

    def commit(self, context: Context, accepted: Accepted, output: TargetOutput) -> None:
        self.retrieval.commit(context, accepted, output)
        self.model_based.commit(context, accepted, output)


def _only(tree: DraftTree, rows: Tensor) -> DraftTree:
    """The trees of these rows ``[rows]``, and only the roots of the others."""
    below = torch.where(rows[:, None], tree.parents[:, 1:], INACTIVE)
    return DraftTree(tree.tokens, torch.cat([tree.parents[:, :1], below], dim=1))
