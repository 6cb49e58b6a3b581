"""Convert the config.json of an EAGLE head, in any published layout, to a ``HeadConfig``.

The layouts differ in the place of a field and in its default:

    SafeAILab (EAGLE-1, EAGLE-3)   all fields at the top level; the default of rope_theta is 10000 and that of
                                   rms_norm_eps 1e-6 (as in ``LlamaConfig``), not the target's value
    SpecForge, SGLang, vLLM        the same plus ``eagle_config``; P-EAGLE adds ``mask_hidden`` and a token id
    speculators                    the decoder's fields are in ``transformer_layer_config``; the default of
                                   ``norm_before_residual`` is True for eagle3 and False for peagle; for mtp
                                   that section describes the target, whose first layer the head's is like

If a tensor shows whether an option is on, the tensor decides when the config does not name the option; if the
config contradicts the tensors, a tensor is reported as missing or unexpected. Only ``norm_output`` and
``norm_before_residual`` can't be seen in the tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from specdec_ext.heads.checkpoints.config.decoder import rope_parameters, sizes, sliding_windows
from specdec_ext.heads.checkpoints.config.feature_layers import RecordedLayers, recorded_layers
from specdec_ext.heads.checkpoints.config.fields import MAX_SIZE, Fields
from specdec_ext.heads.config import HeadConfig, Kind
from specdec_ext.heads.record import HeadRecord

Shapes = Mapping[str, tuple[int, ...]]
# Fields that may hold P-EAGLE's mask token, in the order in which vLLM looks for it.
_MASK_TOKEN_FIELDS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")
_MAX_FEATURES = 256
# Fields of ``HeadRecord`` that this package writes into the section ``specdec_ext`` of a config.json.
RECORDED = ("target_name", "target_revision", "target_fingerprint", "tokenizer_fingerprint")


def head_config(
    kind: Kind,
    config: Fields,
    shapes: Shapes,
    mask_token_id: int | None = None,
) -> tuple[HeadConfig, HeadRecord]:
    """Return the ``HeadConfig`` of a head and the record of its checkpoint.

    Args:
        kind: kind of the head.
        config: its config.json.
        shapes: shapes of its tensors, by our names.
        mask_token_id: for P-EAGLE, replaces the value of the config.

    Raises:
        ValueError: for fields that are missing, of the wrong type, out of range or contradictory.
    """
    layout = config.text("speculators_model_type")
    expected = ("mtp",) if kind == "mtp" else (None, "eagle3", "peagle")
    if layout not in expected:
        named = " or ".join(repr(each) for each in expected if each)
        raise ValueError(
            f"{config.where}: speculators_model_type is {layout!r}; expected {named} for these tensors"
        )
    decoder = config if layout is None else config.section("transformer_layer_config")
    size = sizes(decoder)
    windows = sliding_windows(decoder, size["num_layers"])
    if kind == "mtp":
        _check_one_mtp_layer(config)
        size["num_layers"], windows = 1, windows[:1]
    features, layers = _features(kind, config, shapes, size["hidden_size"])
    norm_output, norm_output_guessed = _norm_output(layout, config)
    vocabulary, tied = _vocabulary(kind, config, shapes, size["vocab_size"])
    fields: dict[str, Any] = dict(
        kind=kind,
        **size,
        **features,
        **vocabulary,
        **_attention_flags(kind, layout, decoder, shapes),
        **_norm_flags(layout, config, shapes),
        norm_output=norm_output or kind == "mtp",
        rms_norm_eps=decoder.number("rms_norm_eps", 1e-6),
        max_positions=decoder.integer("max_position_embeddings", 2048),
        rope_parameters=rope_parameters(decoder),
        sliding_windows=windows,
        logit_scale=config.number("logit_scale", 1.0),
        mask_token_id=_mask_token_id(config, layout, shapes, mask_token_id),
    )
    try:
        found = HeadConfig(**fields)
    except ValueError as error:
        raise ValueError(f"{config.where}: {error}") from None
    guesses = {"feature_layers": layers.guessed, "norm_output": norm_output_guessed}
    record = replace(
        own_record(config),
        format=_format(kind, layout, config),
        layers_from=layers.origin,
        ambiguous=tuple(name for name, guessed in guesses.items() if guessed),
        tied=tied,
    )
    if record.target_name is None:
        verifier = config.section("speculators_config").section("verifier")
        record = replace(record, target_name=verifier.text("name_or_path"))
    return found, record


def own_record(config: Fields) -> HeadRecord:
    """Read the section ``specdec_ext`` of a config.json; empty for files that this package did not write."""
    own = config.section("specdec_ext")
    texts: dict[str, Any] = {name: own.text(name) for name in RECORDED}
    return HeadRecord(**texts)


def _features(
    kind: str, config: Fields, shapes: Shapes, hidden: int
) -> tuple[dict[str, Any], RecordedLayers]:
    """Return the fields about the hidden states that the head reads, and where the layers were found."""
    target_hidden = config.integer("target_hidden_size", hidden)
    declared = config.section("eagle_config").optional_flag("use_aux_hidden_state")
    fields: dict[str, Any] = {"target_hidden_size": target_hidden}
    fields["fc_bias"] = _flag(
        config.optional_flag("bias") if kind == "eagle1" else None, shapes, "fc.bias"
    )
    if kind != "eagle3" or declared is False:
        fields |= {"feature_layers": (-1,), "num_features": 1, "has_fc": kind != "eagle3"}
        fields["fc_bias"] &= fields["has_fc"]
        origin = "the last hidden state, which heads of this kind read"
        return fields, RecordedLayers((-1,), origin)
    recorded = recorded_layers(config)
    count = _num_features(config, recorded.layers, shapes, target_hidden)
    return {**fields, "feature_layers": recorded.layers, "num_features": count}, recorded


def _vocabulary(
    kind: str, config: Fields, shapes: Shapes, vocab: int
) -> tuple[dict[str, Any], bool]:
    """Return vocabulary size and ownership of the embeddings, and whether ``lm_head`` is tied.

    An EAGLE-3 head without an ``lm_head`` uses the target's if ``draft_vocab_size`` is absent (SGLang) or
    ``reuse_target_lm_head`` is set (SpecForge). With ``tie_word_embeddings`` (SGLang) it uses the embedding
    as its ``lm_head``. Any other EAGLE-3 head must have its own.
    """
    declared = config.optional_integer("draft_vocab_size")
    own = "lm_head.weight" in shapes
    full = declared in (None, vocab)
    tied = kind == "eagle3" and full and not own and config.flag("tie_word_embeddings", False)
    reuses = full and config.flag("reuse_target_lm_head", False)
    may_share = kind != "eagle3" or declared is None or reuses or tied
    fields = {
        "draft_vocab_size": declared or vocab,
        "own_embedding": "embed_tokens.weight" in shapes,
        "own_lm_head": own or not may_share,
    }
    return fields, tied


def _check_one_mtp_layer(config: Fields) -> None:
    number = config.integer("num_nextn_predict_layers", 1)
    if number != 1:
        raise ValueError(
            f"{config.where}: num_nextn_predict_layers is {number}; only heads of 1 layer are supported"
        )


def _norm_flags(layout: str | None, config: Fields, shapes: Shapes) -> dict[str, Any]:
    nested = config.section("eagle_config").optional_flag("norm_before_fc")
    before_fc = config.optional_flag("norm_before_fc") if nested is None else nested
    each = config.optional_flag("fc_norm")
    each = config.optional_flag("use_aux_norm") if each is None else each
    return {
        "norm_before_fc": _flag(before_fc, shapes, "input_norm.weight"),
        "fc_norm": _flag(each, shapes, "fc_norm.0.weight"),
        "norm_before_residual": config.flag("norm_before_residual", layout == "eagle3"),
    }


def _norm_output(layout: str | None, config: Fields) -> tuple[bool, bool]:
    """Return ``norm_output``, and whether its meaning is a guess.

    It had another meaning in SpecForge before September 2026. In files of speculators and of this package it
    has one meaning.
    """
    declared = config.flag("norm_output", False)
    ours = config.section("specdec_ext").optional_flag("norm_output")
    if ours not in (None, declared):
        raise ValueError(
            f"{config.where}: norm_output is {declared}, but {ours} in its section specdec_ext; pass the "
            "correct value as norm_output=..."
        )
    return declared, declared and ours is None and layout is None


def _num_features(
    config: Fields, feature_layers: tuple[int, ...] | None, shapes: Shapes, target_hidden: int
) -> int:
    """Return the number of hidden states that ``fc`` reads, from the config or the width of ``fc``."""
    declared = config.optional_integer("num_aux_hidden_states", high=_MAX_FEATURES)
    if feature_layers is not None:
        if declared not in (None, len(feature_layers)):
            raise ValueError(
                f"{config.where}: num_aux_hidden_states is {declared}, but the config names the layers "
                f"{feature_layers}"
            )
        return len(feature_layers)
    width = shapes.get("fc.weight", (0, 3 * target_hidden))[-1]
    return declared or min(max(width // target_hidden, 1), _MAX_FEATURES)


def _flag(declared: bool | None, shapes: Shapes, *names: str) -> bool:
    return any(name in shapes for name in names) if declared is None else declared


def _attention_flags(
    kind: str, layout: str | None, decoder: Fields, shapes: Shapes
) -> dict[str, Any]:
    """Return the flags of biases and per-head norms; outside of speculators only the tensors show them."""
    qkv = o = qk_norm = None
    if kind == "eagle1":
        qkv = decoder.optional_flag("qkv_bias")
    elif layout is not None:
        qkv = o = decoder.flag("attention_bias", False)
        qk_norm = decoder.text("model_type") == "qwen3"
    prefix = [name for name in shapes if name.startswith("layers.")]
    return {
        "qkv_bias": _flag(
            qkv, shapes, *_ending(prefix, "q_proj.bias", "k_proj.bias", "v_proj.bias")
        ),
        "o_bias": _flag(o, shapes, *_ending(prefix, "o_proj.bias")),
        "qk_norm": _flag(qk_norm, shapes, *_ending(prefix, "q_norm.weight", "k_norm.weight")),
    }


def _ending(names: Iterable[str], *endings: str) -> list[str]:
    return [name for name in names if name.endswith(endings)]


def _mask_token_id(
    config: Fields, layout: str | None, shapes: Shapes, given: int | None
) -> int | None:
    """Return the token in P-EAGLE's parallel slots; None for a head that drafts one token at a time."""
    named = layout == "peagle" or any("peagle" in n.lower() for n in config.texts("architectures"))
    if "mask_hidden" not in shapes and not named:
        return None
    if given is not None:
        return given
    places = [(config.section("dflash_config"), "mask_token_id")]
    for fields, name in [*places, *((config, name) for name in _MASK_TOKEN_FIELDS)]:
        token = fields.optional_integer(name, low=0, high=MAX_SIZE)
        if token is not None:
            return token
    raise ValueError(
        f"{config.where} describes a head that drafts in parallel (P-EAGLE), but names no mask token; "
        f"expected one of {', '.join(_MASK_TOKEN_FIELDS)}, or pass mask_token_id=..."
    )


def _format(kind: str, layout: str | None, config: Fields) -> str:
    if layout is not None:
        return f"speculators {layout}"
    if kind == "eagle1":
        return "SafeAILab EAGLE-1"
    published_by_others = "eagle_config" in config or any(
        "Eagle" in name for name in config.texts("architectures")
    )
    return "SpecForge/SGLang EAGLE-3" if published_by_others else "SafeAILab EAGLE-3"
