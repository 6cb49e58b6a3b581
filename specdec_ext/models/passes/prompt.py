"""``Prompt``: the columns of the tokens in a padded batch, and the masks of passes over some of them.

``left_padded`` makes such a batch of lists of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec_ext.models.compat import CACHE
from specdec_ext.models.passes.visibility import BlockVisibility


def left_padded(texts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the ids and the attention mask ``[rows, columns]`` of a batch of texts of any lengths."""
    width = max(map(len, texts))
    ids = [[0] * (width - len(text)) + list(text) for text in texts]
    mask = [[0] * (width - len(text)) + [1] * len(text) for text in texts]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


@dataclass
class Prompt:
    """The text before the first generated token, by column.

    Attributes:
        valid: ``[rows, columns]`` bool, False where a column is padding.
        past: number of columns that are in the cache already.
        lengths: ``[rows]`` number of tokens of each row.
        first, last: ``[rows]`` column of each row's first and last token.
        positions: ``[rows, columns]`` number of tokens before each column.
        padded: whether any column of any row is padding.
        holes: the largest number of padding columns after the first token of a row. A sliding window counts
            tokens, so in columns it may be longer by this number.
    """

    valid: Tensor
    past: int

    def __post_init__(self) -> None:
        columns = self.valid.shape[1]
        self.lengths = self.valid.sum(dim=1)
        self.first = self.valid.long().argmax(dim=1)
        self.last = columns - 1 - self.valid.flip(1).long().argmax(dim=1)
        self.positions = (self.valid.cumsum(dim=1) - 1).clamp(min=0)
        self.padded = int(self.lengths.min()) < columns
        self.holes = int((columns - self.first - self.lengths).max())

    @classmethod
    def of(cls, text: Tensor, attention_mask: Tensor | None, past: int) -> Prompt:
        """Make the prompt of ``text [rows, columns, ...]``, which holds ids or embeddings.

        Raises:
            ValueError: for a row without a token, or without a token after those in the cache.
        """
        columns = text.shape[1]
        if past >= columns:
            raise ValueError(
                f"{CACHE} holds {past} tokens and the prompt {columns}; pass the whole text, "
                "including the part in the cache, with at least one new token"
            )
        valid = torch.ones(text.shape[:2], dtype=torch.bool, device=text.device)
        if attention_mask is not None:
            valid = attention_mask.to(torch.bool)
        if not valid.any(dim=1).all():
            raise ValueError(
                f"attention_mask has no token in row {int((~valid.any(1)).nonzero()[0])}; leave the row out, "
                "or give it at least one token"
            )
        prompt = cls(valid, past)
        if int(prompt.last.min()) < past:
            raise ValueError(
                f"row {int(prompt.last.argmin())} has no token after the {past} that {CACHE} holds; "
                f"give every row a new token, or run the whole text without {CACHE}"
            )
        return prompt

    def chunks(self, size: int | None, only_tokens: bool) -> list[tuple[int, int]]:
        """Return the columns ``(begin, end)`` that each pass reads.

        Args:
            size: the most columns of a pass, None for all.
            only_tokens: put all padding into the first pass, even if it becomes longer than ``size``.
                Recurrent layers skip padding only there.
        """
        columns = self.valid.shape[1]
        size = size or columns
        end = self.past + size
        if only_tokens:
            end = max(end, int(self.first.max()) + 1)
        begins = [self.past, *range(end, columns, size)]
        return list(zip(begins, [*begins[1:], columns], strict=True))

    def visibility(self, begin: int, end: int) -> BlockVisibility | None:
        """Return the mask of a pass over these columns; None if transformers' own masks are correct.

        transformers counts a sliding window in columns; this mask counts it in tokens.
        """
        if not self.padded or not (begin or self.holes):
            return None
        own = torch.eye(end - begin, dtype=torch.bool, device=self.valid.device)
        return BlockVisibility(
            committed=self.valid[:, :begin],
            block=torch.ones_like(own).tril() & self.valid[:, None, begin:end] | own,
            query_positions=self.positions[:, begin:end],
            key_positions=self.positions[:, :end],
        )

    def ends(self, begin: int, end: int) -> list[int]:
        """Return the columns, counted from ``begin``, in which rows have their last tokens."""
        return sorted({column - begin for column in self.last.tolist() if begin <= column < end})
