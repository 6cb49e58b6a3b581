"""``Request``: one request of an engine, from its prompt to its last token."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from specdec_ext.decoding.call import Call
from specdec_ext.engine.handle import Burst, FinishReason, Handle, TokenLogprobs
from specdec_ext.engine.logprobs import logprobs_of
from specdec_ext.engine.prefixes import PrefixCache
from specdec_ext.models import TargetOutput
from specdec_ext.models.base import RowRule
from specdec_ext.models.slots import SlotTarget
from specdec_ext.output import RecordScores
from specdec_ext.tree.draft_tree import DraftTree
from specdec_ext.verify.sampler import Accepted


@dataclass(eq=False)
class Request:
    """A call of one row that joins a batch after its prompt.

    Attributes:
        call: its text.
        target: reads its prompt; the batch adopts what it has cached.
        handle: what the caller holds.
        prefixes: beginnings of earlier prompts.
        takes_drafts: False for a request that is decoded without drafts.
        error: the exception with which it failed.
    """

    call: Call
    target: SlotTarget
    handle: Handle
    prefixes: PrefixCache
    takes_drafts: bool = True
    error: BaseException | None = None
    _unread: int = 0  # number of tokens of the prompt
    _passes: Iterator[TargetOutput | None] | None = None

    @cached_property
    def rule(self) -> RowRule | None:
        """How ops verify its row; None if they can't."""
        rules = self.call.sampler.row_rules
        return None if rules is None else rules[0]

    @property
    def has_begun(self) -> bool:
        """Whether :meth:`begin` was called."""
        return self.handle.times.started is not None

    def begin(self) -> None:
        """Begin to read the prompt, behind what it has in common with an earlier one."""
        self.handle.times.started = time.perf_counter()
        context, handle = self.call.context, self.handle
        parts = self.prefixes.find(context.prompt(0))
        if parts:
            handle.reused_tokens = sum(part.num_tokens for part in parts)
            self.target.restore(parts, context.input_ids.shape[1])
        self._unread = handle.prompt_tokens - handle.reused_tokens
        self._passes = self.target.prefill_passes(context.input_ids, context.attention_mask, room=0)

    @property
    def next_pass(self) -> int:
        """Number of tokens that the next pass over the prompt reads."""
        return min(self._unread, self.prefixes.part_size)

    def prefill(self) -> TargetOutput | None:
        """Run one pass over the prompt. After the last one, emit the first token and return the output."""
        call = self.call
        assert self._passes is not None  # it has begun
        self._unread -= self.next_pass
        output = next(self._passes)
        if output is not None:
            self.prefixes.keep(call.context.prompt(0), self.target, output)
            call.recorder.prompt(output)
            root = DraftTree.root(call.context.input_ids[:, 0])
            call.verify(root, output, self.target)
        return output

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it has ended; None if it goes on."""
        if self.error is not None:
            return "error"
        if self.handle.is_cancelled:
            return "cancelled"
        if self.call.going():
            return None
        context, stop = self.call.context, self.call.stop
        tokens = context.generated[0]
        cut = context.columns(0) >= stop.max_length and tokens[-1] not in stop.eos_ids
        return "length" if cut else "stop"

    def finish(self) -> None:
        """Tell the caller that it has ended."""
        reason = self.finish_reason
        assert reason is not None
        self.handle.finish(reason, self.error)


class BurstStream:
    """Passes what each step emits to the handle; it takes the place of a ``TokenStream``."""

    def __init__(self, handle: Handle, recorder: LogprobRecorder):
        self._handle, self._recorder = handle, recorder

    def advance(self, accepted: Accepted, rows: list[int], columns: int) -> None:
        tokens, count = accepted.emitted[0], accepted.drafted[0]
        if not tokens:
            return
        drafted = [i < count for i in range(len(tokens))]
        self._handle.emit(Burst(tokens, drafted, self._recorder.take()))


class LogprobRecorder:
    """Collects log probabilities of emitted tokens; it takes the place of a ``Recorder``.

    Args:
        top: number of most probable tokens to return; None records nothing.
    """

    record_scores: RecordScores | None = None

    def __init__(self, top: int | None):
        self._top = top
        self.keeps_passes = top is not None
        self._new: list[TokenLogprobs] = []

    def prompt(self, output: TargetOutput) -> None:
        """Nothing of the prompt is recorded."""

    def step(
        self, output: TargetOutput, accepted: Accepted, rows: Sequence[int], *_: object
    ) -> None:
        """Record the tokens that a step of one row has emitted; see :meth:`Recorder.step`."""
        tokens = accepted.emitted[0]
        if not tokens or self._top is None:
            return
        nodes = accepted.paths[0][: len(tokens)]
        self._new += logprobs_of(output.logits[0, nodes], tokens, self._top)

    def take(self) -> list[TokenLogprobs] | None:
        """Remove and return what was recorded since the last call; None if nothing is recorded."""
        if self._top is None:
            return None
        new, self._new = self._new, []
        return new
