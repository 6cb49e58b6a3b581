"""Damaged and foreign checkpoints: each is a clear error, none a crash, a silent start or a run of its code.

Claims: every case of the tables below raises ValueError or OSError whose message names what is wrong;
no value of a config.json's field and no wrong byte of a header raises anything else.
"""

from __future__ import annotations

import copy
import functools
import json
import os
import pickle
import random
import re
import struct
import tracemalloc
import warnings
import zipfile
from pathlib import Path

import pytest
import torch
from helpers.drafters.checkpoint_cases import random_head, read_folder, write_folder
from safetensors.torch import save_file

from specdec_ext.heads.checkpoints import load_draft, save_draft

HEADS = {
    "eagle1": ("eagle", "eagle1", {"own_embedding": True}),
    "eagle3": ("eagle", "eagle3", {"draft_vocab_size": 40, "feature_layers": (2, 4, 5)}),
    "full": ("eagle", "eagle3", {}),
    "fc_norm": ("eagle", "eagle3", {"fc_norm": True}),
    "speculators": ("speculators", "eagle3", {"draft_vocab_size": 40, "own_embedding": True}),
    "windows": ("speculators", "eagle3", {"num_layers": 2, "sliding_windows": (16, None)}),
    "peagle": ("speculators", "eagle3", {"mask_token_id": 7, "num_layers": 2}),
    "mtp": ("speculators", "mtp", {}),
}


@functools.cache
def contents(name: str, folder: Path):
    layout, kind, options = HEADS[name]
    return read_folder(save_draft(random_head(kind, **options), folder / name, layout=layout))


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("heads")


def parts(name: str, folder: Path):
    """A config and tensors that a test may change."""
    config, tensors = contents(name, folder)
    return copy.deepcopy(config), {name: tensor.clone() for name, tensor in tensors.items()}


# --- tensors and fields ------------------------------------------------------------------------------


def drop(*names):
    def edit(config, tensors):
        for name in names:
            del tensors[name]

    return edit


def put(name, *shape, dtype=torch.float32, fill=1.0):
    def edit(config, tensors):
        tensors[name] = torch.full(shape, fill, dtype=dtype)

    return edit


def change(name, function):
    def edit(config, tensors):
        tensors[name] = function(tensors[name])

    return edit


def field(path, value):
    def edit(config, tensors):
        *sections, name = path.split(".")
        for section in sections:
            config = config.setdefault(section, {})
        config[name] = value

    return edit


def no_field(path):
    def edit(config, tensors):
        *sections, name = path.split(".")
        for section in sections:
            config = config[section]
        del config[name]

    return edit


def both(*edits):
    def edit(config, tensors):
        for each in edits:
            each(config, tensors)

    return edit


def at(index, value):
    def function(tensor):
        tensor.view(-1)[index] = value
        return tensor

    return function


def only(*names):
    """A checkpoint of nothing but these tensors."""

    def edit(config, tensors):
        tensors.clear()
        tensors.update({name: torch.ones(4, 4) for name in names})

    return edit


