"""The fused pass without transformers' modules: which models have one, and when it is not used."""

import copy
import random
import re
import warnings

import pytest
import torch
from helpers.models.tiny import (
    CONFIGS,
    DECODERS,
    ScriptedDrafter,
    generated,
    prompts,
    random_model,
    random_tree,
    tiny_model,
    with_varied_vectors,
)
from helpers.places import ROOT
from torch import nn
from transformers import DynamicCache, GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama
from transformers.pytorch_utils import Conv1D

import specdec_ext
from specdec_ext import DraftTree, ops
from specdec_ext.models import make_target
from specdec_ext.models.compat import CACHE
from specdec_ext.models.findings import findings_of
from specdec_ext.models.passes import known_code
from specdec_ext.models.passes.direct import direct_pass as direct
from specdec_ext.models.passes.direct.direct_pass import PACKED_ROWS, SPLIT_KEYS, WAVE_FLOATS
from specdec_ext.models.passes.direct.families import FAMILIES
from specdec_ext.models.passes.direct.rotations import RotationTable
from specdec_ext.models.passes.hidden_states import HiddenStateRecorder, LayerStates
from specdec_ext.models.passes.linears import row_invariant, row_invariant_linears
from specdec_ext.models.passes.modules import ModulePass
from specdec_ext.models.patching.forwards import replaced_forward
from specdec_ext.models.slots.prefill import COMPARED_COLUMNS, DIRECT_COLUMNS

DIRECT = {"llama", "qwen3", "mistral-window", "gemma2-window", "gemma3-window", *DECODERS}
DIRECT |= {"gpt2", "gpt2-short"}
DTYPES = [torch.float32, torch.bfloat16]
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


def test_documentation_lists_the_families():
    page = (ROOT / "docs/reference/models.md").read_text()
    (entry,) = re.findall(r"- \*\*One op on the CPU\*\*.*?(?=\n- )", page, re.DOTALL)
    names = {name for family in FAMILIES for names in family.classes.values() for name in names}
    folders = {name.partition(".")[0] for name in names}
    listed = {name.removesuffix("_text") for name in re.findall(r"`(\w+)`", entry)}
    assert listed == folders


def relative(ours, theirs):
    return float((ours - theirs).float().norm() / theirs.float().norm())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cache", [None, DynamicCache], ids=["own", "without-windows"])
@pytest.mark.parametrize("name", sorted(DIRECT))
def test_fused_pass_equals_that_of_the_modules(name, cache, dtype, op_calls):
    """In logits and hidden states of every layer, also with a caller's cache without windows."""
    model = with_varied_vectors(tiny_model(name, dtype=dtype))
    layers = (0, 1, 3, -1)
    ours = scored(model, layers, cache)
    assert len(op_calls) == 3 and direct_pass(model) is not None  # prompt, compared tree, tree
    theirs = scored(model, layers, cache, by_modules=True)
    assert len(op_calls) == 3
    active = TREE.parents > -2
    for mine, other in ((ours.logits, theirs.logits), (ours.features, theirs.features)):
        assert mine.dtype == other.dtype == dtype
        assert relative(mine[active], other[active]) < (1e-5 if dtype == torch.float32 else 0.02)


@pytest.mark.parametrize(
    ("layers", "outputs"), [((), 1), ((0, 1), 1), ((0, -1), None), ((3,), None)], ids=str
)
def test_the_last_layer_computes_the_outputs_that_are_read(layers, outputs, model, monkeypatch):
    """Of a prompt, the last column's, unless hidden states of the last of 3 layers are recorded."""
    given, op = [], ops.decoder_layers

    def called(*arguments):
        given.append(arguments[-2])
        return op(*arguments)

    monkeypatch.setattr(ops, "decoder_layers", called)
    target = make_target(model, 64)
    target.record_hidden_states(layers)
    output = target.prefill(*prompts((9, 5)))
    assert given == [outputs] and model.config.num_hidden_layers == 3
    assert output.logits.shape[:2] == (2, 1)
    assert not layers or output.features.shape[1] == 9


