"""Checkpoints in every published layout are read as their authors mean them.

Claims: the checkpoints that other projects have written (golden/) give the options that their READMEs and
configs state, and their tensors bit for bit; a head that was written is read back with equal config and bits,
for every option that a layout can express, and the others are refused; spellings that differ between projects
give the same head; safetensors, torch files, shards and the hub's cache give the same head.
"""

from __future__ import annotations

import json
from pathlib import Path

import huggingface_hub
import pytest
import torch
from helpers.drafters.checkpoint_cases import (
    assert_same_head,
    random_head,
    read_folder,
    write_folder,
)
from helpers.models.tiny import tiny_model
from helpers.places import GOLDEN
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, Qwen3Config

from specdec_ext import assets
from specdec_ext.drafters import resolve_drafter
from specdec_ext.heads.checkpoints import load_draft, save_draft, tokenizer_fingerprint
from specdec_ext.heads.weights import UnkeptTensors

# Options that differ from HeadConfig's defaults, as the checkpoints' authors state them.
GOLDEN_OPTIONS = {
    "eagle1_gqa": {"fc_bias": True, "own_embedding": True, "own_lm_head": False},
    "eagle1_nobias": {"own_embedding": True, "own_lm_head": False},
    "eagle3_full_vocab": {"draft_vocab_size": 512},
    "eagle3_gqa_small_vocab": {"draft_vocab_size": 200},
    "eagle3_target_hidden_differs": {"draft_vocab_size": 200, "target_hidden_size": 96},
    "speculators_eagle31_fcnorm_normout": {"draft_vocab_size": 200, "own_embedding": True, "fc_norm": True,
        "norm_output": True},
    "speculators_eagle3_defaults_beforefc": {"draft_vocab_size": 200, "own_embedding": True,
        "norm_before_fc": True, "norm_before_residual": True, "norm_output": True},
    "speculators_qwen3_two_layers": {"draft_vocab_size": 200, "own_embedding": True,
        "norm_before_residual": True, "qk_norm": True, "num_layers": 2, "head_dim": 32},
}  # fmt: skip
FLAGS = [
    *("own_embedding", "fc_bias", "qkv_bias", "o_bias", "qk_norm", "fc_norm"),
    *("norm_before_fc", "norm_before_residual", "norm_output"),
]


@pytest.mark.parametrize("case", GOLDEN_OPTIONS)
def test_golden_checkpoints_have_the_stated_options(case):
    head = load_draft(GOLDEN / case / "draft")
    config, options = head.config, GOLDEN_OPTIONS[case]
    assert config.kind == case[:6].replace("specul", "eagle3")
    for name in FLAGS:
        assert getattr(config, name) == options.get(name, False), name
    for name, expected in options.items():
        assert getattr(config, name) == expected, name
    sizes = config.hidden_size, config.intermediate_size, config.num_heads, config.num_kv_heads
    assert sizes == (64, 128, 4, 2)
    layers = {"eagle1": (-1,), "eagle3": None, "specul": (2, 4, 5)}[case[:6]]
    assert config.feature_layers == layers
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}
    assert config.sliding_windows == (None,) * config.num_layers


@pytest.mark.parametrize("case", GOLDEN_OPTIONS)
def test_golden_tensors_are_read_bit_for_bit(case):
    head = load_draft(GOLDEN / case / "draft")
    stored = load_file(GOLDEN / case / "draft" / "model.safetensors")
    for name, tensor in head.tensors.items():
        if name == "draft_to_target":
            expected = stored["d2t"] + torch.arange(len(stored["d2t"]))
            assert torch.equal(stored["t2d"].nonzero().flatten(), tensor)
        else:
            file_name = name if name in stored else name.replace("layers.0.", "midlayer.")
            expected = stored[file_name]
        assert tensor.dtype == expected.dtype
        assert torch.equal(tensor, expected), name
    full = head.config.draft_vocab_size == head.config.vocab_size
    unused = {"t2d", "d2t"} if full else {"t2d"}
    assert set(head.record.ignored) == (unused & stored.keys())
    assert len(head.tensors) + len(head.record.ignored) == len(stored)