# name -> ([the head, without which it is "eagle3"], the edit, the message)
DAMAGE = {
    # missing and surplus
    "no lm_head": (drop("lm_head.weight"),
        r"lacks lm_head\.weight\. Missing tensors are not initialised at random"),
    "no lm_head, full vocabulary": ("full", drop("lm_head.weight"), r"lacks lm_head\.weight"),
    "no lm_head, tied, small vocabulary": (
        both(drop("lm_head.weight"), field("tie_word_embeddings", True)), r"lacks lm_head\.weight"),
    "no d2t": (drop("d2t"), "lacks d2t"),
    "no fc": (drop("fc.weight"), r"lacks fc\.weight"),
    "no fc, eagle1": ("eagle1", drop("fc.weight"), "a damaged head without fc.weight"),
    "no hidden_norm": (drop("midlayer.hidden_norm.weight"), r"lacks layers\.0\.hidden_norm\.weight"),
    "no norms and no q_proj": (drop("norm.weight", "midlayer.self_attn.q_proj.weight"),
        r"lacks layers\.0\.self_attn\.q_proj\.weight, norm\.weight"),
    "no second layer": ("peagle", drop("layers.1.mlp.down_proj.weight"),
        r"lacks layers\.1\.mlp\.down_proj\.weight"),
    "the target's number of layers": (field("num_hidden_layers", 36),
        r"lacks layers\.1\.input_layernorm.* and 295 more\. Missing"),
    "no mask_hidden": ("peagle", drop("mask_hidden"), "lacks mask_hidden"),
    "no norm of the embedding": ("mtp", drop("mtp_layers.0.token_layernorm.weight"),
        "is a DFlash head"),
    "no norm of the hidden state": ("mtp", drop("mtp_layers.0.hidden_layernorm.weight"),
        r"lacks hidden_norm\.weight"),
    "MTP, no input_layernorm": ("mtp", drop("mtp_layers.0.input_layernorm.weight"),
        r"lacks layers\.0\.input_layernorm\.weight"),
    "MTP of EAGLE's type": ("mtp", field("speculators_model_type", "eagle3"),
        "speculators_model_type is 'eagle3'; expected 'mtp' for these tensors"),
    "MTP without a type": ("mtp", no_field("speculators_model_type"), "speculators_model_type is None"),
    "two MTP layers": ("mtp", field("num_nextn_predict_layers", 2), "only heads of 1 layer"),
    "one fc_norm of three": ("fc_norm", drop("fc_norm.1.weight"), r"lacks fc_norm\.1\.weight"),
    "fc_norm declared, not there": (field("fc_norm", True), r"lacks fc_norm\.0\.weight, fc_norm\.1"),
    "input_norm there, denied": (put("input_norm.weight", 96), r"it has input_norm\.weight"),
    "bias declared, not there": ("eagle1", field("bias", True), r"lacks fc\.bias"),
    "attention_bias, but none of o_proj": ("speculators",
        both(field("transformer_layer_config.attention_bias", True),
            *(put(f"layers.0.self_attn.{name}_proj.bias", 32 if name == "q" else 16) for name in "qkv")),
        r"lacks layers\.0\.self_attn\.o_proj\.bias\."),
    "bias in one of three": (put("midlayer.self_attn.k_proj.bias", 16),
        r"lacks layers\.0\.self_attn\.q_proj\.bias, layers\.0\.self_attn\.v_proj\.bias"),
    "a third layer": ("peagle", put("layers.2.mlp.up_proj.weight", 48, 32),
        r"it has layers\.2\.mlp\.up_proj\.weight, which a head with its config does not have"),
    "two spellings at once": (put("layers.0.hidden_norm.weight", 32),
        "layers.0.hidden_norm.weight and midlayer.hidden_norm.weight are two names"),
    # shapes and types
    "transposed fc": (change("fc.weight", lambda t: t.T.contiguous()),
        r"fc\.weight has shape \[96, 32\].*\[32, 96\]"),
    "wrong lm_head": (put("lm_head.weight", 97, 32), r"lm_head\.weight has shape \[97, 32\].*\[40, 32\]"),
    "short norm": (put("norm.weight", 31), r"norm\.weight has shape \[31\].*\[32\]"),
    "scalar norm": (put("norm.weight"), r"norm\.weight has shape \[\]"),
    "four features in fc": (put("fc.weight", 32, 128), r"fc\.weight has shape \[32, 128\]"),
    "wrong mask_hidden": ("peagle", put("mask_hidden", 1, 1, 32), r"mask_hidden has shape \[1, 1, 32\]"),
    "integer weights": (put("norm.weight", 32, dtype=torch.int64, fill=1), "norm.weight is torch.int64"),
    "eight bits": (put("fc.weight", 32, 96, dtype=torch.float8_e4m3fn), "fc.weight is of a quantised type"),
    "mixed types": (put("fc.weight", 32, 96, dtype=torch.float16),
        r"mixes dtypes: .*torch\.float16.*pass dtype="),
    "NaN": (change("midlayer.mlp.up_proj.weight", at(5, float("nan"))), "up_proj.weight holds NaN or inf"),
    "infinity": ("eagle1", change("embed_tokens.weight", at(-1, float("inf"))),
        "embed_tokens.weight holds NaN or inf"),
    # the draft vocabulary
    "d2t too large": (change("d2t", at(-1, 97)), r"d2t\[39\] is 97, .*target id 136, .*has 97"),
    "d2t negative": (change("d2t", at(0, -1)), r"d2t\[0\] is -1, so draft id 0 is target id -1"),
    "d2t overflows": (change("d2t", at(3, 2**63 - 2)), r"d2t\[3\] is 9223372036854775806"),
    "d2t not ascending": (change("d2t", lambda t: t.flip(0)), r"expected ascending target ids"),
    "d2t holds ids": (change("d2t", lambda t: t + torch.arange(40)),
        r"target id \d+, .*this one may hold ids"),
    "d2t of floats": (change("d2t", lambda t: t.float()), r"d2t has shape \[40\] and dtype torch\.float32"),
    "d2t too short": (change("d2t", lambda t: t[:-1].clone()), r"d2t has shape \[39\]"),
    "d2t of a full vocabulary": ("full", put("d2t", 97, dtype=torch.int64), "draft id 96 is target id 97"),
    "t2d of another head": (change("t2d", lambda t: t.roll(1)), "t2d and d2t name different"),
    "t2d too short": (change("t2d", lambda t: t[:-1].clone()), r"t2d has shape \[96\]"),
    # the config
    "no hidden_size": (no_field("hidden_size"), "config.json has no hidden_size; expected an integer"),
    "no vocab_size": (no_field("vocab_size"), "has no vocab_size"),
    "no decoder": ("speculators", no_field("transformer_layer_config"),
        "transformer_layer_config has no num_attention"),
    "decoder is a list": ("speculators", field("transformer_layer_config", []),
        r"is \[\]; expected an object"),
    "negative size": (field("hidden_size", -32), "hidden_size is -32; expected an integer from 1"),
    "zero heads": (field("num_attention_heads", 0), "num_attention_heads is 0"),
    "huge size": (field("intermediate_size", 10**12), "intermediate_size is 1000000000000"),
    "large size": (field("intermediate_size", 10**7), r"its config requires \[10000000, 32\]"),
    "a million layers": (field("num_hidden_layers", 10**6), "num_hidden_layers is 1000000; .* to 256"),
    "size as text": (field("hidden_size", "32"), "hidden_size is '32'"),
    "size as float": (field("hidden_size", 32.0), "hidden_size is 32.0"),
    "size as truth": (field("num_hidden_layers", True), "num_hidden_layers is True"),
    "flag as text": (field("norm_output", "false"), "norm_output is 'false'; expected true or false"),
    "eps is NaN": (field("rms_norm_eps", float("nan")), "rms_norm_eps is nan"),
    "eps is infinite": (field("rms_norm_eps", float("inf")), "a finite number above 0"),
    "eps negative": (field("rms_norm_eps", -1e-5), "expected a finite number above 0"),
    "heads do not divide": (field("num_key_value_heads", 3), "num_key_value_heads 3; expected .* a multiple"),
    "odd head_dim": (field("head_dim", 7), "head_dim 7; expected an even integer"),
    "more draft than target tokens": (field("draft_vocab_size", 98), r"lm_head\.weight has shape \[40, 32\]"),
    "other activation": (field("hidden_act", "gelu"), "hidden_act is 'gelu'"),
    "unknown rope": (field("rope_scaling", {"type": "spiral", "factor": 2}),
        "rope_type is 'spiral'; expected one"),
    "rope without factor": (field("rope_scaling", {"type": "linear"}), "rope_parameters has no factor"),
    "longrope without factors": (field("rope_scaling", {"rope_type": "longrope", "factor": 2.0}),
        "rope_parameters .* can't be used: "),
    "longrope with factors of another width": (
        field("rope_scaling", {"type": "su", "short_factor": [1.0], "long_factor": [1.0] * 3}),
        "rope_parameters .* can't be used: "),
    "theta negative": (field("rope_theta", -1.0), "rope_theta is -1.0"),
    "window without size": ("windows", field("transformer_layer_config.sliding_window", None),
        "but no sliding_window"),
    "unknown layer type": ("windows",
        field("transformer_layer_config.layer_types", ["full_attention", "mamba"]),
        "layer_types has 'mamba'"),
    "layer types of another depth": ("windows",
        field("transformer_layer_config.layer_types", ["full_attention", "sliding_attention"] * 2),
        "layer_types has 4 entries for 2 layers"),
    "layers as texts": (field("eagle_aux_hidden_state_layer_ids", ["2", "4", "5"]), "a list of integers"),
    "layer twice": (both(no_field("specdec_ext"), field("eagle_aux_hidden_state_layer_ids", [2, 2, 5])),
        "expected different layers"),
    "negative layer": (both(no_field("specdec_ext"), field("eagle_aux_hidden_state_layer_ids", [-1, 2, 5])),
        "expected different layers, numbered from 0"),
    "too few layers": (field("eagle_aux_hidden_state_layer_ids", [2, 5]),
        "names two different sets of target layers"),
    "contradicting layers": (field("eagle_config.eagle_aux_hidden_state_layer_ids", [1, 17, 32]),
        r"\[2, 4, 5\] and eagle_config.* \[1, 17, 32\]; pass .* feature_layers"),
    "layers and their number": (field("num_aux_hidden_states", 4),
        r"num_aux_hidden_states is 4, but the config names the layers"),
    "no mask token": ("peagle", no_field("mask_token_id"), "pass mask_token_id="),
    "a P-EAGLE head without mask_hidden": (
        both(field("architectures", ["PEagleDraftModel"]), field("ptd_token_id", 3)), "lacks mask_hidden"),
    "mask token outside": ("peagle", field("mask_token_id", 97),
        r"mask_token_id=97 must be in \[0, vocab_size=97\)"),
    "speculators dflash": ("speculators", field("speculators_model_type", "dflash"),
        "is 'dflash'; expected 'eagle3' or 'peagle' for"),
    # other kinds of checkpoint
    "latent attention": (put("midlayer.self_attn.kv_a_proj_with_mqa.weight", 8, 64), "latent attention"),
    "MTP": (only("enorm.weight", "hnorm.weight", "eh_proj.weight"), "is an MTP head"),
    "Qwen3-Next MTP": (only("fc.weight", "pre_fc_norm_hidden.weight"), "is an MTP head"),
    "DFlash": (only("hidden_norm.weight", "fc.weight", "norm.weight"), "is a DFlash head"),
    "DSpark": (only("fc.weight", "hidden_norm.weight", "markov_head.markov_w2.weight"),
        "is a DSpark head"),
    "DFlash2": (only("fc.weight", "candidate_selector.hidden_projection.weight"), "is a DFlash2 head"),
    "XPress": (only("fc.weight", "refiner_head.readout.weight"), "is an XPress head"),
    "Hydra": (only("hydra_mlp.0.0.linear.weight"), "is a set of Hydra heads"),
    "ReDrafter": (only("rnn_u.weight", "rnn_w.weight", "lm_head.0.linear.weight"), "is a ReDrafter head"),
    "LoRA": (only("base_model.model.layers.0.q_proj.lora_A.weight"), "is a LoRA adapter"),
    "quantised": (only("layers.0.self_attn.q_proj.qweight"), "is a quantised checkpoint"),
    "experts": (put("midlayer.mlp.experts.0.up_proj.weight", 2, 2), "mixture of experts"),
    "language model": (only("model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"),
        "is a language model, or"),
    "nothing of ours": (only("encoder.conv1.weight"), "is not a draft head: .*it has encoder.conv1.weight"),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGE)
