"""What takes the place of ``model.generate``: a call with its arguments, and defaults for arguments of ours.

transformers' own hook for another decoding loop (``custom_generate=callable``) loses the streamer and the
tokenizer of a call. A function that takes the whole call gets them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from transformers import PreTrainedModel

from specdec_ext.delegation import class_generate
from specdec_ext.errors import NotAcceleratedError
from specdec_ext.generation import custom_generate, generate

# Arguments of generate() that do not depend on the prompt, so they can be checked before a call.
_CHECKED = ("speculation", "verification", "graphs", "seed", "generator")


def check_defaults(drafter: Any, defaults: Mapping[str, Any]) -> None:
    """Refuse defaults that are wrong for any prompt.

    Args:
        drafter: as in :func:`specdec_ext.generate`.
        defaults: its other arguments.

    Raises:
        TypeError, ValueError: as :func:`specdec_ext.custom_generate`.
    """
    custom_generate(drafter, **{name: defaults[name] for name in _CHECKED if name in defaults})


def generate_function(drafter: Any = "auto", **defaults: Any) -> Callable[..., Any]:
    """Return the ``generate`` of a ``custom_generate`` folder; see :func:`write_custom_generate`.

    transformers calls it as ``generate(*args, model=model, **kwargs)``, with the arguments of
    ``model.generate``; it also takes those of :func:`specdec_ext.generate`.

    Args:
        drafter: drafter of calls that pass neither ``drafter`` nor ``assistant_model``.
        **defaults: other arguments of :func:`specdec_ext.generate`, for calls that do not pass them.

    Raises:
        TypeError, ValueError: for arguments that are wrong for any prompt.
    """
    check_defaults(drafter, defaults)
    defaults = {"drafter": drafter, **defaults}

    def speculate(*args: Any, model: PreTrainedModel, **kwargs: Any) -> Any:
        return generate_instead(
            class_generate(model),
            model,
            defaults,
            args,
            kwargs,
            "custom_generate/generate.py of a folder calls specdec_ext in place of model.generate: leave "
            "custom_generate out or, if the model was loaded from that folder, load it without "
            "trust_remote_code",
        )

    return speculate


def generate_instead(
    plain: Callable[..., Any],
    model: PreTrainedModel,
    defaults: Mapping[str, Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    way_out: str,
) -> Any:
    """Generate for a call of ``model.generate(*args, **kwargs)``.

    Args:
        plain: the function that takes the place of ours if the call names a decoding loop of its own
            (``custom_generate=``).
        model: as in :func:`specdec_ext.generate`.
        defaults: arguments that the call may leave out; ``drafter`` is one of them.
        args: positional arguments, in the order of ``model.generate``.
        kwargs: keyword arguments, also those of :func:`specdec_ext.generate`.
        way_out: ends the message if only ``model.generate`` itself can do the work.
    """
    names = list(inspect.signature(class_generate(model)).parameters)
    kwargs = {**dict(zip(names, args, strict=False)), **kwargs}
    if kwargs.get("custom_generate") is not None:
        return plain(**kwargs)
    defaults = dict(defaults)
    if kwargs.get("assistant_model") is not None:
        defaults.pop("drafter")
    try:
        return generate(model, **{**defaults, **kwargs})
    except NotAcceleratedError as error:
        raise NotAcceleratedError(f"{error}. {way_out}") from error
