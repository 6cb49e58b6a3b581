"""The outputs of a call besides the ids: streamed tokens, scores, logits, hidden states, attentions."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput
from transformers.utils import ModelOutput

from specdec_ext.context import Context
from specdec_ext.errors import NotAcceleratedError
from specdec_ext.models import TargetOutput
from specdec_ext.models.compat import CACHE
from specdec_ext.stats import SpeculationStats
from specdec_ext.verify.sampler import Accepted, RecordScores


class HasSpeculationStats:
    """Adds the statistics of the call to an output.

    They are an attribute and not an item, because some code expects that all items are tensors (Whisper's
    ``generate`` does).
    """

    speculation_stats: SpeculationStats | None = None

    @property
    def speculation(self) -> SpeculationStats | None:
        """The old name of ``speculation_stats``; reading it warns."""
        warnings.warn(
            "the attribute `speculation` of an output is deprecated; read `speculation_stats`",
            DeprecationWarning,
            stacklevel=2,
        )
        return self.speculation_stats


class SpeculativeOutput(HasSpeculationStats, GenerateDecoderOnlyOutput):
    """Hugging Face's output of a decoder-only model, and ``speculation_stats``."""


class SpeculativeEncoderDecoderOutput(HasSpeculationStats, GenerateEncoderDecoderOutput):
    """Hugging Face's output of an encoder-decoder model, and ``speculation_stats``."""


AnyOutput = SpeculativeOutput | SpeculativeEncoderDecoderOutput


class TokenStream:
    """Passes one ``[batch]`` tensor per column to a streamer, as soon as every unfinished row has reached it.

    If the streamer has a method ``put_drafted(tokens, drafted)``, it is called instead of ``put``;
    ``drafted [batch]`` tells which of the tokens were accepted drafts. If it has a method ``end_step()``,
    this is called after the columns that one step has completed.
    """

    def __init__(self, streamer: Any, context: Context):
        self._streamer, self._context = streamer, context
        self._next = 0
        self._drafted: list[list[bool]] = [[] for _ in context.generated]
        streamer.put(context.input_ids.cpu())

    def advance(self, accepted: Accepted, rows: list[int], columns: int) -> None:
        """Pass on the first ``columns`` columns of ``sequences``, which are final."""
        for row, emitted, count in zip(rows, accepted.emitted, accepted.drafted, strict=True):
            self._drafted[row].extend(j < count for j in range(len(emitted)))
        end = columns - self._context.prompt_columns
        for column in range(self._next, end):
            tokens = self._context.generated_column(column)
            if hasattr(self._streamer, "put_drafted"):
                flags = [flag[column] if column < len(flag) else False for flag in self._drafted]
                self._streamer.put_drafted(tokens, torch.tensor(flags, device="cpu"))
            else:
                self._streamer.put(tokens)
        if end > self._next and hasattr(self._streamer, "end_step"):
            self._streamer.end_step()
        self._next = end

    def end(self) -> None:
        self._streamer.end()


