"""The decoding loop: propose, score, verify, commit. The same loop serves all drafters, trees and batches."""

from __future__ import annotations

import time

import nvtx

from specdec_ext.context import Context
from specdec_ext.drafters.base import Drafter
from specdec_ext.models import Target, TargetOutput
from specdec_ext.models.base import CommitRound
from specdec_ext.output import Recorder, TokenStream
from specdec_ext.schedule.policy import Policy
from specdec_ext.stats import DraftAlarm, SpeculationStats
from specdec_ext.tree.draft_tree import DraftTree
from specdec_ext.verify.sampler import Accepted, Sampler, SpoiltLogits
from specdec_ext.verify.stopping import StopRule


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
        self._commit_round: CommitRound | None = None  # commits rounds on the device

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
            self._verify(tree, output)
        if self.sampler.decides(self.stop) and self.recorder.record_scores is None:
            self._commit_round = target.begin_rounds(
                context.sequences(),
                [context.columns(row) for row in context.rows],
                self.stop.max_length,
                self.stop.eos_ids,
            )
        if drafter is not None:
            drafter.start(context, target.model, output)
        if policy is not None:
            policy.begin(context, self.stats)
        draft, verify, commit = (
            _Timed(phase, self.stats.seconds) for phase in ("draft", "verify", "commit")
        )
        while self._unfinished():
            with draft:
                tree = self._propose()
            with verify:
                output, accepted = self._score(tree)
            with commit:
                self._count(tree, accepted)
                target.commit(accepted.path, accepted.num_accepted, accepted.on_host)
                if drafter is not None and policy is not None:
                    drafter.commit(context, accepted, output)
                    policy.learn(accepted, context, tree.num_nodes)
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
        roots = [context.generated[row][-1] for row in context.rows]
        if self.drafter is None or self.policy is None or not self.policy.choose(context):
            return DraftTree.root(context.roots, roots)
        # The last token of a row needs no key, so useful nodes are at most remaining - 1 levels deep.
        useful = [left - 1 for left in context.remaining]
        before_end = map(self.target.context_room, context.root_positions)
        rooms = [*map(min, useful, self.target.draft_room, before_end)]
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

    def _score(self, tree: DraftTree) -> tuple[TargetOutput, Accepted]:
        """Score and verify the tree. If drafts caused NaN, score the roots alone instead.

        Masked attention multiplies a hidden value by zero, and zero times NaN is NaN. A draft that overflows
        can therefore spoil the logits of all nodes, accepted or not. Only a pass over the roots alone shows
        what plain decoding would emit.
        """
        output = self.target.forward(tree)
        try:
            return output, self._verify(tree, output)
        except SpoiltLogits:
            self.stats.reruns += 1
        self.target.withdraw(tree)
        roots = DraftTree.root(self.context.roots, [row[0] for row in tree.token_lists])
        output = self.target.forward(roots)
        return output, self._verify(roots, output)

    def _verify(self, tree: DraftTree, output: TargetOutput) -> Accepted:
        context, rows = self.context, list(self.context.rows)
        before = [len(context.generated[row]) for row in rows]
        block_start = self.target.start
        accepted = self.sampler.verify(
            tree,
            output.logits,
            context,
            self.stop,
            self.recorder.record_scores,
            self._commit_round,
        )
        if self.recorder.keeps_passes:
            self.recorder.step(
                output,
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

    def _unfinished(self) -> bool:
        """Remove rows that have finished from the active ones; returns whether any row is left."""
        rows, going = self.context.rows, self._going()
        if not going or len(going) == len(rows):
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
