"""``EngineLoop``: the decoding loop whose rows join and leave between two steps."""

from __future__ import annotations

from specdec_ext.decoding.loop import DecodingLoop
from specdec_ext.drafters.base import Drafter
from specdec_ext.engine.batch import RequestBatch
from specdec_ext.engine.request import Request
from specdec_ext.models import TargetOutput
from specdec_ext.models.slots import SlotTarget
from specdec_ext.schedule.policy import Policy


class EngineLoop(DecodingLoop):
    """The loop of an engine. It begins without rows.

    Args:
        target: has no text yet.
        drafter: is joinable; None for plain decoding.
        batch: the requests; none yet.
        policy: decides what each step drafts; None without a drafter.
    """

    target: SlotTarget
    batch: RequestBatch
    _keeps_finished = False

    def __init__(
        self,
        target: SlotTarget,
        drafter: Drafter | None,
        batch: RequestBatch,
        policy: Policy | None,
    ):
        super().__init__(target, drafter, batch, policy)
        self._known = 0  # number of first active rows whose text the device has
        if drafter is not None and policy is not None:
            target.record_hidden_states(drafter.feature_layers(target.model))
            no_rows = TargetOutput(batch.context.input_ids.new_zeros(0, 1, target.vocab_size))
            drafter.start(batch.context, target.model, no_rows)
            policy.begin(batch.context, batch.stats)
            policy.stop_clock()

    def settle(self) -> None:
        """Read the round ahead, if there is one, without another one: rows may join and leave then."""
        if self._ahead is not None:
            self.step(goes_on=False)

    def hurry(self) -> None:
        """Take note that the rows have waited while a long part of a prompt was read."""
        if self.policy is not None:
            self.policy.hurry()

    def join(self, request: Request, output: TargetOutput) -> None:
        """Let a request join that has emitted its first token. No round is ahead.

        Args:
            request: it goes on.
            output: the output of its prompt.
        """
        assert self._ahead is None
        row = len(self.context.rows)
        place = self._layout[row]
        self._num_logits = output.logits.shape[-1]
        self.target.adopt(request.target, row, num_rows=len(self._layout))
        self.batch.join(request, place)
        if self.drafter is not None and self.policy is not None:
            self.drafter.join(self.context, [place], output)
            self.policy.join([place])

    def step(self, goes_on: bool = True) -> None:
        reruns = self.stats.reruns
        if self.policy is not None:
            self.policy.start_clock()
        if self._ahead is None and self._known < len(self.context.rows):
            self._begin_rounds(self._known)
            self._known = len(self.context.rows) if self._commits_on_device else 0
        super().step(goes_on)
        if self.policy is not None:
            self.policy.stop_clock()
        if self.stats.reruns > reruns:
            # Those rows have kept nothing, and other rows go on: the next block is behind slots with NaN.
            self.target.clear_rejected()

    def follow(self) -> None:
        """Remove the rows of requests that have left, unless a round is ahead of which others take part."""
        rows = len(self.context.rows)
        if not self._unfinished():
            self._ahead, self.context.rows = None, []
        if len(self.context.rows) < rows:
            self._known = len(self.context.rows) if self._known == rows else 0
