"""``quantize``: store the linear layers of a model in 8 or 4 bits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from specdec_ext.display.progress import tracked
from specdec_ext.models.passes.known_code import is_untouched
from specdec_ext.models.quantised.linear import QuantisedLinear
from specdec_ext.models.quantised.rounding import rounded, scales_dtype
from specdec_ext.models.quantised.saved import (
    QuantisedConfig,
    mark_as_quantised,
    names_of,
    replace,
    replace_by_empty,
    scales_kind,
)
from specdec_ext.ops.quantise import CODE_BLOCK

_BITS = {"int8": 8, "int4": 4}
_DEFAULT_GROUPS = {8: None, 4: 32}
_LINEAR = (nn.Linear, Conv1D)


@torch.no_grad()
def quantize(
    model: PreTrainedModel,
    weights: str = "int8",
    *,
    group_size: int | None = None,
    symmetric: bool = True,
    head: str | None = "int8",
    skip: Sequence[str] = (),
) -> PreTrainedModel:
    """Store the weights of a model's linear layers in 8 or 4 bits, in place, for decoding on the CPU.

    Only weights have few bits: inputs and sums stay as they are. Embeddings, norms and everything else that
    is not a linear layer stay as they are, too. If the output head shares its weight with the embedding, the
    head gets codes of its own. Afterwards, ``QuantisationReport.of(model)`` shows sizes and errors, and
    ``save_pretrained`` saves the codes.

    Args:
        model: a Hugging Face model on the CPU, float32 or bfloat16, in evaluation mode.
        weights: ``"int8"`` or ``"int4"``.
        group_size: number of inputs of an output that share a scale: 32, 64, 128, ...; by default all for
            int8 and 32 for int4. A larger group takes fewer bits and has a larger error.
        symmetric: whether zero is a code. Otherwise every group has an offset as well, which takes 64 bits
            with the scale; it pays for large groups.
        head: format of the output head, None to leave it as it is. It has groups of ``group_size`` if its
            format is that of ``weights``, and the default size otherwise.
        skip: names of modules whose linear layers stay as they are, or parts of names from dot to dot:
            ``"down_proj"``, ``"model.layers.0"``.

    Returns:
        ``model``.

    Raises:
        TypeError: if ``model`` is not a Hugging Face model.
        ValueError: for arguments out of range, names in ``skip`` that no linear layer has, and models that
            can't be quantised: quantised ones, ones with hooks, adapters or offloaded weights, training mode,
            other dtypes or devices, weights that are not finite. Nothing is changed then.
    """
    _check_model(model)
    formats = _formats(model, weights, group_size, head, skip)
    for name in formats:
        if problem := _problem(_linear(model, name)):
            raise ValueError(f"{name} can't be quantised: {problem}, or name it in skip")
    names, total = names_of(model), sum(_linear(model, each).weight.numel() for each in formats)
    with tracked("quantising", total, "weight") as work:
        for name, (bits, groups) in formats.items():
            module = _linear(model, name)
            found = rounded(_matrix(module), bits, groups, symmetric)
            layer = QuantisedLinear(found.weight, module.bias, found.error)
            replace(model, names[id(module)], layer)
            work.advance(module.weight.numel())
    mark_as_quantised(model)
    return model


def quantize_empty(
    model: PreTrainedModel,
    weights: str = "int8",
    *,
    group_size: int | None = None,
    symmetric: bool = True,
    head: str | None = "int8",
) -> None:
    """Give a model on the meta device, in place, the layers that :func:`quantize` would give it.

    Raises:
        ValueError: as :func:`quantize`, for arguments out of range and models without linear layers.
    """
    layouts = []
    for name, (bits, groups) in _formats(model, weights, group_size, head).items():
        dtype = scales_dtype(_matrix(_linear(model, name)).shape[1], groups, symmetric)
        kind = scales_kind(dtype, not symmetric)
        layouts.append(dict(bits=bits, group_size=groups, scales=kind, levels=False, layers=[name]))
    replace_by_empty(model, QuantisedConfig(layouts=layouts))


def _formats(
    model: PreTrainedModel,
    weights: str,
    group_size: int | None,
    head: str | None,
    skip: Sequence[str] = (),
) -> dict[str, tuple[int, int | None]]:
    """The linear layers to quantise, by name, with their bits and group size (None for whole rows)."""
    bits = _bits("weights", weights)
    head_bits = None if head is None else _bits("head", head)
    if group_size is not None and not _is_group_size(group_size):
        raise ValueError(f"group_size={group_size!r}; expected 32, 64, 128 or another doubling")
    if isinstance(skip, str):
        raise ValueError(f"skip={skip!r} is one name; expected a sequence of names")
    lm_head = model.get_output_embeddings()
    layers = {name: each for name, each in model.named_modules() if isinstance(each, _LINEAR)}
    for part in skip:
        if not any(_names(part, name) for name in layers):
            raise ValueError(f"skip names {part!r}, but no linear layer of the model has this name")
    found = {}
    for name, module in layers.items():
        its_bits = head_bits if module is lm_head else bits
        if its_bits is None or any(_names(part, name) for part in skip):
            continue
        groups = group_size if its_bits == bits and group_size else _DEFAULT_GROUPS[its_bits]
        found[name] = its_bits, groups
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no linear layers to quantise"
            + (" besides those in skip and the head" if layers else "")
        )
    return found


def _linear(model: PreTrainedModel, name: str) -> Any:
    return model.get_submodule(name)


def _bits(name: str, value: Any) -> int:
    if value not in _BITS:
        expected = "'int8' or 'int4'" + (", or None" if name == "head" else "")
        raise ValueError(f"{name}={value!r}; expected {expected}")
    return _BITS[value]


def _is_group_size(size: Any) -> bool:
    return isinstance(size, int) and size >= CODE_BLOCK and not size & (size - 1)


def _names(part: str, name: str) -> bool:
    return bool(part) and f".{part}." in f".{name}."


def _matrix(module: Any) -> Tensor:
    """The weights ``[outs, ins]`` of a linear layer."""
    weight: Tensor = module.weight
    return weight.T if isinstance(module, Conv1D) else weight


def _check_model(model: Any) -> None:
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"model is a {type(model).__name__}; expected a Hugging Face model, without wrappers such as "
            "torch.compile or PEFT"
        )
    kind = type(model).__name__
    if getattr(model, "hf_quantizer", None) or getattr(model.config, "quantization_config", None):
        raise ValueError(f"{kind} is quantised already; load the model with its plain weights")
    if getattr(model, "_hf_peft_config_loaded", False):
        raise ValueError(f"{kind} has adapters; merge them into the weights first")
    if model.training:
        raise ValueError(f"{kind} is in training mode; call model.eval() first")
    if not is_untouched(model):
        raise ValueError(
            f"{kind} has hooks, offloaded weights or compiled modules; load it on the CPU without "
            "device_map, and add hooks after quantize"
        )


def _problem(module: nn.Module) -> str | None:
    """Why a linear layer can't be quantised, with a way out; None if it can."""
    weight = module._parameters.get("weight")
    if is_parametrized(module) or type(weight) is not nn.Parameter:
        return "its weight is computed from other tensors or is quantised; use a plain weight"
    if type(module) not in _LINEAR:
        return f"it is a {type(module).__name__}, whose forward may be another; use nn.Linear"
    if weight.dtype not in (torch.float32, torch.bfloat16):
        return f"its weight is {weight.dtype}; call model.to(torch.bfloat16) first"
    if not weight.is_cpu:
        return f"its weight is on {weight.device}; call model.to('cpu') first"
    if not weight.numel():
        return "its weight is empty; use a layer with inputs and outputs"
    if not all(map(math.isfinite, weight.aminmax())):
        return "its weight has numbers that are not finite; check the checkpoint"
    return None
