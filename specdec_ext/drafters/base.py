"""``Drafter``: the base class of everything that proposes tokens.

A wrong proposal costs time only: under the match rule, nothing that a drafter returns can change what is
emitted.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from specdec_ext.context import Context
from specdec_ext.models import TargetOutput
from specdec_ext.models.base import CommittedRound, FixedDraft
from specdec_ext.ops import RoundNumbers
from specdec_ext.tree.config import LOOKUP, Lookup, Shape
from specdec_ext.tree.draft_tree import DraftTree
from specdec_ext.verify.sampler import Accepted


@dataclass(frozen=True)
class DraftAhead:
    """A draft after a round that the host has not read.

    Attributes:
        tree: the draft, on the device. The caller makes the roots of rows that have ended inactive.
        match_lengths: ``[rows]`` int64, the lengths of the matches that were copied after; None if nothing
            was copied. The host reads them with the round (:meth:`Drafter.lookups_ahead`).
    """

    tree: DraftTree
    match_lengths: Tensor | None = None

    @classmethod
    def nothing(cls, numbers: RoundNumbers) -> DraftAhead:
        """Trees of one node each, after a round that has left these numbers."""
        return cls(DraftTree.root(numbers.roots.clone()))


# Names of 0.1.0 that a subclass may define, and the names that are read now.
_RENAMED = {"kinds": "lookups", "dead_draft_advice": "low_acceptance_hint"}


class Drafter:
    """Base class of all drafters. A subclass must define ``propose``; the other methods have defaults.

    One object may serve many calls, one at a time. Each call begins with ``feature_layers`` and ``start``.

    Attributes:
        sampled: whether its trees contain ``draft_probs``. All rules except ``verification="match"`` need
            them.
        low_acceptance_hint: a hint for the user, shown when almost no draft is accepted. "" shows nothing,
            for drafters with which this is normal, such as lookups in a text without repetitions.
        whole: whether its trees must be verified whole or not at all. Other trees may be cut to fewer levels.
        joinable: whether rows may join a running batch (:meth:`join`), as the requests of an engine do.
        keeps_outputs: whether it keeps outputs for later calls. Such a drafter takes part in every call, also
            while its drafts do not pay.
    """

    sampled: bool = False
    low_acceptance_hint: str = ""
    whole: bool = False
    joinable: bool = False
    keeps_outputs: bool = False

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        for old, new in _RENAMED.items():
            if old in vars(cls):
                warnings.warn(
                    f"{cls.__name__}.{old} is not read any more; define {new} instead",
                    DeprecationWarning,
                    stacklevel=2,
                )

    def feature_layers(self, model: PreTrainedModel) -> tuple[int, ...]:
        """Return which hidden states of the target ``TargetOutput.features`` holds, concatenated.

        The numbers are indices into transformers' ``hidden_states``: 0 is the output of the embeddings, i the
        input of layer i, and -1 the last hidden state after the final norm. In addition, n for a model of n
        layers is the output of the last layer before the final norm. The default is (), which costs nothing.

        This method is called once per call, before the prompt pass. A drafter may refuse the target here, or
        prepare what later calls can reuse.
        """
        return ()

    def start(self, context: Context, model: PreTrainedModel, output: TargetOutput) -> None:
        """Begin a call, after the prompt pass.

        Args:
            context: the prompt and each row's first token.
            model: the target.
            output: the target's output for the prompt. Its rows and columns are those of
                ``context.input_ids``, without the columns that the caller's cache already contained. No
                row is active yet if all rows join later.
        """

    def join(self, context: Context, rows: Sequence[int], output: TargetOutput) -> None:
        """Begin rows that join after ``start``, with their prompts and first tokens.

        Each takes the number of a row that has ended or never began. Called only if ``joinable``.

        Args:
            context: the text, in which these rows are the last active ones.
            rows: their numbers.
            output: the target's output for their prompts, without padding and in the order of ``rows``.
        """
        raise NotImplementedError(f"{type(self).__name__} must define join, because it is joinable")

    def shapes(self, context: Context) -> Sequence[Shape]:
        """Return the values that ``context.shape`` may have in this call; called after ``start``.

        Each ``TreeConfig`` is a shape that the drafter can draft; the controller chooses one for each step.
        ``LOOKUP`` is a lookup: the text decides what is proposed, and calling ``propose`` must be cheap.
        """
        return (LOOKUP,)

    @property
    def lookups(self) -> Sequence[Lookup | None] | None:
        """For each row of the last proposal, the kind of lookup that it is; None for the requested shape.

        Acceptance is learnt for each kind separately, for example for copies after short and long matches.
        """
        return None

    @property
    def lookup_part(self) -> Drafter | None:
        """The part that proposes by lookup alone, for calls without the other part; None if there is none."""
        return None

    @property
    def identity(self) -> Hashable:
        """The key under which acceptance and costs are kept for later calls on the same model."""
        return f"{type(self).__module__}.{type(self).__qualname__}"

    def rest(self, resting: bool) -> None:
        """Begin or end a rest: a long time in which no draft will be requested.

        A resting drafter may drop what it keeps about the text and ignore ``commit``. After the rest it
        begins anew with the tokens of the following steps. The default does nothing.
        """

    def propose(self, context: Context) -> DraftTree:
        """Return a tree for each active row, in the order of ``context.rows``, with roots ``context.roots``.

        A drafter that offers shapes drafts ``context.shape``. A row without a proposal consists of its root.
        Levels beyond the last token that a row may emit are cut by the caller.

        Not every step calls this method, and a proposal may be verified in part or not at all; ``accepted``
        of :meth:`commit` shows what was accepted.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define propose(context) -> DraftTree"
        )

    @property
    def waits_for_host(self) -> str:
        """The name of the drafter that never drafts ahead, of this one and its parts; "" if there is none."""
        return type(self).__name__ if type(self).nodes_ahead is Drafter.nodes_ahead else ""

    def nodes_ahead(self, last: CommittedRound, context: Context) -> int | None:
        """Return the number of nodes of the trees of :meth:`draft_ahead`, if it were called now.

        None, the default, means that this drafter needs the last round on the host.
        """
        return None

    def prepare_ahead(self, last: CommittedRound, context: Context) -> FixedDraft | str:
        """Do what the host has to do before :meth:`draft_ahead`, whose work may then be replayed.

        Called only if :meth:`nodes_ahead` is a number, and then always before the draft.

        Returns:
            What the work depends on, besides the contents of tensors. The default is a clause that says why
            it can't be recorded; :meth:`draft_ahead` is then called in every round.
        """
        return f"{type(self).__name__} does not define prepare_ahead"

    def draft_ahead(self, last: CommittedRound, context: Context) -> DraftAhead:
        """Draft for each active row, as :meth:`propose`, after a round that the host has not read.

        On CUDA the host must not wait here. ``context`` is the text before ``last``; what came after it is on
        the device. ``commit`` for ``last`` follows later. After a :meth:`prepare_ahead` that returned the
        same key and memory before, this method may not be called: then its work is replayed. So it changes
        nothing on the host, and reads nothing there but what the key contains.
        """
        raise NotImplementedError(f"{type(self).__name__} must define draft_ahead")

    def lookups_ahead(
        self, context: Context, match_lengths: Sequence[int]
    ) -> Sequence[Lookup | None]:
        """Return :attr:`lookups` of a draft ahead with these ``DraftAhead.match_lengths``."""
        raise NotImplementedError(f"{type(self).__name__} must define lookups_ahead")

    def commit(self, context: Context, accepted: Accepted, output: TargetOutput) -> None:
        """End a step. A row that had ended before a round ahead has emitted nothing in it.

        Args:
            context: the text, the emitted tokens included.
            accepted: the emitted tokens and the accepted nodes of each active row.
            output: the target's output for each node of the tree. ``accepted.path`` lists the nodes that are
                part of the text.
        """
