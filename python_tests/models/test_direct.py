"""The fused pass without transformers' modules: which models have one, and when it is not used."""

import copy
import warnings

import pytest
import torch
from helpers.models.tiny import CONFIGS, prompts, tiny_model
from torch import nn
from transformers import DynamicCache
from transformers.models.llama import modeling_llama

import specdec_ext
from specdec_ext import DraftTree, ops
from specdec_ext.models import make_target
from specdec_ext.models.compat import CACHE
from specdec_ext.models.findings import findings_of
from specdec_ext.models.passes import direct, known_code
from specdec_ext.models.passes.hidden_states import HiddenStateRecorder
from specdec_ext.models.passes.linears import plain_linears, row_invariant_linears
from specdec_ext.models.patching.forwards import replaced_forward

DIRECT = {"llama", "qwen3", "mistral-window"}
TREE = DraftTree(
    torch.tensor([[3, 4, 5, 6], [7, 8, 9, 10]]), torch.tensor([[-1, 0, 0, 1], [-1, 0, 1, -2]])
)


def direct_pass(model):
    """The direct pass that a call would use."""
    return direct.usable(model, findings_of(model).direct)


@pytest.fixture
def model():
    return copy.deepcopy(tiny_model("llama"))


@pytest.fixture
def op_calls(monkeypatch):
    calls, op = [], ops.decoder_layers
    monkeypatch.setattr(ops, "decoder_layers", lambda *arguments: calls.append(1) or op(*arguments))
    return calls


def scored(model, layers=(), cache=None, by_modules=False):
    target = make_target(model, 64, model_kwargs={CACHE: cache and cache()})
    if by_modules:
        target.runner.direct = None
    target.record_hidden_states(layers)
    target.prefill(*prompts((9, 5)))
    return target.forward(TREE)


@pytest.mark.parametrize("name", CONFIGS)
def test_models_with_a_fused_pass(name):
    assert (direct_pass(tiny_model(name)) is not None) == (name in DIRECT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cache", [None, DynamicCache], ids=["own", "without-windows"])
@pytest.mark.parametrize("name", sorted(DIRECT))
def test_fused_pass_equals_that_of_the_modules(name, cache, dtype, op_calls):
    """In logits and hidden states of every layer, also with a caller's cache without windows."""
    model = tiny_model(name, dtype=dtype)
    layers = (0, 1, 3, -1)
    ours, theirs = scored(model, layers, cache), scored(model, layers, cache, by_modules=True)
    assert op_calls
    active = TREE.parents > -2
    for mine, other in ((ours.logits, theirs.logits), (ours.features, theirs.features)):
        assert mine.dtype == other.dtype == dtype
        error = (mine - other)[active].float().norm() / other[active].float().norm()
        assert error < (1e-5 if dtype == torch.float32 else 0.02)


def test_generation_uses_the_fused_pass(model, op_calls):
    ids = prompts((7,))[0]
    specdec_ext.generate(model, ids, drafter="ngram", max_new_tokens=8, do_sample=False)
    assert op_calls


def test_fused_pass_is_used_after_hidden_states_were_requested(model, op_calls):
    """transformers never removes its hooks."""
    ids = prompts((7,))[0]
    kwargs = dict(max_new_tokens=4, do_sample=False, return_dict_in_generate=True)
    model.generate(ids, output_hidden_states=True, output_attentions=True, **kwargs)
    specdec_ext.generate(model, ids, drafter="ngram", output_hidden_states=True, **kwargs)
    assert not op_calls
    specdec_ext.generate(model, ids, drafter="ngram", **kwargs)
    assert op_calls


def watch(model, monkeypatch):
    model.model.layers[1].mlp.register_forward_hook(lambda *_: None)


def listen_before(model, monkeypatch):
    model.model.layers[1].register_forward_pre_hook(lambda *_: None)


def replace_forward(model, monkeypatch):
    norm = model.model.norm
    norm.forward = lambda x: type(norm).forward(norm, x)


def other_code(model, monkeypatch):
    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)).clamp(-1, 1)

    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", forward)
    known_code._pattern.cache_clear()


