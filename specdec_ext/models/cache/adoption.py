"""Adopt a cache: replace its layers in place by layers that can be rolled back.

The caller's ``DynamicCache`` object stays usable with ``model.generate`` and with later calls.
"""

from __future__ import annotations

from typing import Any

from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from specdec_ext.models.cache.indexed import IndexedRollbackLayer, is_indexed
from specdec_ext.models.cache.layers import RollbackLayer, RollbackStateLayer
from specdec_ext.models.compat import (
    CACHE,
    DummyLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

# Layer classes that SlotTarget supports: classes that it replaces, and classes without slots to roll back.
_WINDOWED = (DynamicSlidingWindowLayer, LinearAttentionAndSlidingWindowAttentionLayer)
_WITH_STATES = (LinearAttentionAndFullAttentionLayer, LinearAttentionAndSlidingWindowAttentionLayer)
_KEPT = (LinearAttentionLayer, DummyLayer, RollbackLayer, IndexedRollbackLayer, RollbackStateLayer)
_SERVED = (DynamicLayer, *_WINDOWED, *_WITH_STATES, *_KEPT)


def unserved_layers(cache: Cache) -> list[str]:
    """Return the names of the layer classes in ``cache`` that can't be rolled back by slot."""
    return sorted(
        {
            type(layer).__name__
            for layer in cache.layers
            if type(layer) not in _SERVED and not is_indexed(layer)
        }
    )


def adopt_cache(cache: Cache | None, config: PreTrainedConfig) -> DynamicCache:
    """Replace the layers of ``cache`` in place by layers that can be rolled back, and keep their contents.

    Args:
        cache: the caller's ``DynamicCache``, possibly empty, or None for a new one.
        config: the text config of the model; it tells the types of layers that do not exist yet.

    Raises:
        ValueError: for anything but a plain ``DynamicCache`` without offloading, or unknown layer classes.
    """
    if cache is None:
        cache = DynamicCache(config=config)
    if type(cache) is not DynamicCache or cache.offloading:
        kind = (
            "an offloading cache" if getattr(cache, "offloading", False) else type(cache).__name__
        )
        raise ValueError(
            f"{CACHE} is {kind}; expected a transformers.DynamicCache (its layers are replaced in place by "
            f"ones that can be rolled back). Leave {CACHE} and cache_implementation out, or pass "
            "DynamicCache(config=model.config)."
        )
    if cache.layer_class_to_replicate is not None:
        # A cache made without a config would append layers of one class only. Add all layers by the config.
        wanted = DynamicCache(config=config).layers
        cache.layers.extend(DynamicLayer() for _ in range(len(cache.layers), len(wanted)))
        cache.layer_class_to_replicate = None
    if foreign := unserved_layers(cache):
        raise ValueError(
            f"{CACHE} has layers of type {', '.join(foreign)}, which can't be rolled back; leave {CACHE} "
            "out, or pass DynamicCache(config=model.config)"
        )
    cache.layers = [_adopt_layer(layer) for layer in cache.layers]
    return cache


def _adopt_layer(layer: Any) -> Any:
    if type(layer) in _KEPT:
        return layer
    window = layer.sliding_window if isinstance(layer, _WINDOWED) else None
    if type(layer) in _WITH_STATES:
        adopted: RollbackLayer = RollbackStateLayer(window, layer.number_of_states)
        states = vars(LinearAttentionLayer(number_of_states=layer.number_of_states))
        vars(adopted).update({name: getattr(layer, name) for name in states})
    elif is_indexed(layer):
        adopted = IndexedRollbackLayer(window)
    else:
        adopted = RollbackLayer(window)
    if layer.get_seq_length() == 0:
        return adopted
    # A sliding layer has dropped the tokens before its window. Their slots stay zero and are never visible.
    stored, total = layer.keys.shape[2], layer.get_seq_length()
    adopted.reserve(total)
    RollbackLayer.lazy_initialization(adopted, layer.keys, layer.values)
    adopted.key_buffer[:, :, total - stored : total] = layer.keys
    adopted.value_buffer[:, :, total - stored : total] = layer.values
    adopted.length, adopted.dropped = total, total - stored
    if isinstance(adopted, IndexedRollbackLayer):
        adopted.take_index(layer)
    return adopted


def attention_windows(cache: Cache, config: PreTrainedConfig) -> list[int | None]:
    """Return the sliding window of each attention layer, None for full attention, of an adopted cache.

    A layer without keys of its own attends to the keys of the last layer of its type.
    """
    kinds: Any = getattr(config, "layer_types", None) or [None] * len(cache.layers)
    kept: dict[str | None, int | None] = {}
    windows = []
    # Without DummyLayer in transformers, the last layers have no entry in the cache if they keep nothing.
    # Models that run layers in loops append more entries for the later loops.
    layers = [*cache.layers, *(DummyLayer() for _ in kinds[len(cache.layers) :])]
    for kind, layer in zip(kinds, layers, strict=False):
        if isinstance(layer, RollbackLayer):
            kept[kind] = layer.window
        elif not isinstance(layer, DummyLayer) or kind not in kept:
            continue
        windows.append(kept[kind])
    return windows