# --- written and read back ---------------------------------------------------------------------------

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
PARTIAL_ROPE = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5}
# Options that both layouts of EAGLE-3 express.
SHARED = {
    "plain": {},
    "small-vocabulary": {"draft_vocab_size": 40},
    "own-embedding": {"own_embedding": True},
    "layers": {"feature_layers": (1, 2, 5)},
    "default-layers": {"feature_layers": (2, 30, 58)},
    "two-features": {"feature_layers": (3, 4), "num_features": 2},
    "other-width": {"target_hidden_size": 24, "own_embedding": True},
    "head-dim": {"head_dim": 16},
    "no-gqa": {"num_kv_heads": 4},
    "eps": {"rms_norm_eps": 1e-4, "max_positions": 512},
    "rope-llama3": {"rope_parameters": LLAMA3_ROPE},
    "rope-partial": {"rope_parameters": PARTIAL_ROPE},
    "fc-norm": {"fc_norm": True, "norm_output": True},
    "norm-before-fc": {"norm_before_fc": True},
}
EAGLE = {
    "fc-bias": {"fc_bias": True},
    "no-features": {"has_fc": False, "num_features": 1, "feature_layers": (-1,)},
    "target-lm-head": {"own_lm_head": False},
    "both-norms": {"fc_norm": True, "norm_before_fc": True},
    "logit-scale": {"logit_scale": 0.25},
}
EAGLE1 = {
    "eagle1": {},
    "eagle1-embedding": {"own_embedding": True},
    "eagle1-biases": {"fc_bias": True, "qkv_bias": True},
    "eagle1-two-layers": {"num_layers": 2},
    "eagle1-rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
}
SPECULATORS = {
    "norm-before-residual": {"norm_before_residual": True},
    "embeddings-input": {"feature_layers": (0, 1, 2)},
    "qk-norm": {"qk_norm": True},
    "biases": {"qkv_bias": True, "o_bias": True},
    "three-layers": {"num_layers": 3},
    "windows": {"num_layers": 3, "sliding_windows": (16, None, 16)},
    "peagle": {"mask_token_id": 0, "num_layers": 2, "own_embedding": True},
    "peagle-residual": {"mask_token_id": 5, "norm_before_residual": True, "draft_vocab_size": 40},
}
MTP = {
    "mtp": {},
    "mtp-qk-norm": {"qk_norm": True},
    "mtp-window": {"sliding_windows": (9,), "rope_parameters": LLAMA3_ROPE},
    "mtp-biases": {"qkv_bias": True, "o_bias": True},
}
WRITTEN = [
    *(("eagle", name, "eagle3", options) for name, options in {**SHARED, **EAGLE}.items()),
    *(("eagle", name, "eagle1", options) for name, options in EAGLE1.items()),
    *(("speculators", name, "eagle3", o) for name, o in {**SHARED, **SPECULATORS}.items()),
    *(("speculators", name, "mtp", options) for name, options in MTP.items()),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    "layout, kind, options",
    [(layout, kind, options) for layout, _, kind, options in WRITTEN],
    ids=[f"{layout}-{name}" for layout, name, _, _ in WRITTEN],
)
def test_written_heads_are_read_back_equal(tmp_path, layout, kind, options, dtype):
    head = random_head(kind, dtype, **options)
    assert save_draft(head, tmp_path / "head", layout=layout) == tmp_path / "head"
    assert_same_head(load_draft(tmp_path / "head"), head)


@pytest.mark.parametrize("case", GOLDEN_OPTIONS)
@pytest.mark.parametrize("layout", ["eagle", "speculators"])
def test_golden_heads_are_written_and_read_back(tmp_path, case, layout):
    head = load_draft(GOLDEN / case / "draft")
    speculators_only = head.config.qk_norm or head.config.norm_before_residual
    if (head.config.kind == "eagle1") if layout == "speculators" else speculators_only:
        with pytest.raises(ValueError, match=f"layout='{layout}' can't express"):
            save_draft(head, tmp_path, layout=layout)
        return
    assert_same_head(load_draft(save_draft(head, tmp_path, layout=layout)), head)


