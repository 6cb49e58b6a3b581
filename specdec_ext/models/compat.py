"""Differences between the supported versions of transformers, 5.4 and later; the only module that knows them.

Every decision looks at what the installed transformers contains, not at its version number.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    GenerationConfig,
    PreTrainedConfig,
    cache_utils,
    modeling_layers,
)
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer
from transformers.distributed import DistributedConfig
from transformers.generation.utils import ALL_CACHE_NAMES

# The name of a cache as an argument of ``generate`` and in its output: ``cache`` since 5.24, before
# ``past_key_values``.
CACHE: str = ALL_CACHE_NAMES[0]
# Its names as an argument of a model or module. Code outside of transformers may keep the older ones.
CACHE_NAMES = tuple(dict.fromkeys((CACHE, "past_key_values", "cache_params")))
# All arguments of a model that may hold its cache. The last three are no ``Cache`` (RWKV, XLNet, Reformer).
CACHE_ARGUMENTS = (*CACHE_NAMES, "state", "mems", "past_buckets_states")
# The number of cached tokens as an argument of embeddings that count positions from it.
CACHE_LENGTH = f"{CACHE}_length"


def cache_argument(names: Collection[str]) -> str | None:
    """Return which of these arguments is a ``Cache`` of transformers; None if none is."""
    return next((name for name in CACHE_NAMES if name in names), None)


def cache_of(values: Mapping[str, Any]) -> Any:
    """Return the ``Cache`` among arguments or in an output; None if there is none."""
    name = cache_argument(values)
    return None if name is None else values[name]


def cached_tokens(values: Mapping[str, Any]) -> int:
    """Return how many tokens the cache among arguments holds; 0 if it has recurrent states only."""
    cache = cache_of(values)
    # Such caches do not count tokens. Before 5.5 they have no layers and no such method.
    layers = getattr(cache, "layers", None) or ()
    if layers and not any(isinstance(layer, CacheLayerMixin) for layer in layers):
        return 0
    return int(cache.get_seq_length()) if hasattr(cache, "get_seq_length") else 0


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

# Model types of the text part of Gemma 4 and its assistants.
_SHARING = ("gemma4_text", "gemma4_unified_text")

# Exists since 5.23.
MtpModel = getattr(modeling_layers, "MtpModel", None)

_building = Lock()


def spread_over_processes() -> dict[str, Any]:
    """The arguments of ``from_pretrained`` that spread a model over the processes of ``torchrun``.

    Versions whose ``DistributedConfig`` has the plan warn about the argument ``tp_plan``.
    """
    if "tp_plan" in inspect.signature(DistributedConfig).parameters:
        return {"distributed_config": DistributedConfig(tp_plan="auto")}
    return {"tp_plan": "auto"}


@contextmanager
def sharing_all_keys() -> Iterator[None]:
    """Let all layers of a new Gemma-4 model share the keys of another model, as its assistants do.

    5.23.0 raises an error for such a config; 5.22 and 5.24 do not.
    """
    name = "kv_sharing_modes"
    # Not get(), which finds only the classes that were used before.
    kinds = [CONFIG_MAPPING[each] for each in _SHARING if each in CONFIG_MAPPING]
    with _building:
        originals = {kind: vars(kind)[name] for kind in kinds if name in vars(kind)}
        try:
            for kind, original in originals.items():
                setattr(kind, name, property(partial(_sharing_modes, original)))
            yield
        finally:
            for kind, original in originals.items():
                setattr(kind, name, original)


def _sharing_modes(original: property, config: Any) -> list[str | None]:
    if config.num_kv_shared_layers == config.num_hidden_layers:
        return ["reuse"] * config.num_hidden_layers
    modes: list[str | None] = original.__get__(config)
    return modes


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


def first_layer(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the config as the first layer has it; layers may differ, as those of Gemma 4 do."""
    differs = getattr(config, "is_heterogeneous", False)
    first: PreTrainedConfig = config.per_layer_config[0] if differs else config
    return first


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
