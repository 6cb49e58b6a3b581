"""``Batch``: the rows that a loop decodes together. ``Call``: those of one ``generate`` call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass, field

from torch import Tensor

from specdec_ext import ops
from specdec_ext.context import Context
from specdec_ext.decoding.preparation import PreparedCall
from specdec_ext.drafters.base import Drafter
from specdec_ext.models import Target, TargetOutput
from specdec_ext.models.base import CommittedRound, RoundTexts
from specdec_ext.output import Recorder, TokenStream
from specdec_ext.stats import DraftAlarm, SpeculationStats
from specdec_ext.transfer import Staging
from specdec_ext.tree.draft_tree import DraftTree
from specdec_ext.verify.sampler import Accepted, Sampler
from specdec_ext.verify.stopping import StopRule
from specdec_ext.verify.walks import CommittedWalk, FinishedWalk


class Batch(ABC):
    """The text of the rows that a loop decodes together, and what decides how it goes on and ends.

    Attributes:
        context: the text.
        stats: the statistics.
        undrafted: numbers of rows whose next tree must have no drafts.
    """

    context: Context
    stats: SpeculationStats
    undrafted: Collection[int] = ()

    @property
    @abstractmethod
    def keeps_passes(self) -> bool:
        """Whether logits or other outputs of the passes are read after the verification."""

    @abstractmethod
    def stage(self) -> None:
        """Begin a round: stage what its verification needs on the device."""

    @abstractmethod
    def check(self, tree: DraftTree, source: str) -> None:
        """Raise ValueError if this tree of the drafter named ``source`` can't be verified."""

    @abstractmethod
    def verify(
        self,
        tree: DraftTree,
        output: TargetOutput,
        target: Target,
        committed: CommittedRound | None = None,
        is_latest: bool = True,
    ) -> Accepted:
        """Verify the trees of the active rows, or read the result if ops have verified them.

        Args:
            tree: the trees.
            output: their scores.
            target: what has scored them, and has not committed them on the host.
            committed: the round, if it was committed on the device.
            is_latest: whether no later round has been started.

        Raises:
            SpoiltLogits, ValueError: see :meth:`Sampler.verify`.
        """

    def verify_on_device(
        self, tree: DraftTree, logits: Tensor, root_positions: Tensor | None
    ) -> ops.MatchResult:
        """Verify trees without reading the result, if there are no rules (:attr:`RoundTexts.rules`).

        See :meth:`Sampler.verify_on_device`.
        """
        raise NotImplementedError(f"{type(self).__name__} can't be verified on the device alone")

    @abstractmethod
    def decides(self) -> bool:
        """Whether ops alone decide which tokens are emitted, except that the host may end a row earlier."""

    @abstractmethod
    def texts(self, known: int) -> RoundTexts:
        """The text of the active rows; the device has that of the first ``known`` ones."""

    @abstractmethod
    def going(self) -> list[int]:
        """Rows that have not finished."""

    @abstractmethod
    def count(self, tree: DraftTree, accepted: Accepted) -> None:
        """Add a step of the active rows to the statistics."""