class Recorder:
    """Collects the outputs of each token into transformers' tuples, with one entry per generated token.

    After the end of a row, its entries are zeros.

    Args:
        config: the generation config of the call.
        batch: number of rows.
        encoder_outputs: the encoder's output, for an encoder-decoder model.

    Attributes:
        keeps_passes: whether :meth:`step` must be called for every pass.
    """

    def __init__(
        self, config: GenerationConfig, batch: int, encoder_outputs: ModelOutput | None = None
    ):
        wanted = config.return_dict_in_generate
        self._batch, self._encoded = batch, encoder_outputs
        self._scores: list[Tensor] | None = [] if wanted and config.output_scores else None
        self._logits: list[Tensor] | None = [] if wanted and config.output_logits else None
        asked = {
            "hidden_states": config.output_hidden_states,
            "attentions": config.output_attentions,
            "cross_attentions": config.output_attentions and encoder_outputs is not None,
        }
        # Name in ``TargetOutput`` -> for each token, the tensors of all layers.
        self._layers: dict[str, list[tuple[Tensor, ...]]] = {
            name: [] for name, value in asked.items() if wanted and value
        }
        self.keeps_passes = self._logits is not None or bool(self._layers)

    @property
    def forward_kwargs(self) -> dict[str, bool]:
        """The arguments of the target's forward that request these outputs."""
        names = ("hidden_states", "attentions")
        return {f"output_{name}": True for name in names if name in self._layers}

    @property
    def record_scores(self) -> RecordScores | None:
        """The function that receives the scores of each token, or None if scores are not requested."""
        return None if self._scores is None else self._score

    def prompt(self, output: TargetOutput) -> None:
        """Record the hidden states and attentions of the prompt pass, whole, as ordinary tensors."""
        weights = output.attentions
        if "attentions" in self._layers and (not weights or weights[0] is None):
            raise ValueError(
                "output_attentions=True needs attn_implementation='eager': other implementations do not "
                "return attention weights"
            )
        for name, store in self._layers.items():
            store.append(tuple(layer.clone() for layer in getattr(output, name)))

    def step(
        self,
        output: TargetOutput,
        accepted: Accepted,
        rows: list[int],
        before: list[int],
        block_start: int,
        prompt_columns: int,
        windows: list[int | None] | None,
    ) -> None:
        """Record the outputs behind the tokens that one step emitted.

        Args:
            output: the target's output for the tree that was verified.
            accepted: the result of the verification.
            rows: original rows of the active rows.
            before: number of tokens that each active row had generated before the step.
            block_start: cache slot of node 0.
            prompt_columns: number of columns before the first generated token.
            windows: the sliding window of each attention layer, None for full attention; None in place of the
                list if the attention weights have the columns of plain decoding already.
        """
        paths = accepted.paths
        block_end = block_start + accepted.path.shape[1]
        for i, row in enumerate(rows):
            for j in range(len(accepted.emitted[i])):
                step, node = before[i] + j, paths[i][j]
                self._place(self._logits, step, row, output.logits[i, node].float())
                if step == 0:
                    continue  # the prompt pass was recorded as a whole
                for name, store in self._layers.items():
                    values = [layer[i][..., node : node + 1, :] for layer in getattr(output, name)]
                    if name == "attentions" and windows is not None:
                        if len(values) != len(windows):
                            raise NotAcceleratedError(
                                "output_attentions=True: the model runs layers in loops, so it is not known "
                                "which attentions have a sliding window; use model.generate"
                            )
                        # The columns of this row: the slots before its root, then its path in the block.
                        own = prompt_columns + before[i] - 1
                        slots = list(range(own)) + [block_start + k for k in paths[i][: j + 1]]
                        values = [
                            _own_columns(layer, slots, block_end, window)
                            for layer, window in zip(values, windows, strict=True)
                        ]
                    self._place_layers(store, step, row, values)

    def _score(
        self, rows: Sequence[int], steps: Sequence[int], scores: Tensor
    ) -> tuple[Tensor, ...]:
        assert self._scores is not None
        for row, step, value in zip(rows, steps, scores.float(), strict=True):
            self._place(self._scores, step, row, value)
        return tuple(self._scores)

    def _place(self, store: list[Tensor] | None, step: int, row: int, value: Tensor) -> None:
        if store is None:
            return
        while len(store) <= step:
            store.append(self._zeros_like(value))
        store[step][row] = value

    def _zeros_like(self, value: Tensor) -> Tensor:
        # Not new_zeros, which would return an inference tensor; callers could not modify it.
        return torch.zeros(self._batch, *value.shape, dtype=value.dtype, device=value.device)

    def _place_layers(
        self, store: list[tuple[Tensor, ...]], step: int, row: int, values: list[Tensor]
    ) -> None:
        while len(store) <= step:
            store.append(())
        if not store[step]:
            store[step] = tuple(self._zeros_like(value) for value in values)
        for layer, value in zip(store[step], values, strict=True):
            layer[row] = value

    def result(
        self, sequences: Tensor, cache: Any, stats: SpeculationStats, prompt_columns: int
    ) -> AnyOutput:
        """The output object, of the class that transformers returns for such a model."""
        steps = sequences.shape[1] - prompt_columns

        def cut(store: list | None) -> tuple | None:
            return None if store is None else tuple(store[:steps])

        common: dict[str, Any] = {
            "sequences": sequences,
            "scores": cut(self._scores),
            "logits": cut(self._logits),
            CACHE: cache,
        }
        hidden, attentions, cross = (
            cut(self._layers.get(name))
            for name in ("hidden_states", "attentions", "cross_attentions")
        )
        encoded = self._encoded
        output: AnyOutput
        if encoded is None:
            output = SpeculativeOutput(**common, hidden_states=hidden, attentions=attentions)
        else:
            output = SpeculativeEncoderDecoderOutput(
                **common,
                encoder_hidden_states=None if hidden is None else encoded.get("hidden_states"),
                encoder_attentions=None if attentions is None else encoded.get("attentions"),
                decoder_hidden_states=hidden,
                decoder_attentions=attentions,
                cross_attentions=cross,
            )
        output.speculation_stats = stats
        return output


def _own_columns(weights: Tensor, slots: list[int], block_end: int, window: int | None) -> Tensor:
    """Select from ``[heads, 1, keys]`` over cache slots the row's own columns, as in plain decoding."""
    offset = block_end - weights.shape[-1]
    if window is not None:
        slots = slots[-window:]
    index = torch.tensor(slots, device=weights.device) - offset
    return weights.index_select(-1, index)
