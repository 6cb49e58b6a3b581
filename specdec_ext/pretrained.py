"""Facts about a Hugging Face model: the model inside its wrappers, and the size of its vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel


def unwrapped(model: Any) -> Any:
    """Return the Hugging Face model inside a ``torch.compile`` or PEFT wrapper, with its adapters."""
    if isinstance(model, torch._dynamo.OptimizedModule):
        model = model._orig_mod
    base = getattr(model, "get_base_model", None)
    return model if base is None else base()


def vocab_size(model: PreTrainedModel) -> int:
    """Return the number of token ids that a model can read: the rows of its text decoder's embedding.

    Drafted ids must be smaller, because the model reads them to score them. The config and the logits may
    have another size: Moshi reads one id more than it can generate, and either matrix may be padded.
    """
    config = model.config
    decoder: Any = model.get_decoder() if config.is_encoder_decoder else model
    try:
        weight = getattr(decoder.get_input_embeddings(), "weight", None)
    except (AttributeError, NotImplementedError):  # transformers knows no embedding of this model
        weight = None
    # A packed (quantised) weight has another shape.
    if isinstance(weight, Tensor) and weight.is_floating_point() and weight.ndim == 2:
        return len(weight)
    return config.get_text_config(decoder=True).vocab_size
