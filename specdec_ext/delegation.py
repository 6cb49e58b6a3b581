"""Models with a ``generate`` of their own: does it call transformers' ``generate``, and so our loop?

Such a model can be accelerated only if its ``generate`` passes the call on to transformers' ``generate``,
which then calls our loop through ``custom_generate``.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers import GenerationMixin, PreTrainedModel

from specdec_ext.errors import NotAcceleratedError


def check_loop(model: PreTrainedModel) -> None:
    """Refuse a model that replaces transformers' sampling loop, for example to decode several codebooks.

    Raises:
        NotAcceleratedError: the model has a ``_sample`` of its own.
    """
    loop = getattr(type(model), "_sample", None)
    if loop is not None and loop is not GenerationMixin._sample:
        raise NotAcceleratedError(
            f"{type(model).__name__} has its own decoding loop, which can't be accelerated; use "
            "model.generate"
        )


def generate_through(
    model: PreTrainedModel, inputs: Tensor | None, hook: Callable[..., Any], kwargs: dict[str, Any]
) -> Any:
    """Call ``model.generate(inputs, custom_generate=hook, **kwargs)`` and check that it called ``hook``.

    Raises:
        NotAcceleratedError: ``model.generate`` did not call the hook.
    """
    name = type(model).__name__
    own = (
        f"{name}.generate has its own decoding loop, which can't be accelerated; use model.generate"
    )
    if not _delegates(type(model)):
        raise NotAcceleratedError(own)
    noticed = Noticed(hook)
    # The first parameter of a model's own generate may have another name.
    given = () if inputs is None else (inputs,)
    text: Any = model.generate(*given, custom_generate=noticed, **kwargs)  # type: ignore[operator]
    if not noticed.reached:
        raise NotAcceleratedError(own)
    return text


class Noticed:
    """A hook that records whether it was called.

    If ``specdec_ext.generate`` itself gets such a hook, :func:`generate_through` called it in place of the
    model's own ``generate``. This happens after
    ``model.generate = functools.partial(specdec_ext.generate, model)``.
    """

    def __init__(self, hook: Callable[..., Any]):
        functools.update_wrapper(self, hook)  # transformers reads its parameters
        self._hook, self.reached = hook, False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.reached = True
        return self._hook(*args, **kwargs)


def class_generate(model: PreTrainedModel) -> Callable[..., Any]:
    """The ``generate`` of the model's class, even if an attribute of this object replaces it."""
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
