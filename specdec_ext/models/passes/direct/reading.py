"""``read_direct_pass``: look up in a model what its family names, and describe it for the op.

The matrices may be weights in 8 or 4 bits (``models/quantised``). A model is excluded if it was modified or
is observed: hooks, a ``forward`` set on an instance, code from outside of transformers, other subclasses of
``nn.Linear``, parametrized weights, compilation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN
from transformers.pytorch_utils import Conv1D

from specdec_ext.models.cache.adoption import adopt_cache, attention_windows
from specdec_ext.models.passes.direct.direct_pass import DirectPass
from specdec_ext.models.passes.direct.families import FAMILIES, Family, LayerParts
from specdec_ext.models.passes.direct.rotations import Rotation
from specdec_ext.models.passes.known_code import has_code_of, is_untouched
from specdec_ext.models.passes.linears import is_readable, matrix_of
from specdec_ext.ops.decoder_layers import (
    LAYER_MATRICES,
    LAYER_TENSORS,
    Activation,
    DecoderForm,
)
from specdec_ext.ops.quantise import QuantisedWeight


def read_direct_pass(model: PreTrainedModel) -> DirectPass | None:
    """Return the direct pass of a model, or None if the model is not eligible."""
    if not is_untouched(model):
        return None
    return next(filter(None, (_read(model, family) for family in FAMILIES)), None)


def _read(model: Any, family: Family) -> DirectPass | None:
    """Return the direct pass of a model, or None if it is not of this family."""
    try:
        decoder = getattr(model, model.base_model_prefix)
        parts = _parts(model, decoder, family)
        kinds = {kind: frozenset(map(type, modules)) for kind, modules in parts.items()}
        if not has_code_of(family, kinds) or not _has_modules_of(family, model, decoder):
            return None
        return _described(model, decoder, family, kinds)
    except (AttributeError, KeyError):  # a part of the family is missing, or has another size
        return None


def _parts(model: Any, decoder: Any, family: Family) -> dict[str, list[Any]]:
    """Return the modules whose code has to be that of the family, by kind."""
    layers = _layers(decoder, family)
    sparse = _with_experts(layers, family)
    experts = [each.experts for each in sparse]
    parts = {
        "ForCausalLM": [model],
        "Model": [decoder],
        "DecoderLayer": layers,
        "Attention": _each(layers, family.attention),
        "MLP": [each for each in _mlps(layers, family) if each not in experts],
        "SparseMoeBlock": sparse,
        "TopKRouter": [each.gate for each in sparse],
        "Experts": experts,
        "RMSNorm": _norms(decoder, family),
        "TextScaledWordEmbedding": [getattr(decoder, family.embedding)],
        "Conv1D": _uncoded(_matrices(layers, family)),
    }
    return {kind: parts[kind] for kind in family.classes}


def _has_modules_of(family: Family, model: Any, decoder: Any) -> bool:
    """Whether all modules are there, no others, and those whose code is not compared are torch's own."""
    layers = _layers(decoder, family)
    positions = family.positions or "rotary_emb"
    in_decoder = {family.embedding, family.layers, family.final_norm, positions}
    embeddings = [getattr(decoder, name) for name in (family.embedding, family.positions) if name]
    scales = "TextScaledWordEmbedding" in family.classes
    idle = _in_layers(layers, family, lambda parts: parts.idle)
    idle += [getattr(decoder, name) for name in family.idle_in_decoder]
    matrices = _matrices(layers, family)
    kind = Conv1D if "Conv1D" in family.classes else nn.Linear
    device = model.device.type
    return (
        _children(model) == {model.base_model_prefix, "lm_head"}
        and _children(decoder) == in_decoder | family.idle_in_decoder
        and len(layers) == decoder.config.num_hidden_layers
        and all(
            {name for name, _ in layer.named_modules()} == family.of(layer).paths
            for layer in layers
        )
        and all(
            (type(each).__base__ if scales else type(each)) is nn.Embedding
            and each.max_norm is None
            for each in embeddings
        )
        and all(type(module) is nn.Dropout for module in idle)
        and all(is_readable(each, device) for each in (model.lm_head, *matrices))
        and all(type(each) is kind for each in _uncoded(matrices))
        and (
            "RMSNorm" in family.classes
            or all(type(norm) is nn.LayerNorm for norm in _norms(decoder, family))
        )
    )