@pytest.mark.parametrize("layers", [(0, 1), (1, 2), (0, 3), (-1,)], ids=str)
def test_hidden_states_of_a_prompt_and_a_tree_can_be_joined(layers, model):
    """Drafts read them together, and only the pass over the tree may have written those of the last layer."""
    scored(model)  # compares both ways
    target = make_target(model, 64)
    target.record_hidden_states(layers)
    parts = [target.prefill(*prompts((9, 5))), target.forward(TREE)]
    states = [part.aux_hidden_states for part in parts]
    for joined, *both in zip(LayerStates.joined(states), *states, strict=True):
        assert joined.shape[1] == 9 + 4 and torch.equal(joined, torch.cat(both, dim=1))


@pytest.mark.parametrize("name", sorted(DIRECT))
def test_norms_round_where_the_modules_round(name, op_calls):
    """An RMS norm that rounds elsewhere has other bits in every fourth number."""
    model = with_varied_vectors(tiny_model(name, dtype=torch.bfloat16))
    features = scored(model, (model.config.num_hidden_layers, -1)).features[TREE.parents > -2]
    last, normed = features.chunk(2, dim=-1)
    norm = getattr(model.base_model, direct_pass(model).family.final_norm)
    assert op_calls and (norm(last) == normed).float().mean() > 0.98


@pytest.mark.parametrize("name", sorted(DIRECT))
def test_prompts_are_read_as_by_the_modules(name, op_calls):
    """The logits, and the keys and values of every layer."""
    model, results = with_varied_vectors(tiny_model(name)), []
    for by_modules in (False, True):
        target = make_target(model, 64)
        if by_modules:
            target.runner.direct = None
        output = target.prefill(*prompts((9, 5)))
        kept = [x for layer in target.cache.layers for x in (layer.keys, layer.values)]
        results.append([output.logits, *(x[0] for x in kept), *(x[1, :, 4:] for x in kept)])
    assert len(op_calls) == 1
    for mine, other in zip(*results, strict=True):
        assert relative(mine, other) < 1e-5


@pytest.mark.parametrize("name", sorted(DIRECT))
def test_texts_are_those_of_transformers(name, op_calls):
    model = with_varied_vectors(tiny_model(name))
    ids, mask = prompts((9, 4))
    kwargs = dict(attention_mask=mask, max_new_tokens=20, do_sample=False)
    expected = model.generate(ids, **kwargs)
    drafter = ScriptedDrafter(generated(expected, ids.shape[1]), random_tree)
    for each in (None, "ngram", drafter):
        assert torch.equal(specdec_ext.generate(model, ids, drafter=each, **kwargs), expected)
    assert op_calls


def random_experts(seed):
    """A model of one of the three families with experts, with sizes drawn at random."""
    draw = random.Random(seed)
    kind, experts = ("mixtral", "qwen2_moe", "qwen3_moe")[seed % 3], draw.randint(1, 9)
    sizes = dict(
        num_experts_per_tok=draw.choice((1, (experts + 1) // 2, experts)),
        num_hidden_layers=draw.randint(1, 4),
        hidden_act=draw.choice(("silu", "gelu")),
    )
    if kind == "mixtral":
        return random_model(kind, seed, num_local_experts=experts, **sizes)
    return random_model(
        kind,
        seed,
        num_experts=experts,
        moe_intermediate_size=4 * draw.randint(1, 17),  # torch._grouped_mm wants 16 bytes
        shared_expert_intermediate_size=draw.randint(1, 70),
        norm_topk_prob=draw.random() < 0.5,
        decoder_sparse_step=draw.randint(1, 3),
        mlp_only_layers=[layer for layer in range(4) if draw.random() < 0.3],
        **sizes,
    )


ROPES = {
    "default": {},
    "linear": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


def rotary(kind, **rope):
    rope = {"rope_type": kind, "rope_theta": 1e4, **rope}
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, rope_parameters=rope)
    return modeling_llama.LlamaRotaryEmbedding(config)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ROPES)
def test_rotations_from_a_table_have_the_bits_of_those_computed(kind, dtype):
    rotation, states = rotary(kind, **ROPES[kind]), torch.zeros(1, dtype=dtype)
    table = RotationTable(rotation)
    for positions in ([[0, 0, 1, 2], [0, 1, 2, 3]], [[4]], [[5], [3]], [[900, 7]], [[901, 1801]]):
        positions = torch.tensor(positions)
        for ours, theirs in zip(table(states, positions), rotation(states, positions), strict=True):
            assert torch.equal(ours, theirs) and ours.dtype == dtype and ours.is_contiguous()


def test_tables_grow_rarely():
    computed = []

    def rotation(states, position_ids):
        computed.append(position_ids.shape[1])
        return position_ids[..., None], position_ids[..., None]

    table = RotationTable(rotation)
    for position in range(99, 1000):
        table(torch.zeros(1), torch.tensor([[position]]))
    assert computed == [100, 200, 400, 800, 1600]


def test_table_bytes_are_a_close_limit(model):
    direct_pass = findings_of(model).direct.with_tables()
    (table,) = direct_pass.rotations
    for position in (31, 32):
        table(torch.zeros(1), torch.tensor([[position]]))
    held = table._cosines.nbytes + table._sines.nbytes
    assert held <= direct_pass.table_bytes(33) < 1.1 * held


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "default"])
def test_rotations_that_depend_on_the_text_have_no_table(kind):
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
        rope |= {"original_max_position_embeddings": 64}
    sizes = dict(vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1)
    config = LlamaConfig(**sizes, num_attention_heads=4, rope_parameters=rope)
    target = make_target(LlamaForCausalLM(config).eval(), 64)
    tables = [isinstance(each, RotationTable) for each in target.runner.direct.rotations]
    assert tables == [kind == "default"]


