"""``HiddenStateRecorder``: record the auxiliary hidden states of chosen layers while the model runs.

``output_hidden_states=True`` would keep the states of every layer, which for a long prompt takes more memory
than the cache. Forward hooks on the chosen layers keep only what was requested.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from specdec_ext.models.patching.changes import binding, joined_changes

_recorded: ContextVar[tuple[HiddenStateRecorder, dict[int, Tensor]] | None] = ContextVar(
    "specdec_recorded_states", default=None
)


class RecordingHook:
    """The hook of a :class:`HiddenStateRecorder` on one module: records while it is open, changes nothing."""

    def __init__(self, recorder: HiddenStateRecorder, index: int, module: nn.Module, after: bool):
        self._recorder, self._index, self._module, self._after = recorder, index, module, after

    def register(self) -> None:
        if self._after:
            self._module.register_forward_hook(self)
        else:
            self._module.register_forward_pre_hook(self, with_kwargs=True)

    def remove(self) -> None:
        """Remove the hook from the module, even if :meth:`register` was interrupted."""
        for hooks in (self._module._forward_hooks, self._module._forward_pre_hooks):
            for key in [key for key, hook in hooks.items() if hook is self]:
                hooks.pop(key, None)
                self._module._forward_pre_hooks_with_kwargs.pop(key, None)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], other: Any) -> None:
        """``other`` is the output (forward hook) or the keyword arguments (pre-hook) of the call."""
        recorder, taken = _recorded.get() or (None, {})
        if recorder is not self._recorder:
            return
        if not self._after:
            taken[self._index] = args[0] if args else other["hidden_states"]
        else:
            taken[self._index] = other if isinstance(other, Tensor) else other[0]


class LayerStates(Sequence[Tensor]):
    """The chosen hidden states of a pass that wrote the states of all layers into one tensor.

    A state is selected when it is read, so steps whose hidden states are not used cost nothing.

    Args:
        layers: the chosen layers, numbered as in :class:`HiddenStateRecorder`.
        states: ``[layers, rows, nodes, hidden]`` outputs of all layers, or of those up to the last chosen
            one.
        first, last: ``[rows, nodes, hidden]`` states of layers 0 and -1; None if not chosen.
    """

    __slots__ = ("_first", "_last", "_layers", "_states")

    def __init__(
        self, layers: Sequence[int], states: Tensor, first: Tensor | None, last: Tensor | None
    ):
        self._layers, self._states, self._first, self._last = layers, states, first, last

    def __len__(self) -> int:
        return len(self._layers)

    def __getitem__(self, index: Any) -> Any:
        layer = self._layers[index]
        if layer == -1:
            return self._last
        return self._states[layer - 1] if layer else self._first

    def first(self, count: int) -> LayerStates:
        """The states of the first ``count`` nodes."""
        ends = (None if end is None else end[:, :count] for end in (self._first, self._last))
        return LayerStates(self._layers, self._states[:, :, :count], *ends)

    @staticmethod
    def joined(parts: Sequence[LayerStates]) -> LayerStates:
        """Concatenate the nodes of several passes."""
        depth = max(0, *parts[0]._layers)
        states = torch.cat([part._states[:depth] for part in parts], dim=2)
        ends = [[part._first for part in parts], [part._last for part in parts]]
        first, last = (
            None if end[0] is None else torch.cat([state for state in end if state is not None], 1)
            for end in ends
        )
        return LayerStates(parts[0]._layers, states, first, last)


class HiddenStateRecorder:
    """Records the hidden states of ``layers`` of one model.

    Args:
        model: a causal language model.
        config: its text config.
        layers: indices into transformers' ``hidden_states``: i is the input of decoder layer i, -1 the last
            hidden state, after the final norm. For a model of n layers, n is the output of the last layer
            before the final norm, for which transformers has no index.

    Attributes:
        layers: the same as a tuple.
        reads_last_layer: whether one of them is the output of the last layer.

    Raises:
        ValueError: for a layer that the model does not have, or a model without a list of layers.
    """

    def __init__(self, model: PreTrainedModel, config: PreTrainedConfig, layers: Sequence[int]):
        self._sources: list[nn.Module] = []
        self.layers = tuple(layers)
        self._after = {-1, config.num_hidden_layers}  # outputs; the others are inputs
        self.reads_last_layer = not self._after.isdisjoint(layers)
        if not layers:
            return
        decoder: Any = model.get_decoder()
        blocks = _decoder_layers(decoder, config.num_hidden_layers)
        for layer in layers:
            if not -1 <= layer <= config.num_hidden_layers:
                raise ValueError(
                    f"feature_layers has {layer}; {type(model).__name__} has the layers 0 to "
                    f"{config.num_hidden_layers - 1} (their inputs), {config.num_hidden_layers} (the output "
                    "of the last layer) and -1 (the last hidden state, after the final norm)"
                )
            if layer >= 0 and blocks is None:
                raise ValueError(
                    f"{type(model).__name__} has no list of {config.num_hidden_layers} layers to record "
                    "hidden states from; use a drafter that needs none, such as 'ngram'"
                )
            if layer == -1 or blocks is None:
                self._sources.append(decoder)
            else:
                self._sources.append(blocks[min(layer, config.num_hidden_layers - 1)])

    def chosen(self, first: Tensor, states: Tensor, last: Tensor) -> Sequence[Tensor]:
        """Select ``layers`` from the hidden states of a :class:`DirectPass`.

        Args:
            first: input of the first layer.
            states: ``[layers, rows, nodes, hidden]`` outputs of all layers; the last one may be missing if it
                is not read (:attr:`reads_last_layer`).
            last: output of the last layer after the final norm.
        """
        layers = self.layers
        if not layers:
            return ()
        return LayerStates(
            layers, states, first if 0 in layers else None, last if -1 in layers else None
        )

    @contextmanager
    def recording(self) -> Iterator[list[Tensor]]:
        """Record the pass that runs inside of this context.

        Yields:
            A list that is filled when the context ends, with ``[rows, columns, hidden]`` in the order of
            ``layers``. Passes of the same model in other threads are not recorded.
        """
        states: list[Tensor] = []
        taken: dict[int, Tensor] = {}
        with joined_changes() as changes:
            changes.make(self, ((hook.register, hook.remove) for hook in self._hooks()))
            with binding(_recorded, (self, taken)):
                yield states
        states.extend(taken[index] for index in range(len(self._sources)))

    def _hooks(self) -> Iterator[RecordingHook]:
        for index, (layer, source) in enumerate(zip(self.layers, self._sources, strict=True)):
            yield RecordingHook(self, index, source, after=layer in self._after)


def concatenated(states: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Copy the states into one tensor, concatenated: a compiled model may overwrite its outputs later."""
    return (torch.cat(list(states), dim=-1),) if states else ()


def _decoder_layers(decoder: nn.Module, count: int) -> nn.ModuleList | None:
    lists = [
        child
        for child in decoder.children()
        if isinstance(child, nn.ModuleList) and len(child) == count
    ]
    return lists[0] if len(lists) == 1 else None
