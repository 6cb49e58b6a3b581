"""``Sampler``: the processed target distribution and the one verification entry (rule 1, match).

At each visited node one token is drawn from the processed target distribution; a child that carries it is
descended into, otherwise it is emitted and the walk ends. Greedy decoding is the same with no noise.
Noise belongs to (seed, row, position, token), so the text does not depend on the drafter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import logits_process as hf

from specdec_ext import ops
from specdec_ext.context import Context
from specdec_ext.filters import SampleFilter, fuse_filters
from specdec_ext.stopping import StopRule
from specdec_ext.tree import DraftTree

# Functions of one row's scores alone: all nodes of a tree may go through them at once.
PURE = frozenset(
    {
        SampleFilter,
        hf.TemperatureLogitsWarper,
        hf.TopKLogitsWarper,
        hf.TopPLogitsWarper,
        hf.MinPLogitsWarper,
        hf.TypicalLogitsWarper,
        hf.EpsilonLogitsWarper,
        hf.EtaLogitsWarper,
        hf.LogitNormalization,
        hf.InfNanRemoveLogitsProcessor,
        hf.SuppressTokensLogitsProcessor,
    }
)
# Functions of one row's prefix and scores, without memory: rows may be at different lengths.
ROW_INDEPENDENT = PURE | frozenset(
    {
        hf.MinLengthLogitsProcessor,
        hf.MinNewTokensLengthLogitsProcessor,
        hf.RepetitionPenaltyLogitsProcessor,
        hf.EncoderRepetitionPenaltyLogitsProcessor,
        hf.NoRepeatNGramLogitsProcessor,
        hf.EncoderNoRepeatNGramLogitsProcessor,
        hf.SequenceBiasLogitsProcessor,
        hf.NoBadWordsLogitsProcessor,
        hf.ForcedBOSTokenLogitsProcessor,
        hf.ForcedEOSTokenLogitsProcessor,
        hf.ExponentialDecayLengthPenalty,
        hf.SuppressTokensAtBeginLogitsProcessor,
    }
)
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


class Sampler:
    """Draws from the processed target distribution and walks trees.

    Args:
        processors: transformers' prepared list, warpers included.
        stochastic: sampling or greedy.
        seeds: one per row of the batch.
        device: of the logits.
    """

    def __init__(
        self,
        processors: LogitsProcessorList,
        stochastic: bool,
        seeds: Sequence[int],
        device: torch.device,
    ):
        self._processors: Any = fuse_filters(processors, device)
        self._stochastic = stochastic
        self._seeds = list(seeds)
        self._device = device
        kinds = {type(processor) for processor in self._processors}
        self._pure = kinds <= PURE
        self._needs_lockstep = not kinds <= ROW_INDEPENDENT
        self._shared_processors = [each for each in self._processors if type(each) in PURE]
        self._row_tensors: tuple[list[int], tuple[Tensor, ...]] | None = None

    def _rows(self, rows: list[int]) -> tuple[Tensor, ...]:
        """Seeds, row numbers, stochastic flags and counters of these rows, as the op takes them."""
        if self._row_tensors is None or self._row_tensors[0] != rows:
            seeds = torch.tensor(
                [self._seeds[row] for row in rows], dtype=torch.long, device=self._device
            )
            numbers = torch.tensor(rows, dtype=torch.long, device=self._device)
            flags = torch.full((len(rows),), self._stochastic, device=self._device)
            counters = torch.zeros(len(rows), dtype=torch.int32, device=self._device)
            self._row_tensors = (list(rows), (seeds, numbers, flags, counters))
        return self._row_tensors[1]

    def _match(
        self, scores: Tensor, tree: DraftTree, positions: Sequence[int], rows: list[int]
    ) -> ops.MatchResult:
        """The op; ``positions`` are those of the roots."""
        root_positions = torch.tensor(positions, dtype=torch.long, device=self._device)
        return ops.verify_match(
            scores, tree.tokens, tree.parents, root_positions, *self._rows(rows)
        )

    def _walk_tree(
        self, scores: Tensor, tree: DraftTree, positions: Sequence[int], rows: list[int]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """``_match`` with its status turned into an error."""
        path, num_accepted, next_token, status = self._match(scores, tree, positions, rows)
        if status.any():
            i = int(status.nonzero()[0])
            # num_accepted counts the nodes below the root before the bad one (-1 if that is the root);
            # named is the position of the token that could not be drawn.
            position = positions[i] + int(num_accepted[i]) + 2
            raise ValueError(
                f"the target's processed logits of row {rows[i]} at position {position} "
                f"{COMPLAINTS[int(status[i])]}. Check the model's weights and dtype, the prompt, and the "
                "logits processors; InfNanRemoveLogitsProcessor (remove_invalid_values=True) replaces "
                "invalid values."
            )
        return path, num_accepted, next_token

    def draw(self, logits: Tensor, positions: Sequence[int], rows: Sequence[int]) -> Tensor:
        """The tokens the target would emit at ``positions`` if ``logits [n, vocab]`` were its own.

        Processors that look at the text are left out, and logits without a choice (NaN) give token 0:
        a draft need not be right.
        """
        roots = DraftTree.root(torch.zeros(len(logits), dtype=torch.long, device=logits.device))
        before = [position - 1 for position in positions]
        scores = self._processed(self._shared_processors, logits)
        return self._match(scores[:, None], roots, before, list(rows)).next_token.clamp(min=0)

    @staticmethod
    def _processed(processors: Sequence[Any], logits: Tensor) -> Tensor:
        """``[n, vocab]`` through processors that do not look at the text."""
        if not processors:
            return logits
        scores = logits if isinstance(processors[0], SampleFilter) else logits.float()
        no_text = logits.new_empty(len(logits), 0).long()
        for processor in processors:
            scores = processor(no_text, scores)
        return scores

    def verify(
        self,
        tree: DraftTree,
        logits: Tensor,
        context: Context,
        stop: StopRule,
        record: RecordScores | None = None,
    ) -> Accepted:
        """Emit what plain decoding would emit, as far as ``tree`` reaches.

        Writes the emitted tokens into ``context``.

        Args:
            tree: the draft, ``[rows, nodes]``.
            logits: the target's raw logits at its nodes, ``[rows, nodes, vocab]``.
            context: the text; its active rows are the rows of ``tree``.
            stop: ends rows inside an accepted block.
            record: is given the processed scores behind each token as it is emitted; what it answers
                goes to the stopping criteria.

        Raises:
            ValueError: a visited node has NaN or no finite logit; the row and position are named.
        """
        rows, positions = context.rows, context.root_positions
        if self._pure:
            scores = self._processed(self._processors, logits.flatten(0, 1)).view(logits.shape)
            walked = self._walk_tree(scores, tree, positions, rows)
            walk: _Walk = _FinishedWalk(tree, *walked)
        else:
            scores = logits.to(torch.float32, copy=True)
            walk = _StepwiseWalk(self, tree, scores, context)
        lockstep = len(context.generated) > 1 and (stop.needs_lockstep or self._needs_lockstep)
        return self._follow(walk, scores, context, stop, lockstep, record)

    def _follow(
        self,
        walk: _Walk,
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
        num_accepted = [len(tokens) - 1 for tokens in emitted]
        return Accepted(
            path=walk.path(),
            num_accepted=torch.tensor(num_accepted, device=self._device),
            emitted=emitted,
            drafted=drafted,
            ended=ended,
        )


class _FinishedWalk:
    """The walk when the op has already done all of it."""

    def __init__(self, tree: DraftTree, path: Tensor, num_accepted: Tensor, next_token: Tensor):
        self._path = path
        self._lengths = num_accepted.tolist()
        self._next = next_token.tolist()
        self._drafted: list[list[int]] = []
        if tree.num_nodes > 1:
            self._drafted = tree.tokens.gather(1, path.clamp(min=0)).tolist()
        self._depth = 0

    def nodes(self, alive: list[int]) -> list[int]:
        """The node at which each of these rows stands."""
        return self._path[alive, self._depth].tolist()

    def level(self, alive: list[int]) -> tuple[list[int], list[bool]]:
        """Picks at this level and whether a drafted child carries them."""
        self._depth += 1
        descends = [self._depth <= self._lengths[i] for i in alive]
        picks = [
            self._drafted[i][self._depth] if descend else self._next[i]
            for i, descend in zip(alive, descends, strict=True)
        ]
        return picks, descends

    def path(self) -> Tensor:
        return self._path


class _StepwiseWalk:
    """The walk node by node, for processors that need the text: exactly the calls of plain decoding."""

    def __init__(self, sampler: Sampler, tree: DraftTree, scores: Tensor, context: Context):
        self._sampler, self._scores, self._context = sampler, scores, context
        self._batch = len(context.generated)
        self._tokens, self._parents = tree.tokens.tolist(), tree.parents.tolist()
        self._paths = [[0] for _ in context.rows]
        self._positions = context.root_positions
        self._depth = 0

    def nodes(self, alive: list[int]) -> list[int]:
        return [self._paths[i][-1] for i in alive]

    def level(self, alive: list[int]) -> tuple[list[int], list[bool]]:
        rows = [self._context.rows[i] for i in alive]
        index = torch.tensor(alive), torch.tensor(self.nodes(alive))
        raw = self._scores[index]
        ids = self._context.sequences()
        columns = [self._context.columns(row) for row in rows]
        processed = torch.empty_like(raw)
        for width in sorted(set(columns)):
            # Row b of the batch at index b, as processors that know their rows expect.
            members = [j for j, length in enumerate(columns) if length == width]
            batch = raw.new_zeros(self._batch, raw.shape[-1])
            numbers = torch.tensor([rows[j] for j in members])
            batch[numbers] = raw[members]
            processed[members] = self._sampler._processors(ids[:, :width], batch)[numbers].to(
                raw.dtype
            )
        self._scores[index] = processed
        roots = DraftTree.root(torch.zeros(len(alive), dtype=torch.long, device=raw.device))
        positions = [self._positions[i] + self._depth for i in alive]
        picks = self._sampler._walk_tree(processed[:, None], roots, positions, rows)[2].tolist()
        self._depth += 1
        descends = []
        for i, token in zip(alive, picks, strict=True):
            child = self._child(i, token)
            descends.append(child is not None)
            if child is not None:
                self._paths[i].append(child)
        return picks, descends

    def _child(self, i: int, token: int) -> int | None:
        parent = self._paths[i][-1]
        return next(
            (
                node
                for node in range(parent + 1, len(self._parents[i]))
                if self._parents[i][node] == parent and self._tokens[i][node] == token
            ),
            None,
        )

    def path(self) -> Tensor:
        width = len(self._tokens[0])
        padded = [path + [-1] * (width - len(path)) for path in self._paths]
        return torch.tensor(padded, device=self._scores.device)


_Walk = _FinishedWalk | _StepwiseWalk