@pytest.mark.parametrize(
    "layout, kind, options, message",
    [
        ("eagle", "eagle3", {"qk_norm": True}, "qk_norm=True .*; pass layout='speculators'"),
        ("eagle", "eagle3", {"norm_before_residual": True}, "norm_before_residual=True"),
        ("eagle", "eagle3", {"num_layers": 2}, r"num_layers=2 \(only 1\)"),
        ("eagle", "eagle3", {"qkv_bias": True, "o_bias": True}, "o_bias=True .* qkv_bias=True"),
        ("eagle", "eagle3", {"sliding_windows": (8,)}, "sliding_windows=(8,)"),
        ("eagle", "eagle3", {"mask_token_id": 3}, "mask_token_id=3"),
        ("eagle", "eagle3", {"feature_layers": (0, 1, 2)}, "from 1 on"),
        ("eagle", "eagle1", {"num_layers": 2, "qk_norm": True}, r"qk_norm=True \(only False\)$"),
        ("eagle", "eagle1", {"own_lm_head": True}, "own_lm_head=True"),
        ("speculators", "eagle1", {}, "kind='eagle1' .*; pass layout='eagle'"),
        ("speculators", "eagle3", {"fc_bias": True}, "fc_bias=True"),
        ("speculators", "mtp", {"own_lm_head": True}, "own_lm_head=True"),
        ("speculators", "mtp", {"num_layers": 2}, r"num_layers=2 \(only 1\)"),
        ("eagle", "mtp", {}, "kind='mtp' .*; pass layout='speculators'"),
        ("speculators", "eagle3", {"own_lm_head": False}, "own_lm_head=False"),
        ("speculators", "eagle3", {"logit_scale": 2.0}, "logit_scale=2.0"),
        ("speculators", "eagle3", {"o_bias": True}, "o_bias=True"),
        ("speculators", "eagle3", {"fc_norm": True, "norm_before_fc": True}, "norm_before_fc=True"),
        ("speculators", "eagle3", {"num_layers": 2, "sliding_windows": (8, 9)}, "only one size"),
        ("speculators", "eagle3", {"has_fc": False, "num_features": 1, "feature_layers": (-1,)},
            "has_fc=False"),
    ],
)  # fmt: skip
def test_options_that_a_layout_cannot_express_are_refused(tmp_path, layout, kind, options, message):
    message = message.replace("(8,)", r"\(8,\)")
    with pytest.raises(ValueError, match=message):
        save_draft(random_head(kind, **options), tmp_path / "head", layout=layout)
    assert not (tmp_path / "head").exists()


def test_unknown_layout_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"layout='hf'; expected one of \('eagle', 'specul"):
        save_draft(random_head(), tmp_path, layout="hf")


def test_lm_head_that_shares_the_embedding_is_written(tmp_path):
    head = random_head(own_embedding=True)
    head.tensors["lm_head.weight"] = head.tensors["embed_tokens.weight"]
    assert_same_head(load_draft(save_draft(head, tmp_path)), head)


def test_both_spellings_of_the_layers_are_written(tmp_path):
    """vLLM reads the top one as inputs of layers, SGLang the nested one as outputs."""
    save_draft(random_head(feature_layers=(2, 18, 33)), tmp_path)
    config, _ = read_folder(tmp_path)
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 18, 33]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 17, 32]


def test_target_hidden_size_is_written_where_it_differs(tmp_path):
    """SafeAILab's code expects an embedding in the file if the field exists, with any value."""
    save_draft(random_head(), tmp_path)
    assert "target_hidden_size" not in read_folder(tmp_path)[0]
    save_draft(random_head(target_hidden_size=24), tmp_path)
    assert read_folder(tmp_path)[0]["target_hidden_size"] == 24


@pytest.mark.parametrize("layout", ["eagle", "speculators"])
def test_target_and_tokenizer_are_recorded(tmp_path, layout):
    tokenizer = assets.load_tokenizer()
    save_draft(random_head(), tmp_path, layout=layout, target_name="o/n", tokenizer=tokenizer)
    record = load_draft(tmp_path).record
    assert record.target_name == "o/n"
    assert record.tokenizer_fingerprint == tokenizer_fingerprint(tokenizer)
    # A head that is read and written again keeps both.
    save_draft(load_draft(tmp_path), tmp_path / "again", layout=layout)
    again = load_draft(tmp_path / "again").record
    assert again.target_name == "o/n"
    assert again.tokenizer_fingerprint == record.tokenizer_fingerprint


@pytest.mark.parametrize("layout", ["eagle", "speculators"])
def test_absent_epsilon_is_that_of_transformers_configs(tmp_path, layout):
    """1e-6, as in SafeAILab's EConfig, LlamaConfig and Qwen3Config."""
    folder = save_draft(random_head(rms_norm_eps=0.5), tmp_path, layout=layout)
    config, tensors = read_folder(folder)
    del (config if layout == "eagle" else config["transformer_layer_config"])["rms_norm_eps"]
    write_folder(folder, config, tensors)
    head = load_draft(folder)
    assert head.config.rms_norm_eps == 1e-6 == LlamaConfig().rms_norm_eps
    assert Qwen3Config().rms_norm_eps == 1e-6