def test_error_names_the_damaged_part(tmp_path, folder, case):
    *head, edit, message = DAMAGE[case]
    config, tensors = parts(*head or ["eagle3"], folder)
    edit(config, tensors)
    with pytest.raises(ValueError, match=message) as error:
        load_draft(write_folder(tmp_path / "head", config, tensors))
    assert str(tmp_path / "head") in str(error.value), "which checkpoint?"


def test_undamaged_heads_are_read(folder):
    """The table's errors come from its edits."""
    for name in HEADS:
        contents(name, folder)
        load_draft(folder / name)


# --- files -------------------------------------------------------------------------------------------


class Payload:
    """An object whose unpickling would run code: it makes a folder."""

    def __init__(self, evidence: Path):
        self.evidence = evidence

    def __reduce__(self):
        return os.mkdir, (str(self.evidence),)


def truncated(path: Path, kept: float) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * kept)])


def as_torch_file(folder: Path, content) -> Path:
    (folder / "model.safetensors").unlink()
    torch.save(content, folder / "pytorch_model.bin")
    return folder / "pytorch_model.bin"


def huge_header(folder: Path) -> None:
    header = b'{"a":{"dtype":"F32","shape":[1000000000,1000000000],"data_offsets":[0,4]}}'
    content = struct.pack("<Q", len(header)) + header + bytes(4)
    (folder / "model.safetensors").write_bytes(content)


