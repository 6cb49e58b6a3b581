"""``install``: replace ``model.generate`` by speculative decoding, for code that calls ``model.generate``.

``pipeline``, servers and evaluation harnesses call ``model.generate`` and pass their arguments on.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from specdec_ext.delegation import class_generate
from specdec_ext.hosts.replacement import check_defaults, generate_instead
from specdec_ext.models.wrapped import check_model


class Installed:
    """The function that replaces ``model.generate``; as a context manager it uninstalls itself at the end.

    A deep copy or a pickle of the model has the original ``generate``, because drafters hold state of their
    calls. ``save_pretrained`` is not affected.

    Attributes:
        defaults: keyword arguments for calls that do not pass them.
    """

    def __init__(self, model: PreTrainedModel, defaults: dict[str, Any], replaced: Any):
        self._model = weakref.ref(model)  # weak, because the model holds this object
        self._replaced = replaced
        self.defaults = defaults

    @property
    def model(self) -> PreTrainedModel:
        model = self._model()
        if model is None:
            raise ReferenceError(
                "the model on which this generate was installed does not exist any more; keep a reference "
                "to the model"
            )
        return model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Generate as ``model.generate`` does; also takes the arguments of :func:`specdec_ext.generate`."""
        return generate_instead(
            self._replaced or class_generate(self.model),
            self.model,
            self.defaults,
            args,
            kwargs,
            "specdec_ext is installed as model.generate of this model: specdec_ext.uninstall(model) restores "
            "the original",
        )

    def __enter__(self) -> PreTrainedModel:
        return self.model

    def __exit__(self, *error: object) -> None:
        model = self._model()
        if model is not None and vars(model).get("generate") is self:
            uninstall(model)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, str]]:
        return getattr, (self.model, "generate")


def install(model: PreTrainedModel, drafter: Any = "auto", **defaults: Any) -> Installed:
    """Replace ``model.generate`` by speculative decoding with the same arguments and return types.

    Afterwards ``pipeline("text-generation", model=model)`` and all other code that calls ``model.generate``
    speculates. A second call of ``install`` replaces the defaults.

    Args:
        model: as in :func:`specdec_ext.generate`.
        drafter: drafter of calls that pass neither ``drafter`` nor ``assistant_model``.
        **defaults: other arguments of :func:`specdec_ext.generate`, for calls that do not pass them.

    Returns:
        The installed function, which is also a context manager: ``with install(model): ...`` uninstalls it at
        the end.

    Raises:
        TypeError, ValueError: for a model that is not supported, or arguments that are wrong for any prompt.
    """
    model = _holder(model)
    check_model(model, defaults)
    check_defaults(drafter, defaults)
    before = vars(model).get("generate")
    if isinstance(before, Installed):
        before = before._replaced
    installed = Installed(model, {"drafter": drafter, **defaults}, before)
    vars(model)["generate"] = installed
    return installed


def uninstall(model: PreTrainedModel) -> None:
    """Restore the ``generate`` that the model had before :func:`install`; no effect on other models."""
    model = _holder(model)
    installed = vars(model).get("generate")
    if not isinstance(installed, Installed):
        return
    if installed._replaced is None:
        del vars(model)["generate"]
    else:
        vars(model)["generate"] = installed._replaced


def _holder(model: Any) -> Any:
    """The module that holds the model's attributes: for ``torch.compile(model)``, the original model."""
    return model._orig_mod if isinstance(model, torch._dynamo.OptimizedModule) else model
