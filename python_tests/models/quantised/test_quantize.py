"""``quantize``: what becomes codes, what stays, and what is refused."""

import copy
import weakref

import pytest
import torch
from helpers.models.tiny import CONFIGS, prompts, random_model, tiny_model
from torch import nn
from transformers.pytorch_utils import Conv1D

from specdec_ext import QuantisationReport, quantize
from specdec_ext.models.quantised import convert
from specdec_ext.models.quantised.linear import QuantisedLinear


def fresh(name="llama", dtype=torch.float32, **overrides):
    """A model that a test may change."""
    if overrides:
        kind, fields = CONFIGS[name]
        return random_model(kind, **{**fields, **overrides}).to(dtype)
    return copy.deepcopy(tiny_model(name)).to(dtype)


def quantised(model):
    return {name: each for name, each in model.named_modules() if isinstance(each, QuantisedLinear)}


def dequantised(model, original):
    """``original`` with the weights of the codes."""
    plain = copy.deepcopy(original)
    for name, module in quantised(model).items():
        layer = plain.get_submodule(name)
        restored = module.weight.dequantise(layer.weight.dtype)
        layer.weight = nn.Parameter(restored.T if isinstance(layer, Conv1D) else restored)
    return plain


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "gemma2-window", "phi", "bart"])
def test_logits_are_those_of_the_dequantised_weights(name):
    original = tiny_model(name)
    model = quantize(fresh(name), "int4")
    ids, mask = prompts((9, 5))
    with torch.no_grad():
        expected = dequantised(model, original)(ids, attention_mask=mask).logits
        actual = model(ids, attention_mask=mask).logits
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)


def test_what_becomes_codes():
    model = fresh()
    linears = [name for name, each in model.named_modules() if isinstance(each, nn.Linear)]
    embedding, norm = model.model.embed_tokens, model.model.norm
    assert quantize(model, "int4") is model
    assert [*quantised(model)] == linears and len(linears) == 22
    assert model.model.embed_tokens is embedding and model.model.norm is norm
    bits = {name: each.weight.bits for name, each in quantised(model).items()}
    assert bits.pop("lm_head") == 8 and {*bits.values()} == {4}
    assert not model.training and not any(each.training for each in model.modules())
    for each in quantised(model).values():
        assert each.weight.group_size == (32 if each.weight.bits == 4 else 32 and each.in_features)


@pytest.mark.parametrize(
    ("arguments", "head", "others"),
    [
        (dict(), (8, 64), (8, 64)),
        (dict(group_size=32), (8, 32), (8, 32)),
        (dict(weights="int4"), (8, 64), (4, 32)),
        (dict(weights="int4", group_size=64), (8, 64), (4, 64)),
        (dict(weights="int4", head="int4"), (4, 32), (4, 32)),
        (dict(weights="int8", head="int4", group_size=32), (4, 32), (8, 32)),
        (dict(weights="int4", head=None), None, (4, 32)),
    ],
    ids=lambda value: (
        ",".join(f"{k}={v}" for k, v in value.items()) or "default"
        if isinstance(value, dict)
        else ""
    ),
)
def test_formats_and_groups(arguments, head, others):
    model = quantize(fresh(hidden_size=64), **arguments)
    found = {
        name: (each.weight.bits, each.weight.group_size) for name, each in quantised(model).items()
    }
    assert found.pop("lm_head", None) == head
    assert {found[name] for name in found if "down_proj" not in name} == {others}
    assert isinstance(model.lm_head, nn.Linear) == (head is None)


def test_offsets():
    model = quantize(fresh(), "int4", symmetric=False)
    assert all(each.scales.ndim == 3 for each in quantised(model).values())


def test_skip_takes_names_and_parts_of_names():
    model = quantize(fresh(), "int4", skip=("down_proj", "model.layers.1", "lm_head"))
    names = [*quantised(model)]
    assert len(names) == 2 * 6
    assert not any(
        "down_proj" in name or "layers.1." in name or name == "lm_head" for name in names
    )


def test_a_tied_head_gets_codes_of_its_own():
    model = fresh(tie_word_embeddings=True)
    embedding = model.model.embed_tokens.weight
    assert model.lm_head.weight is embedding
    before = embedding.clone()
    quantize(model)
    assert isinstance(model.lm_head, QuantisedLinear)
    assert model.model.embed_tokens.weight is embedding and torch.equal(embedding, before)
    assert not model.config.tie_word_embeddings and not model.all_tied_weights_keys
    model.tie_weights()
    assert isinstance(model.lm_head, QuantisedLinear)


def test_a_shared_module_is_replaced_everywhere():
    model = fresh()
    first, second = model.model.layers[0].mlp, model.model.layers[1].mlp
    second.up_proj = first.up_proj
    quantize(model)
    assert isinstance(first.up_proj, QuantisedLinear) and second.up_proj is first.up_proj


def test_a_weight_is_freed_before_the_next_is_quantised(monkeypatch):
    model, alive, plain = fresh(), [], convert.rounded
    layers = [weakref.ref(each) for each in model.modules() if isinstance(each, nn.Linear)]

    def counted(*arguments):
        alive.append(sum(each() is not None for each in layers))
        return plain(*arguments)

    monkeypatch.setattr(convert, "rounded", counted)
    quantize(model)
    assert alive == [*range(22, 0, -1)]


def test_biases_stay():
    model = fresh(attention_bias=True)
    bias = model.model.layers[0].self_attn.q_proj.bias
    quantize(model)
    assert model.model.layers[0].self_attn.q_proj.bias is bias