def index_of(folder: Path, weight_map) -> None:
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def nested(*parts: torch.Tensor) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that its layout is a prototype
        return torch.nested.nested_tensor(list(parts))


def zipped(path: Path, compression: int, content: bytes) -> None:
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("archive/data.pkl", content)


def sparse_member(path: Path, size: int) -> None:
    """An archive with a pickle of this many bytes, of which the disk holds none."""
    zipped(path, zipfile.ZIP_STORED, b"")
    content = path.read_bytes()
    directory = content.index(b"PK\x01\x02")
    entry = bytearray(content[directory:])
    entry[20:28] = struct.pack("<II", size, size)
    end = entry.index(b"PK\x05\x06")
    entry[end + 16 : end + 20] = struct.pack("<I", directory + size)
    with path.open("r+b") as file:
        file.seek(directory + size)
        file.write(entry)


def overwrite(path: Path, old: bytes, new: bytes) -> None:
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new))


def text(name, content):
    return lambda folder: (folder / name).write_text(content)


FILES = {
    "truncated header": (lambda f: truncated(f / "model.safetensors", 0.001),
        "is damaged or not a safetensors"),
    "truncated tensors": (lambda f: truncated(f / "model.safetensors", 0.7),
        "is damaged or not a safetensors"),
    "empty weights": (text("model.safetensors", ""), "is damaged or not a safetensors"),
    "text as weights": (text("model.safetensors", "version https://git-lfs.github.com/spec/v1"),
        "is damaged or no"),
    "header of absurd size": (huge_header, "is damaged or not a safetensors"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(),
        "has no weight file; expected one of model.safe"),
    "two weights": (
        lambda f: [(f / "model.safetensors").rename(f / "a.safetensors"), save_file({}, f / "b.safetensors")],
        "has 2 files .* and no index of them: a.safetensors, b.safetensors; pass the path of one",
    ),
    "no config": (lambda f: (f / "config.json").unlink(), "config.json is missing"),
    "config is not JSON": (text("config.json", "{'hidden_size': 32}"), "config.json is not JSON: "),
    "config is a list": (text("config.json", "[1]"), "config.json holds a list; expected a JSON object"),
    "config nests too deeply": (text("config.json", '{"a":' * 100_000), "config.json is not JSON"),
    "config is not text": (lambda f: (f / "config.json").write_bytes(b"\xff\xfe\x00"), "is not JSON"),
    "pickle of code": (lambda f: as_torch_file(f, {"fc.weight": Payload(f / "ran")}),
        "is refused: .* can run any code"),
    "plain pickle of code": (lambda f: as_torch_file(f, {}).write_bytes(pickle.dumps(Payload(f / "ran"), 2)),
        "is refused"),
    "truncated torch file": (lambda f: truncated(as_torch_file(f, {"fc.weight": torch.ones(99)}), 0.5),
        "is damaged or not a torch file"),
    "text as torch file": (lambda f: as_torch_file(f, {}).write_text("nothing"), "pytorch_model.bin is "),
    "torch file of a list": (lambda f: as_torch_file(f, [torch.ones(2)]),
        "holds a list; expected a dict of names"),
    "torch file of settings": (lambda f: as_torch_file(f, {"epoch": 3}), "epoch is a int; expected a tensor"),
    "torch file of sparse tensors": (lambda f: as_torch_file(f, {"fc.weight": torch.eye(3).to_sparse()}),
        "fc.weight is not a dense tensor"),
    "torch file of nested tensors": (
        lambda f: as_torch_file(f, {"fc.weight": nested(torch.ones(2), torch.ones(3))}),
        "fc.weight is not a dense tensor",
    ),
    "compressed torch file": (lambda f: zipped(as_torch_file(f, {}), zipfile.ZIP_DEFLATED, bytes(2**24)),
        r"'archive/data.pkl' in it is compressed, from 16777216 bytes"),
    "torch file of names alone": (lambda f: sparse_member(as_torch_file(f, {}), 2**27),
        "has 134217728 bytes; expected at most 67108864"),
    "torch file with a torn directory": (
        lambda f: overwrite(as_torch_file(f, {"fc.weight": torch.ones(9)}), b"PK\x01\x02", b"PK\x01\x09"),
        "is damaged or not a torch file",
    ),
    "weights that are a pipe": (
        lambda f: ((f / "model.safetensors").unlink(), os.mkfifo(f / "model.safetensors")),
        "has no weight file",
    ),
    "config that is a pipe": (lambda f: ((f / "config.json").unlink(), os.mkfifo(f / "config.json")),
        "config.json is missing"),
    "config of a number without end": (text("config.json", '{"hidden_size": ' + "9" * 100_000 + "}"),
        "config.json is not JSON"),
    "tensor without bytes": (lambda f: as_torch_file(f, {"fc.weight": torch.ones(1).expand(2**20, 2**20)}),
        "the file has too few bytes"),
    "index leads out": (lambda f: index_of(f, {"fc.weight": "../part.safetensors"}),
        "is not the name of a weight file"),
    "index of itself": (lambda f: index_of(f, {"fc.weight": "model.safetensors.index.json"}),
        "is not the name of a weight file"),
    "index without file": (lambda f: index_of(f, {"fc.weight": "gone.safetensors"}),
        "lists 'gone.safetensors', which is"),
    "index of fewer": (lambda f: index_of(f, {"fc.weight": "part.safetensors"}),
        "and its files differ: d2t, "),
    "index of nothing": (lambda f: index_of(f, 3), "weight_map is 3; expected an object"),
    "index without map": (lambda f: index_of(f, None), "index.json lists no tensors"),
}  # fmt: skip


