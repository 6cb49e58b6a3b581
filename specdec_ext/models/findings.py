"""``findings_of``: what was found out about a model, kept while the model is unchanged.

Looking at all modules of a model takes milliseconds, as long as several steps of a small one. What was found
out is therefore kept with a copy of everything that it depends on: the attributes of all modules, the dtypes,
devices and strides of their parameters, and the configs.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
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

    Every call compares the whole state, so it is kept as long lists: one comparison of two lists takes a
    fraction of the time of a loop over modules.
    """

    def __init__(self, model: PreTrainedModel):
        modules = modules_of(model)
        self._inner = modules[1:]
        self._kinds: list[Any] = [*map(type, modules)]
        self._forwards = [(kind, kind.forward) for kind in {*self._kinds}]
        # Copies, because other threads may add attributes: a pass replaces forwards.
        self._attributes = [dict(vars(each)) for each in modules]
        # Those that are dicts are the same objects in both, so their contents are compared with copies.
        self._dicts = [
            value
            for attributes in self._attributes
            for value in attributes.values()
            if isinstance(value, dict)
        ]
        self._contents = [*map(dict, self._dicts)]
        self._parameters = parameters_in(modules)
        self._layouts = _layouts(self._parameters)
        self._config = copy.deepcopy(_of_config(model.config))
        self.is_safe = is_untouched(model)

    def is_that_of(self, model: PreTrainedModel) -> bool:
        """Whether the model, of which this was the state, still has it."""
        modules = [model, *self._inner]
        try:
            same = (
                [*map(type, modules)] == self._kinds
                and [*map(vars, modules)] == self._attributes
                and self._dicts == self._contents
            )
        except RuntimeError:  # a tensor was replaced by another
            return False
        return (
            same
            and all(kind.forward is forward for kind, forward in self._forwards)
            and _layouts(self._parameters) == self._layouts
            and _of_config(model.config) == self._config
        )


_kept: WeakKeyDictionary[PreTrainedModel, tuple[_State, Findings]] = WeakKeyDictionary()


def findings_of(model: PreTrainedModel) -> Findings:
    """Return the findings about a model as it is now.

    Raises:
        ValueError: it has no weights.
    """
    state, found = _kept.get(model, (None, None))
    if state is not None and found is not None and state.is_that_of(model):
        return found
    check_weights(model)
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


def check_weights(model: PreTrainedModel) -> None:
    """Refuse a model that has no weights.

    Raises:
        ValueError: a parameter is on the meta device, and nothing will load it when it is needed.
    """
    modules = modules_of(model)
    if not any(each.is_meta for each in parameters_in(modules)):
        return
    # With its hooks, accelerate loads the offloaded weights.
    if not any("_hf_hook" in vars(module) for module in modules):
        empty = next(name for name, each in model.named_parameters() if each.is_meta)
        raise ValueError(
            f"{type(model).__name__} has no weights: {empty} is on the meta device; load it with "
            "from_pretrained"
        )


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


def _layouts(parameters: Sequence[Tensor]) -> list[Any]:
    kinds = map(attrgetter("dtype", "device"), parameters)
    return [*kinds, *map(Tensor.stride, parameters)]


def _of_config(config: PreTrainedConfig) -> dict[str, Any]:
    return {
        name: _of_config(value) if isinstance(value, PreTrainedConfig) else value
        for name, value in vars(config).items()
    }
