"""States that modules hold themselves (RecurrentGemma), put where all others are: into the cache.

A model that remembers a text in its own modules serves one text at a time, and nothing undoes what it has
read. So passes run on twins of those modules, which get their states from the layers of the cache and leave
them there. The modules themselves stay as they are: calls on one model don't meet, not even in two threads.

In a pass over several tokens the modules' convolution starts from zeros, as if nothing were before; that of a
twin reads its state first. The recurrence (RG-LRU, arXiv 2402.19427, section 2.4) goes on from its state in
any pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from specdec_ext.models.compat import LinearAttentionCacheLayerMixin
from specdec_ext.models.patching.arguments import twin
from specdec_ext.models.patching.changes import binding
from specdec_ext.models.patching.forwards import replaced_forward

# The layer of the cache for each module, in the pass that this thread is in.
_layers: ContextVar[dict[nn.Module, Any]] = ContextVar("specdec_held_states")


def holding_states(model: nn.Module) -> list[nn.Module]:
    """Blocks of a convolution and a recurrence that hold the states of both, in order of the layers."""
    return [
        module
        for module in model.modules()
        if hasattr(module, "conv1d_state")
        and isinstance(getattr(module, "conv_1d", None), nn.Conv1d)
        and hasattr(getattr(module, "rg_lru", None), "recurrent_states")
    ]


def all_fit(model: PreTrainedModel) -> bool:
    """Whether there is a layer of the cache for all recurrent states that modules of a model hold."""
    blocks = holding_states(model)
    others = {*model.modules()} - {block.rg_lru for block in blocks}
    if any(hasattr(module, "recurrent_states") for module in others):
        return False
    if not blocks:
        return True
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    return len(blocks) == len(_recurrent_layers(cache))


def _recurrent_layers(cache: Cache) -> list[Any]:
    return [x for x in cache.layers if isinstance(x, LinearAttentionCacheLayerMixin)]


@contextmanager
def held_in(cache: Cache, blocks: Sequence[nn.Module]) -> Iterator[None]:
    """Let these blocks keep their states in the recurrent layers of ``cache``, in this thread."""
    layers = dict(zip(blocks, _recurrent_layers(cache), strict=True))
    with binding(_layers, layers), replaced_forward(blocks, _with_states_of_cache):
        yield


def _with_states_of_cache(
    block: Any, forward: Callable[..., Any], hidden_states: Tensor, *args: Any, **kwargs: Any
) -> Any:
    layer = _layers.get()[block]
    state = layer.conv_states[0]
    recurrence = twin(block.rg_lru, recurrent_states=layer.recurrent_states[0])
    own = twin(block, rg_lru=recurrence, conv1d_state=state)
    read = None
    if state is not None and hidden_states.shape[1] > 1:

        def convolution(tokens: Tensor) -> Tensor:
            """``[rows, channels, tokens]`` to the same, behind those of the state."""
            nonlocal read
            read = torch.cat([state, tokens], dim=-1)
            conv = block.conv_1d
            return nn.functional.conv1d(read, conv.weight, conv.bias, groups=conv.groups)

        vars(own)["conv_1d"] = convolution
    output = type(block).forward(own, hidden_states, *args, **kwargs)
    if state is None:
        layer.lazy_initialization(own.conv1d_state, recurrence.recurrent_states)
    layer.conv_states[0] = own.conv1d_state if read is None else read[..., -state.shape[-1] :]
    layer.recurrent_states[0] = recurrence.recurrent_states
    layer.has_previous_state[0] = True
    return output
