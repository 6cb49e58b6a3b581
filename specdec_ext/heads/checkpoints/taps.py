"""Which hidden states of the target a checkpoint wants, in two spellings of the same thing.

Ours is transformers': k is ``hidden_states[k]``, the *input* of layer k. vLLM and speculators count the same
way. SGLang, SpecForge, TorchSpec and DFlash name the layer whose *output* it is, one less. The default is the
same states in both: inputs 2, n // 2 and n - 3 of n layers (Li et al. 2025, EAGLE-3, as published).

    found in                                           read as
    ``feature_layers=`` of the caller                  inputs
    ``specdec_ext.feature_layers``                     inputs
    ``eagle_aux_hidden_state_layer_ids``               inputs
    ``dflash_config.target_layer_ids``                 outputs
    ``eagle_config.layer_ids``                         inputs
    ``eagle_config.eagle_aux_hidden_state_layer_ids``
        [2, 30, 58] (Kimi), [24, 30, 36] (gpt-oss)     inputs, as SGLang captures them for these two families
        that begin with 1                              outputs: [1, n // 2 - 1, n - 4] is SpecForge's default
        others, such as [4, 20, 40]                    outputs, which is a guess
    nowhere, or an empty list                          the default

A guess is named in ``HeadRecord.ambiguous``; ``calibrate`` finds out.
"""

from __future__ import annotations

from dataclasses import dataclass

from specdec_ext.heads.checkpoints.fields import Fields

# Where ids stand, in the order in which they count (as vLLM looks for them).
_PLACES = (
    ("specdec_ext", "feature_layers"),
    ("", "eagle_aux_hidden_state_layer_ids"),
    ("dflash_config", "target_layer_ids"),
    ("eagle_config", "eagle_aux_hidden_state_layer_ids"),
    ("eagle_config", "layer_ids"),
)
DEFAULT = "the default, inputs of layers 2, n // 2 and n - 3"
_NESTED = "eagle_config.eagle_aux_hidden_state_layer_ids"
_NESTED_INPUTS = ((2, 30, 58), (24, 30, 36))


@dataclass(frozen=True)
class RecordedLayers:
    """The tapped hidden states that a checkpoint names.

    Attributes:
        layers: ascending, as in ``HeadConfig.feature_layers``; None for the default.
        origin: where they were found and how they were read, for people.
        guessed: whether the other spelling is as likely.
    """

    layers: tuple[int, ...] | None
    origin: str
    guessed: bool = False


def recorded_layers(config: Fields) -> RecordedLayers:
    """The tapped hidden states in a config.json.

    Raises:
        ValueError: for ids that are no layers, are named twice, or contradict each other.
    """
    found = []
    for section, name in _PLACES:
        fields = config.section(section) if section else config
        ids = fields.integers(name)
        if ids:
            found.append((ids, f"{section}.{name}" if section else name))
    if not found:
        return RecordedLayers(None, DEFAULT)
    recorded = _as_inputs(*found[0], config.where)
    inputs = recorded.layers or ()
    for ids, place in found[1:]:
        if tuple(sorted(ids)) not in (inputs, tuple(layer - 1 for layer in inputs)):
            raise ValueError(
                f"{config.where} names two sets of target layers: {found[0][1]} {found[0][0]} and {place} "
                f"{ids}; say which states it wants with feature_layers=..."
            )
    return recorded


def _as_inputs(ids: list[int], place: str, where: str) -> RecordedLayers:
    # The target records states in the order of its layers, whatever the order of the ids.
    ordered = tuple(sorted(ids))
    if ordered[0] < 0 or len(set(ordered)) != len(ordered):
        raise ValueError(f"{where}: {place} is {ids}; expected different layers from 0 on")
    nested = place == _NESTED and ordered not in _NESTED_INPUTS
    if nested or place.startswith("dflash"):
        inputs = tuple(layer + 1 for layer in ordered)
        origin = f"{place} {ids}, read as outputs of layers"
        return RecordedLayers(inputs, origin, guessed=nested and ordered[0] != 1)
    return RecordedLayers(ordered, f"{place} {ids}, read as inputs of layers")
