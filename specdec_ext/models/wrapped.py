"""Models that something else has wrapped, sharded or adapted: which can't be decoded exactly, and why.

Quantised modules, LoRA layers, offloaded or tensor-parallel ones and compiled forwards need nothing of us: a
pass is a call of the model, and what it is made of is its own business. What is refused here would give
wrong text, hang, or fail far from its cause.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, distributed, nn
from transformers import PreTrainedModel

# Attributes of modules that are a probability, or a width, of noise in training mode.
_NOISE = re.compile("dropout|layerdrop|jitter")


def check_model(model: Any, arguments: Mapping[str, Any]) -> None:
    """Refuse what can't even reach transformers' ``generate``.

    Args:
        model: whatever a caller took for a model.
        arguments: the keywords of the call.

    Raises:
        TypeError: for something that has no ``generate``, naming the model inside if there is one.
        ValueError: for a model without weights, or an adapter for each row.
    """
    name = type(model).__name__
    if not callable(getattr(model, "generate", None)):
        inside = isinstance(getattr(model, "module", None), nn.Module)
        raise TypeError(
            f"model is a {name}, which has no generate; expected a Hugging Face model"
            + (": pass the one inside, model.module" if inside else "")
        )
    if arguments.get("adapter_names") is not None:
        raise ValueError(
            "adapter_names gives every row of a batch an adapter, but rows that end early leave the batch; "
            "call model.set_adapter(name) and generate the rows of one adapter together"
        )
    if any(hasattr(module, "_hf_hook") for module in model.modules()):
        return  # accelerate brings in the weights that it has offloaded
    empty = next((name for name, each in model.named_parameters() if each.is_meta), None)
    if empty is not None:
        raise ValueError(
            f"{name} has no weights: {empty} is on the meta device; load it with from_pretrained"
        )


def check_ids(model: PreTrainedModel, inputs: Any, input_ids: Any) -> None:
    """Refuse what is no batch of token ids where a model reads ids.

    Args:
        inputs: the first argument of ``generate``.
        input_ids: the keyword of that name.

    Raises:
        TypeError: for anything but a tensor, such as text.
        ValueError: for a tensor of another shape or of floating-point numbers.
    """
    for name, given in (("inputs", inputs), ("input_ids", input_ids)):
        if given is None or (name == "inputs" and model.main_input_name != "input_ids"):
            continue  # of speech and image models the first argument is what their encoder reads
        way_out = "ids [batch, length], such as tokenizer(text, return_tensors='pt').input_ids"
        if isinstance(given, Mapping):
            raise TypeError(
                f"{name} is a {type(given).__name__}; pass its entries: generate(model, **inputs)"
            )
        if not isinstance(given, Tensor):
            raise TypeError(f"{name} is a {type(given).__name__}; expected a tensor of {way_out}")
        if given.is_floating_point() or given.is_complex() or given.dtype == torch.bool:
            raise ValueError(
                f"{name} is of {given.dtype}; expected whole numbers, {way_out}. Embeddings are inputs_embeds"
            )
        if given.ndim != 2:
            one = f"; {name}[None] is a batch of one row" if given.ndim == 1 else ""
            raise ValueError(f"{name} is {list(given.shape)}; expected {way_out}{one}")


def check_wrapping(model: PreTrainedModel) -> None:
    """Refuse a model whose passes don't give the same text twice, or are not what its forward computes.

    Raises:
        ValueError: naming what is in the way, and the way out.
    """
    obstacle = _in_training(model) or _prompt_rewritten(model)
    if obstacle is not None:
        raise ValueError(f"{type(model).__name__} {obstacle}")


def _in_training(model: PreTrainedModel) -> str | None:
    if not model.training:
        return None
    for name, module in model.named_modules():
        if getattr(module, "gradient_checkpointing", False):
            return "is in training mode with gradient checkpointing, which leaves no cache; call model.eval()"
        noise = {key: value for key, value in vars(module).items() if _NOISE.search(key)}
        if isinstance(module, nn.modules.dropout._DropoutNd):
            noise["p"] = module.p
        for key, value in noise.items():
            if module.training and isinstance(value, float) and value > 0:
                return (
                    f"is in training mode and {name}.{key} is {value}: with that noise no pass computes what "
                    "another one did; call model.eval()"
                )
    return None


def _prompt_rewritten(model: PreTrainedModel) -> str | None:
    """PEFT's methods that change what is read, not how it is computed."""
    prepare = vars(model).get("prepare_inputs_for_generation")
    if prepare is not None and getattr(prepare, "__self__", model) is not model:
        return (
            "has its inputs prepared by somebody else (prompt tuning and prefix tuning put virtual tokens in "
            "front of the text), which a pass over drafts does without; use model.generate"
        )
    configs = getattr(model, "peft_config", None)
    if isinstance(configs, dict) and any(
        getattr(config, "alora_invocation_tokens", None) for config in configs.values()
    ):
        return (
            "has an adapter that is active behind certain tokens only (aLoRA), counted from the end of the "
            "text, which drafts make longer; use model.generate"
        )
    return None


@contextmanager
def graph_breaks_explained(model: PreTrainedModel) -> Iterator[None]:
    """Says what to do where the compiler of a model refuses a pass.

    Raises:
        ValueError: from the compiler's own error.
    """
    try:
        yield
    except torch._dynamo.exc.TorchDynamoException as error:
        raise ValueError(
            f"{type(model).__name__} is compiled with fullgraph=True, but the masks of drafts and a growing "
            "cache break its graph; compile it without fullgraph, or use model.generate"
        ) from error


def unwrapped(model: Any) -> Any:
    """The Hugging Face model inside what ``torch.compile`` or PEFT returned, adapters included."""
    if isinstance(model, torch._dynamo.OptimizedModule):
        model = model._orig_mod
    base = getattr(model, "get_base_model", None)
    return model if base is None else base()


def agreed_seed(model: PreTrainedModel, seed: int) -> int:
    """Of a tensor-parallel model the seed that the first of its processes has drawn, else ``seed``.

    Every process draws the tokens itself. With different noise they would read different texts, and soon
    wait for each other for ever.
    """
    agree = _agreement(model)
    return seed if agree is None else int(agree(torch.tensor(seed, device="cpu")))


def agreed_clock(model: PreTrainedModel, clock: Callable[[], float]) -> Callable[[], float]:
    """Of a tensor-parallel model the clock of the first of its processes, else ``clock``.

    What is decided by measurements is decided alike where all read one clock.
    """
    agree = _agreement(model)
    if agree is None:
        return clock
    return lambda: float(agree(torch.tensor(clock(), dtype=torch.float64, device="cpu")))


def is_tensor_parallel(weight: Any) -> bool:
    """Whether each of several processes has a part of this weight."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(weight, DTensor)


def _agreement(model: PreTrainedModel) -> Callable[[Tensor], Tensor] | None:
    """Gives all processes that share a tensor-parallel model what the first of them has; None without any."""
    parts: Any = filter(is_tensor_parallel, model.parameters())
    mesh = next((each.device_mesh for each in parts), None)
    if mesh is None:
        return None
    group = mesh.get_group("tp" if mesh.ndim > 1 else None)

    def agree(value: Tensor) -> Tensor:
        value = value.to(mesh.device_type)
        distributed.broadcast(value, group=group, group_src=0)
        return value

    return agree
