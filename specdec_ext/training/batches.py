"""What a training step reads: texts of a target, with the hidden states that it has of them.

An :class:`Example` is a text; a :class:`Batch` is some of them side by side with the target's features;
``Features`` makes the one from the other: :class:`OnlineFeatures` runs the target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from specdec_ext.models.passes.features import FeatureTap


@dataclass(frozen=True)
class Example:
    """One training text.

    Attributes:
        tokens: ``[length]`` int64, unpadded.
        loss_mask: ``[length]`` bool, the tokens that a head should learn to draft: what the target wrote
            itself in an answer, all tokens of a plain text.
    """

    tokens: Tensor
    loss_mask: Tensor


@dataclass(frozen=True)
class Batch:
    """Texts side by side, padded on the right.

    Attributes:
        tokens: ``[rows, columns]`` int64; paddings are 0.
        loss_mask: ``[rows, columns]`` bool, False on paddings.
        lengths: ``[rows]`` int64, on the CPU.
        features: ``[rows, columns, feature_width]``, the tapped layers side by side, in their order.
        last_hidden: ``[rows, columns, target_hidden]``, after the target's final norm: what its output head
            reads.
    """

    tokens: Tensor
    loss_mask: Tensor
    lengths: Tensor
    features: Tensor
    last_hidden: Tensor


class Features(Protocol):
    """Gives texts the target's hidden states."""

    def __call__(self, examples: Sequence[Example]) -> Batch: ...


class OnlineFeatures:
    """Runs the target on every batch.

    Args:
        model: the target; its weights get no gradients.
        layers: tapped hidden states, numbered as in :class:`~specdec_ext.models.passes.features.FeatureTap`;
            none for heads that read the last hidden state alone.

    Raises:
        ValueError: for a layer that the model does not have.
    """

    def __init__(self, model: PreTrainedModel, layers: Sequence[int]):
        self._model = model
        config: Any = model.config.get_text_config(decoder=True)
        self._tap = FeatureTap(model, config, (*layers, -1))

    @torch.no_grad()
    def __call__(self, examples: Sequence[Example]) -> Batch:
        tokens, loss_mask, lengths = pad(examples)
        device = self._model.device
        tokens, loss_mask = tokens.to(device), loss_mask.to(device)
        columns = torch.arange(tokens.shape[1], device=device)
        valid = columns < lengths.to(device)[:, None]
        # Paddings are behind the text, where a causal model does not look; without a mask it is faster.
        mask = None if bool(valid.all()) else valid.long()
        decoder: Any = self._model.get_decoder()
        # Autocast is for what is trained; the features are those that generation will see.
        with torch.autocast(device.type, enabled=False), self._tap.recording() as states:
            decoder(input_ids=tokens, attention_mask=mask, use_cache=False)
        *tapped, last_hidden = states
        features = torch.cat(tapped, dim=-1) if tapped else last_hidden[..., :0]
        return Batch(tokens, loss_mask, lengths, features, last_hidden)


def pad(examples: Sequence[Example]) -> tuple[Tensor, Tensor, Tensor]:
    """``(tokens, loss_mask, lengths)`` of a :class:`Batch`.

    Raises:
        ValueError: for no texts, or one whose mask has another length.
    """
    if not examples:
        raise ValueError("examples is empty; expected at least one text")
    for example in examples:
        if example.tokens.shape != example.loss_mask.shape or example.tokens.ndim != 1:
            raise ValueError(
                f"an example has tokens {list(example.tokens.shape)} and loss_mask "
                f"{list(example.loss_mask.shape)}; expected one length for both"
            )
    return (
        pad_sequence([example.tokens for example in examples], batch_first=True),
        pad_sequence([example.loss_mask for example in examples], batch_first=True),
        torch.tensor([len(example.tokens) for example in examples], device="cpu"),
    )
