"""``FeatureTap``: hidden states of chosen layers, taken while the model runs.

``output_hidden_states=True`` would keep the states of every layer: for a long prompt more memory than the
cache. Hooks on the tapped layers keep what is asked for.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel


class TapHook(partial[None]):
    """A hook of a :class:`FeatureTap`, which changes nothing and acts in its own thread only."""


class FeatureTap:
    """The hidden states ``layers`` of one model.

    Args:
        model: a causal language model.
        config: its text config.
        layers: indices into transformers' ``hidden_states``: i is the input of decoder layer i, -1 the last
            hidden state, after the final norm. Of n layers, n is the output of the last one, before that
            norm, which transformers has no index for.

    Raises:
        ValueError: for a layer that the model does not have, or a model without a list of layers.
    """

    def __init__(self, model: PreTrainedModel, config: PreTrainedConfig, layers: Sequence[int]):
        self._sources: list[nn.Module] = []
        self._layers = list(layers)
        if not layers:
            return
        decoder: Any = model.get_decoder()
        blocks = _decoder_layers(decoder, config.num_hidden_layers)
        for layer in layers:
            if not -1 <= layer <= config.num_hidden_layers:
                raise ValueError(
                    f"features of layer {layer} were asked for; {type(model).__name__} has layers 0 to "
                    f"{config.num_hidden_layers - 1}, {config.num_hidden_layers} is the output of the last "
                    "one, and -1 its last hidden state"
                )
            if layer >= 0 and blocks is None:
                raise ValueError(
                    f"{type(model).__name__} has no list of {config.num_hidden_layers} layers to take "
                    "features from; use a drafter that needs none, such as 'ngram'"
                )
            if layer == -1 or blocks is None:
                self._sources.append(decoder)
            else:
                self._sources.append(blocks[min(layer, config.num_hidden_layers - 1)])
        self._after = {-1, config.num_hidden_layers}  # outputs; the others are inputs

    def chosen(self, first: Tensor, states: Tensor, last: Tensor) -> tuple[Tensor, ...]:
        """The same out of the input of the first layer, ``states [layers, rows, nodes, hidden]``, the outputs
        of all layers, and that of the last after the norm."""
        ends = {0: first, -1: last}
        return tuple(ends[i] if i in ends else states[i - 1] for i in self._layers)

    @contextmanager
    def recording(self) -> Iterator[list[Tensor]]:
        """A list that the pass inside fills with ``[rows, columns, hidden]``, in the order of ``layers``.

        Passes of the same model in other threads are not recorded.
        """
        states: list[Tensor] = []
        taken: dict[int, Tensor] = {}
        thread = threading.get_ident()

        def before(
            module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, index: int
        ) -> None:
            if threading.get_ident() == thread:
                taken[index] = args[0] if args else kwargs["hidden_states"]

        def after(module: nn.Module, args: tuple[Any, ...], output: Any, *, index: int) -> None:
            if threading.get_ident() == thread:
                taken[index] = output if isinstance(output, Tensor) else output[0]

        handles = []
        for index, (layer, source) in enumerate(zip(self._layers, self._sources, strict=True)):
            if layer in self._after:
                handles.append(source.register_forward_hook(TapHook(after, index=index)))
            else:
                hook = TapHook(before, index=index)
                handles.append(source.register_forward_pre_hook(hook, with_kwargs=True))
        try:
            yield states
            states.extend(taken[index] for index in range(len(handles)))
        finally:
            for handle in handles:
                handle.remove()


def side_by_side(states: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """One copy of them all: what a compiled model returns it may overwrite in its next pass."""
    return (torch.cat(list(states), dim=-1),) if states else ()


def _decoder_layers(decoder: nn.Module, count: int) -> nn.ModuleList | None:
    lists = [
        child
        for child in decoder.children()
        if isinstance(child, nn.ModuleList) and len(child) == count
    ]
    return lists[0] if len(lists) == 1 else None
