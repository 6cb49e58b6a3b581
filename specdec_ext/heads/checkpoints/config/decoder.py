"""Read the fields about a head's decoder layers, which are named as in transformers' configs."""

from __future__ import annotations

from typing import Any

from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from specdec_ext.heads.checkpoints.config.fields import Fields

# "su" is an old name of "longrope". For text, the three positions of "mrope" are equal, so it is the default.
_ROPE_ALIASES = {"su": "longrope", "mrope": "default"}


def sizes(decoder: Fields) -> dict[str, Any]:
    """Return the fields of ``HeadConfig`` that are sizes of the decoder layers."""
    activation = decoder.text("hidden_act") or "silu"
    if activation not in ("silu", "swish"):
        raise ValueError(f"{decoder.where}: hidden_act is {activation!r}; only 'silu' is supported")
    heads = decoder.integer("num_attention_heads")
    kv_heads = decoder.integer("num_key_value_heads", heads)
    hidden = decoder.integer("hidden_size")
    head_dim = decoder.integer("head_dim", max(hidden // heads, 1))
    if heads % kv_heads:
        raise ValueError(
            f"{decoder.where}: num_attention_heads is {heads} and num_key_value_heads {kv_heads}; expected "
            "num_attention_heads to be a multiple"
        )
    if head_dim % 2 or ("head_dim" not in decoder and hidden % heads):
        given = head_dim if "head_dim" in decoder else f"{hidden / heads:g}"
        raise ValueError(
            f"{decoder.where}: hidden_size is {hidden}, num_attention_heads {heads} and head_dim {given}; "
            "expected an even integer as head_dim"
        )
    return {
        "hidden_size": hidden,
        "intermediate_size": decoder.integer("intermediate_size"),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "num_layers": decoder.integer("num_hidden_layers", 1, high=256),
        "vocab_size": decoder.integer("vocab_size"),
    }


def rope_parameters(decoder: Fields) -> dict[str, Any]:
    """Return transformers' ``rope_parameters``, also from the older fields ``rope_theta`` and
    ``rope_scaling``."""
    values = dict(decoder.section("rope_scaling").values)
    values.update(decoder.section("rope_parameters").values)
    rope = Fields(values, f"{decoder.where}: rope_parameters")
    kind = rope.text("rope_type") or rope.text("type") or "default"
    kind = _ROPE_ALIASES.get(kind, kind)
    supported = ["default", *ROPE_INIT_FUNCTIONS]
    if kind not in supported:
        raise ValueError(f"{rope.where}: rope_type is {kind!r}; expected one of {supported}")
    values.pop("type", None)
    values |= {
        "rope_type": kind,
        "rope_theta": rope.number("rope_theta", decoder.number("rope_theta", 10000.0)),
    }
    if "partial_rotary_factor" in decoder:
        values["partial_rotary_factor"] = decoder.number("partial_rotary_factor")
    _check_rope(Fields(values, rope.where))
    return values


def _check_rope(rope: Fields) -> None:
    kind = rope.values["rope_type"]
    if kind in ("linear", "dynamic", "yarn", "llama3") or "factor" in rope:
        rope.number("factor")
    if kind == "llama3":
        rope.number("low_freq_factor")
        rope.number("high_freq_factor")
        rope.integer("original_max_position_embeddings")
    if "partial_rotary_factor" in rope and rope.number("partial_rotary_factor") > 1:
        raise ValueError(f"{rope.where}: partial_rotary_factor is above 1; expected at most 1")


def sliding_windows(decoder: Fields, layers: int) -> tuple[int | None, ...]:
    """Return the sliding window of each layer, from ``layer_types`` or else by the model type."""
    window = decoder.optional_integer("sliding_window")
    types = decoder.texts("layer_types")
    if not types:
        first = _first_sliding_layer(decoder, layers)
        return tuple(window if index >= first else None for index in range(layers))
    if len(types) != layers and len(set(types)) > 1:
        raise ValueError(
            f"{decoder.where}: layer_types has {len(types)} entries for {layers} layers"
        )
    types = [types[0]] * layers if len(types) != layers else types
    for name in types:
        if name not in ("full_attention", "sliding_attention"):
            raise ValueError(
                f"{decoder.where}: layer_types has {name!r}; expected 'full_attention' or 'sliding_attention'"
            )
    if window is None and "sliding_attention" in types:
        raise ValueError(f"{decoder.where}: layer_types has sliding layers but no sliding_window")
    return tuple(window if name == "sliding_attention" else None for name in types)


def _first_sliding_layer(decoder: Fields, layers: int) -> int:
    kind = decoder.text("model_type")
    if kind == "mistral":
        return 0
    if kind in ("qwen2", "qwen3") and decoder.flag("use_sliding_window", False):
        return decoder.integer("max_window_layers", 28, low=0)
    return layers
