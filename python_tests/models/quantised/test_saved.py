"""Quantised models are saved and loaded by transformers, bit for bit."""

import copy
import json

import pytest
import torch
from helpers.models.tiny import random_model, tiny_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from specdec_ext import QuantisationReport, quantize
from specdec_ext.models.quantised.linear import QuantisedLinear
from specdec_ext.models.quantised.saved import QuantisedConfig


def saved(model, folder, **arguments):
    quantize(model, **arguments).save_pretrained(folder)
    return model


def assert_equal(loaded, model):
    assert [type(each) for each in loaded.modules()] == [type(each) for each in model.modules()]
    ours, theirs = model.state_dict(), loaded.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert theirs[name].dtype == tensor.dtype and torch.equal(theirs[name], tensor), name


@pytest.mark.parametrize(
    "arguments",
    [
        dict(),
        dict(weights="int4"),
        dict(weights="int4", symmetric=False, head="int4"),
        dict(group_size=32, head=None, skip=("q_proj",)),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_model_is_saved_and_loaded(arguments, dtype, tmp_path):
    model = saved(random_model("qwen2", tie_word_embeddings=True).to(dtype), tmp_path, **arguments)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert_equal(loaded, model)
    assert loaded.dtype == dtype
    tied = loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    assert tied == (arguments.get("head", "int8") is None)
    if dtype == torch.float32:  # in bfloat16, only a loaded model rotates in float32
        ids = torch.arange(1, 8)[None]
        with torch.no_grad():
            assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_it_can_be_loaded_in_another_dtype(tmp_path):
    """The embedding, norms and biases change, the codes do not."""
    model = saved(random_model("qwen2"), tmp_path, weights="int4", symmetric=False)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert_equal(loaded, model.to(torch.bfloat16))


def test_it_can_be_saved_again(tmp_path):
    model = saved(random_model("llama"), tmp_path / "first", weights="int4")
    once = AutoModelForCausalLM.from_pretrained(tmp_path / "first")
    once.save_pretrained(tmp_path / "second")
    assert_equal(AutoModelForCausalLM.from_pretrained(tmp_path / "second"), model)
    with pytest.raises(ValueError, match="is quantised already"):
        quantize(once)


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_embeddings_that_are_tied_to_each_other_stay_tied(kind, tmp_path):
    model = AutoModelForSeq2SeqLM.from_config(small_config(kind)).eval()
    saved(model, tmp_path)
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert isinstance(loaded.lm_head, QuantisedLinear)
    assert_equal(loaded, model)
    assert loaded.get_encoder().embed_tokens.weight is loaded.get_decoder().embed_tokens.weight


def small_config(kind):
    from transformers import AutoConfig

    sizes = dict(vocab_size=64, d_model=32, num_layers=2, num_heads=2, d_kv=16, d_ff=64)
    if kind == "bart":
        sizes = dict(
            vocab_size=64,
            d_model=32,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            forced_eos_token_id=None,
            decoder_start_token_id=1,
        )
        for part in ("encoder", "decoder"):
            sizes |= {f"{part}_layers": 2, f"{part}_attention_heads": 2, f"{part}_ffn_dim": 64}
    return AutoConfig.for_model(kind, **sizes)  # fmt: skip


def test_transposed_weights_are_loaded(tmp_path):
    model = saved(copy.deepcopy(tiny_model("gpt2")), tmp_path, weights="int4")
    assert_equal(AutoModelForCausalLM.from_pretrained(tmp_path), model)


def test_the_report_of_a_loaded_model_knows_no_errors(tmp_path):
    model = saved(random_model("llama"), tmp_path)
    loaded = QuantisationReport.of(AutoModelForCausalLM.from_pretrained(tmp_path))
    assert loaded.nbytes == QuantisationReport.of(model).nbytes
    assert loaded.error is None and "error" not in str(loaded)


def test_the_config_lists_layers_by_layout(tmp_path):
    saved(random_model("llama"), tmp_path, weights="int4", skip=("mlp",))
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "specdec_ext" and config["version"] == 1
    attention, head = config["layouts"]
    assert attention["bits"] == 4 and len(attention["layers"]) == 12
    assert head == dict(bits=8, group_size=None, scales="float32", levels=False, layers=["lm_head"])


# --- files that were changed


def edit(folder, change):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config["quantization_config"])
    path.write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda config: config.update(version=2), "version is 2; this version of specdec_ext reads 1"),
        (lambda config: config["layouts"][0].update(bits=3), "expected bits 8 or 4"),
        (lambda config: config["layouts"][0].update(group_size=-32), "a group_size"),
        (lambda config: config["layouts"][0].update(scales="int8"), "scales float32, bfloat16, offsets"),
        (lambda config: config["layouts"][0].update(levels=True), "levels false or, for 4 bits, true"),
        (lambda config: config["layouts"][0].update(layers=["model.norm"]), "names 'model.norm', which is"),
        (lambda config: config["layouts"][0].update(layers=["model.nothing"]), "no linear layer of Llama"),
        (lambda config: config["layouts"][0].update(layers=[3]), "names 3, which is no linear"),
    ],
    ids=["version", "bits", "group size", "scales", "levels", "norm", "unknown name", "number"],
)  # fmt: skip
def test_changed_configs_are_refused(change, message, tmp_path):
    saved(random_model("llama"), tmp_path)
    edit(tmp_path, change)
    with pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("part", ["codes", "scales"])
@pytest.mark.parametrize("dimension", [0, 1])
def test_tensors_of_another_shape_are_refused(part, dimension, tmp_path):
    """transformers compares shapes, but not with quantised layers in all versions."""
    saved(random_model("llama"), tmp_path, group_size=32, weights="int4")
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    name = f"model.layers.0.mlp.down_proj.{part}"
    tensors[name] = tensors[name].narrow(dimension, 0, 1).contiguous()
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises((RuntimeError, ValueError), match=r"down_proj|mismatch"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_shapes_are_compared_in_every_version(tmp_path):
    saved(random_model("llama"), tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    for part in ("codes", "scales"):
        changed = copy.deepcopy(model)
        setattr(changed.lm_head, part, getattr(model.lm_head, part)[:-1])
        with pytest.raises(
            ValueError, match=rf"lm_head has tensors .*'{part}': \[96, .* expected .* \[97, "
        ):
            changed.hf_quantizer.postprocess_model(changed)


def test_a_plain_model_is_not_quantised_on_loading(tmp_path):
    random_model("llama").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="pre-quantized"):
        AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=QuantisedConfig())


def test_configs_compare_by_value():
    """What is known about a model is kept while its config is equal."""
    model = quantize(random_model("llama"))
    assert QuantisedConfig.of(model) == model.config.quantization_config
    model.lm_head = nn.Linear(32, 97)
    assert QuantisedConfig.of(model) != model.config.quantization_config
