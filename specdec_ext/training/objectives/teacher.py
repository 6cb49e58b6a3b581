"""``Teacher``: the target's logits, computed from its last hidden states, that a draft head learns from."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec_ext.models.passes.linears import row_invariant, row_invariant_linears

_CHECKED_TOKENS = 8


class Teacher:
    """The output head of a target.

    The logits are ``cap(scale * (W h + b))``. Scale and cap come from the config (``logit_scale`` of Cohere,
    ``logits_scaling`` of Granite, ``final_logit_softcapping`` of Gemma). The formula is compared with the
    model's own logits once on some tokens, because a wrong teacher would not show otherwise.

    Args:
        model: the target.

    Raises:
        ValueError: if the model computes its logits in another way.
    """

    def __init__(self, model: PreTrainedModel):
        head: Any = model.get_output_embeddings()
        if head is None or not isinstance(getattr(head, "weight", None), Tensor):
            raise ValueError(
                f"{type(model).__name__} has no output head with a weight; expected a causal language model"
            )
        config: Any = model.config.get_text_config(decoder=True)
        self._head, self._linears = head, row_invariant(head)
        self.weight: Tensor = head.weight.detach()
        self._cap: float | None = getattr(config, "final_logit_softcapping", None)
        self._scale = float(getattr(config, "logit_scale", None) or 1.0)
        self._scale /= float(getattr(config, "logits_scaling", None) or 1.0)
        self._check(model)

    @torch.no_grad()
    def logits(self, last_hidden: Tensor) -> Tensor:
        """Return logits ``[..., vocab]`` of ``last_hidden [..., hidden]``: float32, or float64 of float64."""
        wide = torch.float64 if last_hidden.dtype == torch.float64 else torch.float32
        # Autocast is only for the trained weights; the teacher must equal the target.
        with (
            torch.autocast(last_hidden.device.type, enabled=False),
            row_invariant_linears(self._linears, few_rows=()),
        ):
            logits: Tensor = self._head(last_hidden).to(wide) * self._scale
        return logits if self._cap is None else self._cap * (logits / self._cap).tanh()

    @torch.no_grad()
    def _check(self, model: PreTrainedModel) -> None:
        ids = torch.arange(1, 1 + _CHECKED_TOKENS, device=model.device)[None] % len(self.weight)
        decoder: Any = model.get_decoder()
        last_hidden = decoder(input_ids=ids, use_cache=False)[0]
        own = model(input_ids=ids, use_cache=False).logits.float()
        ours = self.logits(last_hidden).float()
        apart = float((own - ours).abs().max() / own.abs().max().clamp(min=1e-6))
        if own.shape != ours.shape or not apart < 0.02:
            raise ValueError(
                f"the logits of {type(model).__name__} are not its output head applied to its last hidden "
                f"state (they differ by {apart:.1%} of the largest logit); training for this model is not "
                "supported"
            )
