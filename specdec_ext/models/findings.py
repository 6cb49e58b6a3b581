"""``findings_of``: what was found out about a model, kept while the model is unchanged.

Looking at all modules of a model takes milliseconds, as long as several steps of a small one. What was found
out is therefore kept with a copy of everything that it depends on: the attributes of all modules, the dtypes,
devices and strides of their parameters, and the configs.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from specdec_ext.models.passes.direct.direct_pass import DirectPass
from specdec_ext.models.passes.direct.reading import read_direct_pass
from specdec_ext.models.passes.known_code import is_untouched
from specdec_ext.models.passes.modules import ModelParts
from specdec_ext.models.support import Support, supports


@dataclass(frozen=True)
class Findings:
    """What was found out about a model.

    Attributes:
        support: what can be done exactly with it, with text alone and a cache.
        parts: what passes need to know of its modules; None if transformers lays out its cache.
        direct: its direct pass, None if it has none.
    """

    support: Support
    parts: ModelParts | None
    direct: DirectPass | None


class _State:
    """What the findings about a model depend on, as it was when this object was made.

    It must not refer to the model, which would then never be freed. Hooks and replaced forwards may; with
    them, ``is_safe`` is False.
    """

    def __init__(self, model: PreTrainedModel):
        modules = modules_of(model)
        self._modules = [
            (weakref.ref(each), type(each), type(each).forward, *_attributes(each))
            for each in modules
        ]
        self._parameters = _layouts(modules)
        self._config = copy.deepcopy(_of_config(model.config))
        self.is_safe = is_untouched(model)

    def is_that_of(self, model: PreTrainedModel) -> bool:
        """Whether the model, of which this was the state, still has it."""
        modules = []
        for reference, kind, forward, attributes, dicts_of, contents in self._modules:
            module = reference()
            if type(module) is not kind or kind.forward is not forward:
                return False
            own = vars(module)
            try:
                if own != attributes or dicts_of(own) != contents:
                    return False
            except RuntimeError:  # a tensor was replaced by another
                return False
            modules.append(module)
        return _layouts(modules) == self._parameters and _of_config(model.config) == self._config


_kept: WeakKeyDictionary[PreTrainedModel, tuple[_State, Findings]] = WeakKeyDictionary()


def findings_of(model: PreTrainedModel) -> Findings:
    """Return the findings about a model as it is now."""
    state, found = _kept.get(model, (None, None))
    if state is not None and found is not None and state.is_that_of(model):
        return found
    state = _State(model)
    support = supports(model, {"use_cache": True})
    if support.by_slots:
        found = Findings(support, ModelParts.of(model), read_direct_pass(model))
    else:
        found = Findings(support, None, None)
    # What patches name may be the model itself.
    if state.is_safe and (found.parts is None or not found.parts.patches):
        _kept[model] = state, found
    return found


def modules_of(model: nn.Module) -> list[nn.Module]:
    """Return all modules of a model, itself first; in a tenth of the time of ``model.modules()``."""
    found, seen, left = [], set(), [model]
    while left:
        module = left.pop()
        if module in seen:
            continue
        seen.add(module)
        found.append(module)
        left += [child for child in module._modules.values() if child is not None]
    return found


def parameters_in(modules: list[nn.Module]) -> list[nn.Parameter]:
    """Return the parameters of these modules themselves; one that several have comes several times."""
    return [each for module in modules for each in module._parameters.values() if each is not None]


def _attributes(
    module: nn.Module,
) -> tuple[dict[str, Any], Callable[[dict[str, Any]], Any], tuple[dict[str, Any], ...]]:
    """Return a copy of a module's attributes, a function that picks those that are dicts, and their copies.

    One comparison of all dicts takes less time than one of each: every call compares those of all modules.
    """
    own = dict(vars(module))  # other threads may add attributes: a pass replaces forwards
    dicts = {name: dict(value) for name, value in own.items() if isinstance(value, dict)}
    return own, itemgetter(*dicts), tuple(dicts.values())


def _layouts(modules: list[nn.Module]) -> list[Any]:
    return [(each.dtype, each.device, each.stride()) for each in parameters_in(modules)]


def _of_config(config: PreTrainedConfig) -> dict[str, Any]:
    return {
        name: _of_config(value) if isinstance(value, PreTrainedConfig) else value
        for name, value in vars(config).items()
    }
