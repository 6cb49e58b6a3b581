"""Checks for models that other software has wrapped, sharded or adapted.

Quantised modules, LoRA layers, offloaded or tensor-parallel modules and compiled forwards need no special
treatment, because a pass is an ordinary call of the model. The models that are refused here would give wrong
text, hang, or fail far from the cause.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec_ext.errors import NotAcceleratedError
from specdec_ext.models.findings import check_weights

# Attributes of modules that set the probability or width of noise in training mode.
_NOISE = re.compile("dropout|layerdrop|jitter")


def check_model(model: Any, arguments: Mapping[str, Any]) -> None:
    """Refuse models and arguments that fail before transformers' ``generate`` starts.

    Args:
        model: the object that the caller passed as a model.
        arguments: the keyword arguments of the call.

    Raises:
        TypeError: for an object without ``generate``; the message names the model inside if there is one.
        ValueError: for a model without weights, or a separate adapter for each row.
    """
    name = type(model).__name__
    if not callable(getattr(model, "generate", None)):
        inside = isinstance(getattr(model, "module", None), nn.Module)
        raise TypeError(
            f"model is a {name}, which has no method generate; expected a Hugging Face model"
            + (": pass the wrapped one, model.module" if inside else "")
        )
    if arguments.get("adapter_names") is not None:
        raise ValueError(
            "adapter_names gives each row of a batch its own adapter, which is not supported because rows "
            "that end early leave the batch; call model.set_adapter(name) and generate the rows of one "
            "adapter together"
        )
    # A look at all weights takes long, and findings_of does it for each new model.
    first = next(model.parameters(), None)
    if first is not None and first.is_meta:
        check_weights(model)


def check_ids(model: PreTrainedModel, inputs: Any, input_ids: Any) -> None:
    """Check that the prompt is a batch of token ids, if the model reads token ids.

    Args:
        model: the model of the call.
        inputs: the first argument of ``generate``.
        input_ids: the keyword argument of that name.

    Raises:
        TypeError: for anything but a tensor, such as text.
        ValueError: for a tensor of another shape or of floating-point numbers.
    """
    for name, given in (("inputs", inputs), ("input_ids", input_ids)):
        if given is None or (name == "inputs" and model.main_input_name != "input_ids"):
            continue  # the first argument of speech and image models is the input of their encoder
        way_out = "ids [batch, length], such as tokenizer(text, return_tensors='pt').input_ids"
        if isinstance(given, Mapping):
            raise TypeError(
                f"{name} is a {type(given).__name__}; pass its entries: generate(model, **inputs)"
            )
        if not isinstance(given, Tensor):
            raise TypeError(f"{name} is a {type(given).__name__}; expected a tensor of {way_out}")
        if given.is_floating_point() or given.is_complex() or given.dtype == torch.bool:
            raise ValueError(
                f"{name} is of {given.dtype}; expected integers, {way_out}. Pass embeddings as inputs_embeds"
            )
        if given.ndim != 2:
            one = f"; {name}[None] is a batch of one row" if given.ndim == 1 else ""
            raise ValueError(f"{name} has shape {list(given.shape)}; expected {way_out}{one}")


def check_wrapping(model: PreTrainedModel) -> None:
    """Refuse a model whose passes are random, or whose inputs are changed outside of its forward.

    Raises:
        ValueError: the message names the obstacle and the way out.
    """
    name = type(model).__name__
    if (obstacle := _in_training(model)) is not None:
        raise ValueError(f"{name} {obstacle}")
    if (obstacle := _prompt_rewritten(model)) is not None:
        raise NotAcceleratedError(f"{name} {obstacle}")


def _in_training(model: PreTrainedModel) -> str | None:
    if not model.training:
        return None
    for name, module in model.named_modules():
        if getattr(module, "gradient_checkpointing", False):
            return (
                "is in training mode with gradient checkpointing, which disables the cache; call "
                "model.eval()"
            )
        noise = {key: value for key, value in vars(module).items() if _NOISE.search(key)}
        if isinstance(module, nn.modules.dropout._DropoutNd):
            noise["p"] = module.p
        for key, value in noise.items():
            if module.training and isinstance(value, float) and value > 0:
                return (
                    f"is in training mode and {name}.{key} is {value}: with this noise two passes over the "
                    "same text differ; call model.eval()"
                )
    return None


def _prompt_rewritten(model: PreTrainedModel) -> str | None:
    """Return why a PEFT method that changes the inputs, not the layers, is unsupported; None without one."""
    prepare = vars(model).get("prepare_inputs_for_generation")
    if prepare is not None and getattr(prepare, "__self__", model) is not model:
        return (
            "has a replaced prepare_inputs_for_generation (prompt tuning and prefix tuning put virtual "
            "tokens in front of the text), which passes over drafts do not call; use model.generate"
        )
    configs = getattr(model, "peft_config", None)
    if isinstance(configs, dict) and any(
        getattr(config, "alora_invocation_tokens", None) for config in configs.values()
    ):
        return (
            "has an adapter that is active only after certain tokens (aLoRA). Their place is counted from "
            "the end of the text, which drafts move; use model.generate"
        )
    return None


@contextmanager
def graph_breaks_explained(model: PreTrainedModel) -> Iterator[None]:
    """Turn an error of a model's compiler into one that names the way out.

    Raises:
        NotAcceleratedError: from the compiler's own error.
    """
    try:
        yield
    except torch._dynamo.exc.TorchDynamoException as error:
        raise NotAcceleratedError(
            f"{type(model).__name__} is compiled with fullgraph=True, but the attention masks of drafts and "
            "the growing cache break its graph; compile it without fullgraph, or use model.generate"
        ) from error
