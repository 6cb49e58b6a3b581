"""Griffin (RecurrentGemma): keep the recurrent states in the cache instead of the model's own modules.

Transformers keeps the states of this model as attributes of its modules. Such a model can serve only one text
at a time, and a rejected draft can't be undone. Here, passes run on shallow copies of these modules, which
read their states from the layers of the cache and write them back there. The modules themselves do not
change, so calls on one model do not interfere, not even in different threads.

In a pass over several tokens the original convolution starts from zeros and ignores its state; the copy puts
its state in front of the tokens. The recurrence (RG-LRU, arXiv 2402.19427, section 2.4) starts from its state
in every pass.
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
from specdec_ext.models.patching.arguments import with_attributes
from specdec_ext.models.patching.changes import binding
from specdec_ext.models.patching.forwards import replaced_forward

# The cache layer of each module, in the current pass of this thread.
_layers: ContextVar[dict[nn.Module, Any]] = ContextVar("specdec_griffin_layers")


def recurrent_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks that keep the states of a convolution and a recurrence, in order of the layers."""
    return [
        module
        for module in model.modules()
        if hasattr(module, "conv1d_state")
        and isinstance(getattr(module, "conv_1d", None), nn.Conv1d)
        and hasattr(getattr(module, "rg_lru", None), "recurrent_states")
    ]


def states_fit_cache(model: PreTrainedModel) -> bool:
    """Whether the cache has a layer for every recurrent state that the model's modules keep."""
    blocks = recurrent_blocks(model)
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
def states_in_cache(cache: Cache, blocks: Sequence[nn.Module]) -> Iterator[None]:
    """Make these blocks keep their states in the recurrent layers of ``cache``, in this thread."""
    layers = dict(zip(blocks, _recurrent_layers(cache), strict=True))
    with binding(_layers, layers), replaced_forward(blocks, _with_states_of_cache):
        yield


def _with_states_of_cache(
    block: Any, forward: Callable[..., Any], hidden_states: Tensor, *args: Any, **kwargs: Any
) -> Any:
    layer = _layers.get()[block]
    state = layer.conv_states[0]
    recurrence = with_attributes(block.rg_lru, recurrent_states=layer.recurrent_states[0])
    own = with_attributes(block, rg_lru=recurrence, conv1d_state=state)
    read = None
    if state is not None and hidden_states.shape[1] > 1:

        def convolution(tokens: Tensor) -> Tensor:
            """Convolve ``[rows, channels, tokens]`` with the state in front."""
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
