"""``couple_logits``: adds the noise of the verification to the logits of a drafter."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specdec_ext.ops import _library


class DraftNoise(NamedTuple):
    """The noise with which the rows of a batch draft.

    Attributes:
        temperatures: ``[rows]`` float32, by which logits are divided; a row whose temperature is not above 0
            drafts without noise.
        seeds: ``[rows]`` int64.
        row_ids: ``[rows]`` int64, the stream of each row, as in :func:`verify_match`.
    """

    temperatures: Tensor
    seeds: Tensor
    row_ids: Tensor

    def of_rows(self, index: Tensor) -> DraftNoise:
        """The noise of the rows ``index [n]`` int64."""
        return DraftNoise(*(each[index] for each in self))


def couple_logits(
    logits: Tensor, noise: DraftNoise, positions: Tensor, token_ids: Tensor | None = None
) -> Tensor:
    """Divide logits by the draft's temperature and add the noise of :func:`verify_match`.

    The specification is :func:`specdec_ext.reference.couple_logits.couple_logits`; every backend gives the
    same bits. A row without noise is converted to float32.

    Args:
        logits: ``[rows, vocab]`` float32, bfloat16 or float16, contiguous in the last dimension.
        noise: of the same rows.
        positions: ``[rows]`` int64, positions of the drafted tokens.
        token_ids: ``[vocab]`` int64, the tokens that the logits are for; None for 0, 1, 2, ... Ids out of
            range get arbitrary noise.

    Returns:
        ``[rows, vocab]`` float32.

    Raises:
        ValueError: for an invalid argument.
    """
    return _library.native.couple_logits(logits, *noise, positions, token_ids)


@torch.library.register_fake("specdec::couple_logits")
def _couple_logits_fake(logits: Tensor, *_: Tensor | None) -> Tensor:
    return torch.empty_like(logits, dtype=torch.float32, memory_format=torch.contiguous_format)
