"""The families of decoders that the direct pass runs: their classes, their modules, and what layers compute.

A family is data. ``reading.py`` looks up what it names in a model; ``known_code.py`` compares the code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from specdec_ext.models.passes.attention import IMPLEMENTATION
from specdec_ext.ops.decoder_layers import LAYER_MATRICES, Norm

# Kinds of modules whose code is compared, by the end of the names of their classes.
_KINDS = ("ForCausalLM", "Model", "DecoderLayer", "Attention", "MLP", "RMSNorm")


def _classes(*prefixes: str) -> dict[str, tuple[str, ...]]:
    """Return the classes of ``"folder.Prefix"`` by kind, as ``"folder.Class"``."""
    return {kind: tuple(prefix + kind for prefix in prefixes) for kind in _KINDS}


def _classes_with_experts(prefix: str, without: str | None = None) -> dict[str, tuple[str, ...]]:
    """Of decoders with experts, without one kind."""
    kinds = (*_KINDS, "SparseMoeBlock", "TopKRouter", "Experts")
    return {kind: (prefix + kind,) for kind in kinds if kind != without}


def _without_norms(classes: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Of decoders with ``torch.nn.LayerNorm``."""
    return {kind: names for kind, names in classes.items() if kind != "RMSNorm"}


@dataclass(frozen=True, eq=False, kw_only=True)
class LayerParts:
    """Where the parts of a layer are, as paths in it.

    Attributes:
        modules: name in ``LAYER_TENSORS`` -> path of the module that has the weight.
        parameters: name in ``LAYER_TENSORS`` -> path of the parameter, for routers and experts.
        activations: paths of the activation functions of all MLPs.
        idle: paths of modules that do nothing outside of training.
    """

    modules: Mapping[str, str]
    parameters: Mapping[str, str] = field(default_factory=dict)
    activations: tuple[str, ...] = ("mlp.act_fn",)
    idle: frozenset[str] = frozenset()

    @property
    def matrices(self) -> list[str]:
        """Paths of the linear layers."""
        return [path for name, path in self.modules.items() if name in LAYER_MATRICES]

    @property
    def norms(self) -> list[str]:
        """Paths of the norms."""
        return [path for name, path in self.modules.items() if name not in LAYER_MATRICES]

    @property
    def paths(self) -> set[str]:
        """Paths of all modules in a layer, with that of the layer itself."""
        owners = {path.rpartition(".")[0] for path in self.parameters.values()}
        leaves = {*self.modules.values(), *owners, *self.activations, *self.idle}
        return {"", *leaves, *(path.rpartition(".")[0] for path in leaves)}


@dataclass(frozen=True, eq=False, kw_only=True)
class Family(LayerParts):
    """Decoders whose layers compute the same, and where their parts are.

    Attributes:
        classes: kind of module -> classes with its code, as ``"folder.Class"`` of ``transformers.models``. If
            there is no RMSNorm, norms are ``torch.nn.LayerNorm``.
        sparse: the parts of layers with experts, if others have none.
        layers: name in the decoder.
        attention: path of this module in a layer.
        embedding, final_norm: names in the decoder.
        positions: name in the decoder of the embedding of positions; None if positions are rotations.
        idle_in_decoder: like ``idle``, in the decoder.
        norm: kind of all norms.
        eps: attribute of a norm.
        head_dim: attribute of the attention.
        windowed: whether the code honours sliding windows in the config.
        interleaved: as in :class:`specdec_ext.ops.decoder_layers.DecoderForm`.
        partly_rotated: whether a part of each head may be left without rotation.
        rotations_by_type: whether types of layers (``config.layer_types``) may have rotations of their own.
        rotates: attribute of the attention, whether the layer rotates at all; None if all do.
        softcap: attribute of the attention: cap of the scores or None.
        residual_scale, parallel: attributes of a layer.
        normalised: attribute of a router, whether the weights of chosen experts are divided by their sum;
            None if they always are.
        wide_experts: as in :class:`specdec_ext.ops.decoder_layers.DecoderForm`.
        embedding_scale: attribute of the decoder.
        logits_divisor, logits_cap: attributes of the config.
        implementation: of attention, with which the modules compute the same.
    """

    classes: Mapping[str, tuple[str, ...]]
    sparse: LayerParts | None = None
    layers: str = "layers"
    attention: str = "self_attn"
    embedding: str = "embed_tokens"
    positions: str | None = None
    final_norm: str = "norm"
    idle_in_decoder: frozenset[str] = frozenset()
    norm: Norm = Norm.RMS
    eps: str = "variance_epsilon"
    head_dim: str = "head_dim"
    windowed: bool = False
    interleaved: bool = False
    partly_rotated: bool = False
    rotations_by_type: bool = False
    rotates: str | None = None
    softcap: str | None = None
    residual_scale: str | None = None
    parallel: str | None = None
    normalised: str | None = None
    wide_experts: bool = False
    embedding_scale: str | None = None
    logits_divisor: str | None = None
    logits_cap: str | None = None
    implementation: str = IMPLEMENTATION

    def of(self, layer: Any) -> LayerParts:
        """Return the parts of this layer."""
        return self.sparse if self.sparse is not None and "experts" in layer.mlp._modules else self


