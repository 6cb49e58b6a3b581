"""Passes over quantised models: directly and by modules, and the texts of drafters."""

import copy

import pytest
import torch
from helpers.models.tiny import (
    ScriptedDrafter,
    generated,
    prompts,
    random_tree,
    tiny_model,
    with_varied_vectors,
)
from torch import nn

import specdec_ext
from specdec_ext import DraftTree, ops
from specdec_ext.models import make_target
from specdec_ext.models.findings import findings_of
from specdec_ext.models.passes.linears import row_invariant, row_invariant_linears
from specdec_ext.models.quantised.linear import QuantisedLinear
from specdec_ext.ops.quantise import QuantisedWeight

FAMILIES = [
    "llama",
    "qwen3",
    "gemma3-window",
    "phi3-half",
    "olmo2",
    "gpt_neox",
    "gpt2",
    "qwen2_moe",
]
# Without a direct pass.
OTHERS = ["phi", "deepseek_v3"]
FORMATS = {
    "int8": {"weights": "int8"},
    "int4": {"weights": "int4"},
    "int4-asymmetric": {"weights": "int4", "symmetric": False, "group_size": 128},
}
DTYPES = [torch.float32, torch.bfloat16]
TREE = DraftTree(
    torch.tensor([[3, 4, 5, 6], [7, 8, 9, 10]]), torch.tensor([[-1, 0, 0, 1], [-1, 0, 1, -2]])
)

formats = pytest.mark.parametrize("format", FORMATS)


def quantised(name, format, dtype=torch.float32):
    model = with_varied_vectors(copy.deepcopy(tiny_model(name, dtype=dtype)))
    return specdec_ext.quantize(model, **FORMATS[format])


def scored(model, by_modules):
    target = make_target(model, 64)
    if by_modules:
        target.runner.direct = None
    target.record_hidden_states((0, -1))
    # With these tokens, no two experts have scores so near that rounding decides between them.
    target.prefill(*prompts((9, 5), seed=1))
    return target.forward(TREE)


@formats
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_the_direct_pass_equals_that_of_the_modules(name, dtype, format):
    model = quantised(name, format, dtype)
    assert findings_of(model).direct is not None
    ours, theirs = (scored(model, by_modules) for by_modules in (False, True))
    active = TREE.parents > -2
    for mine, other in ((ours.logits, theirs.logits), (ours.features, theirs.features)):
        difference = (mine - other)[active].float().norm() / other[active].float().norm()
        assert difference < (1e-5 if dtype == torch.float32 else 0.02)


@formats
@pytest.mark.parametrize("name", [*FAMILIES, *OTHERS])
def test_texts_are_those_of_transformers(name, format):
    model = quantised(name, format)
    ids, mask = prompts((9, 4))
    kwargs = dict(attention_mask=mask, max_new_tokens=20, do_sample=False)
    expected = model.generate(ids, **kwargs)
    drafter = ScriptedDrafter(generated(expected, ids.shape[1]), random_tree)
    for each in (None, "ngram", drafter):
        assert torch.equal(specdec_ext.generate(model, ids, drafter=each, **kwargs), expected)


@formats
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sampled_texts_are_those_of_plain_decoding(dtype, format):
    model = quantised("llama", format, dtype)
    ids, mask = prompts((9, 4))
    for seed in range(3):
        kwargs = dict(attention_mask=mask, max_new_tokens=24, do_sample=True, seed=seed)
        texts = [
            specdec_ext.generate(model, ids, drafter=each, **kwargs) for each in (None, "ngram")
        ]
        assert torch.equal(*texts)


def test_matrices_of_several_formats_in_one_model():
    """Queries, keys and values of a layer may be weights, codes of 8 bits and codes of 4 bits."""
    model = with_varied_vectors(copy.deepcopy(tiny_model("llama")))
    specdec_ext.quantize(model, "int8", skip=["q_proj", "v_proj", "gate_proj"])
    for layer in model.model.layers:
        weight = layer.self_attn.v_proj.weight
        scales = weight.detach().abs().amax(1, keepdim=True) / 7
        codes = (weight.detach() / scales).round().long() + 8
        layer.self_attn.v_proj = QuantisedLinear(QuantisedWeight.pack(codes, scales, bits=4)).eval()
    kinds = {type(each) for each in model.model.layers[0].self_attn.children()}
    assert kinds == {nn.Linear, QuantisedLinear} and findings_of(model).direct is not None
    ids, mask = prompts((9, 4))
    kwargs = dict(attention_mask=mask, max_new_tokens=20, do_sample=False)
    expected = model.generate(ids, **kwargs)
    assert torch.equal(specdec_ext.generate(model, ids, drafter="ngram", **kwargs), expected)


@formats
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layers_in_a_pass_are_those_of_the_op(dtype, format):
    """In both orders; their own forward has that for few rows."""
    model = quantised("llama", format, dtype)
    layer = model.model.layers[0].mlp.up_proj
    modules = row_invariant(model)
    assert layer in modules and model.lm_head in modules
    input = torch.randn(40, layer.in_features, dtype=dtype)
    with torch.inference_mode():
        few = ops.linear(input, layer.weight, layer.bias)
        many = ops.linear(input, layer.weight, layer.bias, many_rows=True)
        assert not torch.equal(few, many) or dtype == torch.bfloat16
        assert torch.equal(layer(input), few)
        with row_invariant_linears(modules):
            assert torch.equal(layer(input), few)
        with row_invariant_linears(modules, few_rows=[]):
            assert torch.equal(layer(input), many)
        with row_invariant_linears(modules, few_rows=[layer]):
            assert torch.equal(layer(input), few)


def test_a_model_that_is_quantised_later_is_read_anew():
    model = copy.deepcopy(tiny_model("llama"))
    ids, mask = prompts((9, 4))
    kwargs = dict(attention_mask=mask, max_new_tokens=12, do_sample=False, drafter="ngram")
    before = findings_of(model).direct
    specdec_ext.generate(model, ids, **kwargs)
    specdec_ext.quantize(model, "int4")
    assert findings_of(model).direct is not before
    kwargs.pop("drafter")
    expected = model.generate(ids, **kwargs)
    assert torch.equal(specdec_ext.generate(model, ids, drafter="ngram", **kwargs), expected)
