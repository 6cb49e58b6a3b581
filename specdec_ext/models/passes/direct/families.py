"""The families of decoders that the direct pass runs: their classes, their modules, and what layers compute.

A family is data. ``reading.py`` looks up what it names in a model; ``known_code.py`` compares the code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from specdec_ext.models.passes.attention import IMPLEMENTATION
from specdec_ext.ops.decoder_layers import Norm

# Kinds of modules whose code is compared, by the end of the names of their classes.
_KINDS = ("ForCausalLM", "Model", "DecoderLayer", "Attention", "MLP", "RMSNorm")


def _classes(*prefixes: str) -> dict[str, tuple[str, ...]]:
    """Return the classes of ``"folder.Prefix"`` by kind, as ``"folder.Class"``."""
    return {kind: tuple(prefix + kind for prefix in prefixes) for kind in _KINDS}


def _without_norms(classes: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Of decoders with ``torch.nn.LayerNorm``."""
    return {kind: names for kind, names in classes.items() if kind != "RMSNorm"}


@dataclass(frozen=True, eq=False)
class Family:
    """Decoders whose layers compute the same, and where their parts are.

    Attributes:
        classes: kind of module -> classes with its code, as ``"folder.Class"`` of ``transformers.models``. If
            there is no RMSNorm, norms are ``torch.nn.LayerNorm``.
        layers: name in the decoder.
        modules: name in ``LAYER_TENSORS`` -> path of the module in a layer that has the weight.
        attention, activation: paths of these modules in a layer.
        idle: paths of modules in a layer that do nothing outside of training.
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
        embedding_scale: attribute of the decoder.
        logits_divisor, logits_cap: attributes of the config.
        implementation: of attention, with which the modules compute the same.
    """

    classes: Mapping[str, tuple[str, ...]]
    modules: Mapping[str, str]
    layers: str = "layers"
    attention: str = "self_attn"
    activation: str = "mlp.act_fn"
    idle: frozenset[str] = frozenset()
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
    embedding_scale: str | None = None
    logits_divisor: str | None = None
    logits_cap: str | None = None
    implementation: str = IMPLEMENTATION

    @property
    def paths(self) -> set[str]:
        """Paths of all modules in a layer, with that of the layer itself."""
        leaves = {*self.modules.values(), self.activation, *self.idle}
        return {"", *leaves, *(path.rpartition(".")[0] for path in leaves)}


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
    activation="mlp.activation_fn",
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
    activation="mlp.act",
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
    activation="mlp.act",
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
    activation="mlp.act",
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
    *(_STARCODER2, _GPT_NEOX, _GPT2),
)
