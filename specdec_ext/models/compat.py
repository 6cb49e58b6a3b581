"""What differs between the supported versions of transformers, 5.4 and later. Nothing else knows of versions.

Everything is decided by what the installed transformers has, not by its number.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

from torch import Tensor
from transformers import GenerationConfig, cache_utils
from transformers.cache_utils import Cache, DynamicLayer

# Up to 5.12 a pass over several tokens forgets the states that recurrent layers hold, and a layer holds one
# tensor of each kind; since 5.15 (5.13 and 5.14 were not tried) they go on from them, and hold them by index.
STATES_CONTINUE = (
    "number_of_states"
    in inspect.signature(
        getattr(cache_utils, "LinearAttentionCacheLayerMixin", object).__init__
    ).parameters
)

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

    def _layer_class(name: str, usable: bool = True) -> type:
        """A cache layer class; one that no layer is of where it is missing or of no use."""
        return getattr(cache_utils if usable else None, name, type(name, (), {}))

    # Since 5.5; usable, see above, since 5.15. Before 5.5 such models have cache classes of their own.
    LinearAttentionCacheLayerMixin = _layer_class("LinearAttentionCacheLayerMixin", STATES_CONTINUE)
    LinearAttentionLayer = _layer_class("LinearAttentionLayer", STATES_CONTINUE)
    LinearAttentionAndFullAttentionLayer = _layer_class(
        "LinearAttentionAndFullAttentionLayer", STATES_CONTINUE
    )
    LinearAttentionAndSlidingWindowAttentionLayer = _layer_class(
        "LinearAttentionAndSlidingWindowAttentionLayer", STATES_CONTINUE
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


def index_positions(layer: DynamicIndexedLayer) -> Tensor | None:
    """``[dims, rows, length]`` positions of a layer's index keys, which it has a place for after 5.17."""
    return getattr(layer, "indexer_position_ids", None)


def cut_positions(cache: Cache, length: int) -> None:
    """Forget positions behind ``length`` that the cache itself keeps: those of Qwen4's indexer up to 5.17."""
    positions: Tensor | None = getattr(cache, "position_ids", None)
    if positions is not None:
        cache.position_ids = positions[..., :length]  # type: ignore[attr-defined]


# Up to 5.17 ``generate`` gives every model a mask, if only of ones, and some rely on it (Git, Moshi).
NEEDS_MASK = "_mask_length" not in GenerationConfig.__annotations__

# Up to 5.17 Git counts the tokens before in its positions only where a pass is over a single token.
ONE_TOKEN_MODELS = {"git"} if NEEDS_MASK else set[str]()


def masked_columns(config: GenerationConfig, columns: int) -> int:
    """Columns of the attention mask behind an ``attention_mask`` of None.

    Since 5.20 ``generate`` hands over only the length of a mask of ones, in ``config``; before, it hands
    over the mask.

    Args:
        config: as ``generate`` prepared it.
        columns: of ``input_ids``.
    """
    return getattr(config, "_mask_length", columns)
