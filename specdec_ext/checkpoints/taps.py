"""Which hidden states of the target a checkpoint wants, in two spellings of the same thing.

Ours is transformers': k is ``hidden_states[k]``, the *input* of layer k. vLLM and speculators count the same
way. SGLang, SpecForge, TorchSpec and DFlash name the layer whose *output* it is, one less. The default is the
same states in both: inputs 2, n // 2 and n - 3 of n layers (Li et al. 2025, EAGLE-3, as published).

    found in                                        read as
    ``feature_layers=`` of the caller               inputs
    ``eagle_aux_hidden_state_layer_ids``            inputs
    ``dflash_config.target_layer_ids``              outputs
    ``eagle_config.*`` that begins with 1           outputs: [1, n // 2 - 1, n - 4] is SpecForge's default
    ``eagle_config.*`` otherwise                    inputs
    nowhere                                         the default

The last but two is a guess, and heads exist that say it wrongly: ``calibrate`` finds out.
"""

from __future__ import annotations

from specdec_ext.checkpoints.fields import Fields

# Where ids stand, in the order in which they count (as vLLM looks for them).
_PLACES = (
    ("", "eagle_aux_hidden_state_layer_ids"),
    ("dflash_config", "target_layer_ids"),
    ("eagle_config", "eagle_aux_hidden_state_layer_ids"),
    ("eagle_config", "layer_ids"),
)
DEFAULT = "the default, inputs of layers 2, n // 2 and n - 3"


def recorded_layers(config: Fields) -> tuple[tuple[int, ...] | None, str]:
    """The tapped hidden states, ascending, and where they were found.

    Returns:
        Indices as in ``HeadConfig.feature_layers``, None for the default; a text for people.

    Raises:
        ValueError: for ids that are no layers, are named twice, or contradict each other.
    """
    found = []
    for section, name in _PLACES:
        fields = config.section(section) if section else config
        ids = fields.integers(name)
        if ids is not None:
            found.append((ids, f"{section}.{name}" if section else name))
    if not found:
        return None, DEFAULT
    layers, origin = _as_inputs(*found[0], config.where)
    for ids, place in found[1:]:
        if tuple(sorted(ids)) not in (layers, tuple(layer - 1 for layer in layers)):
            raise ValueError(
                f"{config.where} names two sets of target layers: {found[0][1]} {found[0][0]} and {place} "
                f"{ids}; say which states it wants with feature_layers=..."
            )
    return layers, origin


def _as_inputs(ids: list[int], place: str, where: str) -> tuple[tuple[int, ...], str]:
    # The target records states in the order of its layers, whatever the order of the ids.
    ordered = tuple(sorted(ids))
    if ordered[0] < 0 or len(set(ordered)) != len(ordered):
        raise ValueError(f"{where}: {place} is {ids}; expected different layers from 0 on")
    outputs = place.startswith("dflash") or (place.startswith("eagle_config") and ordered[0] == 1)
    if outputs:
        return tuple(layer + 1 for layer in ordered), f"{place} {ids}, read as outputs of layers"
    return ordered, f"{place} {ids}, read as inputs of layers"