def test_results_are_the_same_in_every_run():
    states = [quantize(fresh(), "int4").state_dict() for _ in range(2)]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_a_copy_of_a_quantised_model():
    model, ids = quantize(fresh(), "int4"), torch.arange(1, 9)[None]
    copied = copy.deepcopy(model)
    with torch.no_grad():
        expected = model(ids).logits
        model.lm_head.codes.zero_()
        assert torch.equal(copied(ids).logits, expected)


def test_the_dtype_of_a_quantised_model_can_change():
    model = quantize(fresh(), "int4", symmetric=False)
    before = {name: each.clone() for name, each in model.state_dict().items()}
    model.to(torch.bfloat16)
    after = model.state_dict()
    assert model.model.embed_tokens.weight.dtype == torch.bfloat16
    codes = [name for name in before if name.endswith((".codes", ".scales"))]
    assert len(codes) == 2 * 22
    assert all(torch.equal(before[name], after[name]) for name in codes)
    with torch.no_grad():
        assert model(torch.ones(1, 3, dtype=torch.long)).logits.dtype == torch.bfloat16


# --- the report


def test_the_report_counts_bits_and_bytes():
    model = quantize(fresh(dtype=torch.bfloat16), "int4")
    report = QuantisationReport.of(model)
    linears = {name: each.weight for name, each in quantised(model).items()}
    assert report.nbytes == sum(each.codes.nbytes + each.scales.nbytes for each in linears.values())
    numbers = sum(each.shape[0] * each.shape[1] for each in linears.values())
    assert report.nbytes_before == 2 * numbers
    assert report.bits_per_weight == pytest.approx(8 * report.nbytes / numbers)
    assert report.nbytes + report.other_bytes == model.get_memory_footprint()
    assert [each.name for each in report.layers] == [*linears]
    assert all(0 < each.error < 0.12 for each in report.layers)
    head = report.layers[-1]
    assert head.name == "lm_head" and head.error < 0.01


def test_the_report_says_what_is_known():
    report = QuantisationReport.of(quantize(fresh(), "int4"))
    assert str(report).startswith("22 layers of ") and "mean error of a layer " in str(report)
    (table,) = report.tables()
    assert [row[:3] for row in table.rows][:2] == [
        ("q_proj", "3", "4, rows, float32"),
        ("k_proj", "3", "4, rows, float32"),
    ]
    with pytest.raises(ValueError, match="LlamaForCausalLM has no quantised layers; call"):
        QuantisationReport.of(tiny_model("llama"))


# --- refusals


def with_hook(model):
    model.model.layers[1].register_forward_hook(lambda *_: None)


def with_forward(model):
    model.model.layers[1].forward = lambda *_: None


def with_parametrisation(model):
    nn.utils.parametrize.register_parametrization(
        model.model.layers[1].mlp.up_proj, "weight", nn.Identity()
    )
    model.eval()


def with_subclass(model):
    class Mine(nn.Linear):
        pass

    model.model.layers[1].mlp.up_proj.__class__ = Mine


def with_nan(model):
    model.model.layers[2].mlp.up_proj.weight.data[3, 4] = torch.nan


def with_infinity(model):
    model.lm_head.weight.data[3, 4] = -torch.inf


def twice(model):
    quantize(model)


def half(model):
    model.half()


def training(model):
    model.train()


def on_meta(model):
    model.to("meta")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_hook, "LlamaForCausalLM has hooks, offloaded weights or compiled modules"),
        (with_forward, "LlamaForCausalLM has hooks, offloaded weights or compiled modules"),
        (
            with_parametrisation,
            "up_proj can't be quantised: its weight is computed from other tensors",
        ),
        (with_subclass, "up_proj can't be quantised: it is a Mine, whose forward may be another"),
        (
            with_nan,
            "up_proj can't be quantised: its weight has numbers that are not finite",
        ),
        (with_infinity, "lm_head can't be quantised: its weight has numbers that are not finite"),
        (twice, "LlamaForCausalLM is quantised already"),
        (half, r"its weight is torch.float16; call model.to\(torch.bfloat16\) first"),
        (training, r"LlamaForCausalLM is in training mode; call model.eval\(\) first"),
        (on_meta, r"its weight is on meta; call model.to\('cpu'\) first"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_models_that_are_refused(change, message):
    model = fresh()
    change(model)
    before = [type(each) for each in model.modules()]
    with pytest.raises(ValueError, match=message):
        quantize(model)
    assert [type(each) for each in model.modules()] == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(weights="int5"), "weights='int5'; expected 'int8' or 'int4'"),
        (dict(weights=4), "weights=4; expected 'int8' or 'int4'"),
        (dict(head="fp8"), "head='fp8'; expected 'int8' or 'int4', or None"),
        (dict(group_size=48), "group_size=48; expected 32, 64, 128 or another doubling"),
        (dict(group_size=16), "group_size=16; expected 32"),
        (dict(group_size="32"), "group_size='32'; expected 32"),
        (
            dict(skip=("down_proj", "o_pro")),
            "skip names 'o_pro', but no linear layer of the model has",
        ),
        (dict(skip=("",)), "skip names '', but no linear layer"),
        (dict(skip="down_proj"), "skip='down_proj' is one name; expected a sequence of names"),
        (
            dict(skip=("model",), head=None),
            "no linear layers to quantise besides those in skip and the head",
        ),
    ],
    ids=str,
)
def test_arguments_that_are_refused(arguments, message):
    model = fresh()
    with pytest.raises(ValueError, match=message):
        quantize(model, **arguments)
    assert not quantised(model)


def test_only_models_of_transformers():
    with pytest.raises(
        TypeError, match="model is a Linear; expected a Hugging Face model, without wrappers"
    ):
        quantize(nn.Linear(32, 32))


def test_layers_in_skip_are_not_judged():
    model = fresh()
    with_nan(model)
    quantize(model, skip=("model.layers.2.mlp.up_proj",))
    assert len(quantised(model)) == 21