_ATTENTION = {
    "attention_norm": "input_layernorm",
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "output": "self_attn.o_proj",
}
_MLP = {
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
_HEAD_NORMS = {"query_norm": "self_attn.q_norm", "key_norm": "self_attn.k_norm"}
_BOTH_NORMS = {
    **_ATTENTION,
    **_MLP,
    "attention_output_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_output_norm": "post_feedforward_layernorm",
}
_LLAMA_LIKE = ("llama.Llama", "mistral.Mistral", "qwen2.Qwen2", "qwen3.Qwen3")
_LLAMA = Family(
    classes={
        **_classes(*_LLAMA_LIKE),
        "Model": ("llama.LlamaModel",),  # ignores windows in its config
        "Attention": tuple(f"{prefix}Attention" for prefix in _LLAMA_LIKE[:3]),
    },
    modules={**_ATTENTION, **_MLP},
)
_MISTRAL = replace(
    _LLAMA,
    classes={
        **_LLAMA.classes,
        "Model": tuple(f"{prefix}Model" for prefix in _LLAMA_LIKE[1:]),
    },
    windowed=True,
)
_QWEN3 = replace(
    _MISTRAL,
    classes={**_MISTRAL.classes, "Attention": ("qwen3.Qwen3Attention",)},
    modules={**_MISTRAL.modules, **_HEAD_NORMS},
)
_WITH_EXPERTS = {**_ATTENTION, "mlp_norm": _MLP["mlp_norm"]}
_EXPERTS = {
    "router": "mlp.gate.weight",
    "experts_gate": "mlp.experts.gate_up_proj",
    "experts_down": "mlp.experts.down_proj",
}
_MIXTRAL = Family(
    classes=_classes_with_experts("mixtral.Mixtral", without="MLP"),
    modules=_WITH_EXPERTS,
    parameters=_EXPERTS,
    activations=("mlp.experts.act_fn",),
    windowed=True,
    wide_experts=True,
)
_QWEN2_MOE = Family(
    classes=_classes_with_experts("qwen2_moe.Qwen2Moe"),
    modules={**_ATTENTION, **_MLP},
    sparse=LayerParts(
        modules={
            **_WITH_EXPERTS,
            "gate": "mlp.shared_expert.gate_proj",
            "up": "mlp.shared_expert.up_proj",
            "down": "mlp.shared_expert.down_proj",
            "shared_gate": "mlp.shared_expert_gate",
        },
        parameters=_EXPERTS,
        activations=("mlp.experts.act_fn", "mlp.shared_expert.act_fn"),
    ),
    windowed=True,
    normalised="norm_topk_prob",
)
_QWEN3_MOE = replace(
    _QWEN2_MOE,
    classes=_classes_with_experts("qwen3_moe.Qwen3Moe"),
    modules={**_ATTENTION, **_MLP, **_HEAD_NORMS},
    sparse=LayerParts(
        modules={**_WITH_EXPERTS, **_HEAD_NORMS},
        parameters=_EXPERTS,
        activations=("mlp.experts.act_fn",),
    ),
)
_GEMMA = Family(
    classes={
        **_classes("gemma.Gemma"),
        "TextScaledWordEmbedding": ("gemma.GemmaTextScaledWordEmbedding",),
    },
    modules={**_ATTENTION, **_MLP},
    norm=Norm.RMS_OFFSET,
    eps="eps",
    embedding_scale="embed_tokens.embed_scale",
)
_GEMMA2 = replace(
    _GEMMA,
    classes={
        **_classes("gemma2.Gemma2"),
        "TextScaledWordEmbedding": ("gemma2.Gemma2TextScaledWordEmbedding",),
    },
    modules=_BOTH_NORMS,
    windowed=True,
    softcap="attn_logit_softcapping",
    logits_cap="final_logit_softcapping",
    implementation="eager",  # transformers has no other that caps scores
)
_GEMMA3 = replace(
    _GEMMA2,
    classes={
        **_classes("gemma3.Gemma3"),
        "Model": ("gemma3.Gemma3TextModel",),
        "TextScaledWordEmbedding": ("gemma3.Gemma3TextScaledWordEmbedding",),
    },
    modules={**_BOTH_NORMS, **_HEAD_NORMS},
    softcap=None,
    rotations_by_type=True,
    implementation=IMPLEMENTATION,
)
_PHI3 = Family(
    classes=_classes("phi3.Phi3"),
    modules={
        "attention_norm": "input_layernorm",
        "query": "self_attn.qkv_proj",
        "output": "self_attn.o_proj",
        "mlp_norm": "post_attention_layernorm",
        "gate": "mlp.gate_up_proj",
        "down": "mlp.down_proj",
    },
    activations=("mlp.activation_fn",),
    idle=frozenset({"resid_attn_dropout", "resid_mlp_dropout"}),
    windowed=True,
    partly_rotated=True,
)
_SMOLLM3 = replace(_LLAMA, classes=_classes("smollm3.SmolLM3"), windowed=True, rotates="use_rope")
_GRANITE = replace(
    _LLAMA,
    classes=_classes("granite.Granite"),
    residual_scale="residual_multiplier",
    embedding_scale="embedding_multiplier",
    logits_divisor="logits_scaling",
)
_OLMO2 = Family(
    classes=_classes("olmo2.Olmo2"),
    modules={
        **{name: path for name, path in {**_ATTENTION, **_MLP}.items() if "norm" not in name},
        **_HEAD_NORMS,  # over all heads
        "attention_output_norm": "post_attention_layernorm",
        "mlp_output_norm": "post_feedforward_layernorm",
    },
    norm=Norm.RMS_WIDE,
)
_OLMO3 = replace(_OLMO2, classes=_classes("olmo3.Olmo3"), windowed=True, rotations_by_type=True)
_STARCODER2 = Family(
    classes=_without_norms(_classes("starcoder2.Starcoder2")),
    modules={
        **_ATTENTION,
        "mlp_norm": "post_attention_layernorm",
        "up": "mlp.c_fc",
        "down": "mlp.c_proj",
    },
    activations=("mlp.act",),
    norm=Norm.LAYER,
    eps="eps",
    windowed=True,
)
_GPT_NEOX = Family(
    classes={
        **_without_norms(_classes("gpt_neox.GPTNeoX")),
        "DecoderLayer": ("gpt_neox.GPTNeoXLayer",),
    },
    modules={
        "attention_norm": "input_layernorm",
        "query": "attention.query_key_value",
        "output": "attention.dense",
        "mlp_norm": "post_attention_layernorm",
        "up": "mlp.dense_h_to_4h",
        "down": "mlp.dense_4h_to_h",
    },
    attention="attention",
    activations=("mlp.act",),
    idle=frozenset({"post_attention_dropout", "post_mlp_dropout"}),
    embedding="embed_in",
    final_norm="final_layer_norm",
    idle_in_decoder=frozenset({"emb_dropout"}),
    norm=Norm.LAYER,
    eps="eps",
    head_dim="head_size",
    interleaved=True,
    partly_rotated=True,
    parallel="use_parallel_residual",
)
_GPT2 = Family(
    classes={
        "ForCausalLM": ("gpt2.GPT2LMHeadModel",),
        "Model": ("gpt2.GPT2Model",),
        "DecoderLayer": ("gpt2.GPT2Block",),
        "Attention": ("gpt2.GPT2Attention",),
        "MLP": ("gpt2.GPT2MLP",),
        "Conv1D": ("gpt2.Conv1D",),
    },
    modules={
        "attention_norm": "ln_1",
        "query": "attn.c_attn",
        "output": "attn.c_proj",
        "mlp_norm": "ln_2",
        "up": "mlp.c_fc",
        "down": "mlp.c_proj",
    },
    layers="h",
    attention="attn",
    activations=("mlp.act",),
    idle=frozenset({"attn.attn_dropout", "attn.resid_dropout", "mlp.dropout"}),
    embedding="wte",
    positions="wpe",
    final_norm="ln_f",
    idle_in_decoder=frozenset({"drop"}),
    norm=Norm.LAYER,
    eps="eps",
)
FAMILIES = (
    *(
        _LLAMA,
        _MISTRAL,
        _QWEN3,
        _GEMMA,
        _GEMMA2,
        _GEMMA3,
        _PHI3,
        _SMOLLM3,
        _GRANITE,
        _OLMO2,
        _OLMO3,
    ),
    *(_STARCODER2, _GPT_NEOX, _GPT2, _MIXTRAL, _QWEN2_MOE, _QWEN3_MOE),
)
