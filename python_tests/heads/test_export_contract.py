"""Other engines read from an exported config.json the head that was exported.

An engine that does not find an option computes something else or refuses the file. The tables say where each
looks, as tried with vLLM 0.33 (``transformers_utils/configs/speculators/algos.py`` and its EAGLE models),
SGLang 0.5.23 (``models/llama_eagle3.py``) and speculators 0.9.0 (``models/eagle3/config.py``). Claims: for
every option that a layout can express, what an engine finds is what the head computes.
"""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest
from helpers.drafters.checkpoint_cases import random_head, read_folder
from transformers import AutoConfig

from specdec_ext.heads.checkpoints import export_head, load_draft, save_draft

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


# speculators: fields of its own class with their defaults; None if the field is required.
SPECULATORS_READS = {
    "draft_vocab_size": ("draft_vocab_size", 32000),
    "norm_before_residual": ("norm_before_residual", False),
    "norm_before_fc": ("norm_before_fc", False),
    "fc_norm": ("fc_norm", False),
    "norm_output": ("norm_output", False),
    "mask_token_id": ("mask_token_id", None),
}
# ... and of transformers' config of a decoder, which it makes from the rest.
DECODER_READS = {
    name: VLLM_READS[name]
    for name in ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim",
        "intermediate_size", "vocab_size", "rms_norm_eps", "qkv_bias")
}  # fmt: skip


@pytest.mark.parametrize("case", [case for case in OPTIONS if case != "wide target"])
def test_speculators_reads_the_exported_head(case, tmp_path):
    head = random_head(**OPTIONS[case])
    config, tensors = read_folder(save_draft(head, tmp_path, layout="speculators"))
    given = dict(config["transformer_layer_config"])
    decoder = AutoConfig.for_model(given.pop("model_type"), **given)
    for fields, seen in ((SPECULATORS_READS, config), (DECODER_READS, vars(decoder))):
        for field, (name, default) in fields.items():
            assert seen.get(name, default) == getattr(head.config, field), f"{field} as {name}"
    assert not (config["fc_norm"] and config["norm_before_fc"])  # it refuses both
    # It counts the layers; without them it takes three.
    assert tensors["fc.weight"].shape[1] == len(config.get(IDS) or "...") * decoder.hidden_size


# --- export_head -------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", OPTIONS)
def test_export_for_vllm_names_the_method(case, tmp_path):
    head = random_head(**OPTIONS[case])
    export = export_head(head, tmp_path / "out", "vllm")
    assert export.layout == "speculators"
    words = shlex.split(export.command)
    assert words[:3] == ["vllm", "serve", head.record.target_name or "TARGET"]
    given = json.loads(words[words.index("--speculative-config") + 1])
    parallel = {"parallel_drafting": True} if "mask_token_id" in OPTIONS[case] else {}
    tokens = {"num_speculative_tokens": given["num_speculative_tokens"]}
    assert given == {"method": "eagle3", "model": str(tmp_path / "out"), **tokens, **parallel}
    again = load_draft(export.folder)
    assert again.config == head.config


def test_export_takes_the_first_layout_that_can_express_the_head(tmp_path):
    """The layout of speculators has no head that borrows the target's lm_head; SafeAILab's has."""
    head = random_head(kind="eagle1")
    assert export_head(head, tmp_path / "vllm", "vllm").layout == "eagle"
    assert '"method": "eagle"' in export_head(head, tmp_path / "v", "vllm").command
    sglang = export_head(head, tmp_path / "sglang", "sglang")
    assert sglang.layout == "eagle" and "--speculative-algorithm EAGLE " in sglang.command


@pytest.mark.parametrize(
    ("options", "engine", "message"),
    [
        ({"mask_token_id": 7}, "sglang", "sglang can't compute this head: .*mask_token_id=7"),
        ({"qk_norm": True}, "sglang", "sglang can't compute this head: .*qk_norm=True"),
        ({"kind": "eagle1"}, "speculators", "speculators can't compute this head: .*kind='eagle1'"),
        ({"target_hidden_size": 64, "own_embedding": True}, "speculators", "target_hidden_size=64"),
        ({"num_features": 5}, "speculators", "num_features=5 without feature_layers"),
        ({"kind": "mtp"}, "vllm", "vllm can't compute this head: kind='mtp'"),
        ({}, "llama.cpp", "engine='llama.cpp'; expected one of"),
    ],
    ids=["P-EAGLE", "Qwen", "EAGLE-1", "wide target", "unknown layers", "MTP", "engine"],
)
def test_a_head_that_an_engine_cant_compute_is_refused(options, engine, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        export_head(random_head(**options), tmp_path / "out", engine)
    assert not (tmp_path / "out").exists()


def test_export_replaces_no_head(tmp_path):
    export_head(random_head(), tmp_path, "vllm")
    before = (tmp_path / "config.json").read_text()
    with pytest.raises(FileExistsError, match=r"has a config\.json already"):
        export_head(random_head(fc_norm=True), tmp_path, "vllm")
    with pytest.raises(ValueError, match="is the folder of the head itself"):
        export_head(tmp_path, tmp_path, "sglang", overwrite=True)
    assert (tmp_path / "config.json").read_text() == before
    export_head(random_head(fc_norm=True), tmp_path, "vllm", overwrite=True)
    assert (tmp_path / "config.json").read_text() != before
