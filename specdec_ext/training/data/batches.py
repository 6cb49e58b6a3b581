"""The input of a training step: texts with the target's hidden states.

An :class:`Example` is one text. A :class:`Batch` holds several texts with the target's hidden states. A
``Features`` object makes a batch from examples; :class:`OnlineFeatures` does so by running the target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from specdec_ext.models.passes.hidden_states import HiddenStateRecorder
from specdec_ext.models.passes.linears import row_invariant, row_invariant_linears

# Batch.rounded pads to multiples of this number of columns.
COLUMNS = 32


@dataclass(frozen=True)
class Example:
    """One training text.

    Attributes:
        tokens: ``[length]`` int64, unpadded.
        loss_mask: ``[length]`` bool, True for the tokens that a head should learn to draft: the answers in a
            chat, all tokens of a plain text.
    """

    tokens: Tensor
    loss_mask: Tensor


@dataclass(frozen=True)
class Batch:
    """A batch of texts, padded on the right.

    Attributes:
        tokens: ``[rows, columns]`` int64; padding is 0.
        loss_mask: ``[rows, columns]`` bool; padding is False.
        lengths: ``[rows]`` int64, on the CPU.
        features: ``[rows, columns, feature_width]`` auxiliary hidden states of the feature layers,
            concatenated in their order.
        last_hidden: ``[rows, columns, target_hidden]`` the target's last hidden state after the final norm,
            which its output head reads.
    """

    tokens: Tensor
    loss_mask: Tensor
    lengths: Tensor
    features: Tensor
    last_hidden: Tensor

    def rounded(self) -> Batch:
        """Return the batch with padding up to the next multiple of 32 columns.

        oneDNN compiles a kernel for each new shape of a matrix product, which takes 3 to 6 times as long as
        the product. Rounding keeps the number of shapes small.
        """
        spare = -self.tokens.shape[1] % COLUMNS
        if spare == 0:
            return self
        return replace(
            self,
            tokens=F.pad(self.tokens, (0, spare)),
            loss_mask=F.pad(self.loss_mask, (0, spare)),
            features=F.pad(self.features, (0, 0, 0, spare)),
            last_hidden=F.pad(self.last_hidden, (0, 0, 0, spare)),
        )


class Features(Protocol):
    """Makes a batch with the target's hidden states from examples."""

    def __call__(self, examples: Sequence[Example]) -> Batch: ...


class OnlineFeatures:
    """Computes the hidden states by running the target on every batch.

    On a CPU, products are those of a prompt during generation (:mod:`specdec_ext.models.passes.linears`).

    Args:
        model: the target; its weights get no gradients.
        layers: feature layers, numbered as in ``Drafter.feature_layers``; empty for heads that read only the
            last hidden state.

    Raises:
        ValueError: for a layer that the model does not have.
    """

    def __init__(self, model: PreTrainedModel, layers: Sequence[int]):
        self._model = model
        config: Any = model.config.get_text_config(decoder=True)
        self._recorder = HiddenStateRecorder(model, config, (*layers, -1))
        self._linears = row_invariant(model)

    @torch.no_grad()
    def __call__(self, examples: Sequence[Example]) -> Batch:
        tokens, loss_mask, lengths = pad(examples)
        device = self._model.device
        tokens, loss_mask = tokens.to(device), loss_mask.to(device)
        decoder: Any = self._model.get_decoder()
        # Autocast is only for the trained weights; the hidden states must equal those during generation.
        with (
            torch.autocast(device.type, enabled=False),
            row_invariant_linears(self._linears, few_rows=()),
            self._recorder.recording() as states,
        ):
            # No attention mask: a causal model ignores padding after the text, and masks cost time.
            decoder(input_ids=tokens, use_cache=False)
        *auxiliary, last_hidden = states
        features = torch.cat(auxiliary, dim=-1) if auxiliary else last_hidden[..., :0]
        return Batch(tokens, loss_mask, lengths, features, last_hidden)


def pad(examples: Sequence[Example]) -> tuple[Tensor, Tensor, Tensor]:
    """Pad examples to ``(tokens, loss_mask, lengths)`` of a :class:`Batch`.

    Raises:
        ValueError: for no texts, or a text whose mask has another length.
    """
    if not examples:
        raise ValueError("examples is empty; expected at least one text")
    for example in examples:
        if example.tokens.shape != example.loss_mask.shape or example.tokens.ndim != 1:
            raise ValueError(
                f"an example has tokens of shape {list(example.tokens.shape)} and a loss_mask of shape "
                f"{list(example.loss_mask.shape)}; expected [length] for both"
            )
    return (
        pad_sequence([example.tokens for example in examples], batch_first=True),
        pad_sequence([example.loss_mask for example in examples], batch_first=True),
        torch.tensor([len(example.tokens) for example in examples], device="cpu"),
    )
