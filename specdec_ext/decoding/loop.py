"""The decoding loop: propose, score, verify, commit. The same loop serves all drafters, trees and batches.

A round that ops have committed on the device need not be read at once: if the next round can be drafted from
what is on the device, the loop starts it first, so the device never waits for the host. The host is then one
round *behind*, and the device one round *ahead*. The text is the same. A row that has ended emits nothing in
the round ahead, or, if the device did not know the end, what it emits is dropped. The row is removed from
the batch when that round has been read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import nvtx
from torch import Tensor

from specdec_ext.decoding.call import Batch
from specdec_ext.drafters.base import DraftAhead, Drafter
from specdec_ext.models import Target, TargetOutput
from specdec_ext.models.base import CommittedRound, FixedDraft
from specdec_ext.schedule.policy import Policy
from specdec_ext.tree.config import Lookup
from specdec_ext.tree.draft_tree import INACTIVE, ROOT_PARENT, DraftTree
from specdec_ext.verify.sampler import Accepted, SpoiltLogits


@dataclass
class Round:
    """A round that has been started.

    Attributes:
        tree: what is verified.
        output: its scores.
        committed: the round on the device; None if the host verifies and commits it.
        is_ahead: whether it was drafted before the host has read the round before.
    """

    tree: DraftTree
    output: TargetOutput
    committed: CommittedRound | None = None
    is_ahead: bool = False

    def keep(self) -> None:
        """Copy what a recording has lent and its next replay overwrites, if something may read it then."""
        if self.output.is_lent:
            self.output = self.output.copied()
            assert self.committed is not None
            self.committed.verdict = self.committed.verdict.copied()


class DecodingLoop:
    """The loop over the rows of a batch.

    Args:
        target: scores trees and keeps the cache.
        drafter: proposes trees; None for plain decoding.
        batch: the text of the rows.
        policy: decides what each step drafts; None without a drafter.
    """

    # Whether the cached tokens of finished rows are needed at the end.
    _keeps_finished = True

    def __init__(
        self, target: Target, drafter: Drafter | None, batch: Batch, policy: Policy | None
    ):
        self.target, self.drafter, self.policy = target, drafter, policy
        self.batch, self.context, self.stats = batch, batch.context, batch.stats
        self._layout = list(range(len(self.context.generated)))  # row of the cache -> original row
        self._num_logits = 0
        self._commits_on_device = self._may_run_ahead = self._has_rules = False
        self._is_void = False  # whether drafts spoilt the last round that was read
        self._ahead: Round | None = None
        self._draft, self._scoring, self._commit = (
            Timed(phase, self.stats.seconds) for phase in ("draft", "verify", "commit")
        )

    def _begin_rounds(self, known: int = 0) -> None:
        """Commit the next rounds on the device if ops alone decide them and the target can, else on the host.

        Args:
            known: number of first active rows whose text the device has.
        """
        before = self._commits_on_device
        self._commits_on_device = self.target.commits_rounds and self.batch.decides()
        if self._commits_on_device:
            texts = self.batch.texts(known)
            self._has_rules = texts.rules is not None
            self.target.begin_rounds(texts)
        elif before:
            self.target.end_rounds()
        if self.target.commits_rounds:
            if not self._commits_on_device:
                self.target.tell_round_reason("the host decides which tokens are emitted")
            if self.drafter is not None and (name := self.drafter.waits_for_host):
                self.target.tell_round_reason(f"{name} needs the last round on the host")
        self._may_run_ahead = self._commits_on_device

    def step(self, goes_on: bool = True) -> None:
        """Draft, score, verify and commit one round, unless it has been started ahead.

        Args:
            goes_on: whether the next round may be started ahead.
        """
        context, drafter, policy = self.context, self.drafter, self.policy
        current, self._ahead = self._ahead, None
        if current is None:
            with self._draft:
                tree = self._propose()
        elif drafter is not None and policy is not None:
            policy.repeat()
        if self._may_run_ahead and goes_on:
            if current is None:
                with self._scoring:
                    current = self._start(tree)
            self._ahead = self._start_ahead(current)
        with self._scoring:
            if current is None:
                current = self._start(tree)
            if drafter is not None and self._ahead is None:
                current.keep()  # it commits the outputs
            verified = self._read(current)
        if verified is None:
            return
        with self._commit:
            tree, output, accepted = verified
            self.batch.count(tree, accepted)
            self.target.commit(accepted.path, accepted.num_accepted, accepted.on_host)
            if drafter is not None and policy is not None:
                drafter.commit(context, accepted, output)
                if current.is_ahead and current.tree.num_nodes > 1:
                    policy.verified(tree, self._lookups(current, drafter))
                policy.learn(accepted, context, current.tree.num_nodes)

    def _propose(self) -> DraftTree:
        context = self.context
        if context.staging.waits:
            context.stage()
            self.batch.stage()
        roots = self._last_tokens()
        drafter, policy = self.drafter, self.policy
        if drafter is None or policy is None or not policy.choose(context):
            return DraftTree.root(context.roots, roots)
        rooms = self._rooms()
        for row in self.batch.undrafted:
            rooms[context.rows.index(row)] = 0
        limits = context.staging.stage(rooms)
        tree, name = drafter.propose(context), type(drafter).__name__
        if not isinstance(tree, DraftTree):
            raise TypeError(
                f"{name}.propose returned a {type(tree).__name__}; expected a DraftTree"
            )
        tree = tree.validated(roots, self.target.vocab_size, name, self._num_logits)
        if not self.target.support.tree:
            tree = tree.first_chain()
        tree = policy.cut(tree.pruned(rooms, limits), context)
        self.batch.check(tree, name)
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

    def _start(self, tree: DraftTree) -> Round:
        """Score a tree, and verify and commit it on the device if that is possible."""
        if not self._commits_on_device:
            return Round(tree, self.target.forward(tree))
        return self._launched(self._computed(tree), is_ahead=False)

    def _computed(
        self,
        tree: DraftTree,
        root_positions: Tensor | None = None,
        match_lengths: Tensor | None = None,
    ) -> Round:
        """Score, verify and commit a tree on the device.

        A recorded round repeats this work, so nothing that the host has to remember is done here.

        Args:
            tree: what to verify.
            root_positions: of its roots, if the host does not know them.
            match_lengths: see :class:`CommittedRound`.
        """
        output = self.target.forward(tree)
        if self._has_rules:
            verdict = self.target.verify_round(tree, output.logits)
        else:
            verdict = self.batch.verify_on_device(tree, output.logits, root_positions)
        return Round(tree, output, self.target.commit_round(verdict, match_lengths))

    def _launched(self, computed: Round, is_ahead: bool) -> Round:
        """Take note of a round that was computed or replayed."""
        assert computed.committed is not None
        committed = self.target.round_launched(computed.committed)
        started = Round(committed.tree, computed.output, committed, is_ahead)
        if self.batch.keeps_passes:
            started.keep()
        return started

    def _start_ahead(self, current: Round) -> Round | None:
        """Start the next round before the host reads ``current``, if this is possible and useful."""
        context, committed = self.context, current.committed
        assert committed is not None
        drafts = False if self.policy is None else self.policy.decided
        if drafts is None or self._is_void or len(self.batch.going()) < len(context.rows):
            return None
        if drafts and self.batch.undrafted:
            return None
        if max(context.remaining) < 2:  # the text ends in this round
            return None
        drafter = self.drafter if drafts else None
        num_nodes = 1 if drafter is None else drafter.nodes_ahead(committed, context)
        if num_nodes is None or not self.target.runs_ahead(num_nodes, current.tree.num_nodes):
            return None
        fixed: FixedDraft | str = FixedDraft(None)
        with self._draft:
            if drafter is not None:
                fixed = drafter.prepare_ahead(committed, context)
            elif self.drafter is not None:
                current.keep()  # this drafter may read the outputs later
            if not self._has_rules:
                fixed = "other logits processors than temperature, top-k, top-p and min-p take part"

        def compute() -> Round:
            numbers = committed.numbers
            if drafter is None:
                ahead = DraftAhead.nothing(numbers)
            else:
                ahead = drafter.draft_ahead(committed, context)
            tree = ahead.tree.filled(num_nodes).with_roots(numbers.root_parents)
            return self._computed(tree, numbers.root_positions, ahead.match_lengths)

        with self._scoring:
            computed = self.target.run_round(fixed, num_nodes, compute)
            committed.is_overwritten = current.output.is_lent
            return self._launched(computed, is_ahead=True)

    def _lookups(
        self, current: Round, drafter: Drafter
    ) -> Callable[[], Sequence[Lookup | None]] | None:
        """What returns the kinds of lookups of a draft ahead, if any row may have copied text."""
        committed = current.committed
        assert committed is not None
        if committed.match_lengths is None:
            return None
        return lambda: drafter.lookups_ahead(self.context, committed.match_lengths_on_host)

    def _read(self, current: Round) -> tuple[DraftTree, TargetOutput, Accepted] | None:
        """Read the result of a round. If drafts caused NaN, score the roots alone instead.

        Masked attention multiplies a hidden value by zero, and zero times NaN is NaN. A draft that overflows
        can therefore spoil the logits of all nodes, accepted or not. Only a pass over the roots alone shows
        what plain decoding would emit.

        Args:
            current: the round.

        Returns:
            The tree that was verified, its scores and the result. None if the round is void and the round
            ahead has repeated it.
        """
        tree = self._tree_on_host(current) if current.is_ahead else current.tree
        try:
            accepted = self._verify(current, is_latest=self._ahead is None)
        except SpoiltLogits:
            self._is_void = True
            if self._ahead is not None:
                return None
            self.stats.reruns += 1
            self.target.withdraw(current.tree)
            current = self._start(self._roots())
            accepted = self._verify(current, is_latest=True)
        self._is_void = False
        if current.is_ahead:
            # The device knows where a text ends, but not that its last token needs no draft.
            deepest = (max(0, *depths) for depths in tree.depths)
            accepted.drafted = [*map(min, accepted.drafted, deepest)]
        return tree, current.output, accepted

    def _roots(self) -> DraftTree:
        """The trees of a step without drafts. Rows that have ended, but wait to be removed, are inactive."""
        tree, going = DraftTree.root(self.context.roots, self._last_tokens()), self.batch.going()
        rows = self.context.rows
        if len(going) == len(rows):
            return tree
        parents = [ROOT_PARENT if row in going else INACTIVE for row in rows]
        return tree.with_roots(self.context.staging.stage(parents).tensor)

    def _tree_on_host(self, ahead: Round) -> DraftTree:
        """The tree of a round ahead as the host would have drafted it: nothing that the row can't emit."""
        if ahead.tree.num_nodes == 1:
            roots = self._last_tokens()
            return DraftTree.of_lists([[token] for token in roots], [[ROOT_PARENT] for _ in roots])
        assert ahead.committed is not None
        return ahead.committed.tree_on_host.pruned(self._rooms())

    def _verify(self, current: Round, is_latest: bool) -> Accepted:
        return self.batch.verify(
            current.tree, current.output, self.target, current.committed, is_latest
        )

    def _unfinished(self) -> bool:
        """Remove rows that have finished from the active ones; returns whether any row is left.

        While a round is ahead, its rows stay.
        """
        rows, going = self.context.rows, self.batch.going()
        if not going or len(going) == len(rows) or self._ahead is not None:
            return bool(going)
        # The last active rows take the places of finished ones, so few rows are copied.
        order, active = list(range(len(self._layout))), len(going)
        kept = set(going)
        holes = [i for i, row in enumerate(rows[:active]) if row not in kept]
        movers = [i for i, row in enumerate(rows) if i >= active and row in kept]
        for hole, mover in zip(holes, movers, strict=True):
            order[hole], order[mover] = mover, hole
        sources = order if self._keeps_finished else [*order[:active], *range(active, len(order))]
        self.target.reorder(sources, active, self.context.roots)
        self._layout = [self._layout[i] for i in order]
        self.context.rows = self._layout[:active]
        return True


class Timed:
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