@pytest.mark.parametrize("seed", range(12))
def test_random_models_with_experts(seed, op_calls):
    model = with_varied_vectors(random_experts(seed))
    assert direct_pass(model) is not None
    ours, theirs = (scored(model, (0, -1), by_modules=each) for each in (False, True))
    active = TREE.parents > -2
    assert relative(ours.features[active], theirs.features[active]) < 1e-5
    assert relative(ours.logits[active], theirs.logits[active]) < 1e-5
    ids, mask = prompts((9, 4))
    kwargs = dict(attention_mask=mask, max_new_tokens=12, do_sample=False)
    expected = model.generate(ids, **kwargs)
    drafter = ScriptedDrafter(generated(expected, ids.shape[1]), random_tree)
    assert torch.equal(specdec_ext.generate(model, ids, drafter=drafter, **kwargs), expected)
    assert len(op_calls) > 3


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe"])
def test_experts_are_chosen_as_by_the_modules_if_all_tie(name, implementation, op_calls):
    """And experts that lose every tie are not read."""
    model = with_varied_vectors(tiny_model(name))
    model.set_experts_implementation(implementation)
    with torch.no_grad():
        for block in (layer(index, "mlp")(model) for index in (0, 2)):
            block.gate.weight.zero_()
            _, _, chosen = block.gate(torch.ones(1, 32))
            for expert in set(range(block.gate.num_experts)) - set(chosen[0].tolist()):
                block.experts.gate_up_proj[expert] = torch.nan
                block.experts.down_proj[expert] = torch.nan
    ours, theirs = (scored(model, by_modules=each).logits for each in (False, True))
    active = TREE.parents > -2
    assert op_calls and torch.isfinite(ours[active]).all()
    assert relative(ours[active], theirs[active]) < 1e-5


def test_work_bytes_count_the_buffers_of_experts():
    """Per token, of bfloat16 numbers: those of dense layers, and a row and float32 sums of experts."""
    dense, sparse = (
        direct_pass(tiny_model(each, dtype=torch.bfloat16))
        for each in ("mistral-window", "mixtral")
    )
    hidden, experts = 32, 4
    assert [dense.form.top_k, sparse.form.top_k] == [0, 2]
    extra = 2 * hidden + 4 * (hidden + experts)
    assert sparse.work_bytes(1, 7, 7) - dense.work_bytes(1, 7, 7) == 7 * extra
    widest = direct_pass(tiny_model("qwen2_moe", dtype=torch.bfloat16))
    assert widest.work_bytes(1, 1, 1) == dense.work_bytes(1, 1, 1) + extra + 4  # a fifth expert


def test_work_bytes_count_what_attention_keeps():
    """Values, a maximum and a sum of each head, in float32, for each 256 keys; at most 16 MiB."""
    full, window = (direct_pass(tiny_model(each)) for each in ("llama", "mistral-window"))
    heads, head_dim, (reach,) = 4, 8, set(window.windows)
    split = 4 * heads * (head_dim + 2)
    assert full.work_bytes(2, 3, 257) - full.work_bytes(2, 3, 256) == 2 * 3 * split
    assert window.work_bytes(1, 3, 5000) == window.work_bytes(1, 3, reach + 3)
    limit = full.work_bytes(1, 512, 1 << 24) - full.work_bytes(1, 512, 0)
    assert limit == 4 * WAVE_FLOATS == 16 << 20