def _described(
    model: Any, decoder: Any, family: Family, kinds: dict[str, frozenset[type]]
) -> DirectPass | None:
    """Return the direct pass of a model with the code and the modules of a family, None for odd values."""
    config, layers = decoder.config, _layers(decoder, family)
    embedding = _weight(getattr(decoder, family.embedding))
    positions = _weight(getattr(decoder, family.positions)) if family.positions else None
    attentions, norms = _each(layers, family.attention), _norms(decoder, family)
    final = getattr(decoder, family.final_norm)
    first: Any = attentions[0]
    head_dim: int = getattr(first, family.head_dim)
    kv_heads = _kv_heads(layers[0], first, head_dim, config, family)
    activations = _in_layers(layers, family, lambda parts: parts.activations)
    activation, *others = set(map(_activation, activations))
    routers = [each.gate for each in _with_experts(layers, family)]
    uniform = [
        *((layers, name) for name in (family.residual_scale, family.parallel)),
        *((attentions, name) for name in (family.softcap, family.head_dim, "scaling")),
        (norms, family.eps),
        *((routers, name) for name in ("top_k", family.normalised) if routers),
    ]
    found = [_weights(layer, family.of(layer)) for layer in layers]
    codes = [each for own in found for each in own.values() if isinstance(each, QuantisedWeight)]
    plain = [each for own in found for each in own.values() if isinstance(each, Tensor)]
    given = [embedding, positions, *plain, *_vectors(final)]
    tensors = [tensor for tensor in given if tensor is not None and tensor.numel()]
    tables, rotations = _rotations(decoder, attentions, family)
    if not (
        embedding.device.type in ("cpu", "meta")  # a model on the meta device is only planned
        and all(
            each.dtype == embedding.dtype and each.device == embedding.device for each in tensors
        )
        and all(type(tensor) in (nn.Parameter, Tensor) for tensor in tensors)
        and all(tensor.is_contiguous() for tensor in tensors)
        and all(each.levels is codes[0].levels for each in codes)
        and all(
            len({getattr(each, name) for each in those}) == 1 for those, name in uniform if name
        )
        and [each.layer_idx for each in attentions] == [*range(len(layers))]
        and all(each.is_causal for each in attentions)
        and not getattr(config, "use_bidirectional_attention", None)
        and not others
        and _fits_heads(decoder, head_dim, family)
    ):
        return None

    def value(owner: Any, name: str | None, default: Any = None) -> Any:
        return default if name is None else attrgetter(name)(owner)

    form = DecoderForm(
        tensors=tuple(name for name in LAYER_TENSORS if any(name in own for own in found)),
        norm=family.norm,
        activation=activation,
        interleaved=family.interleaved,
        parallel=bool(value(layers[0], family.parallel)),
        transposed="Conv1D" in family.classes,
        softcap=value(first, family.softcap) or 0.0,
        residual_scale=value(layers[0], family.residual_scale, 1.0),
        top_k=routers[0].top_k if routers else 0,
        normalised=bool(routers) and bool(value(routers[0], family.normalised, True)),
        wide_experts=family.wide_experts,
        tables=tables,
    )
    return DirectPass(
        family,
        kinds,
        embedding,
        value(decoder, family.embedding_scale),
        positions,
        rotations,
        *_in_order(found, form.tensors, _vectors(final)),
        codes[0].levels if codes else None,
        *_matrix(model.lm_head),
        value(config, family.logits_divisor),
        value(config, family.logits_cap),
        _windows(decoder, family),
        kv_heads,
        head_dim,
        getattr(final, family.eps),
        first.scaling,
        form,
    )


def _layers(decoder: Any, family: Family) -> list[Any]:
    return list(getattr(decoder, family.layers))


def _each(layers: Sequence[Any], path: str) -> list[Any]:
    """Return the module at this path of each layer."""
    return [layer.get_submodule(path) for layer in layers]


def _with_experts(layers: Sequence[Any], family: Family) -> list[Any]:
    """Return the MLPs that have experts."""
    return [layer.mlp for layer in layers if family.of(layer).parameters]


def _in_layers(
    layers: Sequence[Any], family: Family, paths: Callable[[LayerParts], Iterable[str]]
) -> list[Any]:
    """Return the modules of all layers at the paths that the parts of a layer give."""
    return [layer.get_submodule(path) for layer in layers for path in paths(family.of(layer))]


def _mlps(layers: Sequence[Any], family: Family) -> list[Any]:
    """Return the modules that have an activation function."""
    return _in_layers(
        layers, family, lambda parts: [path.rpartition(".")[0] for path in parts.activations]
    )


def _matrices(layers: Sequence[Any], family: Family) -> list[Any]:
    return _in_layers(layers, family, lambda parts: parts.matrices)


def _uncoded(matrices: Sequence[Any]) -> list[Any]:
    """Return the modules whose weights are not in 8 or 4 bits."""
    return [each for each in matrices if not isinstance(matrix_of(each)[0], QuantisedWeight)]


def _norms(decoder: Any, family: Family) -> list[Any]:
    inside = _in_layers(_layers(decoder, family), family, lambda parts: parts.norms)
    return [*inside, getattr(decoder, family.final_norm)]


def _activation(module: Any) -> Activation:
    """Return what an activation module computes.

    Raises:
        KeyError: the op does not know it.
    """
    kind, gelu = type(module), nn.functional.gelu
    if kind in (nn.SiLU, type(ACT2FN["silu"])):
        return Activation.SILU
    if kind is type(ACT2FN["gelu"]) and module.act is gelu:
        return Activation.GELU
    if kind is type(ACT2FN["gelu_pytorch_tanh"]) and isinstance(module.act, partial):
        act = module.act
        if act.func is gelu and not act.args and act.keywords == {"approximate": "tanh"}:
            return Activation.GELU_TANH
    if kind is type(ACT2FN["gelu_new"]):
        return Activation.GELU_NEW
    raise KeyError(kind)