@dataclass(eq=False)
class Call(Batch):
    """One ``generate`` call, or one request of an engine.

    Attributes:
        sampler: verifies trees.
        stop: decides when a row ends.
        recorder: collects scores, logits, hidden states and attentions for the output.
        alarm: warns if almost no draft is accepted.
        stream: feeds the caller's streamer, if there is one.
        ends: for each row that has ended, its length in columns then.
    """

    context: Context
    sampler: Sampler
    stop: StopRule
    recorder: Recorder
    stats: SpeculationStats
    alarm: DraftAlarm
    stream: TokenStream | None = None
    ends: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        prepared: PreparedCall,
        target: Target,
        recorder: Recorder,
        drafter: Drafter | None,
        verification: str = "match",
    ) -> Call:
        """Check the inputs of a prepared call against its target and drafter.

        Args:
            verification: one of ``VERIFICATIONS``.

        Raises:
            ValueError: for inputs that the target does not support, or a rule for which the drafter or the
                processors do not do.
        """
        ids, config, stop = prepared.input_ids, prepared.config, prepared.stop
        target.staging = Staging(ids.device)
        attention_mask = target.admit(ids, prepared.model_kwargs, config)
        sampler = Sampler(
            prepared.processors, config.do_sample, prepared.noise, target.staging, verification
        )
        if sampler.needs_draft_probs and drafter is not None and not drafter.sampled:
            raise ValueError(
                f"verification={verification!r} needs a drafter that samples its drafts from known "
                f"probabilities, such as DraftModelDrafter(model, sampled=True); {type(drafter).__name__} "
                "does not. Use verification='match', the default"
            )
        pad = config._pad_token_tensor
        context = Context(
            ids,
            attention_mask,
            0 if pad is None else int(pad),
            stop.max_length,
            sampler.draw,
            sampler.sample,
            target.offset,
            _ids_of(prepared.encoder_input, len(ids), target.vocab_size),
            target.staging,
            sampler.draft_noise,
            target.committed_keys,
        )
        return cls.beginning(drafter, context, sampler, stop, recorder)

    @classmethod
    def beginning(
        cls,
        drafter: Drafter | None,
        context: Context,
        sampler: Sampler,
        stop: StopRule,
        recorder: Recorder,
    ) -> Call:
        """A call whose statistics name ``drafter``; the other arguments are attributes."""
        stats = SpeculationStats(drafter=type(drafter).__name__ if drafter else "none")
        stats.policy = "fixed" if drafter else "none"
        stats.host_processors = sampler.host_processors
        alarm = DraftAlarm(stats, drafter.low_acceptance_hint if drafter else "")
        return cls(context, sampler, stop, recorder, stats, alarm)

    @property
    def keeps_passes(self) -> bool:
        return self.recorder.keeps_passes

    def stage(self) -> None:
        self.sampler.stage(self.context)

    def check(self, tree: DraftTree, source: str) -> None:
        self.sampler.check(tree, source)

    def verify(
        self,
        tree: DraftTree,
        output: TargetOutput,
        target: Target,
        committed: CommittedRound | None = None,
        is_latest: bool = True,
    ) -> Accepted:
        context, sampler, stop = self.context, self.sampler, self.stop
        before = [len(context.generated[row]) for row in context.rows]
        if committed is not None:
            accepted = sampler.read(committed, context, stop, self.going(), is_latest)
        else:
            scores = self.recorder.record_scores
            accepted = sampler.verify(tree, output.logits, context, stop, scores)
        self.take(output, target, accepted, before)
        return accepted

    def follow(
        self,
        walk: FinishedWalk | CommittedWalk,
        tree: DraftTree,
        output: TargetOutput,
        target: Target,
    ) -> Accepted:
        """:meth:`verify` for trees that ops have verified for this and other calls."""
        before = [len(self.context.generated[row]) for row in self.context.rows]
        accepted = self.sampler.follow(walk, tree, self.context, self.stop)
        self.take(output, target, accepted, before)
        return accepted

    def verify_on_device(
        self, tree: DraftTree, logits: Tensor, root_positions: Tensor | None
    ) -> ops.MatchResult:
        return self.sampler.verify_on_device(tree, logits, self.context, root_positions)

    def take(
        self, output: TargetOutput, target: Target, accepted: Accepted, before: list[int]
    ) -> None:
        """Record and stream what a step has emitted, and note which rows have ended.

        Args:
            output, target: as in :meth:`verify`.
            accepted: the result of the verification.
            before: number of tokens that each active row had generated before the step.
        """
        context, rows = self.context, list(self.context.rows)
        if self.recorder.keeps_passes:
            columns = context.prompt_columns + target.offset
            self.recorder.step(
                output, accepted, rows, before, target.start, columns, target.windows
            )
        for row, ended in zip(rows, accepted.ended, strict=True):
            if ended:
                self.ends.setdefault(row, context.columns(row))
        if self.stream is not None:
            going = self.going()
            columns = min(map(context.columns, going)) if going else self.width()
            self.stream.advance(accepted, rows, columns)

    def decides(self) -> bool:
        records = self.recorder.record_scores is not None
        return not records and self.sampler.decides(self.stop, len(self.context.rows))

    def texts(self, known: int) -> RoundTexts:
        context, rows = self.context, self.context.rows
        assert known == 0  # the rows of a call begin together
        text, limit = context.sequences(), self.stop.max_length
        return RoundTexts(
            text,
            [context.columns(row) for row in rows],
            [limit] * len(rows),
            self.stop.eos_ids,
            (len(rows), max(limit, text.shape[1])),
            self.sampler.row_rules,
        )

    def going(self) -> list[int]:
        everyone = range(len(self.context.generated))
        if self.stop.pads:
            return [row for row in everyone if row not in self.ends]
        # Without an end-of-sequence id, transformers lets ended rows continue until the last row ends.
        limit = self.width() if len(self.ends) == len(everyone) else self.stop.max_length
        return [row for row in everyone if self.context.columns(row) < limit]

    def width(self) -> int:
        """Number of columns of ``sequences``, once all rows have ended."""
        return max(self.ends.values())

    def count(self, tree: DraftTree, accepted: Accepted) -> None:
        for i in range(tree.num_rows):
            count_row(self.stats, tree, accepted, i)
        self.alarm.check()


def count_row(stats: SpeculationStats, tree: DraftTree, accepted: Accepted, i: int) -> None:
    """Add the step of row ``i`` to the statistics."""
    depths, emitted = tree.depths[i], accepted.emitted[i]
    if not emitted:
        return  # the row had ended before a round ahead, or drafts have spoilt the logits
    stats.count_step(
        draft_tokens=sum(depth > 0 for depth in depths),
        depth=max(depths),
        num_accepted=accepted.drafted[i],
        num_emitted=len(emitted),
    )


def _ids_of(encoder_input: Tensor | None, batch: int, vocab_size: int) -> Tensor | None:
    """``[batch, columns]`` ids that the encoder reads; None if the decoder's vocabulary lacks them."""
    if encoder_input is None or encoder_input.ndim != 2 or encoder_input.is_floating_point():
        return None
    if int(encoder_input.max()) >= vocab_size:
        return None
    return encoder_input.repeat_interleave(batch // len(encoder_input), dim=0)
