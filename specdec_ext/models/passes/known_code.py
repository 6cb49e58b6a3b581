"""Whether the code of a model's modules is that of a known decoder, byte for byte, and unmodified."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Collection, Mapping
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any

import transformers
from torch import nn
from torch.nn.modules import module as module_hooks
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from specdec_ext.models.passes.direct.families import Family
from specdec_ext.models.passes.hidden_states import RecordingHook
from specdec_ext.models.patching.forwards import own_forward_replaced

_HOOKS = [name for name in vars(nn.Module()) if name.endswith("_hooks")]
_PACKAGE = Path(transformers.__file__).parent
_CAPTURING = "transformers.utils.output_capturing"
_EXPERTS_MODULE = "transformers.integrations.moe"
_EXPERTS = ("grouped_mm", "batched_mm")
# Functions of a module's class that compute; those that a class does not have are skipped.
_FUNCTIONS = ("forward", "_norm", "_apply_gate")


def has_code_of(family: Family, kinds: Mapping[str, Collection[Any]]) -> bool:
    """Whether the code of all modules is that of a family.

    Args:
        family: a supported family.
        kinds: kind of module, such as ``"Attention"`` -> the classes of a model's modules of that kind.
    """
    if kinds.keys() != family.classes.keys():
        return False
    for kind, classes in kinds.items():
        pattern = _pattern(family.classes[kind])
        if any(_code(each) is None or _code(each) not in pattern for each in classes):
            return False
    if family.positions is not None:
        return True
    rotations = {_rotation(each.forward) for each in kinds["Attention"]}
    return None not in rotations and rotations <= _rotations(family.classes["Attention"])


def has_known_experts(config: Any) -> bool:
    """Whether experts run by functions of transformers that compute the same up to rounding."""
    name = config._experts_implementation
    if name == "eager":
        return True
    function = ALL_EXPERTS_FUNCTIONS.get(name, None)
    return name in _EXPERTS and getattr(function, "__module__", None) == _EXPERTS_MODULE


def has_global_hooks() -> bool:
    """Whether hooks are set that run in the calls of all modules."""
    return module_hooks._has_any_global_hook()


def is_untouched(model: nn.Module) -> bool:
    """Whether no module is in training, and a call of each runs only the forward of its class."""
    return all(map(_is_untouched, model.modules()))


def _is_untouched(module: nn.Module) -> bool:
    return not (
        module.training
        or own_forward_replaced(module)
        or module._compiled_call_impl is not None
        or not all(map(_changes_nothing, _hooks(module)))
    )


def _changes_nothing(hook: Any) -> bool:
    """Whether a hook is known to change nothing and to be idle: those of ``HiddenStateRecorder``, and those
    that transformers leaves on the modules of a model after it recorded hidden states or attentions once."""
    return type(hook) is RecordingHook or getattr(hook, "__module__", None) == _CAPTURING


def _hooks(module: nn.Module) -> list[Any]:
    """Return all hooks of a module. A copy of each list is read, because a call in another thread may add or
    remove the hooks of its ``HiddenStateRecorder``."""
    return [hook for name in _HOOKS for hook in list(vars(module).get(name, {}).values())]


def _class(name: str) -> Any:
    """Return the class of ``"folder.Class"``; None if the installed transformers does not have it."""
    folder, _, name = name.partition(".")
    try:
        module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    except ImportError:
        return None
    return getattr(module, name, None)


@cache
def _pattern(names: tuple[str, ...]) -> set[Any]:
    return {_code(each) for each in map(_class, names) if each is not None}


def _rotations(names: tuple[str, ...]) -> set[Any]:
    return {_rotation(each.forward) for each in map(_class, names) if each is not None}


def _code(kind: Any) -> tuple[Any, ...] | None:
    """Return a value that identifies the code of a class; None if any is defined outside of transformers."""
    codes = [_codes(getattr(kind, name)) for name in _FUNCTIONS if hasattr(kind, name)]
    return None if None in codes else tuple(codes)


def _rotation(attention: Callable[..., Any]) -> tuple[Any, ...] | None:
    """Return the code of the functions that rotate queries and keys; None for code outside transformers."""
    turn = inspect.unwrap(attention).__globals__.get("apply_rotary_pos_emb")
    half = inspect.unwrap(turn).__globals__.get("rotate_half") if callable(turn) else None
    if turn is None or half is None:
        return None
    codes = _codes(turn), _codes(half)
    return None if None in codes else codes


@cache
def _codes(function: Any) -> tuple[Any, ...] | None:
    """Return a value that identifies the code of a function and of all functions that it wraps.

    None if any of them is defined outside of transformers.
    """
    codes = []
    while function is not None:
        code = function.__code__
        if _PACKAGE not in Path(code.co_filename).parents:
            return None
        codes.append(_identity(code))
        function = getattr(function, "__wrapped__", None)
    return tuple(codes)


def _identity(code: CodeType) -> tuple[Any, ...]:
    constants: list[Any] = [
        _identity(each) if isinstance(each, CodeType) else each for each in code.co_consts
    ]
    if constants and isinstance(constants[0], str) and "\n" in constants[0]:
        constants[0] = None  # a docstring, which may name the model
    return (
        code.co_code,
        code.co_names,
        code.co_varnames,
        code.co_freevars,
        tuple(map(repr, constants)),
    )
