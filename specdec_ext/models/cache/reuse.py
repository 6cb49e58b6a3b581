"""Reuse of the cache that a call returned, for a text that begins as the text of that call did."""

from __future__ import annotations

from typing import Any

from transformers import DynamicCache

from specdec_ext.models import compat
from specdec_ext.models.cache.layers import RollbackLayer
from specdec_ext.models.compat import DummyLayer


def keep_slots(cache: Any, slots: int) -> bool:
    """Cut a returned cache of one row to its first slots, so that another text continues from there.

    Args:
        cache: ``past_key_values`` of an output.
        slots: number of slots to keep, at most those that the cache holds.

    Returns:
        False, without a change, if the text from the cut cache might be another one than without it:
        recurrent states can't be undone, sparse attention selects other tokens if a text is read in two
        passes (in transformers, too), and nothing is known about a cache of a model's own class. Also False
        if the cache holds fewer slots, as after an exception, which empties it.
    """
    if type(cache) is not DynamicCache:
        return False
    layers = [layer for layer in cache.layers if type(layer) is not DummyLayer]
    if not all(type(layer) is RollbackLayer and not layer.dropped for layer in layers):
        return False
    surplus = max((layer.length for layer in layers), default=0) - slots  # type: ignore[union-attr]
    if surplus < 0:
        return False
    if surplus:  # to old versions of transformers, 0 is the length to keep
        for layer in layers:
            layer.crop(-surplus)  # type: ignore[union-attr]
        compat.cut_positions(cache, slots)
    return True
