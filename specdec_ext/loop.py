"""The decoding loop: propose, score, verify, commit. The same loop serves all drafters, trees and batches.

A round that ops have committed on the device need not be read at once: if the next round can be drafted from
what is on the device, the loop starts it first, so the device never waits for the host. The host is then one
round *behind*, and the device one round *ahead*. The text is the same. A row that has ended emits nothing in
the round ahead, or, if the device did not know the end, what it emits is dropped. The row is removed from
the batch when that round has been read.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import nvtx

from specdec_ext.context import Context
from specdec_ext.drafters.base import DraftAhead, Drafter
from specdec_ext.models import Target, TargetOutput
from specdec_ext.models.base import CommittedRound
from specdec_ext.output import Recorder, TokenStream
from specdec_ext.schedule.policy import Policy
from specdec_ext.stats import DraftAlarm, SpeculationStats
from specdec_ext.tree.draft_tree import ROOT_PARENT, DraftTree
from specdec_ext.verify.sampler import Accepted, Sampler, SpoiltLogits
from specdec_ext.verify.stopping import StopRule


@dataclass
class Round:
    """A round that has been started.

    Attributes:
        tree: what is verified.
        output: its scores.
        committed: the round on the device; None if the host verifies and commits it.
        draft: the draft ahead; None for other rounds.
    """

    tree: DraftTree
    output: TargetOutput
    committed: CommittedRound | None = None
    draft: DraftAhead | None = None


class DecodingLoop:
    """The loop of one ``generate`` call.

    Args:
        target: scores trees and keeps the cache.
        drafter: proposes trees; None for plain decoding.
        sampler: verifies trees.
        stop: decides when a row ends.
        context: the text.
        recorder: collects scores, logits, hidden states and attentions for the output.
        stream: feeds the caller's streamer, if there is one.
        policy: decides what each step drafts; None without a drafter.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        sampler: Sampler,
        stop: StopRule,
        context: Context,
        recorder: Recorder,
        stream: TokenStream | None,
        policy: Policy | None,
    ):
        self.target, self.drafter, self.sampler, self.stop = target, drafter, sampler, stop
        self.context, self.recorder, self.stream = context, recorder, stream
        self.policy = policy
        self.stats = SpeculationStats(drafter=type(drafter).__name__ if drafter else "none")
        self.stats.policy = "fixed" if drafter else "none"
        self.stats.host_processors = sampler.host_processors
        self._alarm = DraftAlarm(self.stats, drafter.low_acceptance_hint if drafter else "")
        self._ends: dict[int, int] = {}  # original row -> its length in columns when it ended
        self._layout = list(context.rows)  # row of the cache -> original row
        self._commits_on_device = self._may_run_ahead = False
        self._is_void = False  # whether drafts spoilt the last round that was read

    def run(self) -> int:
        """Generate until all rows have ended; returns the width of ``sequences``."""
        context, target, policy = self.context, self.target, self.policy
        steps = context.max_length - context.prompt_columns
        if policy is not None:
            self.drafter = policy.drafter_of(len(context.rows), steps)
        drafter = self.drafter
        if drafter is not None:
            target.record_hidden_states(drafter.feature_layers(target.model))
        # The token of this root is not read. A prompt of embeddings has none.
        tree = DraftTree.root(context.input_ids.new_zeros(len(context.input_ids)))
        with _Timed("prefill", self.stats.seconds):
            output = target.prefill(context.input_ids, context.attention_mask)
            self._num_logits = output.logits.shape[-1]
            self.recorder.prompt(output)
            self._verify(Round(tree, output), is_latest=True)
        decides = self.sampler.decides(self.stop, len(context.rows))
        if decides and self.recorder.record_scores is None:
            self._commits_on_device = target.begin_rounds(
                context.sequences(),
                [context.columns(row) for row in context.rows],
                self.stop.max_length,
                self.stop.eos_ids,
            )
        self._may_run_ahead = self._commits_on_device and not self.sampler.needs_draft_probs
        if drafter is not None:
            drafter.start(context, target.model, output)
        if policy is not None:
            policy.begin(context, self.stats)
        draft, verify, commit = (
            _Timed(phase, self.stats.seconds) for phase in ("draft", "verify", "commit")
        )
        ahead: Round | None = None
        while self._unfinished(ahead):
            current = ahead
            if current is None:
                with draft:
                    tree = self._propose()
            elif drafter is not None and policy is not None:
                policy.repeat()
            ahead = None
            if self._may_run_ahead:
                if current is None:
                    with verify:
                        current = self._start(tree)
                ahead = self._start_ahead(current, draft, verify)
            with verify:
                if current is None:
                    current = self._start(tree)
                verified = self._read(current, ahead)
            if verified is None:
                continue
            with commit:
                tree, output, accepted = verified
                self._count(tree, accepted)
                target.commit(accepted.path, accepted.num_accepted, accepted.on_host)
                if drafter is not None and policy is not None:
                    drafter.commit(context, accepted, output)
                    if current.draft is not None and current.tree.num_nodes > 1:
                        policy.verified(tree, current.draft.lookups)
                    policy.learn(accepted, context, current.tree.num_nodes)
        if policy is not None:
            policy.end()
        # The cache is left with the rows and columns of sequences[:, :-1].
        width = self._width()
        everyone = range(len(self._layout))
        places = {row: i for i, row in enumerate(self._layout)}
        target.reorder([places[row] for row in everyone], active=0)
        columns = [min(context.columns(row), width) for row in everyone]
        target.finish(context.last_tokens(everyone), columns)
        return width

    def _propose(self) -> DraftTree:
        context = self.context
        if context.staging.waits:
            context.stage()
            self.sampler.stage(context)
        roots = self._last_tokens()
        if self.drafter is None or self.policy is None or not self.policy.choose(context):
            return DraftTree.root(context.roots, roots)
        rooms = self._rooms()
        limits = context.staging.stage(rooms)
        tree, name = self.drafter.propose(context), type(self.drafter).__name__
        if not isinstance(tree, DraftTree):
            raise TypeError(
                f"{name}.propose returned a {type(tree).__name__}; expected a DraftTree"
            )
        tree = tree.validated(roots, self.target.vocab_size, name, self._num_logits)
        if not self.target.support.tree:
            tree = tree.first_chain()
        tree = self.policy.cut(tree.pruned(rooms, limits), context)
        self.sampler.check(tree, name)
        return tree.on(context.staging)

    def _last_tokens(self) -> list[int]:
        return [self.context.generated[row][-1] for row in self.context.rows]

    def _rooms(self) -> list[int]:
        """The largest useful depth of a draft of each active row."""
        context, target = self.context, self.target
        # The last token of a row needs no key, so useful nodes are at most remaining - 1 levels deep.
        useful = [left - 1 for left in context.remaining]
        before_end = map(target.context_room, context.root_positions)
        return [*map(min, useful, target.draft_room, before_end)]

    def _start(
        self, tree: DraftTree, last: CommittedRound | None = None, draft: DraftAhead | None = None
    ) -> Round:
        """Score a tree, and verify and commit it on the device if that is possible.

        Args:
            tree: what to verify.
            last: the last round, if the host has not read it.
            draft: the draft after ``last``.
        """
        output = self.target.forward(tree)
        if not self._commits_on_device:
            return Round(tree, output)
        positions = None if last is None else last.numbers.root_positions
        verdict = self.sampler.verify_on_device(tree, output.logits, self.context, positions)
        return Round(tree, output, self.target.commit_round(verdict), draft)

    def _start_ahead(self, current: Round, draft: _Timed, verify: _Timed) -> Round | None:
        """Start the next round before the host reads ``current``, if this is possible and useful."""
        context, drafter, committed = self.context, self.drafter, current.committed
        assert committed is not None
        drafts = False if self.policy is None else self.policy.decided
        if drafts is None or self._is_void or len(self._going()) < len(context.rows):
            return None
        if max(context.remaining) < 2:  # the text ends in this round
            return None
        num_nodes = drafter.nodes_ahead(context) if drafts and drafter is not None else 1
        if num_nodes is None or not self.target.runs_ahead(num_nodes, current.tree.num_nodes):
            return None
        with draft:
            if drafts and drafter is not None:
                ahead = drafter.draft_ahead(committed, context)
            else:
                ahead = DraftAhead.nothing(committed.numbers)
            if ahead is None:
                return None
            tree = ahead.tree.filled(num_nodes).with_roots(committed.numbers.root_parents)
        with verify:
            return self._start(tree, committed, ahead)

    def _read(
        self, current: Round, ahead: Round | None
    ) -> tuple[DraftTree, TargetOutput, Accepted] | None:
        """Read the result of a round. If drafts caused NaN, score the roots alone instead.

        Masked attention multiplies a hidden value by zero, and zero times NaN is NaN. A draft that overflows
        can therefore spoil the logits of all nodes, accepted or not. Only a pass over the roots alone shows
        what plain decoding would emit.

        Args:
            current: the round.
            ahead: the round after it, if it has been started.

        Returns:
            The tree that was verified, its scores and the result. None if the round is void and ``ahead``
            has repeated it.
        """
        tree = current.tree if current.draft is None else self._tree_on_host(current)
        try:
            accepted = self._verify(current, is_latest=ahead is None)
        except SpoiltLogits:
            self._is_void = True
            if ahead is not None:
                return None
            self.stats.reruns += 1
            self.target.withdraw(current.tree)
            current = self._start(DraftTree.root(self.context.roots, self._last_tokens()))
            accepted = self._verify(current, is_latest=True)
        self._is_void = False
        return tree, current.output, accepted

    def _tree_on_host(self, ahead: Round) -> DraftTree:
        """The tree of a round ahead as the host would have drafted it: nothing that the row can't emit."""
        if ahead.tree.num_nodes == 1:
            roots = self._last_tokens()
            return DraftTree.of_lists([[token] for token in roots], [[ROOT_PARENT] for _ in roots])
        assert ahead.committed is not None
        return ahead.committed.tree_on_host.pruned(self._rooms())

    def _verify(self, current: Round, is_latest: bool) -> Accepted:
        context, rows = self.context, list(self.context.rows)
        before = [len(context.generated[row]) for row in rows]
        block_start = self.target.start
        if current.committed is not None:
            accepted = self.sampler.read(
                current.committed, context, self.stop, self._going(), is_latest
            )
        else:
            accepted = self.sampler.verify(
                current.tree,
                current.output.logits,
                context,
                self.stop,
                self.recorder.record_scores,
            )
        if self.recorder.keeps_passes:
            self.recorder.step(
                current.output,
                accepted,
                rows,
                before,
                block_start,
                context.prompt_columns + self.target.offset,
                self.target.windows,
            )
        for row, ended in zip(rows, accepted.ended, strict=True):
            if ended:
                self._ends.setdefault(row, context.columns(row))
        if self.stream is not None:
            going = self._going()
            columns = min(map(context.columns, going)) if going else self._width()
            self.stream.advance(accepted, rows, columns)
        return accepted

    def _going(self) -> list[int]:
        """Original rows that have not finished."""
        everyone = range(len(self.context.generated))
        if self.stop.pads:
            return [row for row in everyone if row not in self._ends]
        # Without an end-of-sequence id, transformers lets ended rows continue until the last row ends.
        limit = self._width() if len(self._ends) == len(everyone) else self.stop.max_length
        return [row for row in everyone if self.context.columns(row) < limit]

    def _width(self) -> int:
        return max(self._ends.values())

    def _unfinished(self, ahead: Round | None) -> bool:
        """Remove rows that have finished from the active ones; returns whether any row is left.

        While a round is ahead, its rows stay.
        """
        rows, going = self.context.rows, self._going()
        if not going or len(going) == len(rows) or ahead is not None:
            return bool(going)
        # Each finished row swaps places with an active row after it, so only rows that move are copied.
        order = list(range(len(self._layout)))
        active, kept = 0, set(going)
        for i, row in enumerate(rows):
            if row in kept:
                order[active], order[i] = order[i], order[active]
                active += 1
        self.target.reorder(order, active, self.context.roots)
        self._layout = [self._layout[i] for i in order]
        self.context.rows = self._layout[:active]
        return True

    def _count(self, tree: DraftTree, accepted: Accepted) -> None:
        for row, depths in enumerate(tree.depths):
            if not accepted.emitted[row]:
                continue  # the row had ended before a round ahead
            self.stats.count_step(
                draft_tokens=sum(depth > 0 for depth in depths),
                depth=max(depths),
                num_accepted=accepted.drafted[row],
                num_emitted=len(accepted.emitted[row]),
            )
        self._alarm.check()


class _Timed:
    """Adds up the seconds of a phase and marks it as an NVTX range for Nsight."""

    def __init__(self, phase: str, seconds: dict[str, float]):
        self._phase, self._seconds = phase, seconds
        self._range = nvtx.annotate(phase, domain="specdec")

    def __enter__(self) -> None:
        self._began = time.perf_counter()
        self._range.__enter__()

    def __exit__(self, *error: object) -> None:
        self._range.__exit__(*error)
        self._seconds[self._phase] += time.perf_counter() - self._began
