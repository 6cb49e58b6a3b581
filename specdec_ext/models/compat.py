"""Differences between the supported versions of transformers, 5.4 and later; the only module that knows them.

Every decision looks at what the installed transformers contains, not at its version number.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

from torch import Tensor
from transformers import GenerationConfig, cache_utils, modeling_layers
from transformers.cache_utils import Cache, DynamicLayer

# Up to 5.12, recurrent layers start from zero states in a pass over several tokens, and a layer holds one
# tensor of each kind. Since 5.15 (5.13 and 5.14 were not tried) they start from their states, held by index.
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
        """Return a cache layer class, or an empty class without instances if it is missing or unusable."""
        return getattr(cache_utils if usable else None, name, type(name, (), {}))

    # Exists since 5.5, usable since 5.15 (see above). Before 5.5 such models have cache classes of their own.
    LinearAttentionCacheLayerMixin = _layer_class("LinearAttentionCacheLayerMixin", STATES_CONTINUE)
    LinearAttentionLayer = _layer_class("LinearAttentionLayer", STATES_CONTINUE)
    LinearAttentionAndFullAttentionLayer = _layer_class(
        "LinearAttentionAndFullAttentionLayer", STATES_CONTINUE
    )
    LinearAttentionAndSlidingWindowAttentionLayer = _layer_class(
        "LinearAttentionAndSlidingWindowAttentionLayer", STATES_CONTINUE
    )
    # Exists since 5.12. Before, models with an indexer keep its keys in their modules.
    DynamicIndexedLayer = _layer_class("DynamicIndexedLayer")
    # Exists after 5.17. Before, layers that read another layer's keys have no entry in the cache.
    DummyLayer = _layer_class("DummyLayer")

# Exists since 5.23.
MtpModel = getattr(modeling_layers, "MtpModel", None)

# Up to 5.14, a positive argument of ``Cache.crop`` was the length to keep.
_CROPS_TO_LENGTH = "max_length" in inspect.signature(DynamicLayer.crop).parameters


def cropped_length(length: int, argument: int) -> int:
    """Return how many of ``length`` slots remain after ``crop(argument)`` in the installed transformers.

    Raises:
        ValueError: for a positive argument in 5.15 and later, where it has no meaning any more.
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
    """Return ``[dims, rows, length]`` positions of a layer's index keys; None up to 5.17."""
    return getattr(layer, "indexer_position_ids", None)


def cut_positions(cache: Cache, length: int) -> None:
    """Cut the positions that the cache itself keeps (for Qwen4's indexer, up to 5.17) to ``length``."""
    positions: Tensor | None = getattr(cache, "position_ids", None)
    if positions is not None:
        cache.position_ids = positions[..., :length]  # type: ignore[attr-defined]


# Up to 5.17, ``generate`` always passes a mask to the model, and some models rely on it (Git, Moshi).
NEEDS_MASK = "_mask_length" not in GenerationConfig.__annotations__

# Up to 5.17, Git's positions count the cached tokens only in passes over a single token.
ONE_TOKEN_MODELS = {"git"} if NEEDS_MASK else set[str]()


def masked_columns(config: GenerationConfig, columns: int) -> int:
    """Return the number of columns of the caller's attention mask where ``generate`` passes None.

    Since 5.20, ``generate`` replaces a mask of ones by its length, which it stores in ``config``. Before, it
    passes the mask itself.

    Args:
        config: generation config as ``generate`` prepared it.
        columns: number of columns of ``input_ids``.
    """
    return getattr(config, "_mask_length", columns)
