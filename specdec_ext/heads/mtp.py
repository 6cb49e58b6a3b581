"""``MtpHeads``: the heads for multi-token prediction (MTP) that many checkpoints contain.

An MTP layer is a decoder layer of the target's own architecture. Its input is a projection of a token's
embedding and the hidden state of the token before it (DeepSeek-AI 2024, "DeepSeek-V3", section 2.2)::

    layer 0      h[t] = decoder_layer(eh_proj(cat(enorm(e[t + 1]), hnorm(g[t]))))
    layer k      h[t] = decoder_layer(eh_proj(cat(enorm(e[t + 1 + k]), hnorm(h'[t]))))
    logits of token t + 2 + k = lm_head(post_norm(h[t]))

with the target's last hidden state g after its final norm, the embedding e of a token, and the normed output
h' of layer k - 1. Embedding, ``lm_head`` and rotation are the target's. The weights are read by transformers'
``MtpModel``, which knows all published names of them.

Here each layer becomes a model of one decoder layer, so that the passes of this package run it
(:class:`specdec_ext.models.slots.SlotTarget`): cache, masks, trees and ragged rows of every architecture.
"""

from __future__ import annotations

import copy
import weakref
from contextlib import AbstractContextManager
from contextvars import ContextVar
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from specdec_ext.models.compat import MtpModel, cache_argument
from specdec_ext.models.patching.changes import binding
from specdec_ext.models.support import supports

# Lists of a config with an entry for each layer.
_PER_LAYER = ("layer_types", "mlp_layer_types")


# ``[rows, nodes, hidden]``, the hidden states for the tokens of the pass that runs in this thread.
_states: ContextVar[Tensor] = ContextVar("specdec_mtp_states")


def passing_states(states: Tensor) -> AbstractContextManager[None]:
    """Give the passes of MTP layers inside of this context their hidden states ``[rows, nodes, hidden]``."""
    return binding(_states, states)


class MtpInput(nn.Module):
    """Takes the place of a decoder's embedding: projects embedded tokens and hidden states."""

    def __init__(self, layer: Any, embedding: nn.Module, states_first: bool):
        super().__init__()
        self.enorm, self.hnorm, self.eh_proj = layer.enorm, layer.hnorm, layer.eh_proj
        self.embedding, self._states_first = embedding, states_first

    def forward(self, tokens: Tensor) -> Tensor:
        parts = [self.enorm(self.embedding(tokens)), self.hnorm(_states.get())]
        return self.eh_proj(torch.cat(parts[::-1] if self._states_first else parts, dim=-1))


class MtpLayerModel(PreTrainedModel, GenerationMixin):
    """A causal language model of one MTP layer, which takes hidden states from :func:`passing_states`."""

    _supports_sdpa = True
    base_model_prefix = "model"

    def __init__(
        self, config: PreTrainedConfig, mtp: Any, index: int, decoder_class: type[nn.Module]
    ):
        super().__init__(config)
        layer = mtp.layers[index]
        with torch.device("meta"):
            decoder: Any = decoder_class(config)
        # The block is made anew because it knows its own index, which is that of its cache.
        decoder.layers[0].load_state_dict(layer.mtp_block.state_dict(), assign=True)
        post_norm = layer.post_norm if mtp.use_post_norm else None
        if mtp.use_shared_post_norm:
            post_norm = mtp.shared_post_norm
        decoder.norm = nn.Identity() if post_norm is None else post_norm
        states_first = getattr(config, "mtp_hidden_states_first", False)
        decoder.embed_tokens = MtpInput(layer, mtp.embed_tokens, states_first)
        if mtp.rotary_emb is not None:
            decoder.rotary_emb = mtp.rotary_emb
        self.model = decoder
        self._cache_argument: Any = cache_argument(signature(decoder_class.forward).parameters)
        self._to_logits, self._num_tokens = mtp._project_to_logits, len(mtp.embed_tokens.weight)
        if missing := [name for name, each in self._all_tensors() if each.is_meta]:
            raise ValueError(
                f"{decoder_class.__name__} has parameters that its MTP layer lacks: {', '.join(missing)}"
            )
        self.eval()

    # The implementations are those of the target, which has checked them.
    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return True

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return True

    def _all_tensors(self) -> list[tuple[str, Tensor]]:
        return [*self.named_parameters(), *self.named_buffers()]

    def get_decoder(self) -> Any:
        return self.model

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed_tokens

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        output = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            use_cache=use_cache,
            **{self._cache_argument: past_key_values},
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        # Tokens beyond the embedding can't be read, so they are not drafted.
        logits = self._to_logits(output.last_hidden_state[:, kept])[..., : self._num_tokens]
        return CausalLMOutputWithPast(logits=logits)


class MtpHeads:
    """The MTP layers of a target.

    Args:
        model: the target.
        mtp: transformers' ``MtpModel`` of this target; by default it is read from the target's checkpoint.

    Attributes:
        layers: one model for each MTP layer.

    Raises:
        ValueError: the config has no MTP layers, or the installed transformers has no ``MtpModel``.
        OSError, RuntimeError: the checkpoint can't be read, or has no weights of MTP layers.
    """

    def __init__(self, model: PreTrainedModel, mtp: Any = None):
        if mtp is None:
            if reason := no_mtp_reason(model):
                raise ValueError(reason)
            device = next(model.get_decoder().layers[-1].parameters()).device
            assert MtpModel is not None
            mtp = MtpModel.from_pretrained(model, device_map={"": device})
        decoder_class = type(model.get_decoder())
        self.layers = [
            MtpLayerModel(_of_layer(mtp.config, index), mtp, index, decoder_class)
            for index in range(mtp.num_mtp_layers)
        ]
        for layer in self.layers:
            support = supports(layer)
            if (
                not (support.by_slots and support.tree and support.batch)
                or support.rollback != "compact"
            ):
                reasons = support.reasons or ("it has recurrent states",)
                raise ValueError(
                    f"the MTP layers of {type(model).__name__} can't draft, because their cache can't be "
                    f"rolled back token by token: {'; '.join(reasons)}"
                )
        self._target = weakref.ref(model)

    @property
    def dtype(self) -> torch.dtype:
        return self.layers[0].dtype

    def check(self, model: PreTrainedModel) -> None:
        """Raise ValueError unless these are the heads of this target."""
        if self._target() is not model:
            raise ValueError(
                f"these MTP heads share the embedding and lm_head of another target than this "
                f"{type(model).__name__}; make MtpHeads(model) for it"
            )


def no_mtp_reason(model: PreTrainedModel) -> str | None:
    """Return why no MTP layers can be read for a target, None if its config names some."""
    if not getattr(model.config.get_text_config(decoder=True), "num_mtp_layers", None):
        return (
            f"the config of this {type(model).__name__} names no MTP layers (num_mtp_layers); use "
            "drafter='auto', or a drafter that needs none"
        )
    if not model.config._name_or_path:
        return (
            f"this {type(model).__name__} was not loaded from a checkpoint, which would hold its MTP layers; "
            "pass drafter=MtpHeads(model, mtp_model), or use drafter='auto'"
        )
    if MtpModel is None:
        return "MTP layers need transformers 5.23 or later; upgrade it, or use drafter='auto'"
    return None


def _of_layer(config: PreTrainedConfig, index: int) -> PreTrainedConfig:
    """The config of a model that consists of this MTP layer."""
    config = copy.deepcopy(config)
    for name in _PER_LAYER:
        if (values := getattr(config, name, None)) is not None:
            setattr(config, name, [values[index]])
    config.num_hidden_layers = 1
    return config
