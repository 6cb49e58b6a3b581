"""``DraftCache``: the cache of a draft model, whose rows begin together or join later.

The prompts of rows that begin together are read in one pass. The prompt of a row that joins is read by a
target of its own, a part in each draft, while other rows are drafted for. Then the common target adopts its
slots, as the target of an engine does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from specdec_ext.models import TargetOutput, make_target
from specdec_ext.models.passes.prompt import left_padded
from specdec_ext.models.slots import SlotTarget
from specdec_ext.models.support import Support
from specdec_ext.tree.draft_tree import DraftTree

# Largest number of tokens of a row that are read in one pass after the first prompts; also the most tokens of
# the prompts of joining rows that a draft reads while other rows wait for it.
BLOCK_TOKENS = 256
# Largest number of tokens of a pass whose products are those for few rows, which are faster for few tokens.
# Losslessness does not depend on how drafts are rounded.
INVARIANT_ROWS = 128


class DraftCache:
    """The text that a draft model has read, of each row that it drafts for.

    Args:
        model: the draft model.
        max_slots: the most cache slots that a row may need.
        num_rows: the most rows.

    Attributes:
        rows: original numbers of the rows in the cache, in its order.
        lengths: for each of them, number of tokens in the cache.
    """

    def __init__(self, model: PreTrainedModel, max_slots: int, num_rows: int):
        self._model, self._max_slots, self._num_rows = model, max_slots, num_rows
        self.rows: list[int] = []
        self.lengths: dict[int, int] = {}
        self._newcomers: deque[_Newcomer] = deque()

    @cached_property
    def _target(self) -> SlotTarget:
        target = self._new_target()
        target.runner.invariant_rows = INVARIANT_ROWS
        return target

    def _new_target(self) -> SlotTarget:
        target = make_target(self._model, self._max_slots)
        check_support(self._model, target.support)
        assert isinstance(target, SlotTarget)
        return target

    def begin(self, texts: Mapping[int, Sequence[int]]) -> None:
        """Read the prompts of the first rows.

        Args:
            texts: number of a row -> its prompt, with at least one token.

        Raises:
            ValueError: the cache of the model can't be rolled back token by token.
        """
        self._target.prefill(*left_padded([*texts.values()], self._model.device))
        self.rows = [*texts]
        self.lengths = {row: len(text) for row, text in texts.items()}

    def join(self, row: int, text: Sequence[int]) -> None:
        """Let a row join as soon as :meth:`read_prompts` has read its prompt; it is not in the cache yet."""
        self._newcomers.append(_Newcomer(row, text, len(text)))

    def read_prompts(self) -> None:
        """Read prompts of rows that join, first come, first served; those that are complete join.

        As long as there are rows to draft for, these are ``BLOCK_TOKENS`` tokens at most.
        """
        budget = BLOCK_TOKENS
        while self._newcomers:
            newcomer = self._newcomers[0]
            budget -= newcomer.next_pass
            if budget < 0 and self.rows:
                return
            if newcomer.target is None:
                newcomer.begin(self._new_target())
            if newcomer.read():
                self._adopt(self._newcomers.popleft())

    def _adopt(self, newcomer: _Newcomer) -> None:
        assert newcomer.target is not None
        self._target.adopt(newcomer.target, len(self.rows), self._num_rows)
        self.rows.append(newcomer.row)
        self.lengths[newcomer.row] = len(newcomer.text)

    def follow(self, rows: Collection[int]) -> None:
        """Drop all rows but these, also those that have not joined yet."""
        self.drop(
            [*self.lengths.keys() - rows, *(x.row for x in self._newcomers if x.row not in rows)]
        )

    def drop(self, rows: Collection[int]) -> None:
        """Drop these rows; the others keep their order."""
        if not rows:
            return
        self._newcomers = deque(each for each in self._newcomers if each.row not in rows)
        going = [i for i, row in enumerate(self.rows) if row not in rows]
        if len(going) == len(self.rows):
            return
        if going:  # otherwise the next row that joins begins anew
            ended = [i for i, row in enumerate(self.rows) if row in rows]
            self._target.reorder([*going, *ended], len(going))
        self.rows = [self.rows[i] for i in going]
        self.lengths = {row: self.lengths[row] for row in self.rows}

    def read(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        """Read tokens of each row, in the order of ``rows``; returns ``[rows, vocab]`` logits after the last.

        Usually these are a few per row; after steps without a draft there may be many.

        Args:
            tokens: at least one for each row.
        """
        longest = max(map(len, tokens))
        if longest <= BLOCK_TOKENS:
            return self._read_block(tokens)
        after: list[Tensor | None] = [None] * len(tokens)
        for begin in range(0, longest, BLOCK_TOKENS):
            block = [new[begin : begin + BLOCK_TOKENS] for new in tokens]
            for i, logits in enumerate(self._read_block(block)):
                after[i] = logits if block[i] else after[i]
        return torch.stack([logits for logits in after if logits is not None])

    def _read_block(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        """:meth:`read` in one pass. The logits of a row without tokens are arbitrary."""
        lengths = [len(new) for new in tokens]
        width, device = max(lengths), self._model.device
        padded = torch.tensor([[*new] + [0] * (width - len(new)) for new in tokens], device=device)
        counts = torch.tensor(lengths, device=device)
        # A row without tokens runs a padding token, which is not committed.
        tree = DraftTree.chain(padded[:, 0], padded[:, 1:], (counts - 1).clamp(min=0))
        logits = self._target.forward(tree).logits
        path = torch.arange(width, device=device).expand(len(tokens), -1)
        path = torch.where(path < counts[:, None], path, -1)
        chains = [[*range(length), *[-1] * (width - length)] for length in lengths]
        self._target.commit(path, counts - 1, (chains, [length - 1 for length in lengths]))
        for row, length in zip(self.rows, lengths, strict=True):
            self.lengths[row] += length
        return logits[torch.arange(len(tokens), device=device), (counts - 1).clamp(min=0)]

    def rewind(self, counts: Sequence[int]) -> None:
        """Discard the last ``counts[r]`` tokens of each row."""
        self._target.rewind(counts)
        for row, count in zip(self.rows, counts, strict=True):
            self.lengths[row] -= count


@dataclass(eq=False)
class _Newcomer:
    """A row whose prompt is read by a target of its own.

    Attributes:
        row: its original number.
        text: its prompt.
        unread: number of tokens of the prompt that have not been read.
        target: what reads it; None before it has begun.
    """

    row: int
    text: Sequence[int]
    unread: int
    target: SlotTarget | None = None
    _passes: Iterator[TargetOutput | None] | None = None

    @property
    def next_pass(self) -> int:
        """Number of tokens that the next pass reads."""
        return min(self.unread, BLOCK_TOKENS)

    def begin(self, target: SlotTarget) -> None:
        self.target = target
        ids = torch.tensor([self.text], device=target.model.device)
        target.admit(ids, {}, GenerationConfig(prefill_chunk_size=BLOCK_TOKENS))
        self._passes = target.prefill_passes(ids, None, room=0)

    def read(self) -> bool:
        """Run a pass; returns whether the prompt is complete."""
        assert self._passes is not None  # it has begun
        self.unread -= self.next_pass
        return next(self._passes) is not None


def check_support(model: PreTrainedModel, support: Support) -> None:
    """Raise ValueError for a model whose cache can't be rolled back token by token."""
    if not support.by_slots or support.rollback != "compact":
        raise ValueError(
            f"{type(model).__name__} can't be a draft model, because its cache can't be rolled back token by "
            f"token: {'; '.join(support.reasons)}"
        )