def test_work_bytes_know_the_limits_of_the_ops():
    sources = "".join(path.read_text() for path in (ROOT / "csrc" / "cpu").rglob("*.[ch]*"))
    for name, value in (
        ("kSplitKeys", SPLIT_KEYS),
        ("kWaveFloats", WAVE_FLOATS),
        ("kManyPassRows", PACKED_ROWS),
    ):
        (found,) = re.findall(rf"constexpr int64_t {name} = ([\d <]+);", sources)
        number, *shift = map(int, found.split("<<"))
        assert value == number << sum(shift)


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


def own_embedding(model, monkeypatch):
    class Embedding(nn.Embedding):
        pass

    model.model.embed_tokens.__class__ = Embedding


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
    *(another_module, own_linear, own_embedding, other_eps, half_a_rotation, other_order, train),
    *(parametrize, mix_dtypes, compile_a_part),
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_changed_or_watched_modules_have_no_fused_pass(model, monkeypatch, change):
    assert direct_pass(model) is not None
    change(model, monkeypatch)
    assert direct_pass(model) is None
    monkeypatch.undo()
    known_code._pattern.cache_clear()


def layer(index, path=""):
    return lambda model: model.model.layers[index].get_submodule(path)


def change_attribute(name, path, value, index=1):
    def change(model):
        owner = layer(index, path)(model)
        assert hasattr(owner, name)
        setattr(owner, name, value)

    return change


def change_config(name, value):
    return lambda model: setattr(model.config, name, value)


def change_code(path, function="forward", index=0):
    """Give a module a class of its own with another function."""

    def change(model):
        module = layer(index, path)(model)
        kind = type(module)
        assert hasattr(kind, function)
        module.__class__ = type(kind.__name__, (kind,), {function: lambda self, x, *_: x})

    return change


def change_norm_code(model):
    """The norm of Gemma has its arithmetic in another function than ``forward``."""
    kind = type(model.model.norm)
    changed = type(kind.__name__, (kind,), {"_norm": lambda self, x: 2 * x})
    model.model.norm.__class__ = changed


def change_embedding_code(model):
    kind = type(model.model.embed_tokens)
    model.model.embed_tokens.__class__ = type(kind.__name__, (kind,), {"forward": lambda s, x: x})


def own_dropout(model):
    class Dropout(nn.Dropout):
        pass

    model.model.layers[0].resid_mlp_dropout.__class__ = Dropout


def own_layer_norm(model):
    class LayerNorm(nn.LayerNorm):
        pass

    model.model.layers[0].input_layernorm.__class__ = LayerNorm


def rotate_a_part(model):
    rotary = model.model.rotary_emb
    rotary.sliding_attention_inv_freq = rotary.sliding_attention_inv_freq[:-1]


def rotate_too_much(model):
    rotary = model.model.rotary_emb
    rotary.inv_freq = torch.cat([rotary.inv_freq] * 3)


def slower_gelu(model):
    for each in model.model.layers:
        each.mlp.act_fn = type(each.mlp.act_fn)(use_gelu_tanh_python=True)


def fewer_rows(model):
    joined = model.model.layers[0].self_attn.qkv_proj
    joined.weight, joined.out_features = nn.Parameter(joined.weight[:-8].clone()), 56


def other_conv(model):
    class Conv(Conv1D):
        pass

    model.transformer.h[1].mlp.c_fc.__class__ = Conv


def linear_for_conv(model):
    model.transformer.h[1].mlp.c_fc = nn.Linear(32, 64).eval()


def conv_for_linear(model):
    model.model.layers[1].self_attn.q_proj = Conv1D(32, 32).eval()


def own_positions(model):
    class Embedding(nn.Embedding):
        pass

    model.transformer.wpe.__class__ = Embedding


def scale_by_layer(model):
    model.transformer.h[1].attn.scaling /= 2


