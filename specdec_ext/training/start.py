"""Initial weights of new draft heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec_ext.heads.config import DraftHead, HeadConfig, Kind
from specdec_ext.heads.medusa import MedusaConfig, MedusaHeads
from specdec_ext.models.compat import first_layer

# Recorded if the target's config does not say; rope tables are computed for any length.
_UNKNOWN_POSITIONS = 2048


def new_head(
    model: PreTrainedModel,
    layers: Sequence[int] = (-1,),
    draft_to_target: Tensor | None = None,
    *,
    kind: Kind = "eagle3",
    num_layers: int = 1,
    intermediate_size: int | None = None,
    mask_token_id: int | None = None,
    seed: int = 0,
) -> DraftHead:
    """Make a head with layers of the target's shape, in float32.

    Matrices are random, and those that write to the residual stream are small. An EAGLE 3.1 head
    (``fc_norm``, ``norm_output``) has an output head, which starts with the target's rows of the draft
    vocabulary. EAGLE-1 and MTP heads read the last hidden state and use the target's output head. The norm
    before it, if there is one, starts with the target's final norm.

    Args:
        model: the target.
        layers: feature layers, numbered as in ``HeadConfig.feature_layers``; (-1,) for EAGLE-1 and MTP.
        draft_to_target: ``[draft_vocab]`` int64 ascending ids; None for the whole vocabulary, which EAGLE-1
            and MTP heads always draft.
        kind: "eagle3" for an EAGLE 3.1 head, "eagle1" or "mtp". MTP layers norm queries and keys if the
            target's layers do.
        num_layers: number of decoder layers; P-EAGLE heads have several.
        intermediate_size: inner width of the MLPs; None for the target's.
        mask_token_id: mask token of a P-EAGLE head, None for other heads.
        seed: seed of the random numbers.
    """
    config: Any = first_layer(model.config.get_text_config(decoder=True))
    output: Any = model.get_output_embeddings()
    rows = output.weight.detach().float().cpu()
    heads = config.num_attention_heads
    rope = getattr(config, "rope_parameters", None) or {}
    head_config = HeadConfig(
        kind=kind,
        hidden_size=config.hidden_size,
        intermediate_size=intermediate_size
        or _first_integer(config, "intermediate_size", "ffn_dim", "n_inner")
        or 4 * config.hidden_size,
        num_heads=heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        num_layers=num_layers,
        vocab_size=len(rows),
        draft_vocab_size=len(rows) if draft_to_target is None else len(draft_to_target),
        target_hidden_size=config.hidden_size,
        num_features=len(layers),
        feature_layers=tuple(layers),
        rms_norm_eps=getattr(config, "rms_norm_eps", 1e-5),
        max_positions=_first_integer(
            config, "max_position_embeddings", "n_positions", "max_seq_len"
        )
        or _UNKNOWN_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": rope.get("rope_theta", 10000.0)},
        sliding_windows=(None,) * num_layers,
        own_lm_head=kind == "eagle3",
        qk_norm=kind == "mtp" and _norms_queries(model),
        fc_norm=kind == "eagle3",
        norm_output=kind != "eagle1",
        mask_token_id=mask_token_id,
    )
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, shape in head_config.tensor_shapes().items():
        if name == "draft_to_target":
            assert draft_to_target is not None
            tensors[name] = draft_to_target
        elif name == "lm_head.weight":
            tensors[name] = (rows if draft_to_target is None else rows[draft_to_target]).clone()
        elif name == "norm.weight":
            tensors[name] = _final_norm(model, config.hidden_size)
        elif len(shape) == 1 and name != "mask_hidden":
            tensors[name] = torch.ones(shape, device="cpu")
        else:
            onto_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            deviation = shape[-1] ** -0.5 * (0.2 if onto_residual else 1.0)
            if name == "mask_hidden":
                deviation = 1.0
            tensors[name] = torch.randn(shape, generator=generator, device="cpu") * deviation
    return DraftHead(head_config, tensors, "a new head")


def new_medusa_heads(
    model: PreTrainedModel,
    num_heads: int,
    draft_to_target: Tensor | None = None,
) -> MedusaHeads:
    """Make Medusa heads (Cai et al. 2024) with zero blocks and the target's output head, in float32.

    Args:
        model: the target.
        num_heads: number of heads.
        draft_to_target: as for :func:`new_head`.
    """
    output: Any = model.get_output_embeddings()
    rows = output.weight.detach().float().cpu()
    chosen = rows if draft_to_target is None else rows[draft_to_target]
    config = MedusaConfig(
        num_heads=num_heads,
        num_layers=1,
        hidden_size=rows.shape[1],
        vocab_size=len(rows),
        draft_vocab_size=len(chosen),
    )
    tensors: dict[str, Tensor] = {}
    for name, shape in config.tensor_shapes().items():
        if name == "draft_to_target":
            assert draft_to_target is not None
            tensors[name] = draft_to_target
        else:
            tensors[name] = (
                chosen.clone() if "lm_head" in name else torch.zeros(shape, device="cpu")
            )
    return MedusaHeads(config, tensors, "new heads")


def _first_integer(config: Any, *names: str) -> int | None:
    """Return the first of these fields that is an integer; architectures use different names."""
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if isinstance(value, int)), None)


def default_layers(num_layers: int) -> tuple[int, ...]:
    """Return EAGLE-3's feature layers, the inputs of layers 2, n // 2 and n - 3.

    For targets with fewer than 8 layers: the first, a middle and the last layer's output.
    """
    if num_layers >= 8:
        return 2, num_layers // 2, num_layers - 3
    return tuple(sorted({1, (num_layers + 1) // 2, num_layers}))


def _norms_queries(model: PreTrainedModel) -> bool:
    """Whether the target's layers norm queries and keys per head, as in Qwen3."""
    attention = getattr(model.get_decoder().layers[-1], "self_attn", None)
    return getattr(attention, "q_norm", None) is not None


def _final_norm(model: PreTrainedModel, width: int) -> Tensor:
    """Return the weight of the target's final norm, or ones if there is no single norm of this width."""
    decoder: Any = model.get_decoder()
    norms = [
        child.weight
        for child in decoder.children()
        if isinstance(getattr(child, "weight", None), Tensor) and child.weight.shape == (width,)
    ]
    if len(norms) != 1:
        return torch.ones(width, device="cpu")
    return norms[0].detach().float().cpu().clone()
