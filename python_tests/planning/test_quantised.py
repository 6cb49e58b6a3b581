"""``plan`` of models that ``quantize`` has changed, or would change."""

from __future__ import annotations

import json

import pytest
import torch
from helpers.models.tiny import random_model
from transformers import AutoModelForCausalLM

from specdec_ext import assets, quantize
from specdec_ext.planning.memory import plan
from specdec_ext.planning.sizes.configs import ConfigFile
from specdec_ext.planning.sizes.language_model import LanguageModel

BUNDLED = assets.FOLDER / "tiny-python-target"
# Not all sizes are multiples of a group, and of a block of packed codes.
SIZES = dict(hidden_size=160, intermediate_size=272, head_dim=24)
# Arguments of ``quantize``, and what ``--quantisation`` calls the same; None if it has no name.
FORMATS = [
    (dict(), "int8"),
    (dict(group_size=32), "int8:32"),
    (dict(symmetric=False), None),
    (dict(weights="int4"), "int4"),
    (dict(weights="int4", group_size=128), "int4:128"),
    (dict(weights="int4", group_size=32, symmetric=False), "int4:32:offsets"),
    (dict(weights="int4", group_size=128, symmetric=False), "int4:128:offsets"),
    (dict(weights="int4", head="int4", skip=("q_proj",)), None),
    (dict(weights="int4", head=None), None),
]


def planned(folder, quantisation="auto") -> LanguageModel:
    return LanguageModel.of(ConfigFile.find(folder), "auto", quantisation, "cpu")


def held(model) -> int:
    """Bytes of the parameters and buffers of a model that was loaded; those that are shared count once."""
    tensors = {id(each): each for each in (*model.parameters(), *model.buffers())}
    return sum(each.nbytes for each in tensors.values())


def weights(found) -> int:
    parts = ("target: embedding", "target: lm_head", "target: other weights")
    return sum(part.num_bytes for part in found.parts if part.name in parts)


@pytest.mark.parametrize(("arguments", "name"), FORMATS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_size_is_that_of_the_loaded_model(arguments, name, dtype, tmp_path):
    model = random_model("qwen2", tie_word_embeddings=True, **SIZES).to(dtype)
    model.save_pretrained(tmp_path / "plain")
    quantize(model, **arguments).save_pretrained(tmp_path / "codes")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "codes", dtype="auto")
    assert planned(tmp_path / "codes").weights.total == held(loaded)
    assert weights(plan(tmp_path / "codes", context=64, new_tokens=8, device="cpu")) == held(loaded)
    if name is not None:
        assert planned(tmp_path / "plain", name).weights == planned(tmp_path / "codes").weights


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2", "mixtral", "phi"])
def test_architectures(kind, tmp_path):
    """Conv1D, untied and tied heads, and experts that stay as they are."""
    quantize(random_model(kind), "int4", symmetric=False).save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert planned(tmp_path).weights.total == held(loaded)


def test_levels_are_counted(tmp_path):
    """As in checkpoints of bitsandbytes that ``repack`` has read."""
    quantize(random_model("llama"), "int4").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    before, layers = planned(tmp_path).weights, 0
    for layout in config["quantization_config"]["layouts"]:
        layout["levels"] = layout["bits"] == 4
        layers += len(layout["layers"]) if layout["levels"] else 0
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert layers and planned(tmp_path).weights.total == before.total + layers * 16 * 4


def test_the_parts_of_a_quantised_head():
    """It is counted beside the embedding with which it shared its weight."""
    tied, codes = (planned(BUNDLED, name).weights for name in ("none", "int4:128"))
    assert tied.lm_head == 0 and codes.embedding == tied.embedding
    outs, width = 4096, 256
    assert codes.lm_head == outs * (width + 4)  # int8, with a float32 scale per output
    assert codes.unpacked == 0


def test_passes_run_on_the_layers_with_codes():
    """Activations do not depend on the format of the weights."""
    plain, codes = (planned(BUNDLED, name) for name in ("none", "int8"))
    assert codes.run(2, 24, True) == plain.run(2, 24, True)
    assert codes.bytes_per_slot == plain.bytes_per_slot
    assert codes.parameters == plain.parameters


def test_the_format_is_shown():
    found = plan(BUNDLED, context=300, quantisation="int4:128:offsets", device="cpu")
    assert found.settings["quantisation"] == "int4:128:offsets"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("int4:33", "group_size=33; expected 32, 64, 128"),
        ("int4:", "quantisation='int4:' is not known; expected auto, none, float8, int8, int4, or"),
        ("int4:128:zeros", "quantisation='int4:128:zeros' is not known"),
        ("int4:128:offsets:more", "is not known"),
        ("float8:128", "quantisation='float8:128' is not known"),
    ],
)
def test_formats_that_are_not_known(name, message):
    with pytest.raises(ValueError, match=message):
        plan(BUNDLED, quantisation=name, device="cpu")


def test_codes_are_for_the_cpu(tmp_path):
    with pytest.raises(ValueError, match=r"int4:128 is a format for the CPU; pass device='cpu'"):
        plan(BUNDLED, quantisation="int4:128")
    quantize(random_model("llama"), "int4").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"specdec_ext, 8 and 4 bits is a format for the CPU"):
        plan(tmp_path)
    with pytest.raises(ValueError, match=r"specdec_ext, 8 and 4 bits is a format for the CPU"):
        plan(BUNDLED, tmp_path)


def test_a_head_can_share_numbers_only(tmp_path):
    target = random_model("llama").config.to_dict()
    shared = dict(target, architectures=["LlamaForCausalLMEagle3"], num_hidden_layers=1)
    for name, values in (("target", target), ("shared", shared)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(values))
    arguments = dict(context=64, new_tokens=8, device="cpu")
    assert plan(tmp_path / "target", tmp_path / "shared", **arguments).shared
    with pytest.raises(ValueError, match=r"no lm_head of its own, and that of .* is quantised"):
        plan(tmp_path / "target", tmp_path / "shared", quantisation="int4", **arguments)
    head = assets.FOLDER / "tiny-python-head"  # has an lm_head of its own
    assert plan(BUNDLED, head, context=300, quantisation="int8", device="cpu").compared


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (dict(version=2), r"quantization_config\.version is 2"),
        (dict(layouts=7), r"layouts is 7; expected a list"),
        (dict(layouts=[7]), r"layouts has 7; expected bits"),
        (dict(news=1), r"unexpected keyword argument 'news'"),
        (
            dict(
                layouts=[
                    dict(bits=4, group_size=32, scales="float32", levels=False, layers=["norm"])
                ]
            ),
            "names 'norm', which is no linear layer",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_damaged_configs_are_refused(changed, message, tmp_path):
    config = random_model("llama").config.to_dict()
    recorded = {"quant_method": "specdec_ext", "version": 1, "layouts": [], **changed}
    config["quantization_config"] = recorded
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        plan(tmp_path, device="cpu")
