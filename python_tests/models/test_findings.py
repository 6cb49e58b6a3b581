"""What was found out about a model is kept as long as the model stays the same, and no longer."""

import copy
import gc
import weakref
from functools import partial

import pytest
import torch
from helpers.models import zoo
from helpers.models.tiny import prompts, tiny_model
from torch import nn

import specdec_ext
from specdec_ext.models.findings import findings_of, modules_of


@pytest.fixture
def model():
    return copy.deepcopy(tiny_model("llama"))


def test_findings_are_kept(model):
    first = findings_of(model)
    specdec_ext.generate(
        model, prompts((5,))[0], drafter="ngram", max_new_tokens=4, do_sample=False
    )
    assert findings_of(model) is first
    assert first.direct is not None and first.support.tree


def replace_forward(model):
    model.model.norm.forward = lambda x: x


def replace_weight(model):
    linear = model.model.layers[1].mlp.up_proj
    linear.weight = nn.Parameter(linear.weight.detach().clone())


def replace_module(model):
    norm = model.model.norm
    model.model.norm = copy.deepcopy(norm)


def transpose_weight(model):
    weight = model.model.layers[0].self_attn.o_proj.weight
    weight.data = weight.data.mT.contiguous().mT


def change_rotation(model):
    model.config.rope_parameters["rope_theta"] += 1.0


def add_submodule(model):
    model.model.layers[2].extra = nn.Identity()


def remove_bias_slot(model):
    model.model.layers[0].mlp.down_proj.register_parameter("bias", nn.Parameter(torch.zeros(32)))


CHANGES = [
    replace_forward,
    replace_weight,
    replace_module,
    transpose_weight,
    change_rotation,
    add_submodule,
    remove_bias_slot,
    lambda model: model.train(),
    lambda model: model.model.layers[0].train(),
    lambda model: model.to(torch.bfloat16),
    lambda model: model.register_forward_hook(lambda *_: None),
    lambda model: model.model.layers[1].register_forward_pre_hook(lambda *_: None),
    lambda model: model.compile(),
    lambda model: setattr(model.config, "num_hidden_layers", 2),
    lambda model: setattr(model.model.layers[0].input_layernorm, "variance_epsilon", 0.5),
    lambda model: setattr(model.model.rotary_emb, "inv_freq", torch.ones(4)),
    lambda model: setattr(model.model.norm, "__class__", type("Other", (nn.Module,), {})),
]


@pytest.mark.parametrize("change", CHANGES, ids=range(len(CHANGES)))
def test_a_changed_model_is_looked_at_again(model, change):
    before = findings_of(model)
    change(model)
    assert findings_of(model) is not before


def test_a_model_is_looked_at_again_after_a_class_got_another_forward(model, monkeypatch):
    before = findings_of(model)
    monkeypatch.setattr(type(model.model.norm), "forward", lambda self, x: x)
    assert findings_of(model) is not before


def test_the_direct_pass_is_lost_and_found_again(model):
    handle = model.model.layers[0].register_forward_hook(lambda *_: None)
    assert findings_of(model).direct is None
    handle.remove()
    assert findings_of(model).direct is not None


@pytest.mark.parametrize("name", ["llama", "gpt2", "bart", "mamba"])
def test_findings_do_not_keep_a_model_alive(name):
    model = copy.deepcopy(zoo.build(name))
    findings_of(model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_a_model_with_foreign_hooks_is_freed():
    """Hooks, and the forward that accelerate sets, refer to the model."""
    model = copy.deepcopy(tiny_model("llama"))
    model.lm_head.register_forward_hook(partial(print, model))
    model.forward = partial(type(model).forward, model)
    findings_of(model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_modules_of_finds_each_module_once():
    model = zoo.build("gpt2")
    model.again = model.transformer  # a module with two names
    try:
        found = modules_of(model)
        assert found[0] is model and len(found) == len({*found})
        assert {*found} == {*model.modules()}
    finally:
        del model.again


def test_a_module_may_change_while_it_is_looked_at(model):
    """A pass in another thread replaces the forwards of modules, which are attributes."""

    class Changing:
        @property
        def __class__(self):
            vars(model)[f"more_{len(vars(model))}"] = None
            return object

    model.odd = Changing()
    assert findings_of(model).direct is not None
