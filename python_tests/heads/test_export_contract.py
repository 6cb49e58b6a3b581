"""Other engines read from an exported config.json the head that was exported.

An engine that does not find an option computes something else or refuses the file. The tables say where each
looks, as tried with vLLM 0.33 (``transformers_utils/configs/speculators/algos.py`` and its EAGLE models) and
SGLang 0.5.23 (``models/llama_eagle3.py``). Claims: for every option that a layout can express, what an engine
finds is what the head computes.
"""

from __future__ import annotations

from typing import Any

import pytest
from helpers.drafters.checkpoint_cases import random_head, read_folder

from specdec_ext.heads.checkpoints import save_draft

IDS = "eagle_aux_hidden_state_layer_ids"
# vLLM copies these from the top into transformer_layer_config, which is then all that its models see:
# the same name or (name, name there); "given" copies only what is there and not null or empty.
VLLM_COPIES = {
    "eagle3": {
        "always": [("draft_vocab_size", None), ("norm_before_residual", True), ("norm_before_fc", False),
            ("fc_norm", False), ("norm_output", False)],
        "given": ["target_hidden_size", IDS],
        "renamed": {},
    },
    "peagle": {
        "always": [("draft_vocab_size", None), ("norm_before_residual", False), ("norm_before_fc", False)],
        "given": ["target_hidden_size", IDS],
        "renamed": {"mask_token_id": "pard_token"},
    },
}  # fmt: skip
VLLM_ARCHITECTURES = {"llama", "qwen3"}
# Field of HeadConfig -> the name under which an engine's model looks, and what it takes for absence.
VLLM_READS = {
    "hidden_size": ("hidden_size", None),
    "num_layers": ("num_hidden_layers", None),
    "num_heads": ("num_attention_heads", None),
    "num_kv_heads": ("num_key_value_heads", None),
    "head_dim": ("head_dim", None),
    "intermediate_size": ("intermediate_size", None),
    "vocab_size": ("vocab_size", None),
    "draft_vocab_size": ("draft_vocab_size", None),
    "rms_norm_eps": ("rms_norm_eps", None),
    "num_features": ("num_aux_hidden_states", 3),
    "fc_norm": ("fc_norm", False),
    "norm_output": ("norm_output", False),
    "norm_before_fc": ("norm_before_fc", False),
    "norm_before_residual": ("norm_before_residual", False),
    "qkv_bias": ("attention_bias", False),
    "mask_token_id": ("pard_token", None),
}
SGLANG_READS = {
    name: VLLM_READS[name]
    for name in ("hidden_size", "num_features", "fc_norm", "norm_output", "rms_norm_eps")
}


def seen_by_vllm(config: dict[str, Any]) -> dict[str, Any]:
    """The config of vLLM's model for a file in the layout of speculators."""
    copies = VLLM_COPIES[config["speculators_model_type"]]
    seen = dict(config["transformer_layer_config"])
    seen |= {name: config.get(name, default) for name, default in copies["always"]}
    seen |= {name: config[name] for name in copies["given"] if config.get(name)}
    return seen | {new: config[name] for name, new in copies["renamed"].items()}


def compare(head, seen: dict[str, Any], reads: dict[str, tuple[str, Any]]) -> None:
    for field, (name, default) in reads.items():
        assert seen.get(name, default) == getattr(head.config, field), f"{field} as {name}"
    target_hidden = seen.get("target_hidden_size", seen["hidden_size"])
    assert target_hidden == head.config.target_hidden_size


OPTIONS = {
    "EAGLE-3": {},
    "EAGLE 3.1": {"fc_norm": True, "norm_output": True},
    "five layers": {"num_features": 5, "feature_layers": (1, 2, 4, 5, 7), "fc_norm": True},
    "one layer": {"num_features": 1, "feature_layers": (6,)},
    "small vocabulary": {"draft_vocab_size": 40, "rms_norm_eps": 1e-5},
    "wide target": {"target_hidden_size": 64, "own_embedding": True},
    "Qwen": {"qk_norm": True, "norm_before_residual": True},
    "bias, norm before fc": {"qkv_bias": True, "o_bias": True, "norm_before_fc": True},
    "P-EAGLE": {"mask_token_id": 7, "num_layers": 4},
    "P-EAGLE of EAGLE 3.1": {"mask_token_id": 7, "fc_norm": True, "norm_output": True,
        "norm_before_residual": True},
    "P-EAGLE, two features": {"mask_token_id": 0, "num_features": 2, "feature_layers": (3, 6)},
}  # fmt: skip


@pytest.mark.parametrize("case", OPTIONS)
def test_vllm_reads_the_exported_head(case, tmp_path):
    head = random_head(**OPTIONS[case])
    config, tensors = read_folder(save_draft(head, tmp_path, layout="speculators"))
    seen = seen_by_vllm(config)
    compare(head, seen, VLLM_READS)
    assert seen["model_type"] in VLLM_ARCHITECTURES
    assert seen.get(IDS) == (list(head.config.feature_layers or ()) or None)
    width = seen["num_aux_hidden_states"] * head.config.target_hidden_size
    assert tensors["fc.weight"].shape[1] == width
    # vLLM refuses a config without these.
    proposal = config["speculators_config"]
    assert proposal["proposal_methods"][0]["speculative_tokens"] > 0
    assert "name_or_path" in proposal["verifier"]


EAGLE = {
    case: options
    for case, options in OPTIONS.items()
    if not {"mask_token_id", "qk_norm", "o_bias", "norm_before_residual"} & options.keys()
}


@pytest.mark.parametrize("case", EAGLE)
def test_sglang_reads_the_exported_head(case, tmp_path):
    head = random_head(**EAGLE[case])
    config, _ = read_folder(save_draft(head, tmp_path, layout="eagle"))
    compare(head, config, SGLANG_READS)
    layers = head.config.feature_layers
    outputs = None if layers is None else [layer - 1 for layer in layers]
    assert config["eagle_config"].get(IDS) == outputs, "SGLang names outputs of layers"
