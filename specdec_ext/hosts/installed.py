"""``install``: a model whose own ``generate`` speculates, for code that calls ``model.generate``.

``pipeline``, servers and evaluation harnesses call that and pass on whatever they were given; transformers'
hook for a loop of one's own (``custom_generate=``) drops the streamer and the tokenizer on the way. An
installed model takes them as it always did.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from specdec_ext.delegation import class_generate
from specdec_ext.generation import custom_generate, generate
from specdec_ext.models.wrapped import check_model

# Those of generate() that do not belong to one prompt, and are checked when they are given.
_OF_HOOK = ("speculation", "verification", "seed", "generator")


class Installed:
    """What stands in for ``model.generate``; as a context manager, until its end.

    A deep copy of the model is a plain model, and so is one that was pickled: drafters hold the memory of
    their calls. ``save_pretrained`` saves what it always does.

    Attributes:
        defaults: keyword arguments of the calls that do not name them.
    """

    def __init__(self, model: PreTrainedModel, defaults: dict[str, Any], replaced: Any):
        self._model = weakref.ref(model)  # which holds this: it is freed when nobody uses it
        self._replaced = replaced
        self.defaults = defaults

    @property
    def model(self) -> PreTrainedModel:
        model = self._model()
        if model is None:
            raise ReferenceError(
                "the model that this generate was installed on does not exist any more"
            )
        return model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As ``model.generate``, with the arguments of :func:`specdec_ext.generate` in addition."""
        plain = class_generate(self.model)
        names = list(inspect.signature(plain).parameters)
        kwargs = {**dict(zip(names, args, strict=False)), **kwargs}
        if kwargs.get("custom_generate") is not None:
            return (self._replaced or plain)(**kwargs)
        defaults = dict(self.defaults)
        if kwargs.get("assistant_model") is not None:
            defaults.pop("drafter")
        try:
            return generate(self.model, **{**defaults, **kwargs})
        except ValueError as error:
            if "model.generate" not in str(error):
                raise
            raise ValueError(
                f"{error}. model.generate is specdec_ext's here: specdec_ext.uninstall(model) brings back "
                "the model's own"
            ) from error

    def __enter__(self) -> PreTrainedModel:
        return self.model

    def __exit__(self, *error: object) -> None:
        model = self._model()
        if model is not None and vars(model).get("generate") is self:
            uninstall(model)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, str]]:
        return getattr, (self.model, "generate")


def install(model: PreTrainedModel, drafter: Any = "auto", **defaults: Any) -> Installed:
    """Let ``model.generate`` speculate, with its own arguments, streamers and return types.

    ``pipeline("text-generation", model=model)`` and all other code that calls ``model.generate`` speculates
    from now on. Installed again, a model has the new defaults.

    Args:
        model: as in :func:`specdec_ext.generate`.
        drafter: for calls that name neither ``drafter`` nor ``assistant_model``.
        **defaults: other arguments of :func:`specdec_ext.generate`, for calls that do not name them.

    Returns:
        ``with install(model): ...`` uninstalls at the end.

    Raises:
        TypeError, ValueError: for a model that can't be served, or arguments that are wrong for any prompt.
    """
    model = _holder(model)
    check_model(model, defaults)
    custom_generate(drafter, **{name: defaults[name] for name in _OF_HOOK if name in defaults})
    before = vars(model).get("generate")
    if isinstance(before, Installed):
        before = before._replaced
    installed = Installed(model, {"drafter": drafter, **defaults}, before)
    vars(model)["generate"] = installed
    return installed


def uninstall(model: PreTrainedModel) -> None:
    """Give a model back the ``generate`` that it had before :func:`install`; others stay as they are."""
    model = _holder(model)
    installed = vars(model).get("generate")
    if not isinstance(installed, Installed):
        return
    if installed._replaced is None:
        del vars(model)["generate"]
    else:
        vars(model)["generate"] = installed._replaced


def _holder(model: Any) -> Any:
    """The module whose attributes a model's are: what ``torch.compile`` returned has none of its own."""
    return model._orig_mod if isinstance(model, torch._dynamo.OptimizedModule) else model
