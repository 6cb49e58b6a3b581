"""``Sampler``: verifies draft trees against the processed target distribution.

Rule 1, "match", is the default. At each visited node, one token is drawn from the processed target
distribution. If a child has this token, the walk continues there; otherwise the token is emitted and the walk
ends. Greedy decoding is the same without noise. The noise is a function of (seed, stream, position, token),
so the text does not depend on the drafter.

Rows of a batch that share a seed use its streams 0, 1, 2, ...; a row with its own seed uses stream 0, at any
place in a batch. The position of a token is the number of tokens before it, without paddings.

Rules 2 to 4 (:mod:`specdec_ext.ops.verify_sampled`) preserve the distribution of the text, but not the text
of a seed. They need trees with ``draft_probs``. Their noise is a function of (seed, stream, position of the
round's root, depth). Under these rules, greedy decoding and rows without drafts use rule 1, which they equal
in the greedy limit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from specdec_ext import ops
from specdec_ext.context import Context
from specdec_ext.models.base import CommittedRound, RowRule
from specdec_ext.reference import rng
from specdec_ext.transfer import Latest, Staged, Staging
from specdec_ext.tree.draft_tree import ROOT_PARENT, DraftTree
from specdec_ext.verify.processors import Processors
from specdec_ext.verify.stopping import StopRule
from specdec_ext.verify.walks import CommittedWalk, FinishedWalk, StepwiseWalk, Walk

# The rules other than "match", for drafts that were sampled from known probabilities.
RULES: dict[str, Callable[..., ops.MatchResult]] = {
    "rejection": ops.verify_rejection,
    "block": ops.verify_block,
    "recursive": ops.verify_recursive,
}
VERIFICATIONS = ("match", *RULES)
# The temperature of coupled drafts, relative to that of the call, by whether top-k, top-p, min-p or other
# processors make the target's distribution narrower than the temperature does. Removing the same tokens from
# the drafter's distribution helps chains a little and costs trees much, because a token that the drafter
# ranks low may still be the target's. Measured in docs/reference/performance.md.
DRAFT_TEMPERATURES = {False: 0.9, True: 0.7}
COMPLAINTS = {
    ops.STATUS_NAN: "contain NaN",
    ops.STATUS_NO_FINITE_LOGIT: "are all -inf: the logits processors excluded every token",
}
# (original rows, number of tokens that each row had before, scores [rows, vocab]) -> all scores so far, by
# position
RecordScores = Callable[[Sequence[int], Sequence[int], Tensor], tuple[Tensor, ...]]


@dataclass
class Accepted:
    """The result of one verification, per active row.

    Attributes:
        path: ``[rows, nodes]``, the node visited at each depth, -1 beyond the walk. It is on the CPU, as
            ``num_accepted``, if a replay has overwritten the result on the device.
        num_accepted: ``[rows]``, number of nodes below the root whose keys and values are kept, which is the
            number of emitted tokens minus one.
        emitted: the emitted tokens, in order.
        drafted: number of emitted tokens that came from the draft.
        ended: whether the row ended with its last emitted token.
        known_paths: ``path`` as lists, if these are on the host already.
        committed: the round on the device, if it was committed there.
    """

    path: Tensor
    num_accepted: Tensor
    emitted: list[list[int]]
    drafted: list[int]
    ended: list[bool]
    known_paths: list[list[int]] | None = None
    committed: CommittedRound | None = None

    @classmethod
    def nothing(cls) -> Accepted:
        """A row that has emitted nothing."""
        path = torch.empty(1, 0, dtype=torch.long, device="cpu")
        return cls(path, torch.tensor([-1], device="cpu"), [[]], [0], [False], [[]])

    @classmethod
    def of_round(
        cls,
        committed: CommittedRound,
        context: Context,
        emitted: list[list[int]],
        drafted: list[int],
        ended: list[bool],
        positions: Latest,
        is_latest: bool,
    ) -> Accepted:
        """What the rows have taken from a round that was committed on the device.

        If no later round has been started, the next one finds its roots and their positions on the device.

        Args:
            committed: the round.
            context: the text, the emitted tokens included.
            emitted, drafted, ended: see :class:`Accepted`; they may be less than the device has.
            positions: the positions of the roots.
            is_latest: whether no later round has been started.
        """
        entry, numbers, result = committed.entry, committed.numbers, committed.verdict
        counts = [len(tokens) for tokens in emitted]
        # Whether the device has the last token and the length of every row that goes on.
        knows = counts == entry.counts
        if is_latest:
            context.stage(numbers.roots if knows else None)
            positions.of(context.root_positions, numbers.root_positions if knows else None)
        path, last = result.path, [count - 1 for count in counts]
        if committed.is_overwritten:
            path, kept = (torch.tensor(each, device="cpu") for each in (entry.paths, last))
        elif knows and not any(entry.ended) and not any(entry.status):
            kept = result.num_accepted
        elif knows and is_latest:
            kept = numbers.counts - 1
        else:
            kept = context.staging.stage(last).tensor
        return cls(path, kept, emitted, drafted, ended, entry.paths, committed)

    @cached_property
    def paths(self) -> list[list[int]]:
        """``path`` on the host."""
        return self.path.tolist() if self.known_paths is None else self.known_paths

    @property
    def on_host(self) -> tuple[list[list[int]], list[int]]:
        """``path`` and ``num_accepted`` as lists."""
        return self.paths, [len(tokens) - 1 for tokens in self.emitted]


class SpoiltLogits(Exception):
    """Drafts may have put NaN into the logits of a pass, also where no draft was accepted."""


class Sampler:
    """Draws from the processed target distribution and verifies trees.

    Args:
        processors: the list that transformers prepared, warpers included.
        stochastic: True for sampling, False for greedy decoding.
        noise: (seed, stream) of each row of the batch.
        staging: copies integers to the device of the logits.
        verification: one of ``VERIFICATIONS``; ignored in greedy decoding.

    Raises:
        ValueError: for a rule other than "match" together with a processor that may keep state.
    """

    def __init__(
        self,
        processors: LogitsProcessorList,
        stochastic: bool,
        noise: Sequence[tuple[int, int]],
        staging: Staging,
        verification: str = "match",
    ):
        self._processors = Processors(processors, staging.device)
        self._stochastic = stochastic
        self.noise = list(noise)
        self._staging, self._device = staging, staging.device
        self._verification = verification if stochastic else "match"
        self._noise_of: tuple[list[int], Staged] | None = None
        self._row_tensors: tuple[Staged, tuple[Tensor, ...]] | None = None
        self._root_positions = Latest(staging)
        if self.needs_draft_probs and self._processors.with_memory:
            raise ValueError(
                f"verification={verification!r} can't be combined with the logits processors "
                f"{', '.join(self._processors.with_memory)}: they may keep state, and this rule scores "
                "drafted tokens that are never emitted. Use verification='match', the default"
            )

    @property
    def needs_draft_probs(self) -> bool:
        """Whether trees must contain the probabilities that their tokens were sampled from."""
        return self._verification != "match"

    @property
    def temperature(self) -> float:
        """The temperature of the call; 0 for greedy decoding."""
        return self._processors.temperature if self._stochastic else 0.0

    @property
    def row_rules(self) -> list[RowRule] | None:
        """How ops verify each row of the batch; None if other processors or rules are needed."""
        filters = self._processors.filters
        if filters is None or self.needs_draft_probs:
            return None
        return [RowRule(*noise, self._stochastic, **filters) for noise in self.noise]

    @property
    def draft_noise(self) -> ops.DraftNoise | None:
        """The noise for coupled drafts (:attr:`specdec_ext.context.Context.noise`)."""
        if not self.draft_temperature:
            return None
        seeds, streams, *_ = self._rows(list(range(len(self.noise))))
        temperatures = torch.full_like(seeds, self.draft_temperature, dtype=torch.float32)
        return ops.DraftNoise(temperatures, seeds, streams)

    @property
    def draft_temperature(self) -> float:
        """The temperature of coupled drafts; 0 for drafts without noise."""
        if not self._stochastic or self.needs_draft_probs:
            return 0.0
        return self.temperature * DRAFT_TEMPERATURES[self._processors.narrows]

    def decides(self, stop: StopRule, rows: int) -> bool:
        """Whether ops alone decide which tokens are emitted to ``rows`` rows, except that criteria cut them.

        A row that the host cuts must end there. Rows that wait for each other, or that go on after their end,
        can't be committed on the device before the host has called the criteria.
        """
        waits = stop.needs_lockstep or not stop.pads
        return not self._processors.reads_text and (stop.is_known or rows == 1 or not waits)

    def check(self, tree: DraftTree, source: str) -> None:
        """Raise ValueError if the rule can't verify this tree.

        Args:
            tree: the tree.
            source: the name of its drafter, for the message.
        """
        if not self.needs_draft_probs or tree.num_nodes == 1:
            return
        if tree.draft_probs is None:
            raise ValueError(
                f"{source} returned a DraftTree without draft_probs, which verification="
                f"{self._verification!r} needs; use verification='match', the default"
            )
        if self._verification != "recursive" and not tree.is_chain:
            raise ValueError(
                f"{source} returned a tree in which nodes have several children; verification="
                f"{self._verification!r} is for chains; use 'recursive' or 'match'"
            )

    @property
    def host_processors(self) -> list[str]:
        """Names of the processors that are called node by node, with the text on the host."""
        return self._processors.on_host

    def stage(self, context: Context) -> None:
        """Begin a round: stage the integers that its verification needs on the device."""
        self._staged_rows(list(context.rows))
        self._root_positions.of(context.root_positions)
        self._processors.stage(context)

    def _staged_rows(self, rows: list[int]) -> Staged:
        """Seeds and streams of these rows, ``[2, rows]``."""
        if self._noise_of is None or self._noise_of[0] != rows:
            noise = [[self.noise[row][i] for row in rows] for i in (0, 1)]
            self._noise_of = rows, self._staging.stage(noise)
        return self._noise_of[1]

    def _rows(self, rows: list[int]) -> tuple[Tensor, ...]:
        """Seeds, streams, stochastic flags and counters of these rows: the last arguments of the op."""
        staged = self._staged_rows(rows)
        if self._row_tensors is None or self._row_tensors[0] is not staged:
            seeds, streams = staged.tensor
            flags = torch.full_like(streams, self._stochastic, dtype=torch.bool)
            counters = torch.zeros_like(streams, dtype=torch.int32)
            self._row_tensors = (staged, (seeds, streams, flags, counters))
        return self._row_tensors[1]

    def _on_device(self, positions: Sequence[int] | Tensor) -> Tensor:
        if isinstance(positions, Tensor):
            return positions
        return self._root_positions.of(list(positions)).tensor

    def _match(
        self, scores: Tensor, tree: DraftTree, positions: Sequence[int] | Tensor, rows: list[int]
    ) -> ops.MatchResult:
        """Apply rule 1. ``positions`` are those of the roots."""
        root_positions = self._on_device(positions)
        return ops.verify_match(
            scores, tree.tokens, tree.parents, root_positions, *self._rows(list(rows))
        )

    def _sampled(
        self, scores: Tensor, tree: DraftTree, positions: Sequence[int] | Tensor, rows: list[int]
    ) -> ops.MatchResult:
        """Apply rules 2 to 4; rule 1 to rows without drafts, so that they do not depend on other rows."""
        root_positions = self._on_device(positions)
        seeds, streams, *_ = self._rows(list(rows))
        result = RULES[self._verification](
            scores, tree.draft_probs, tree.tokens, tree.parents, root_positions, seeds, streams
        )
        without = [max(depths) == 0 for depths in tree.depths]
        if not any(without):
            return result
        plain = self._match(scores[:, :1], tree.pruned([0] * tree.num_rows), positions, rows)
        is_plain = torch.tensor(without, device=self._device)
        # next_token is a view of result.packed, which the host reads.
        result.next_token.copy_(torch.where(is_plain, plain.next_token, result.next_token))
        return result

    def _walk_tree(
        self, scores: Tensor, tree: DraftTree, positions: Sequence[int], rows: list[int]
    ) -> tuple[ops.MatchResult, ops.HostMatchResult]:
        """Verify a tree; raises as :meth:`_check_status`."""
        result = self._result(scores, tree, positions, rows)
        on_host = result.on_host()
        self._check_status(on_host, tree, positions, rows)
        return result, on_host

    def _result(
        self, scores: Tensor, tree: DraftTree, positions: Sequence[int] | Tensor, rows: list[int]
    ) -> ops.MatchResult:
        verified = self._match if self._by_match(tree) else self._sampled
        return verified(scores, tree, positions, rows)

    def _check_status(
        self,
        on_host: ops.HostMatchResult | ops.RoundEntry,
        tree: DraftTree,
        positions: Sequence[int],
        rows: list[int],
        going: Collection[int] | None = None,
    ) -> None:
        """Check the result of a verification.

        Args:
            going: the rows that had not ended; None for all.

        Raises:
            SpoiltLogits: if a visited node has invalid logits, and drafts may be the reason.
            ValueError: if there are no drafts: the model or the processors are the reason.
        """
        if any(on_host.status):
            if tree.num_nodes > 1:
                raise SpoiltLogits
            problems = [
                (i, each)
                for i, each in enumerate(on_host.status)
                if each and (going is None or rows[i] in going)
            ]
            if not problems:
                return
            i, problem = problems[0]
            # num_accepted counts the nodes below the root before the invalid one (-1 if that is the root).
            # The message names the position of the token that could not be drawn.
            position = positions[i] + on_host.num_accepted[i] + 2
            raise ValueError(
                f"the target's processed logits of row {rows[i]} at position {position} "
                f"{COMPLAINTS[problem]}. Check the model's weights and dtype, the prompt, and the "
                "logits processors; InfNanRemoveLogitsProcessor (remove_invalid_values=True) replaces "
                "invalid values."
            )

    def _by_match(self, tree: DraftTree) -> bool:
        return not self.needs_draft_probs or tree.num_nodes == 1

    def _pick(self, scores: Tensor, positions: Sequence[int], rows: list[int]) -> list[int]:
        """Draw tokens from ``scores [n, vocab]``; ``positions`` are those of the preceding tokens."""
        roots = DraftTree.root(torch.zeros(len(scores), dtype=torch.long, device=scores.device))
        _, on_host = self._walk_tree(scores[:, None], roots, positions, rows)
        return on_host.next_token

    def draw(self, logits: Tensor, positions: Sequence[int], rows: Sequence[int]) -> Tensor:
        """Return the tokens that the target would emit at ``positions`` with these ``logits [n, vocab]``.

        Drafts need not be right: processors that read the text are left out, and NaN gives token 0.
        """
        roots = DraftTree.root(torch.zeros(len(logits), dtype=torch.long, device=logits.device))
        before = [position - 1 for position in positions]
        scores = self._processors.shared(logits)
        return self._match(scores[:, None], roots, before, list(rows)).next_token.clamp(min=0)

    def sample(
        self, logits: Tensor, depth: int, root_positions: Sequence[int], rows: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Draw independently from the distribution that the target would have with ``logits [n, vocab]``.

        The noise is a function of (seed, stream, position of the round's root, depth), with a purpose of its
        own, so it is independent of the noise of the verification. Processors that read the text are left
        out. Greedy decoding draws the arg-max.

        Args:
            logits: logits at the nodes whose children are drawn.
            depth: depth of these nodes, 0 for the root.
            root_positions: positions of the roots of the round.
            rows: original rows.

        Returns:
            ``[n]`` tokens, -1 where the distribution is NaN or empty, and the distributions, ``[n, vocab]``
            float32: the values of ``DraftTree.draft_probs`` at these nodes.
        """
        scores = self._processors.shared(logits).float()
        if self._stochastic:
            probs = scores.softmax(dim=-1)
        else:
            probs = torch.zeros_like(scores).scatter(1, scores.argmax(dim=-1, keepdim=True), 1.0)
        seeds, streams, *_ = self._rows(list(rows))
        positions = self._on_device(root_positions)
        bits = rng.round_bits(seeds, streams, positions, depth, rng.PURPOSE_DRAFT, 2)
        return _invert(probs, bits), probs

    def verify(
        self,
        tree: DraftTree,
        logits: Tensor,
        context: Context,
        stop: StopRule,
        record: RecordScores | None = None,
    ) -> Accepted:
        """Verify a tree and append the emitted tokens to ``context``.

        Under rule 1 these are the tokens that plain decoding would emit. Under rules 2 to 4 they have the
        distribution of plain decoding.

        Args:
            tree: the draft, ``[rows, nodes]``.
            logits: the target's raw logits at its nodes, ``[rows, nodes, vocab]``.
            context: the text; its active rows are the rows of ``tree``.
            stop: ends rows inside an accepted block.
            record: is called with the processed scores of each emitted token; its result is passed to the
                stopping criteria.

        Raises:
            SpoiltLogits: if drafts may have spoilt the logits. Nothing was emitted, and the caller must score
                the roots alone.
            ValueError: if a tree of roots alone has NaN or no finite logit; the message names the row and
                the position.
        """
        rows, positions = context.rows, context.root_positions
        walk: Walk
        if not self._processors.on_host or not self._by_match(tree):
            scores = self._scores(tree, logits, context)
            result, on_host = self._walk_tree(scores, tree, positions, rows)
            walk = FinishedWalk(tree.token_lists, on_host, result)
        elif tree.num_nodes > 1 and bool(_spoilt(logits, tree).any()):
            raise SpoiltLogits  # before processors that may keep state are called
        else:
            scores = logits.to(torch.float32, copy=True)
            walk = StepwiseWalk(self._processors, self._pick, tree, scores, context)
        lockstep = len(context.generated) > 1 and (
            stop.needs_lockstep or bool(self._processors.with_memory)
        )
        if isinstance(walk, FinishedWalk) and record is None and not lockstep:
            return self._accepted(walk, *self._emit(walk, context, stop))
        alive = list(range(len(rows)))
        emitted = self._follow(walk, alive, context, stop, lockstep, scores, record)
        return self._accepted(walk, *emitted)

    def verify_on_device(
        self,
        tree: DraftTree,
        logits: Tensor,
        context: Context,
        root_positions: Tensor | None = None,
    ) -> ops.MatchResult:
        """Verify a tree without reading the result. Ops alone must decide (:meth:`decides`).

        Args:
            tree, logits, context: as in :meth:`verify`.
            root_positions: ``[rows]``, the positions of the roots, if the context does not know them yet.
        """
        positions = context.root_positions if root_positions is None else root_positions
        scores = self._scores(tree, logits, context)
        return self._result(scores, tree, positions, list(context.rows))

    def read(
        self,
        committed: CommittedRound,
        context: Context,
        stop: StopRule,
        going: Collection[int],
        is_latest: bool,
    ) -> Accepted:
        """Append to ``context`` what a round emitted that was committed on the device.

        Args:
            committed: the round.
            context: the text before this round.
            stop: ends rows inside a block. Criteria that the device does not know are called now.
            going: original rows that had not ended before this round. What others emitted is dropped.
            is_latest: whether no later round has been started.

        Raises:
            SpoiltLogits, ValueError: as :meth:`verify`.
        """
        entry, rows = committed.entry, context.rows
        self._check_status(entry, committed.tree, context.root_positions, rows, going)
        emitted = self._emit(CommittedWalk(entry), context, stop, going)
        return Accepted.of_round(committed, context, *emitted, self._root_positions, is_latest)

    def _scores(self, tree: DraftTree, logits: Tensor, context: Context) -> Tensor:
        """The processed scores of all nodes."""
        return self._with_nan(self._processors.on_tree(logits, tree, context), logits, tree)

    def _with_nan(self, scores: Tensor, logits: Tensor, tree: DraftTree) -> Tensor:
        """Put NaN into ``scores`` wherever drafts may have put it into ``logits``, so that the walk finds it.

        Processors may have replaced NaN (``remove_invalid_values``). Under rules 2 to 4, NaN at any node of a
        row is put into all its nodes, visited or not: whether the walk visits a node depends on the drawn
        tokens, and drawing again only in some of these cases would change the distribution of the text.
        """
        if tree.num_nodes == 1 or (self._by_match(tree) and self._processors.keep_nan):
            return scores
        spoilt = _spoilt(logits, tree)
        if not self._by_match(tree):
            spoilt = spoilt.any(dim=1, keepdim=True)
        return scores.masked_fill(spoilt[..., None], torch.nan)

    def follow(
        self,
        walk: FinishedWalk | CommittedWalk,
        tree: DraftTree,
        context: Context,
        stop: StopRule,
    ) -> Accepted:
        """Append to ``context`` what a walk emits that ops have finished for this and other samplers.

        Its tensors are on the CPU.

        Raises:
            SpoiltLogits, ValueError: as :meth:`verify`.
        """
        self._check_status(walk.on_host, tree, context.root_positions, context.rows)
        return self._accepted(walk, *self._emit(walk, context, stop))

    def _emit(
        self,
        walk: FinishedWalk | CommittedWalk,
        context: Context,
        stop: StopRule,
        going: Collection[int] | None = None,
    ) -> tuple[list[list[int]], list[int], list[bool]]:
        """Append to ``context`` what a finished walk emits, the whole block of each row at once if possible.

        Args:
            going: the rows that emit something; None for all.

        Returns:
            ``emitted``, ``drafted`` and ``ended`` of :class:`Accepted`.
        """
        rows = context.rows
        if not stop.is_known:
            alive = [
                i
                for i, row in enumerate(rows)
                if (going is None or row in going) and walk.whole(i)[0]
            ]
            return self._follow(walk, alive, context, stop)
        emitted, drafted, ended = [], [], []
        for i, row in enumerate(rows):
            tokens, count = walk.whole(i) if going is None or row in going else ([], 0)
            end = stop.end_of(tokens, context.columns(row))
            tokens = tokens[:end]
            emitted.append(tokens)
            drafted.append(min(count, len(tokens)))
            ended.append(end is not None)
            context.extend(row, tokens)
        return emitted, drafted, ended

    def _follow(
        self,
        walk: Walk,
        alive: list[int],
        context: Context,
        stop: StopRule,
        lockstep: bool = False,
        scores: Tensor | None = None,
        record: RecordScores | None = None,
    ) -> tuple[list[list[int]], list[int], list[bool]]:
        """Emit one token per row and level until every row of ``alive`` has left the tree or ended.

        Returns:
            ``emitted``, ``drafted`` and ``ended`` of :class:`Accepted`.
        """
        rows = context.rows
        count = len(rows)
        emitted: list[list[int]] = [[] for _ in rows]
        drafted, ended = [0] * count, [False] * count
        while alive:
            nodes = walk.nodes(alive) if record else []
            picks, descends = walk.level(alive)
            going = []
            for i, token, descend in zip(alive, picks, descends, strict=True):
                emitted[i].append(token)
                drafted[i] += descend
            numbers = [rows[i] for i in alive]
            context.emit(numbers, picks)
            columns = [context.columns(row) for row in numbers]
            recorded = None
            if record is not None:
                assert scores is not None
                steps = [len(context.generated[row]) - 1 for row in numbers]
                recorded = record(numbers, steps, scores[alive, nodes])
            over = stop.ended(numbers, picks, columns, context, recorded)
            for i, descend, end in zip(alive, descends, over, strict=True):
                ended[i] = end
                if descend and not end:
                    going.append(i)
            # Plain decoding calls processors and criteria that keep state once per position for the whole
            # batch. So when one row has to wait for the next target pass, all rows wait.
            alive = [] if lockstep and len(going) < count else going
        return emitted, drafted, ended

    def _accepted(
        self, walk: Walk, emitted: list[list[int]], drafted: list[int], ended: list[bool]
    ) -> Accepted:
        path, num_accepted, paths = walk.accepted([len(tokens) - 1 for tokens in emitted])
        return Accepted(path, num_accepted, emitted, drafted, ended, paths)


def _spoilt(logits: Tensor, tree: DraftTree) -> Tensor:
    """``[rows, nodes]``: which active nodes have NaN in their ``logits [rows, nodes, vocab]``."""
    return logits.isnan().any(dim=-1) & (tree.parents >= ROOT_PARENT)


def _invert(probs: Tensor, bits: Tensor) -> Tensor:
    """``[n]`` tokens at which the running sum of ``probs [n, vocab]`` exceeds a 52-bit uniform number."""
    sums = torch.where(probs > 0, probs, 0).double().cumsum(dim=-1)
    uniform = ((bits[:, :1] << 20 | bits[:, 1:] >> 12).double() + 0.5) * 2.0**-52
    total = sums[:, -1:]
    tokens = torch.searchsorted(sums, uniform * total, right=True).clamp(max=probs.shape[-1] - 1)
    return torch.where(total > 0, tokens, -1)[:, 0]