CHANGED_FAMILIES = {
    "conv": ("gpt2", other_conv),
    "conv-linear": ("gpt2", linear_for_conv),
    "linear-conv": ("llama", conv_for_linear),
    "positions": ("gpt2", own_positions),
    "scaling": ("gpt2", scale_by_layer),
    "soft-cap": ("gemma2-window", change_attribute("attn_logit_softcapping", "self_attn", 3.0)),
    "norm-code": ("gemma2-window", change_norm_code),
    "embedding-code": ("gemma3-window", change_embedding_code),
    "eps": ("gemma3-window", change_attribute("eps", "self_attn.q_norm", 0.1)),
    "a-rotation": ("gemma3-window", rotate_a_part),
    "sees-later": ("gemma3-window", change_attribute("is_causal", "self_attn", False)),
    "bidirectional": ("gemma3-window", change_config("use_bidirectional_attention", True)),
    "activation": ("gemma3-window", slower_gelu),
    "residual": ("granite", change_attribute("residual_multiplier", "", 0.1)),
    "dropout": ("phi3-window", own_dropout),
    "rows": ("phi3-window", fewer_rows),
    "rotation": ("phi3-half", rotate_too_much),
    "top-k": ("mixtral", change_attribute("top_k", "mlp.gate", 1)),
    "normalised": ("qwen3_moe", change_attribute("norm_topk_prob", "mlp.gate", False)),
    "router-code": ("mixtral", change_code("mlp.gate")),
    "experts-code": ("mixtral", change_code("mlp.experts")),
    "experts-gate-code": ("mixtral", change_code("mlp.experts", "_apply_gate")),
    "sparse-code": ("qwen2_moe", change_code("mlp")),
    "shared-code": ("qwen2_moe", change_code("mlp.shared_expert")),
    "dense-code": ("qwen3_moe-window", change_code("mlp")),
    "experts-activation": (
        "qwen2_moe",
        change_attribute("act_fn", "mlp.experts", nn.GELU(), index=0),
    ),
    "shared-activation": (
        "qwen2_moe",
        change_attribute("act_fn", "mlp.shared_expert", nn.GELU(), index=0),
    ),
    "experts-dtype": ("mixtral", lambda m: layer(1, "mlp.experts")(m).double()),
    "other-experts": ("mixtral", change_config("_experts_implementation_internal", "deepgemm")),
    "layer-norm": ("starcoder2-window", own_layer_norm),
    "layer-norm-eps": ("starcoder2-window", change_attribute("eps", "input_layernorm", 0.1)),
}


@pytest.mark.parametrize("change", CHANGED_FAMILIES)
def test_changed_families_have_no_fused_pass(change):
    name, apply = CHANGED_FAMILIES[change]
    model = copy.deepcopy(tiny_model(name))
    assert direct_pass(model) is not None
    apply(model)
    assert direct_pass(model) is None


def new_positions(model):
    model.transformer.wpe.weight.data = model.transformer.wpe.weight.data.flip(0)


def new_columns(model):
    weight = model.transformer.h[0].mlp.c_fc.weight
    weight.data = 2 * weight.data


def test_changed_code_of_a_transposed_matrix_has_no_fused_pass(monkeypatch):
    model = copy.deepcopy(tiny_model("gpt2"))
    assert direct_pass(model) is not None
    monkeypatch.setattr(Conv1D, "forward", lambda self, x: 2 * x @ self.weight)
    assert direct_pass(model) is None


FOLLOWED = {
    "positions": ("gpt2", new_positions),
    "columns": ("gpt2", new_columns),
    "embedding-scale": ("gemma2-window", lambda m: m.model.embed_tokens.embed_scale.mul_(0.5)),
    "new-embedding-scale": ("granite", lambda m: setattr(m.model, "embedding_multiplier", 0.5)),
    "logits-cap": ("gemma2-window", change_config("final_logit_softcapping", 1.0)),
    "no-logits-cap": ("gemma2-window", change_config("final_logit_softcapping", None)),
    "logits-divisor": ("granite", change_config("logits_scaling", 0.3)),
    "joined-rows": ("phi3-half", lambda m: m.model.layers[0].self_attn.qkv_proj.weight.data.mul_(2)),
    "other-joined-rows": ("phi3-half", lambda m: setattr(layer(0, "self_attn.qkv_proj")(m).weight, "data",
        2 * layer(0, "self_attn.qkv_proj")(m).weight.data)),
    "experts": ("mixtral", lambda m: layer(1, "mlp.experts")(m).down_proj.data.mul_(2)),
    "router": ("qwen3_moe", lambda m: layer(0, "mlp.gate")(m).weight.neg_()),
    "all-top-k": ("qwen3_moe", lambda m: [setattr(each.mlp.gate, "top_k", 1) for each in m.model.layers]),
    "none-normalised": ("qwen3_moe", lambda m: [setattr(each.mlp.gate, "norm_topk_prob", False)
        for each in m.model.layers]),
    "use-rope": ("smollm3", change_attribute("use_rope", "self_attn", 0, index=0)),
    "soft-caps": ("gemma2-window", lambda m: [setattr(each.self_attn, "attn_logit_softcapping", 0.5)
        for each in m.model.layers]),
}  # fmt: skip


