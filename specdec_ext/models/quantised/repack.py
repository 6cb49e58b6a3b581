"""``repack``: replace the quantised layers of other libraries by those of this package."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from specdec_ext.models.quantised.linear import QuantisedLinear
from specdec_ext.models.quantised.saved import mark_as_quantised, names_of, replace
from specdec_ext.models.quantised.sources import is_foreign, weight_of
from specdec_ext.ops.quantise import QuantisedWeight

# What loading leaves on a model: a hook of compressed-tensors, which restores all numbers in the first pass,
# marks of bitsandbytes, and the conversions of a checkpoint, which saving reverts.
_HOOK = "ct_decompress_hook"
_MARKS = ("is_loaded_in_4bit", "is_loaded_in_8bit")
_CONVERSIONS = "_weight_conversions"


@torch.no_grad()
def repack(model: PreTrainedModel) -> PreTrainedModel:
    """Replace the layers that another library has quantised by layers of this package, in place.

    The weights stay exactly those of the checkpoint: of torchao, GPTQ, AWQ, compressed-tensors or
    bitsandbytes, if it quantises weights only. The library's copies are freed, and ``save_pretrained`` saves
    the codes as it does after :func:`quantize`. Call it before the first pass: in it, some libraries bring
    their tensors into another order.

    Args:
        model: a Hugging Face model on the CPU, loaded as float32 or bfloat16.

    Returns:
        ``model``.

    Raises:
        TypeError: if ``model`` is not a Hugging Face model.
        ValueError: if it has no quantised layers, a layer whose format is not read, or another dtype or
            device. Nothing is changed then.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model is a {type(model).__name__}; expected a Hugging Face model")
    kind = type(model).__name__
    if model.dtype not in (torch.float32, torch.bfloat16) or model.device.type != "cpu":
        raise ValueError(
            f"{kind} is {model.dtype} on {model.device}; load it on the CPU with dtype=torch.bfloat16 or "
            "torch.float32"
        )
    found: dict[nn.Module, QuantisedLinear] = {}
    for name, module in model.named_modules():
        if is_foreign(module):
            weight = weight_of(module)
            if not isinstance(weight, QuantisedWeight):
                raise ValueError(
                    f"{name} ({type(module).__name__}) can't be repacked: its format is not read, it "
                    "quantises its input as well, or a pass has changed its tensors. Load the model anew, or "
                    "use it as it is"
                )
            found[module] = QuantisedLinear(weight, _bias(module, model.dtype))
    if not found:
        raise ValueError(f"{kind} has no layers that another library has quantised; use quantize")
    names = names_of(model)
    for module, layer in found.items():
        replace(model, names[id(module)], layer)
    _forget_library(vars(model))
    mark_as_quantised(model)
    return model


def _forget_library(attributes: dict[str, Any]) -> None:
    hook = attributes.pop(_HOOK, None)
    if hook is not None:
        hook.remove()
    for mark in _MARKS:
        attributes.pop(mark, None)
    if attributes.get(_CONVERSIONS):
        attributes[_CONVERSIONS] = [
            each
            for each in attributes[_CONVERSIONS]
            if not any(hasattr(op, "hf_quantizer") for op in getattr(each, "operations", ()))
        ]


def _bias(module: nn.Module, dtype: torch.dtype) -> nn.Parameter | None:
    bias = getattr(module, "bias", None)
    return None if bias is None else nn.Parameter(bias.detach().to(dtype), requires_grad=False)