# --- other spellings of the same head ----------------------------------------------------------------


def rename(old: str, new: str):
    def edit(config, tensors):
        for name in [name for name in tensors if old in name]:
            tensors[name.replace(old, new)] = tensors.pop(name)

    return edit


def settings(**values):
    return lambda config, tensors: config.update(values)


def without(*names):
    def edit(config, tensors):
        for name in names:
            del config[name]

    return edit


def old_rope_scaling(config, tensors):
    scaling = config["rope_scaling"]
    scaling["type"] = scaling.pop("rope_type")


def prefixed(config, tensors):
    for name in list(tensors):
        if name not in ("lm_head.weight", "d2t", "t2d"):
            tensors[f"model.{name}"] = tensors.pop(name)


def legacy_aux_norms(config, tensors):
    config["use_aux_norm"] = config.pop("fc_norm")
    for index, name in enumerate(("low", "mid", "high")):
        tensors[f"aux_norm_{name}.weight"] = tensors.pop(f"fc_norm.{index}.weight")


def vllm_peagle(field):
    """As published for vLLM: EAGLE-3's config, several layers, the token's id under one of many names."""

    def edit(config, tensors):
        decoder = config.pop("transformer_layer_config")
        for name in ("speculators_model_type", "speculators_config", "mask_token_id"):
            del config[name]
        config.update(decoder, architectures=["LlamaForCausalLMEagle3"])
        section, _, name = field.rpartition(".")
        (config.setdefault(section, {}) if section else config)[name] = 7

    return edit


def with_buffers(config, tensors):
    tensors["layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    tensors["verifier_norm.weight"] = torch.ones(32)


def fc_that_is_not_run(config, tensors):
    tensors["fc.weight"] = torch.ones(32, 96)


SPELLINGS = {
    "layers.0": ("eagle", {}, rename("midlayer.", "layers.0.")),
    "midlayer": ("speculators", {}, rename("layers.0.", "midlayer.")),
    "model-prefix": ("eagle", {"draft_vocab_size": 40, "own_embedding": True}, prefixed),
    "vllm-d2t": ("eagle", {"draft_vocab_size": 40}, rename("d2t", "draft_id_to_target_id")),
    "legacy-norms": ("eagle", {"fc_norm": True}, legacy_aux_norms),
    "legacy-norms-silent": ("eagle", {"fc_norm": True}, without("fc_norm")),
    "nested-layers": ("eagle", {"feature_layers": (2, 30, 58)}, without("eagle_aux_hidden_state_layer_ids")),
    "nested-norm-before-fc": ("eagle", {"norm_before_fc": True}, without("norm_before_fc")),
    "silent-norm-before-fc": ("eagle", {"norm_before_fc": True}, without("eagle_config", "norm_before_fc")),
    "no-rope": ("eagle", {}, without("rope_theta", "rope_scaling")),
    "old-rope": ("eagle", {"rope_parameters": LLAMA3_ROPE}, old_rope_scaling),
    "no-head-dim": ("eagle", {}, without("head_dim")),
    "no-kv-heads": ("eagle", {"num_kv_heads": 4}, without("num_key_value_heads")),
    "safeailab": ("eagle", {"draft_vocab_size": 40},
        without("eagle_config", "num_aux_hidden_states", "norm_output")),
    "nulls": ("eagle", {}, settings(rope_scaling=None, target_hidden_size=None, sliding_window=None)),
    "text-part-of-a-vision-model": ("eagle",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 1, 1]}},
        settings(rope_scaling={"type": "mrope", "mrope_section": [2, 1, 1]})),
    "window-that-is-off": ("eagle", {}, settings(sliding_window=512, use_sliding_window=False)),
    "reused-lm-head": ("eagle", {"own_lm_head": False},
        settings(draft_vocab_size=97, reuse_target_lm_head=True)),
    "buffers": ("eagle", {}, with_buffers),
    "unused-fc": ("eagle", EAGLE["no-features"], fc_that_is_not_run),
    "silent-residual": ("speculators", {"norm_before_residual": True}, without("norm_before_residual")),
    "silent-peagle": ("speculators", {"mask_token_id": 3}, without("norm_before_residual")),
    **{
        f"peagle-{field}": ("speculators", {"mask_token_id": 7, "num_layers": 2}, vllm_peagle(field))
        for field in ("mask_token_id", "dflash_config.mask_token_id", "dspark_noise_token_id", "pard_token",
            "ptd_token_id")
    },
}  # fmt: skip