@pytest.mark.parametrize("change", FOLLOWED)
def test_fused_pass_follows_changes_of_values(change):
    """Also after both ways were compared."""
    name, apply = FOLLOWED[change]
    model = copy.deepcopy(tiny_model(name))
    before = scored(model).logits
    with torch.no_grad():
        apply(model)
    after = scored(model).logits
    active = TREE.parents > -2
    assert direct_pass(model) is not None
    assert relative(after[active], before[active]) > 1e-3
    assert relative(after[active], scored(model, by_modules=True).logits[active]) < 1e-5


def test_activations():
    for act, known in (
        ("silu", True),
        ("gelu", True),
        ("gelu_pytorch_tanh", True),
        ("gelu_new", True),
        ("relu", False),
    ):
        model = with_varied_vectors(random_model("starcoder2", hidden_act=act))
        assert (direct_pass(model) is not None) == known
        active = TREE.parents > -2
        ours, theirs = (scored(model, by_modules=each).logits[active] for each in (False, True))
        assert relative(ours, theirs) < 1e-5


def test_changes_of_a_call_in_another_thread_keep_the_fused_pass(model):
    """Otherwise the rounding of logits would depend on the timing of threads."""
    recorder = HiddenStateRecorder(model, model.config, (0, 2, -1))
    with row_invariant_linears(row_invariant(model)), recorder.recording():
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


@pytest.mark.parametrize("seed", range(2))
def test_other_experts_by_rounding_are_no_difference(seed, recwarn):
    """In bfloat16, a deep random model gives some tokens other experts in each way."""
    sizes = dict(hidden_size=128, num_hidden_layers=12, moe_intermediate_size=32, num_experts=60)
    model = random_model("qwen2_moe", seed, num_experts_per_tok=4, **sizes).bfloat16()
    scored(model)
    assert not recwarn and direct_pass(model) is not None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_wrong_experts_are_a_difference(monkeypatch, dtype):
    """With those of another layer, the logits of the first tree are unrelated."""
    model, op = copy.deepcopy(tiny_model("mixtral", dtype=dtype)), ops.decoder_layers

    def wrong(*arguments):
        weights, form = list(arguments[3]), arguments[-1]
        place, count = form.tensors.index("experts_down"), len(form.tensors)
        for layer in range(3):
            weights[layer * count + place] = weights[layer * count + place].flip(0)
        return op(*arguments[:3], weights, *arguments[4:])

    monkeypatch.setattr(ops, "decoder_layers", wrong)
    with pytest.warns(UserWarning, match="its logits differ from those of the fused pass"):
        scored(model)
    assert direct_pass(model) is None


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


def read(model, lengths, chunk=None):
    """The logits of a prompt, read in passes of up to ``chunk`` columns."""
    ids, mask = prompts(lengths)
    target = make_target(model, max(lengths) + 1)
    options = GenerationConfig(prefill_chunk_size=chunk)
    mask = target.admit(ids, {"attention_mask": mask}, options)
    return target.prefill(ids, mask).logits


@pytest.fixture
def passes(monkeypatch):
    """How the columns of prompts were read: "op" or "modules", and the number of columns of each pass."""
    seen, op, by_modules = [], ops.decoder_layers, ModulePass.__call__

    def fused(hidden, *arguments):
        seen.append(("op", hidden.shape[1]))
        return op(hidden, *arguments)

    def called(self, *arguments, **inputs):
        seen.append(("modules", inputs["input_ids"].shape[1]))
        return by_modules(self, *arguments, **inputs)

    monkeypatch.setattr(ops, "decoder_layers", fused)
    monkeypatch.setattr(ModulePass, "__call__", called)
    return seen


