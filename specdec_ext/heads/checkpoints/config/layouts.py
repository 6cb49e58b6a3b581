"""Convert a ``HeadConfig`` to the config.json of a published layout, or refuse options it can't express.

    eagle         as SafeAILab publishes and SGLang reads: ``midlayer.*``, fields at the top level
    speculators   as the speculators library saves and vLLM reads: ``layers.*``, ``transformer_layer_config``;
                  MTP heads: ``mtp_layers.0.*``, which speculators itself reads only with ``qk_norm``

Both get a section ``specdec_ext`` with the target that the head was trained for, and with the unambiguous
values of fields that other projects read in two ways (``feature_layers``: inputs of layers; ``norm_output``:
the normed output is fed back).

Software that does not know an option silently computes something else. An option that the layout's main
reader ignores therefore counts as one that the layout can't express.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from specdec_ext.heads.checkpoints.config.eagle import RECORDED
from specdec_ext.heads.config import HeadConfig
from specdec_ext.heads.record import HeadRecord

Layout = Literal["eagle", "speculators"]
# The version of the speculators library with which reading and writing is tested.
_SPECULATORS_VERSION = "0.9.0"
_ARCHITECTURES = {
    "eagle3": "Eagle3DraftModel",
    "peagle": "PEagleDraftModel",
    "mtp": "MTPDraftModel",
}


def config_json(config: HeadConfig, record: HeadRecord, layout: Layout) -> dict[str, Any]:
    """Return the contents of config.json for a head.

    Raises:
        ValueError: for an option that the layout can't express.
    """
    problems = list(_PROBLEMS[layout](config, record))
    if problems:
        others = [name for name in _PROBLEMS if not list(_PROBLEMS[name](config, record))]
        way_out = f"; pass layout={others[0]!r}, which can" if others else ""
        raise ValueError(f"layout={layout!r} can't express {', '.join(problems)}{way_out}")
    written = _WRITERS[layout](config, record)
    ours: dict[str, Any] = own_section(record)
    if config.kind == "eagle3":
        ours["norm_output"] = config.norm_output
        if config.has_fc and config.feature_layers is not None:
            ours["feature_layers"] = list(config.feature_layers)
    return {**written, **({"specdec_ext": ours} if ours else {})}


def own_section(record: HeadRecord) -> dict[str, Any]:
    """Return the section ``specdec_ext`` with the record of a head of any kind."""
    values = {name: getattr(record, name) for name in RECORDED}
    return {name: value for name, value in values.items() if value is not None}


def _options(config: HeadConfig, **allowed: Any) -> Iterator[str]:
    """Yield a description of each option whose value differs from the only one that a layout supports."""
    for name, value in allowed.items():
        given = getattr(config, name)
        if given != value:
            yield f"{name}={given!r} (only {value!r})"


def _eagle_problems(config: HeadConfig, record: HeadRecord) -> Iterator[str]:
    if config.kind == "mtp":
        yield "kind='mtp' (only EAGLE heads)"
        return
    windows = (None,) * config.num_layers
    common = {"qk_norm": False, "o_bias": False, "norm_before_residual": False}
    yield from _options(config, **common, sliding_windows=windows, mask_token_id=None)
    if not config.own_lm_head:
        yield from _options(config, draft_vocab_size=config.vocab_size)
    if config.kind == "eagle1":
        absent = {"norm_output": False, "norm_before_fc": False, "fc_norm": False}
        yield from _options(config, **absent, own_lm_head=False, logit_scale=1.0)
        yield from _options(config, target_hidden_size=config.hidden_size, feature_layers=(-1,))
        return
    yield from _options(config, num_layers=1, qkv_bias=False)
    if not config.has_fc:
        yield from _options(config, feature_layers=(-1,))
    elif min(config.feature_layers or (1,)) < 1:
        yield f"feature_layers={config.feature_layers} (only inputs of layers from 1 on)"


def _speculators_problems(config: HeadConfig, record: HeadRecord) -> Iterator[str]:
    if config.kind == "mtp":
        shared = {
            "own_embedding": False,
            "own_lm_head": False,
            "draft_vocab_size": config.vocab_size,
        }
        absent = {
            "norm_before_fc": False,
            "fc_norm": False,
            "fc_bias": False,
            "mask_token_id": None,
        }
        yield from _options(config, **shared, **absent, num_layers=1, feature_layers=(-1,))
        yield from _options(config, logit_scale=1.0, o_bias=config.qkv_bias)
        return
    yield from _options(config, kind="eagle3", has_fc=True, fc_bias=False, own_lm_head=True)
    yield from _options(config, logit_scale=1.0, o_bias=config.qkv_bias)
    if config.fc_norm:
        yield from _options(config, norm_before_fc=False)
    if min(config.feature_layers or (0,)) < 0:
        yield f"feature_layers={config.feature_layers} (only inputs of layers)"
    if len(set(config.sliding_windows) - {None}) > 1:
        yield f"sliding_windows={config.sliding_windows} (only one size)"


def _decoder(config: HeadConfig) -> dict[str, Any]:
    return {
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "num_hidden_layers": config.num_layers,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_positions,
    }


def _eagle(config: HeadConfig, record: HeadRecord) -> dict[str, Any]:
    scaling = dict(config.rope_parameters)
    written = {**_decoder(config), "rope_theta": scaling.pop("rope_theta")}
    if "partial_rotary_factor" in scaling:
        written["partial_rotary_factor"] = scaling.pop("partial_rotary_factor")
    written["rope_scaling"] = None if scaling == {"rope_type": "default"} else scaling
    written |= {"model_type": "llama", "tie_word_embeddings": record.tied, "bias": config.fc_bias}
    if config.kind == "eagle1":
        return {
            **written,
            "architectures": ["LlamaForCausalLM"],
            "qkv_bias": config.qkv_bias,
        }
    layers = config.feature_layers
    nested: dict[str, Any] = {
        "use_aux_hidden_state": config.has_fc,
        "norm_before_fc": config.norm_before_fc,
    }
    if config.has_fc:
        written["num_aux_hidden_states"] = config.num_features
        if layers is not None:
            # Both conventions are written: vLLM reads the first (inputs), SGLang the second (outputs).
            written["eagle_aux_hidden_state_layer_ids"] = list(layers)
            nested["eagle_aux_hidden_state_layer_ids"] = [layer - 1 for layer in layers]
    if config.target_hidden_size != config.hidden_size:
        # If this field exists, SafeAILab's code expects an embedding in the file, whatever the value.
        written["target_hidden_size"] = config.target_hidden_size
    uses_target_lm_head = not config.own_lm_head and not record.tied
    return {
        **written,
        "architectures": ["LlamaForCausalLMEagle3"],
        "attention_bias": False,
        "draft_vocab_size": None if uses_target_lm_head else config.draft_vocab_size,
        "eagle_config": nested,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "logit_scale": config.logit_scale,
    }


def _speculators(config: HeadConfig, record: HeadRecord) -> dict[str, Any]:
    window = next((size for size in config.sliding_windows if size is not None), None)
    parallel = config.mask_token_id is not None
    same_width = config.target_hidden_size == config.hidden_size
    kind = "mtp" if config.kind == "mtp" else "peagle" if parallel else "eagle3"
    decoder = {
        **_decoder(config),
        "model_type": "qwen3" if config.qk_norm else "llama",
        "attention_bias": config.qkv_bias,
        "mlp_bias": False,
        "rope_parameters": dict(config.rope_parameters),
        "layer_types": [
            "full_attention" if size is None else "sliding_attention"
            for size in config.sliding_windows
        ],
        "sliding_window": window,
        "use_sliding_window": window is not None,
        # vLLM's models read these fields here. Its reader copies the first two from the top level of eagle3
        # configs but not of peagle configs, and never copies the third.
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "num_aux_hidden_states": config.num_features,
    }
    written: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[kind]],
        "speculators_model_type": kind,
        "speculators_version": _SPECULATORS_VERSION,
        "transformer_layer_config": decoder,
        "tie_word_embeddings": False,
        "speculators_config": _proposal(kind, record.target_name),
    }
    if kind == "mtp":
        return {**written, "num_nextn_predict_layers": 1}
    written |= {
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": None if same_width else config.target_hidden_size,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
    }
    if config.feature_layers is not None:
        written["eagle_aux_hidden_state_layer_ids"] = list(config.feature_layers)
    if parallel:
        written["mask_token_id"] = config.mask_token_id
    return written


def _proposal(kind: str, target_name: str | None) -> dict[str, Any]:
    method = {
        "proposal_type": "greedy",
        "speculative_tokens": 5,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "algorithm": kind,
        "default_proposal_method": "greedy",
        "proposal_methods": [method],
        "verifier": {"name_or_path": target_name, "architectures": []},
    }


_PROBLEMS = {"eagle": _eagle_problems, "speculators": _speculators_problems}
_WRITERS = {"eagle": _eagle, "speculators": _speculators}
