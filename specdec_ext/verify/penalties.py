"""Penalties on tokens that occur in the new text, as OpenAI defines them."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LogitsProcessor

from specdec_ext.keyword_table import Reads


class OccurrencePenalties(LogitsProcessor):
    """Subtracts ``presence + frequency * count`` from the score of each token that the new text contains.

    ``count`` is how often the token was emitted; the prompt is not counted. (OpenAI API reference, "frequency
    and presence penalties"; transformers has only the multiplicative ``repetition_penalty``.)

    Args:
        presence: subtracted once from the score of a token that occurs; negative values reward it.
        frequency: subtracted for each occurrence.
        prompt_columns: number of columns of the prompt.
    """

    reads = Reads.PREFIX

    def __init__(self, presence: float, frequency: float, prompt_columns: int):
        self._presence, self._frequency = presence, frequency
        self._prompt_columns = prompt_columns

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """``[rows, vocab]`` scores of the tokens after ``[rows, columns]`` ids."""
        emitted = input_ids[:, self._prompt_columns :].to(scores.device)
        counts = torch.zeros_like(scores)
        counts.scatter_add_(1, emitted, torch.ones_like(emitted, dtype=scores.dtype))
        return scores - self._presence * (counts > 0) - self._frequency * counts
