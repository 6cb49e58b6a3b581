"""Reuse of the cache that a call returned, for a text that begins as the text of that call did."""

from __future__ import annotations

from typing import Any

from transformers import DynamicCache

from specdec_ext.models import compat
from specdec_ext.models.cache.indexed import is_indexed
from specdec_ext.models.cache.layers import RollbackLayer, RollbackStateLayer
from specdec_ext.models.compat import DummyLayer


def keep_slots(cache: Any, slots: int) -> bool:
    """Cut a returned cache of one row to its first slots, so that another text continues from there.

    Args:
        cache: ``past_key_values`` of an output.
        slots: number of slots to keep, at most those that the cache holds.

    Returns:
        False, without a change, if the text from the cut cache might be another one: recurrent states can't
        be undone, sparse attention selects other tokens if a text is read in two passes (in transformers,
        too), and nothing is known about a cache of a model's own class.
    """
    if type(cache) is not DynamicCache:
        return False
    layers = [layer for layer in cache.layers if type(layer) is not DummyLayer]
    if any(is_indexed(layer) for layer in layers):
        return False
    held = max((layer.length for layer in layers if isinstance(layer, RollbackLayer)), default=0)
    if slots >= held:
        return slots == held > 0
    if not all(_forgets(layer) for layer in layers):
        return False
    for layer in layers:
        layer.crop(slots - held)  # type: ignore[union-attr]
    compat.cut_positions(cache, slots)
    return True


def _forgets(layer: Any) -> bool:
    # Layers that adopted transformers' own, with only the tokens of the window, may lack the earlier ones.
    return (
        isinstance(layer, RollbackLayer)
        and not isinstance(layer, RollbackStateLayer)
        and not layer.dropped
    )
