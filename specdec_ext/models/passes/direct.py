"""``DirectPass``: run all layers of a Llama-like decoder with one op instead of its modules.

Many decoders are Llama under another name, and for a small one the Python code of its modules takes longer
than the arithmetic. If the code of every module equals that of a known decoder (``known_code.py``), byte for
byte, one call of ``ops.decoder_layers`` replaces all layers. The op reads the model's own weights without a
copy, and uses the same row-invariant matrix products and attention as other block passes.

A model is excluded if it was modified or is observed: hooks, a ``forward`` set on an instance, code from
outside of transformers, subclasses of ``nn.Linear``, quantised or parametrized weights, compilation. The
first prompt of a model and the first pass over a draft tree are computed both ways, and the logits are
compared.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from specdec_ext import ops
from specdec_ext.models.cache.adoption import adopt_cache, attention_windows
from specdec_ext.models.cache.layers import RollbackLayer
from specdec_ext.models.passes.agreement import TOLERANCE, relative_difference
from specdec_ext.models.passes.attention import TreeBlock
from specdec_ext.models.passes.known_code import (
    has_global_hooks,
    is_known,
    is_llama,
    is_untouched,
)
from specdec_ext.models.passes.linears import is_plain

_LAYER = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj", "act_fn")

# Kinds of passes.
PROMPT, TREE = "prompt", "tree"

# Of each model, the kinds of passes of which both ways were compared, and whether they agreed.
_agreed: WeakKeyDictionary[nn.Module, dict[str, bool]] = WeakKeyDictionary()


@dataclass(frozen=True)
class PromptBlock:
    """Columns of prompts; with the attributes of :class:`TreeBlock` that ``ops.decoder_layers`` takes.

    Attributes:
        prefix_starts: ``[rows]`` slot of the first token of each row.
        prefix_lengths: ``[rows]`` number of tokens before the columns; negative if these begin with padding.
        stop: the slot after the last column, a number on the host.
    """

    prefix_starts: Tensor
    prefix_lengths: Tensor
    stop: int
    ancestors: None = None


@dataclass(frozen=True)
class DirectPass:
    """The embeddings, all layers, the final norm and the output head of one model.

    Attributes:
        kinds: classes of the modules, as for :func:`is_known`.
        windows: sliding window of each layer, 0 for full attention.
    """

    kinds: dict[str, frozenset[type]]
    embedding: Tensor
    rotary: Callable[..., tuple[Tensor, Tensor]]
    weights: list[Tensor]
    head: nn.Linear
    windows: list[int]
    kv_heads: int
    head_dim: int
    eps: float
    scale: float

    def serves(self, layers: Sequence[Any]) -> bool:
        """Whether these cache layers match the decoder layers one by one."""
        # A cache layer without a window is fine: it keeps all tokens.
        return len(layers) == len(self.windows) and all(
            type(layer) is RollbackLayer and layer.window in (None, window)
            for layer, window in zip(layers, self.windows, strict=True)
        )

    def __call__(
        self,
        tokens: Tensor,
        position_ids: Tensor,
        block: TreeBlock | PromptBlock,
        layers: Sequence[RollbackLayer],
        kept: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """Score ``tokens [rows, nodes]`` and append their keys and values to the cache.

        ``kept`` lists the nodes whose logits are wanted; None for all.

        Returns:
            ``[rows, nodes, vocab]`` logits, and the arguments of :meth:`HiddenStateRecorder.chosen`.
        """
        rows, nodes = tokens.shape
        hidden = nn.functional.embedding(tokens, self.embedding)
        caches = []
        for layer in layers:
            layer.reserve(block.stop)
            if not layer.is_initialized:
                nothing = hidden.new_empty(rows, self.kv_heads, 0, self.head_dim)
                layer.lazy_initialization(nothing, nothing)
            layer.length = block.stop
            caches += layer.buffers
        if len(caches[0]) != rows:
            caches = [buffer[:rows] for buffer in caches]
        cosines, sines = self.rotary(hidden, position_ids=position_ids)
        states, output = ops.decoder_layers(
            hidden,
            cosines,
            sines,
            self.weights,
            caches,
            self.windows,
            block.ancestors,
            block.prefix_starts,
            block.prefix_lengths,
            block.stop - nodes,
            self.head_dim,
            self.eps,
            self.scale,
        )
        scored = output if kept is None else output[:, kept]
        logits = ops.linear(scored, self.head.weight, self.head.bias)
        return logits, (hidden, states, output)


def usable(model: PreTrainedModel, direct: DirectPass | None) -> DirectPass | None:
    """Return the direct pass of a model; None if something outside of the model rules it out now."""
    if (
        direct is None
        or False in _agreed.get(model, {}).values()
        or torch.is_autocast_enabled("cpu")
        or has_global_hooks()
        or not is_known(direct.kinds)  # classes and functions can be replaced at any time
    ):
        return None
    return direct


def read_direct_pass(model: PreTrainedModel) -> DirectPass | None:
    """Return the direct pass of a model, or None if the model is not eligible."""
    if not is_untouched(model):
        return None
    try:
        return _read(model)
    except (AttributeError, KeyError):  # a module of the supported families is missing
        return None


def agrees(model: nn.Module, kind: str, directly: Tensor, by_modules: Tensor) -> bool:
    """Whether the logits of both ways differ by rounding only; remembered for this kind of passes."""
    error = relative_difference(directly, by_modules)
    if not math.isfinite(error):
        return False  # NaN or infinite logits prove nothing; not remembered
    agreed = _agreed.setdefault(model, {})
    agreed[kind] = error <= TOLERANCE[by_modules.dtype]
    if not agreed[kind]:
        warnings.warn(
            f"{type(model).__name__} has the code of a supported decoder, but its logits differ from those "
            f"of the fused pass by {error:.2g} (relative). It is run module by module, which is slower. "
            f"Please report this, with the version of transformers, {transformers.__version__}",
            stacklevel=2,
        )
    return agreed[kind]


def is_agreed(model: nn.Module, kind: str) -> bool:
    """Whether both ways were compared for this kind of passes of the model and agreed."""
    return _agreed.get(model, {}).get(kind, False)


def _read(model: Any) -> DirectPass | None:
    decoder = getattr(model, model.base_model_prefix)
    head, embedding, norm = model.lm_head, decoder.embed_tokens, decoder.norm
    layers = list(decoder.layers)
    first = layers[0].self_attn
    parts = {
        "ForCausalLM": [model],
        "Model": [decoder],
        "DecoderLayer": layers,
        "Attention": [layer.self_attn for layer in layers],
        "MLP": [layer.mlp for layer in layers],
        "RMSNorm": list(_norms(decoder)),
    }
    linears = [head, *(linear for layer in layers for linear in _linears(layer))]
    activations = [layer.mlp.act_fn for layer in layers]
    shaped = (
        _children(model) == {model.base_model_prefix, "lm_head"}
        and _children(decoder) == {"embed_tokens", "layers", "norm", "rotary_emb"}
        and all(_children(layer) == {*_LAYER} for layer in layers)
        and all(_children(layer.mlp) == {*_MLP} for layer in layers)
        and all(
            _children(attention) in ({*_PROJECTIONS}, {*_PROJECTIONS, "q_norm", "k_norm"})
            for attention in parts["Attention"]
        )
        and type(embedding) is nn.Embedding
        and embedding.max_norm is None
        and all(type(linear) is nn.Linear and is_plain(linear) for linear in linears)
        and all(type(act) in (nn.SiLU, type(ACT2FN["silu"])) for act in activations)
    )
    if not shaped or len(layers) != decoder.config.num_hidden_layers:
        return None
    weights = [tensor for layer in layers for tensor in _weights(layer)] + [_weight(norm)]
    vectors = [tensor for tensor in [*weights, _weight(embedding)] if tensor.numel()]
    dtype = head.weight.dtype
    same = (
        all(tensor.dtype == dtype and tensor.is_cpu for tensor in vectors)
        and all(type(tensor) is nn.Parameter and tensor.is_contiguous() for tensor in vectors)
        and len({each.variance_epsilon for each in parts["RMSNorm"]}) == 1
        and [each.layer_idx for each in parts["Attention"]] == [*range(len(layers))]
        and {each.scaling for each in parts["Attention"]} == {first.scaling}
        and {each.head_dim for each in parts["Attention"]} == {first.head_dim}
        and 2 * decoder.rotary_emb.inv_freq.numel() == first.head_dim
    )
    kinds = {part: frozenset(map(type, modules)) for part, modules in parts.items()}
    if not same or not is_known(kinds):
        return None
    return DirectPass(
        kinds,
        _weight(embedding),
        decoder.rotary_emb,
        weights,
        head,
        _windows(decoder),
        first.k_proj.out_features // first.head_dim,
        first.head_dim,
        norm.variance_epsilon,
        first.scaling,
    )


def _windows(decoder: Any) -> list[int]:
    if is_llama(decoder):
        return [0] * len(decoder.layers)  # Llama's code ignores windows in its config
    cache = adopt_cache(None, decoder.config)
    return [window or 0 for window in attention_windows(cache, decoder.config)]


def _children(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_children()}


def _norms(decoder: Any) -> Iterator[Any]:
    yield decoder.norm
    for layer in decoder.layers:
        yield from (layer.input_layernorm, layer.post_attention_layernorm)
        if hasattr(layer.self_attn, "q_norm"):
            yield from (layer.self_attn.q_norm, layer.self_attn.k_norm)


def _linears(layer: Any) -> list[nn.Linear]:
    attention, mlp = layer.self_attn, layer.mlp
    return [
        *(getattr(attention, name) for name in _PROJECTIONS),
        mlp.gate_proj,
        mlp.up_proj,
        mlp.down_proj,
    ]


def _weight(module: nn.Module) -> Tensor:
    weight = module._parameters["weight"]
    assert weight is not None
    return weight


def _weights(layer: Any) -> list[Tensor]:
    """Return the tensors of one layer in the order of ``LAYER_TENSORS``; empty if absent."""
    nothing = _weight(layer.input_layernorm).new_empty(0)

    def linear(module: nn.Linear) -> list[Tensor]:
        bias = module._parameters["bias"]
        return [_weight(module), nothing if bias is None else bias]

    attention, mlp = layer.self_attn, layer.mlp
    query, key, value, output = (linear(getattr(attention, name)) for name in _PROJECTIONS)
    norms = [nothing, nothing]
    if hasattr(attention, "q_norm"):
        norms = [_weight(attention.q_norm), _weight(attention.k_norm)]
    return [
        _weight(layer.input_layernorm),
        *query,
        *key,
        *value,
        *norms,
        *output,
        _weight(layer.post_attention_layernorm),
        *linear(mlp.gate_proj),
        *linear(mlp.up_proj),
        *linear(mlp.down_proj),
    ]
