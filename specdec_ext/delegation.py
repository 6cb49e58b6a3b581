"""Models whose ``generate`` is their own: does it come to our loop, and may ours stand in for theirs?"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers import GenerationMixin, PreTrainedModel


def check_loop(model: PreTrainedModel) -> None:
    """Refuse a model whose tokens come from a loop of its own, such as one over several codebooks.

    Raises:
        ValueError: naming the class and the way out.
    """
    loop = getattr(type(model), "_sample", None)
    if loop is not None and loop is not GenerationMixin._sample:
        raise ValueError(
            f"{type(model).__name__} draws its tokens in a loop of its own; use model.generate"
        )


def generate_through(
    model: PreTrainedModel, inputs: Tensor | None, hook: Callable[..., Any], kwargs: dict[str, Any]
) -> Any:
    """``model.generate(inputs, custom_generate=hook, **kwargs)``, sure to have called ``hook``.

    Raises:
        ValueError: for a model that does not come to the hook.
    """
    name = type(model).__name__
    own = f"{name}.generate decodes in a way of its own, which can't be sped up; use model.generate"
    if not _delegates(type(model)):
        raise ValueError(own)
    noticed = Noticed(hook)
    # A generate of a model's own may call its first parameter otherwise.
    given = () if inputs is None else (inputs,)
    text: Any = model.generate(*given, custom_generate=noticed, **kwargs)  # type: ignore[operator]
    if not noticed.reached:
        raise ValueError(own)
    return text


class Noticed:
    """A hook that knows whether it was called.

    A ``generate`` of ours that is given one was called by :func:`generate_through`: it stands in for the
    model's own, as after ``model.generate = functools.partial(specdec_ext.generate, model)``.
    """

    def __init__(self, hook: Callable[..., Any]):
        functools.update_wrapper(self, hook)  # transformers reads its parameters
        self._hook, self.reached = hook, False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.reached = True
        return self._hook(*args, **kwargs)


def class_generate(model: PreTrainedModel) -> Callable[..., Any]:
    """The ``generate`` that a model has by its class, whatever stands in for it in this object."""
    function = getattr(type(model), "generate", None)
    plain: Any = model.generate if function is None else function.__get__(model)
    return plain


def _delegates(cls: type) -> bool:
    """Whether the class has transformers' ``generate``, or one that calls another ``generate``."""
    generate = getattr(cls, "generate", None)
    if generate is None or generate is GenerationMixin.generate:
        return True
    code = inspect.unwrap(generate).__code__
    calls_super = "__class__" in code.co_freevars
    return calls_super or any(name.startswith("generate") for name in code.co_names)
