"""Which auxiliary hidden states of the target a checkpoint reads; their ids follow two conventions.

This package numbers them like transformers: k is ``hidden_states[k]``, the *input* of layer k. vLLM and
speculators do the same. SGLang, SpecForge, TorchSpec and DFlash name the layer whose *output* it is, which is
one less. The default is the same in both conventions: the inputs of layers 2, n // 2 and n - 3 of n layers
(Li et al. 2025, EAGLE-3, as published).

    found in                                           read as
    ``feature_layers=`` of the caller                  inputs
    ``specdec_ext.feature_layers``                     inputs
    ``eagle_aux_hidden_state_layer_ids``               inputs
    ``dflash_config.target_layer_ids``                 outputs
    ``eagle_config.layer_ids``                         inputs
    ``eagle_config.eagle_aux_hidden_state_layer_ids``
        [2, 30, 58] (Kimi), [24, 30, 36] (gpt-oss)     inputs, as SGLang captures them for these two families
        lists that begin with 1                        outputs: [1, n // 2 - 1, n - 4] is SpecForge's default
        others, such as [4, 20, 40]                    outputs, which is a guess
    no field, or an empty list                         the default

``HeadRecord.ambiguous`` lists a guess; ``calibrate`` resolves it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from specdec_ext.heads.checkpoints.config.fields import Fields


class _Convention(Enum):
    """What the ids of a field number."""

    INPUTS = auto()
    OUTPUTS = auto()
    EITHER = auto()


@dataclass(frozen=True)
class _Place:
    """A field of config.json that may hold the ids, in a section or, with section "", at the top."""

    section: str
    name: str
    convention: _Convention

    def __str__(self) -> str:
        return f"{self.section}.{self.name}" if self.section else self.name


# The first one found is used, in vLLM's order.
_PLACES = (
    _Place("specdec_ext", "feature_layers", _Convention.INPUTS),
    _Place("", "eagle_aux_hidden_state_layer_ids", _Convention.INPUTS),
    _Place("dflash_config", "target_layer_ids", _Convention.OUTPUTS),
    _Place("eagle_config", "eagle_aux_hidden_state_layer_ids", _Convention.EITHER),
    _Place("eagle_config", "layer_ids", _Convention.INPUTS),
)
DEFAULT = "the default, inputs of layers 2, n // 2 and n - 3"
# Ids in a field of either convention that are known to be inputs.
_KNOWN_INPUTS = ((2, 30, 58), (24, 30, 36))


@dataclass(frozen=True)
class RecordedLayers:
    """The auxiliary hidden states that a checkpoint names.

    Attributes:
        layers: ascending ids, as in ``HeadConfig.feature_layers``; None for the default.
        origin: where they were found and how they were read, in words.
        guessed: whether the other convention is equally likely.
    """

    layers: tuple[int, ...] | None
    origin: str
    guessed: bool = False


def recorded_layers(config: Fields) -> RecordedLayers:
    """Read the auxiliary hidden states from a config.json.

    Raises:
        ValueError: for ids that are negative, duplicate or contradictory.
    """
    found = []
    for place in _PLACES:
        fields = config.section(place.section) if place.section else config
        ids = fields.integers(place.name)
        if ids:
            found.append((ids, place))
    if not found:
        return RecordedLayers(None, DEFAULT)
    recorded = _as_inputs(*found[0], config.where)
    inputs = recorded.layers or ()
    for ids, place in found[1:]:
        if tuple(sorted(ids)) not in (inputs, tuple(layer - 1 for layer in inputs)):
            raise ValueError(
                f"{config.where} names two different sets of target layers: {found[0][1]} {found[0][0]} and "
                f"{place} {ids}; pass the correct ones as feature_layers=..."
            )
    return recorded


def _as_inputs(ids: list[int], place: _Place, where: str) -> RecordedLayers:
    # The target records hidden states in the order of its layers, not in that of the ids.
    ordered = tuple(sorted(ids))
    if ordered[0] < 0 or len(set(ordered)) != len(ordered):
        raise ValueError(f"{where}: {place} is {ids}; expected different layers, numbered from 0")
    unclear = place.convention is _Convention.EITHER and ordered not in _KNOWN_INPUTS
    if unclear or place.convention is _Convention.OUTPUTS:
        inputs = tuple(layer + 1 for layer in ordered)
        origin = f"{place} {ids}, read as outputs of layers"
        return RecordedLayers(inputs, origin, guessed=unclear and ordered[0] != 1)
    return RecordedLayers(ordered, f"{place} {ids}, read as inputs of layers")
