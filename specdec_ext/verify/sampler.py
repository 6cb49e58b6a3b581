"""``Sampler``: the processed target distribution and the one verification entry.

Rule 1, match, is the default. At each visited node one token is drawn from the processed target distribution;
a child that carries it is descended into, otherwise it is emitted and the walk ends. Greedy decoding is the
same with no noise. Noise belongs to (seed, stream, position, token), so no text depends on the drafter.

The rows of a batch with one seed are streams 0, 1, 2, ... of it; a row with a seed of its own is stream 0,
wherever it is in a batch. The position counts the tokens before, without paddings.

Rules 2 to 4 (:mod:`specdec_ext.ops.verify_sampled`) keep the law, not the text: they are for trees with
``draft_probs``, and their noise belongs to (seed, stream, position of the round's root, depth). A row
without drafts is decoded plainly, by rule 1, under all of them, and so is greedy decoding, which is their
common limit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from specdec_ext import ops
from specdec_ext.context import Context
from specdec_ext.reference import rng
from specdec_ext.transfer import Staged, Staging
from specdec_ext.tree.draft_tree import ROOT_PARENT, DraftTree
from specdec_ext.verify.processors import Processors
from specdec_ext.verify.stopping import StopRule
from specdec_ext.verify.walks import FinishedWalk, StepwiseWalk, Walk

# The rules beside "match", for drafts that were sampled from known probabilities.
RULES: dict[str, Callable[..., ops.MatchResult]] = {
    "rejection": ops.verify_rejection,
    "block": ops.verify_block,
    "recursive": ops.verify_recursive,
}
VERIFICATIONS = ("match", *RULES)
COMPLAINTS = {
    ops.STATUS_NAN: "contain NaN",
    ops.STATUS_NO_FINITE_LOGIT: "are all -inf: the logits processors left no token to choose",
}
# (original rows, how many tokens each had before, scores [rows, vocab]) -> all scores so far, per position
RecordScores = Callable[[Sequence[int], Sequence[int], Tensor], tuple[Tensor, ...]]


@dataclass
class Accepted:
    """What one verification emitted, per active row.

    Attributes:
        path: ``[rows, nodes]`` node visited at each depth, -1 beyond.
        num_accepted: ``[rows]`` nodes after the root whose keys and values stay (emitted tokens minus one).
        emitted: tokens emitted by each row, in order.
        drafted: how many of them came from the draft.
        ended: whether the row ended with its last token.
    """

    path: Tensor
    num_accepted: Tensor
    emitted: list[list[int]]
    drafted: list[int]
    ended: list[bool]
    known_paths: list[list[int]] | None = None

    @cached_property
    def paths(self) -> list[list[int]]:
        """``path`` on the host."""
        return self.path.tolist() if self.known_paths is None else self.known_paths

    @property
    def on_host(self) -> tuple[list[list[int]], list[int]]:
        """``path`` and ``num_accepted`` as lists."""
        return self.paths, [len(tokens) - 1 for tokens in self.emitted]


class Sampler:
    """Draws from the processed target distribution and walks trees.

    Args:
        processors: transformers' prepared list, warpers included.
        stochastic: sampling or greedy.
        noise: (seed, stream) of each row of the batch.
        staging: takes integers to the device of the logits.
        verification: one of ``VERIFICATIONS``; greedy decoding has no use for it.

    Raises:
        ValueError: for a rule beside "match" together with a processor that may keep state.
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
        self._noise = list(noise)
        self._staging, self._device = staging, staging.device
        self._verification = verification if stochastic else "match"
        self._noise_of: tuple[list[int], Staged] | None = None
        self._row_tensors: tuple[Staged, tuple[Tensor, ...]] | None = None
        self._root_positions: tuple[list[int], Staged] | None = None
        if self.needs_draft_probs and self._processors.with_memory:
            raise ValueError(
                f"verification={verification!r} can't be combined with the logits processors "
                f"{', '.join(self._processors.with_memory)}: they may keep state, and this rule scores "
                "drafted tokens that are never emitted. Use verification='match', the default"
            )

    @property
    def needs_draft_probs(self) -> bool:
        """Whether trees must say what their tokens were sampled from."""
        return self._verification != "match"

    def check(self, tree: DraftTree, source: str) -> None:
        """Refuse a tree that the rule can't verify; ``source`` is who made it, for the message."""
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
                f"{self._verification!r} is for chains, use 'recursive' or 'match'"
            )

    def stage(self, rows: Sequence[int], root_positions: Sequence[int]) -> None:
        """A round begins: what its verification needs waits for the first copy to the device."""
        self._staged_rows(list(rows))
        self._positions_of(list(root_positions))

    def _staged_rows(self, rows: list[int]) -> Staged:
        """``[2, rows]``: seeds and streams."""
        if self._noise_of is None or self._noise_of[0] != rows:
            noise = [[self._noise[row][i] for row in rows] for i in (0, 1)]
            self._noise_of = rows, self._staging.stage(noise)
        return self._noise_of[1]

    def _rows(self, rows: list[int]) -> tuple[Tensor, ...]:
        """Seeds, streams, stochastic flags and counters of these rows, as the op takes them."""
        staged = self._staged_rows(rows)
        if self._row_tensors is None or self._row_tensors[0] is not staged:
            seeds, streams = staged.tensor
            flags = torch.full_like(streams, self._stochastic, dtype=torch.bool)
            counters = torch.zeros_like(streams, dtype=torch.int32)
            self._row_tensors = (staged, (seeds, streams, flags, counters))
        return self._row_tensors[1]

    def _positions_of(self, positions: list[int]) -> Staged:
        if self._root_positions is None or self._root_positions[0] != positions:
            self._root_positions = positions, self._staging.stage(positions)
        return self._root_positions[1]

    def _match(
        self, scores: Tensor, tree: DraftTree, positions: Sequence[int], rows: list[int]
    ) -> ops.MatchResult:
        """Rule 1; ``positions`` are those of the roots."""
        root_positions = self._positions_of(list(positions)).tensor
        return ops.verify_match(
            scores, tree.tokens, tree.parents, root_positions, *self._rows(list(rows))
        )

    def _sampled(
        self, scores: Tensor, tree: DraftTree, positions: Sequence[int], rows: list[int]
    ) -> ops.MatchResult:
        """Rules 2 to 4; rule 1 for rows without drafts, which are not to depend on those of others."""
        root_positions = self._positions_of(list(positions)).tensor
        seeds, streams, *_ = self._rows(list(rows))
        result = RULES[self._verification](
            scores, tree.draft_probs, tree.tokens, tree.parents, root_positions, seeds, streams
        )
        without = [max(depths) == 0 for depths in tree.depths]
        if not any(without):
            return result
        plain = self._match(scores[:, :1], tree.pruned([0] * tree.num_rows), positions, rows)
        is_plain = torch.tensor(without, device=self._device)
        # A part is a view of what is packed, so the host finds it there, too.
        result.next_token.copy_(torch.where(is_plain, plain.next_token, result.next_token))
        return result

    def _walk_tree(
        self, scores: Tensor, tree: DraftTree, positions: Sequence[int], rows: list[int]
    ) -> tuple[ops.MatchResult, ops.HostMatchResult] | None:
        """What the rule accepts of a tree.

        Where a visited node's logits are of no use it is None if there are drafts, which may have spoilt
        them, and else an error.
        """
        verified = self._match if self._by_match(tree) else self._sampled
        result = verified(scores, tree, positions, rows)
        on_host = result.on_host()
        if any(on_host.status):
            if tree.num_nodes > 1:
                return None
            i, problem = next((i, each) for i, each in enumerate(on_host.status) if each)
            # num_accepted counts the nodes below the root before the bad one (-1 if that is the root);
            # named is the position of the token that could not be drawn.
            position = positions[i] + on_host.num_accepted[i] + 2
            raise ValueError(
                f"the target's processed logits of row {rows[i]} at position {position} "
                f"{COMPLAINTS[problem]}. Check the model's weights and dtype, the prompt, and the "
                "logits processors; InfNanRemoveLogitsProcessor (remove_invalid_values=True) replaces "
                "invalid values."
            )
        return result, on_host

    def _by_match(self, tree: DraftTree) -> bool:
        return not self.needs_draft_probs or tree.num_nodes == 1

    def _pick(self, scores: Tensor, positions: Sequence[int], rows: list[int]) -> list[int]:
        """Tokens drawn from ``scores [n, vocab]`` after these positions."""
        roots = DraftTree.root(torch.zeros(len(scores), dtype=torch.long, device=scores.device))
        walked = self._walk_tree(scores[:, None], roots, positions, rows)
        assert walked is not None
        return walked[1].next_token

    def draw(self, logits: Tensor, positions: Sequence[int], rows: Sequence[int]) -> Tensor:
        """The tokens the target would emit at ``positions`` if ``logits [n, vocab]`` were its own.

        Processors that look at the text are left out, and logits without a choice (NaN) give token 0:
        a draft need not be right.
        """
        roots = DraftTree.root(torch.zeros(len(logits), dtype=torch.long, device=logits.device))
        before = [position - 1 for position in positions]
        scores = self._processors.shared(logits)
        return self._match(scores[:, None], roots, before, list(rows)).next_token.clamp(min=0)

    def sample(
        self, logits: Tensor, depth: int, root_positions: Sequence[int], rows: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Independent draws from the law that the target would have if ``logits [n, vocab]`` were its own.

        The noise is the drafter's: (seed, stream, position of the round's root, depth), for a purpose that no
        verification has. Processors that look at the text are left out; greedy draws the arg-max.

        Args:
            logits: of the node whose child is drawn.
            depth: of that node, 0 for the root.
            root_positions: of the round.
            rows: original rows.

        Returns:
            ``[n]`` tokens, -1 where the law is NaN or empty, and the law, ``[n, vocab]`` float32: what
            ``DraftTree.draft_probs`` is to hold for the node.
        """
        scores = self._processors.shared(logits).float()
        if self._stochastic:
            law = scores.softmax(dim=-1)
        else:
            law = torch.zeros_like(scores).scatter(1, scores.argmax(dim=-1, keepdim=True), 1.0)
        seeds, streams, *_ = self._rows(list(rows))
        positions = self._positions_of(list(root_positions)).tensor
        bits = rng.round_bits(seeds, streams, positions, depth, rng.PURPOSE_DRAFT, 2)
        return _invert(law, bits), law

    def verify(
        self,
        tree: DraftTree,
        logits: Tensor,
        context: Context,
        stop: StopRule,
        record: RecordScores | None = None,
    ) -> Accepted | None:
        """Emit what plain decoding would emit (of rules 2 to 4: could emit), as far as ``tree`` reaches.

        Writes the emitted tokens into ``context``.

        Args:
            tree: the draft, ``[rows, nodes]``.
            logits: the target's raw logits at its nodes, ``[rows, nodes, vocab]``.
            context: the text; its active rows are the rows of ``tree``.
            stop: ends rows inside an accepted block.
            record: is given the processed scores behind each token as it is emitted; what it answers
                goes to the stopping criteria.

        Returns:
            What was emitted, or None if the drafts may have spoilt the logits: nothing was emitted, and the
            roots are to be scored alone.

        Raises:
            ValueError: of a tree of roots, one has NaN or no finite logit; the row and position are named.
        """
        rows, positions = context.rows, context.root_positions
        walk: Walk
        if self._processors.pure or not self._by_match(tree):
            scores = self._with_nan(self._processors.on_tree(logits, tree, context), logits, tree)
            walked = self._walk_tree(scores, tree, positions, rows)
            if walked is None:
                return None
            walk = FinishedWalk(tree, *walked)
        elif tree.num_nodes > 1 and bool(_spoilt(logits, tree).any()):
            return None  # before processors that keep state are called
        else:
            scores = logits.to(torch.float32, copy=True)
            walk = StepwiseWalk(self._processors, self._pick, tree, scores, context)
        lockstep = len(context.generated) > 1 and (
            stop.needs_lockstep or bool(self._processors.with_memory)
        )
        if isinstance(walk, FinishedWalk) and stop.is_known and record is None and not lockstep:
            return self._emit(walk, context, stop)
        return self._follow(walk, scores, context, stop, lockstep, record)

    def _with_nan(self, scores: Tensor, logits: Tensor, tree: DraftTree) -> Tensor:
        """``scores`` with NaN wherever a draft may have left it in ``logits``, for the walk to find.

        Processors may replace NaN (``remove_invalid_values``). And a rule whose text depends on the drafts
        must not be asked whether it visits such a node: what is drawn again after that would not have the
        law of what was drawn first.
        """
        if tree.num_nodes == 1 or (self._by_match(tree) and self._processors.keep_nan):
            return scores
        spoilt = _spoilt(logits, tree)
        if not self._by_match(tree):
            spoilt = spoilt.any(dim=1, keepdim=True)
        return scores.masked_fill(spoilt[..., None], torch.nan)

    def _emit(self, walk: FinishedWalk, context: Context, stop: StopRule) -> Accepted:
        """Emit each row's block at once: nobody asks token by token."""
        emitted, drafted, ended = [], [], []
        for i, row in enumerate(context.rows):
            tokens = walk.whole(i)
            end = stop.end_of(tokens, context.columns(row))
            drafted.append(min(end or len(tokens), len(tokens) - 1))
            emitted.append(tokens[:end])
            ended.append(end is not None)
            context.extend(row, emitted[i])
        return self._accepted(walk, emitted, drafted, ended)

    def _follow(
        self,
        walk: Walk,
        scores: Tensor,
        context: Context,
        stop: StopRule,
        lockstep: bool,
        record: RecordScores | None,
    ) -> Accepted:
        """Emit level by level until every row has left the tree or ended."""
        rows = context.rows
        count = len(rows)
        emitted: list[list[int]] = [[] for _ in rows]
        drafted, ended = [0] * count, [False] * count
        alive = list(range(count))
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
                steps = [len(context.generated[row]) - 1 for row in numbers]
                recorded = record(numbers, steps, scores[alive, nodes])
            over = stop.ended(numbers, picks, columns, context.sequences, recorded)
            for i, descend, end in zip(alive, descends, over, strict=True):
                ended[i] = end
                if descend and not end:
                    going.append(i)
            # Plain decoding calls stateful processors and criteria once per position for the whole
            # batch: as soon as one row has to wait for the next target pass, all do.
            alive = [] if lockstep and len(going) < count else going
        return self._accepted(walk, emitted, drafted, ended)

    def _accepted(
        self, walk: Walk, emitted: list[list[int]], drafted: list[int], ended: list[bool]
    ) -> Accepted:
        path, num_accepted, paths = walk.accepted([len(tokens) - 1 for tokens in emitted])
        return Accepted(path, num_accepted, emitted, drafted, ended, paths)


def _spoilt(logits: Tensor, tree: DraftTree) -> Tensor:
    """``[rows, nodes]`` nodes of the trees that have NaN among their ``logits [rows, nodes, vocab]``."""
    return logits.isnan().any(dim=-1) & (tree.parents >= ROOT_PARENT)


def _invert(law: Tensor, bits: Tensor) -> Tensor:
    """``[n]`` tokens at which the running sum of ``law [n, vocab]`` passes a uniform of 52 bits."""
    sums = torch.where(law > 0, law, 0).double().cumsum(dim=-1)
    uniform = ((bits[:, :1] << 20 | bits[:, 1:] >> 12).double() + 0.5) * 2.0**-52
    total = sums[:, -1:]
    tokens = torch.searchsorted(sums, uniform * total, right=True).clamp(max=law.shape[-1] - 1)
    return torch.where(total > 0, tokens, -1)[:, 0]