@pytest.mark.parametrize("case", SPELLINGS)
def test_other_spellings_give_the_same_head(tmp_path, case):
    layout, options, edit = SPELLINGS[case]
    head = random_head(**options)
    config, tensors = read_folder(save_draft(head, tmp_path / "ours", layout=layout))
    before = json.dumps(config), sorted(tensors)
    edit(config, tensors)
    assert before != (json.dumps(config), sorted(tensors)), "the case changes nothing"
    assert_same_head(load_draft(write_folder(tmp_path / "theirs", config, tensors)), head)


def test_tied_lm_head_is_the_heads_embedding_or_the_targets(tmp_path):
    """As in SGLang: the head's own embedding, or the target's if the head has none."""
    config, tensors = read_folder(save_draft(random_head(own_embedding=True), tmp_path))
    config["tie_word_embeddings"] = True
    del tensors["lm_head.weight"]
    head = load_draft(write_folder(tmp_path, config, tensors))
    assert head.config.own_lm_head and not head.record.tied
    assert torch.equal(head.tensors["lm_head.weight"], tensors["embed_tokens.weight"])
    del tensors["embed_tokens.weight"]
    head = load_draft(write_folder(tmp_path, config, tensors))
    assert not head.config.own_lm_head and head.record.tied
    assert_same_head(load_draft(save_draft(head, tmp_path / "again")), head)


# --- files -------------------------------------------------------------------------------------------


def test_path_of_a_weight_file_is_accepted(tmp_path):
    head = random_head()
    save_draft(head, tmp_path)
    assert_same_head(load_draft(tmp_path / "model.safetensors"), head)
    assert_same_head(load_draft(str(tmp_path)), head)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "anything.pt"])
def test_torch_files_give_the_same_head(tmp_path, name):
    head = random_head("eagle1", torch.float16, own_embedding=True)
    _, tensors = read_folder(save_draft(head, tmp_path))
    (tmp_path / "model.safetensors").unlink()
    torch.save(tensors, tmp_path / name)
    assert_same_head(load_draft(tmp_path), head)


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_sharded_files_give_the_same_head(tmp_path, suffix):
    head = random_head(draft_vocab_size=40)
    _, tensors = read_folder(save_draft(head, tmp_path))
    (tmp_path / "model.safetensors").unlink()
    write_shards(tmp_path, tensors, suffix)
    assert_same_head(load_draft(tmp_path), head)


def write_shards(folder: Path, tensors: dict[str, torch.Tensor], suffix: str) -> None:
    stem = "model" if suffix == "safetensors" else "pytorch_model"
    save = save_file if suffix == "safetensors" else torch.save
    weight_map = {}
    for part in range(2):
        names = sorted(tensors)[part::2]
        file = f"{stem}-0000{part + 1}-of-00002.{suffix}"
        save({name: tensors[name] for name in names}, folder / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps(index))


