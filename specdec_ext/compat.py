"""What differs between the supported versions of transformers, 5.4 and later. Nothing else knows of versions.

Everything is decided by what the installed transformers has, not by its number.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

from transformers import GenerationConfig, cache_utils
from transformers.cache_utils import DynamicLayer

if TYPE_CHECKING:
    from transformers.cache_utils import (
        DummyLayer,
        DynamicIndexedLayer,
        LinearAttentionAndFullAttentionLayer,
        LinearAttentionAndSlidingWindowAttentionLayer,
        LinearAttentionCacheLayerMixin,
        LinearAttentionLayer,
    )
else:

    def _layer_class(name: str) -> type:
        """A cache layer class; one that no layer is of where this transformers does not have it."""
        return getattr(cache_utils, name, type(name, (), {}))

    # Since 5.5. Before, each recurrent or hybrid model has a cache class of its own.
    LinearAttentionCacheLayerMixin = _layer_class("LinearAttentionCacheLayerMixin")
    LinearAttentionLayer = _layer_class("LinearAttentionLayer")
    LinearAttentionAndFullAttentionLayer = _layer_class("LinearAttentionAndFullAttentionLayer")
    # Since a version between 5.13 and 5.17.
    LinearAttentionAndSlidingWindowAttentionLayer = _layer_class(
        "LinearAttentionAndSlidingWindowAttentionLayer"
    )
    # Since 5.12. Before, models with an indexer keep its keys in themselves.
    DynamicIndexedLayer = _layer_class("DynamicIndexedLayer")
    # After 5.17. Before, layers that read another layer's keys have no place in the cache.
    DummyLayer = _layer_class("DummyLayer")

# Up to 5.14 a positive argument of ``Cache.crop`` was the length to keep.
_CROPS_TO_LENGTH = "max_length" in inspect.signature(DynamicLayer.crop).parameters


def cropped_length(length: int, argument: int) -> int:
    """What is left of ``length`` slots after ``crop(argument)``, as this transformers means it.

    Raises:
        ValueError: for a positive argument where it has no meaning any more (5.15 and later).
    """
    if argument < 0 or (argument == 0 and not _CROPS_TO_LENGTH):
        return max(0, length + argument)
    if not _CROPS_TO_LENGTH:
        raise ValueError(
            f"crop takes the negative number of tokens to remove, got {argument}; "
            "a positive value meant an absolute length in older transformers and is ambiguous"
        )
    return min(length, argument)


def masked_columns(config: GenerationConfig, columns: int) -> int:
    """Columns of the attention mask behind an ``attention_mask`` of None.

    Since 5.20 ``generate`` hands over only the length of a mask of ones, in ``config``; before, it hands
    over the mask.

    Args:
        config: as ``generate`` prepared it.
        columns: of ``input_ids``.
    """
    return getattr(config, "_mask_length", columns)