def other_rotation(model, monkeypatch):
    turn = modeling_llama.apply_rotary_pos_emb
    monkeypatch.setattr(
        modeling_llama, "apply_rotary_pos_emb", lambda q, k, cos, sin: turn(k, q, cos, sin)
    )


def other_activation(model, monkeypatch):
    model.model.layers[0].mlp.act_fn = nn.GELU()


def another_module(model, monkeypatch):
    model.model.layers[0].self_attn.gate = nn.Identity()


def own_linear(model, monkeypatch):
    class Linear(nn.Linear):
        pass

    model.model.layers[0].self_attn.q_proj.__class__ = Linear


def other_eps(model, monkeypatch):
    model.model.layers[0].input_layernorm.variance_epsilon = 0.1


def half_a_rotation(model, monkeypatch):
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq[:-1]


def train(model, monkeypatch):
    model.model.layers[2].train()


def parametrize(model, monkeypatch):
    nn.utils.parametrizations.weight_norm(model.model.layers[0].mlp.up_proj)


def mix_dtypes(model, monkeypatch):
    model.model.norm.bfloat16()


def compile_a_part(model, monkeypatch):
    model.model.layers[0]._compiled_call_impl = lambda *_: None


def other_order(model, monkeypatch):
    """The modules keep the index of their layer in the cache."""
    model.model.layers = nn.ModuleList(reversed(model.model.layers))


CHANGES = [
    *(watch, listen_before, replace_forward, other_code, other_rotation, other_activation),
    *(another_module, own_linear, other_eps, half_a_rotation, other_order, train),
    *(parametrize, mix_dtypes, compile_a_part),
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_changed_or_watched_modules_have_no_fused_pass(model, monkeypatch, change):
    assert direct_pass(model) is not None
    change(model, monkeypatch)
    assert direct_pass(model) is None
    monkeypatch.undo()
    known_code._pattern.cache_clear()


def test_changes_of_a_call_in_another_thread_keep_the_fused_pass(model):
    """Otherwise the rounding of logits would depend on the timing of threads."""
    recorder = HiddenStateRecorder(model, model.config, (0, 2, -1))
    with row_invariant_linears(plain_linears(model)), recorder.recording():
        assert direct_pass(model) is not None
        model(prompts((4,))[0])  # recording needs a pass
    replace_forward(model, None)
    with replaced_forward([model.model.norm], lambda module, forward, *args: forward(*args)):
        assert direct_pass(model) is None


def test_no_fused_pass_with_global_hooks_or_autocast(model):
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert direct_pass(model) is None
    finally:
        handle.remove()
    with torch.autocast("cpu"):
        assert direct_pass(model) is None
    assert direct_pass(model) is not None


def test_fused_pass_that_differs_is_not_used(model, monkeypatch):
    op = ops.decoder_layers

    def wrong(*arguments):
        states, output = op(*arguments)
        return states, output.flip(-1)

    expected = scored(model, by_modules=True).logits
    with monkeypatch.context() as patched:
        patched.setattr(ops, "decoder_layers", wrong)
        with pytest.warns(UserWarning, match="its logits differ from those of the fused pass"):
            assert torch.equal(scored(model).logits, expected)
    assert direct_pass(model) is None  # any more
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(scored(model).logits, expected)


def test_nan_logits_do_not_disable_the_fused_pass(model, recwarn):
    with torch.no_grad():
        weights = model.model.norm.weight.clone()
        model.model.norm.weight[0] = torch.nan
        assert scored(model).logits.isnan().any()
        model.model.norm.weight.copy_(weights)
    kinds = (direct.PROMPT, direct.TREE)
    assert not recwarn and not any(direct.is_agreed(model, kind) for kind in kinds)
    scored(model)
    assert all(direct.is_agreed(model, kind) for kind in kinds)