@pytest.mark.parametrize("case", FILES)
def test_error_names_the_damaged_file(tmp_path, folder, case):
    damage, message = FILES[case]
    write_folder(tmp_path, *parts("eagle3", folder))
    damage(tmp_path)
    with pytest.raises((ValueError, OSError), match=message):
        load_draft(tmp_path)
    assert not (tmp_path / "ran").exists(), "the checkpoint's code was run"


def test_missing_path_is_an_error():
    with pytest.raises(OSError, match="'no/such/folder' is neither a file nor a folder, nor a hub"):
        load_draft("no/such/folder")


def test_empty_path_is_not_the_working_directory(tmp_path, folder, monkeypatch):
    """A shell variable that is not set must not load a head from the current folder."""
    write_folder(tmp_path, *parts("eagle3", folder))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="path of the checkpoint is empty"):
        load_draft("")


# --- any value of any field --------------------------------------------------------------------------

NESTED = functools.reduce(lambda inner, _: [inner], range(300), 1)
STRANGE = [
    *(None, True, -1, 0, 1, 3, 2**40, 10**400, 1e400, float("nan"), 0.5),
    *("", "x", [], [[1]], NESTED, {}, {"a": {}}),
]
FAST = ("eagle3", "windows")


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in HEADS]
)
def test_no_field_can_crash(tmp_path, folder, name):
    """Each field in turn, sections included, has each strange value."""
    config, tensors = parts(name, folder)
    write_folder(tmp_path, config, tensors)

    def paths(values, prefix=()):
        for field, value in values.items():
            yield (*prefix, field)
            if isinstance(value, dict):
                yield from paths(value, (*prefix, field))

    for path in [*paths(config), ("layer_types",), ("rope_parameters",), ("dflash_config",)]:
        for value in STRANGE:
            strange = copy.deepcopy(config)
            functools.reduce(dict.__getitem__, path[:-1], strange)[path[-1]] = value
            (tmp_path / "config.json").write_text(json.dumps(strange))
            try:
                head = load_draft(tmp_path)
            except ValueError as error:
                assert len(str(error)) < 2000, (path, value)
            else:
                assert head.config.tensor_shapes().keys() == head.tensors.keys()


def test_no_byte_of_a_header_can_crash(tmp_path, folder):
    write_folder(tmp_path, *parts("eagle3", folder))
    path = tmp_path / "model.safetensors"
    content = path.read_bytes()
    header = 8 + struct.unpack("<Q", content[:8])[0]
    rng = random.Random(0)
    for _ in range(300):
        damaged = bytearray(content)
        damaged[rng.randrange(header)] = rng.randrange(256)
        path.write_bytes(damaged)
        try:
            load_draft(tmp_path)
        except (ValueError, OSError):
            continue


def test_sizes_are_refused_before_memory_is_allocated(tmp_path, folder):
    """A config that asks for terabytes costs no more memory than its text."""
    config, tensors = parts("eagle3", folder)
    config |= {"hidden_size": 2**23, "intermediate_size": 2**23, "head_dim": 2**21}
    write_folder(tmp_path, config, tensors)
    tracemalloc.start()
    with pytest.raises(ValueError, match=re.escape("its config requires")):
        load_draft(tmp_path)
    assert tracemalloc.get_traced_memory()[1] < 2**22
    tracemalloc.stop()