def test_prompts_are_read_once_but_for_the_compared_columns(model, passes):
    compared = [("modules", COMPARED_COLUMNS), ("op", COMPARED_COLUMNS)]
    read(model, (9,))
    assert passes == [("modules", 9), ("op", 9)]
    passes.clear()
    read(model, (100,))
    assert passes == [("op", 100)]  # short prompts have no end of their own
    for length in (2 * DIRECT_COLUMNS - 1, DIRECT_COLUMNS):  # the same power of two
        passes.clear()
        read(model, (length,))
        between = length - DIRECT_COLUMNS - COMPARED_COLUMNS
        last = [("op", between), *compared] if between > 0 else []
        assert passes == [("op", DIRECT_COLUMNS), *last]
    other = copy.deepcopy(model)
    passes.clear()
    read(other, (300,))
    assert passes == [*compared, ("op", 300 - 2 * COMPARED_COLUMNS), *compared]


@pytest.mark.parametrize("chunk", [None, 24, 1])
@pytest.mark.parametrize("lengths", [(9,), (40, 3), (150,), (700, 60)], ids=str)
def test_comparing_does_not_change_a_bit(model, lengths, chunk):
    """The parts that modules read, too, are those of the op in the end."""
    first, later = (read(model, lengths, chunk) for _ in range(2))
    assert torch.equal(first, later) and direct_pass(model) is not None


def wrong_window(arguments):
    arguments[5] = [0 for _ in arguments[5]]


def sees_padding(arguments):
    arguments[7] = torch.zeros_like(arguments[7])
    arguments[8] = torch.full_like(arguments[8], arguments[9])


def forgets_the_first_token(arguments):
    arguments[7], arguments[8] = arguments[7] + 1, arguments[8] - 1


def wrong_later_passes(arguments):
    if arguments[9] > 0:
        forgets_the_first_token(arguments)


def wrong_first_pass(arguments):
    if arguments[9] == 0:
        arguments[0] = arguments[0] * torch.linspace(0.5, 1.0, arguments[0].shape[1])[:, None]


PLANTED = {
    "window": (wrong_window, dict(kind="mistral", sliding_window=140), (300,), None),
    "window-long": (wrong_window, dict(kind="mistral", sliding_window=600), (700,), None),
    "window-short": (wrong_window, dict(kind="mistral", sliding_window=8), (20,), None),
    "padding": (sees_padding, dict(kind="llama"), (20, 4), None),
    "much-padding": (sees_padding, dict(kind="llama"), (100, 60), None),
    "more-padding-than-a-pass": (sees_padding, dict(kind="llama"), (700, 100), None),
    "first-token": (forgets_the_first_token, dict(kind="llama"), (20,), None),
    "first-pass": (wrong_first_pass, dict(kind="llama"), (700,), None),
    "later-passes": (wrong_later_passes, dict(kind="llama"), (700,), None),
    "small-passes": (wrong_later_passes, dict(kind="llama"), (20,), 8),
}


@pytest.mark.parametrize("case", PLANTED)
def test_differences_that_show_in_some_columns_only_are_found(case, monkeypatch):
    plant, options, lengths, chunk = PLANTED[case]
    model, op = random_model(**options), ops.decoder_layers

    def wrong(*arguments):
        changed = list(arguments)
        plant(changed)
        return op(*changed)

    monkeypatch.setattr(ops, "decoder_layers", wrong)
    with pytest.warns(UserWarning, match="its logits differ from those of the fused pass"):
        ours = read(model, lengths, chunk)
    assert direct_pass(model) is None
    assert torch.equal(ours, read(model, lengths, chunk))  # both by modules


def test_a_window_is_compared_in_the_first_prompt_that_is_long_enough(monkeypatch):
    model, op = random_model("mistral", sliding_window=140), ops.decoder_layers

    def wrong(*arguments):
        changed = list(arguments)
        wrong_window(changed)
        return op(*changed)

    monkeypatch.setattr(ops, "decoder_layers", wrong)
    read(model, (9,))
    assert direct_pass(model) is not None
    with pytest.warns(UserWarning, match="its logits differ from those of the fused pass"):
        read(model, (300,))
    assert direct_pass(model) is None