def _kv_heads(layer: Any, attention: Any, head_dim: int, config: Any, family: Family) -> int:
    """Return the number of heads of keys.

    Raises:
        KeyError: a joined matrix has not as many rows as it should.
    """
    if "key" in family.modules:
        return _outs(layer.get_submodule(family.modules["key"])) // head_dim
    heads = config.num_attention_heads
    kv_heads = getattr(attention, "num_key_value_heads", heads)
    if _outs(layer.get_submodule(family.modules["query"])) != (heads + 2 * kv_heads) * head_dim:
        raise KeyError("query")
    return kv_heads


def _outs(module: nn.Module) -> int:
    """Return the number of outputs of a matrix."""
    return _matrix(module)[0].shape[0]


def _rotations(
    decoder: Any, attentions: list[Any], family: Family
) -> tuple[tuple[int, ...], list[Rotation]]:
    """Return the table of each layer, and what computes the tables."""
    if family.positions:
        return (-1,) * len(attentions), []
    rotary = decoder.rotary_emb
    if names := _rotated_types(decoder, family):
        kinds = decoder.config.layer_types[: len(attentions)]
        tables = tuple(map(names.index, kinds))
        return tables, [partial(rotary, layer_type=name) for name in names]
    rotates = family.rotates
    turned = tuple(0 if rotates is None or getattr(each, rotates) else -1 for each in attentions)
    return turned, [rotary]


def _rotated_types(decoder: Any, family: Family) -> list[str]:
    """Return the types of layers that have rotations of their own; none if all layers share one."""
    # In older versions of transformers, all layers of OLMo 3 share one.
    by_type = family.rotations_by_type and hasattr(decoder.rotary_emb, "layer_types")
    return sorted(set(decoder.config.layer_types)) if by_type else []


def _fits_heads(decoder: Any, head_dim: int, family: Family) -> bool:
    """Whether the rotations are those of whole heads, or of a part if the code allows it."""
    if family.positions:
        return True
    types = _rotated_types(decoder, family)
    names = [f"{name}_inv_freq" for name in types] or ["inv_freq"]
    sizes = [2 * getattr(decoder.rotary_emb, name).numel() for name in names]
    return all(size <= head_dim if family.partly_rotated else size == head_dim for size in sizes)


def _windows(decoder: Any, family: Family) -> list[int]:
    if not family.windowed:
        return [0] * len(_layers(decoder, family))
    cache = adopt_cache(None, decoder.config)
    return [window or 0 for window in attention_windows(cache, decoder.config)]


def _children(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_children()}


def _weight(module: nn.Module) -> Tensor:
    weight = module._parameters["weight"]
    if weight is None:
        raise KeyError("weight")
    return weight


def _vectors(norm: nn.Module) -> tuple[Tensor, Tensor]:
    """Return the weight of a norm and its bias, which is empty if there is none."""
    weight, bias = _weight(norm), norm._parameters.get("bias")
    return weight, weight.new_empty(0) if bias is None else bias


def _matrix(module: nn.Module) -> tuple[Tensor | QuantisedWeight, Tensor | None]:
    weight, bias = matrix_of(module)
    if weight is None:
        raise KeyError("weight")
    return weight, bias


def _weights(layer: Any, parts: LayerParts) -> dict[str, Tensor | QuantisedWeight]:
    """Return what a layer has of ``LAYER_TENSORS``."""
    found: dict[str, Tensor | QuantisedWeight] = {}
    for name, path in parts.modules.items():
        module = layer.get_submodule(path)
        weight, bias = _matrix(module) if name in LAYER_MATRICES else _vectors(module)
        if type(module) is Conv1D:
            weight = module.weight  # itself: a transposed view would not follow changes of its data
        found[name] = weight
        if bias is not None:
            found[f"{name}_bias"] = bias
    for name, path in parts.parameters.items():
        owner, _, parameter = path.rpartition(".")
        found[name] = layer.get_submodule(owner)._parameters[parameter]
    return found


def _in_order(
    layers: list[dict[str, Tensor | QuantisedWeight]], names: Sequence[str], final: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the weights ``names`` and the scales in the order of the op; empty tensors for absent ones."""
    nothing = final[0].new_empty(0)
    weights, scales = [], []
    for own in layers:
        for name in names:
            each = own.get(name, nothing)
            weights.append(each.codes if isinstance(each, QuantisedWeight) else each)
        for name in LAYER_MATRICES:
            each = own.get(name, nothing)
            scales.append(each.scales if isinstance(each, QuantisedWeight) else nothing)
    return [*weights, *final], scales if any(each.numel() for each in scales) else []