def test_hub_id_is_read_from_the_cache_when_offline(tmp_path, monkeypatch):
    """The folders are those of huggingface_hub's cache."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "models--org--head"
    head = random_head()
    save_draft(head, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    found = load_draft("org/head")
    assert_same_head(found, head)
    assert found.source == "org/head"
    assert_same_head(load_draft("org/head", revision=commit), head)
    message = "'org/other' is neither a file .* not in the hub's cache, and HF_HUB_OFFLINE"
    with pytest.raises(OSError, match=message):
        load_draft("org/other")


def test_pickles_are_fetched_only_without_safetensors(tmp_path, monkeypatch):
    head = random_head()
    _, tensors = read_folder(save_draft(head, tmp_path))
    (tmp_path / "model.safetensors").unlink()
    asked = []

    def snapshot_download(name, *, allow_patterns, revision, token):
        asked.append((name, allow_patterns, revision, token))
        if "*.bin" in allow_patterns:
            torch.save(tensors, tmp_path / "pytorch_model.bin")
        return str(tmp_path)

    monkeypatch.setattr(
        "specdec_ext.heads.checkpoints.storage.files.snapshot_download", snapshot_download
    )
    monkeypatch.setattr("specdec_ext.heads.checkpoints.storage.hub.hub_answers", lambda: True)
    assert_same_head(load_draft("org/head", revision="v1", token="secret"), head)
    assert asked == [
        ("org/head", ["*.json", "*.safetensors"], "v1", "secret"),
        ("org/head", ["*.json", "*.bin", "*.pt"], "v1", "secret"),
    ]


# --- overrides ---------------------------------------------------------------------------------------


def test_overrides_replace_the_checkpoints_options(tmp_path):
    save_draft(random_head(norm_output=True, feature_layers=(2, 3, 4)), tmp_path)
    head = load_draft(tmp_path, norm_output=False, feature_layers=[1, 2, 3], dtype=torch.bfloat16)
    assert head.config.norm_output is False
    assert head.config.feature_layers == (1, 2, 3)
    assert "the argument feature_layers" in head.record.layers_from
    assert {tensor.dtype for tensor in head.tensors.values()} == {torch.bfloat16}


def test_mixed_dtypes_are_converted_on_request(tmp_path):
    """Old EAGLE-1 files have a float32 embedding beside float16 weights."""
    head = random_head("eagle1", torch.float16, own_embedding=True)
    config, tensors = read_folder(save_draft(head, tmp_path))
    tensors["embed_tokens.weight"] = tensors["embed_tokens.weight"].float()
    write_folder(tmp_path, config, tensors)
    assert_same_head(load_draft(tmp_path, dtype=torch.float16), head)


def test_override_of_none_changes_nothing(tmp_path):
    head = random_head(norm_output=True, feature_layers=(2, 3, 4))
    save_draft(head, tmp_path)
    assert_same_head(load_draft(tmp_path, feature_layers=None, norm_output=None), head)


def test_rope_windows_and_scale_can_be_overridden(tmp_path):
    save_draft(random_head(), tmp_path)
    rope = {"type": "linear", "factor": 2}
    config = load_draft(tmp_path, rope_parameters=rope, sliding_windows=[7], logit_scale=2).config
    assert config.rope_parameters == {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2}
    assert config.sliding_windows == (7,)
    assert config.logit_scale == 2


@pytest.mark.parametrize(
    "overrides, message",
    [
        ({"hidden_size": 3}, "can't override hidden_size; it can override feature_layers, "),
        ({"feature_layers": (1, 2)}, r"feature_layers=.* reads 3 different hidden states"),
        ({"feature_layers": (1, 2, 2)}, "reads 3 different hidden states"),
        ({"feature_layers": (-2, 1, 2)}, "numbered from 0, or -1 for the last"),
        ({"sliding_windows": (1, 2)}, "for each of the 1 layers"),
        ({"sliding_windows": (0,)}, "a number of tokens or None"),
        ({"norm_output": "no"}, "norm_output is 'no'; expected true or false"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps is -1.0"),
        ({"rope_parameters": {"rope_type": "spiral"}}, "rope_type is 'spiral'"),
    ],
)
def test_invalid_overrides_are_refused(tmp_path, overrides, message):
    save_draft(random_head(), tmp_path)
    with pytest.raises(ValueError, match=message):
        load_draft(tmp_path, **overrides)


@pytest.mark.parametrize("kind, layers", [("eagle3", (1, 2, 3)), ("eagle1", (-1,))])
def test_unkept_tensors_are_read_and_checked_at_each_access(kind, layers, tmp_path):
    """A drafter that is named by its folder keeps its tensors in the file."""
    head = random_head(kind, torch.bfloat16, feature_layers=layers)
    save_draft(head, tmp_path)
    unkept = load_draft(tmp_path, keep=False)
    assert_same_head(unkept, load_draft(tmp_path))
    name = "layers.0.mlp.down_proj.weight"
    tensors = unkept.to("cpu", torch.float32).tensors
    assert isinstance(tensors, UnkeptTensors) and tensors[name] is not tensors[name]
    assert tensors[name].dtype == torch.float32 and len(tensors) == len(head.tensors)
    with pytest.raises(KeyError, match=r"layers\.7"):
        tensors["layers.7"]
    named = resolve_drafter(str(tmp_path), tiny_model("llama"))
    assert isinstance(named.head.tensors, UnkeptTensors)
    damaged = {**load_file(tmp_path / "model.safetensors")}
    stored = next(key for key in damaged if key.endswith("mlp.down_proj.weight"))
    damaged[stored][3, 2] = torch.nan
    save_file(damaged, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="holds NaN or infinity"):
        tensors[name]
