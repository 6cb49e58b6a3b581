"""``Prefill``: check the prompt of a call and run it, in chunks if the call asks for them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from specdec_ext.errors import NotAcceleratedError
from specdec_ext.models.base import TargetOutput
from specdec_ext.models.compat import CACHE, masked_columns
from specdec_ext.models.context_limit import Span, rotation_change
from specdec_ext.models.passes.direct.direct_pass import (
    PROMPT,
    PromptBlock,
    agrees,
    end_of_prompt,
    is_agreed,
)
from specdec_ext.models.passes.prompt import Prompt
from specdec_ext.models.patching.changes import inference_mode
from specdec_ext.models.slots.runner import PassRunner
from specdec_ext.models.support import beyond_text

# The most columns of a direct pass: the states of all its layers are in memory at the same time.
DIRECT_COLUMNS = 512
# Columns that are read directly and by modules, to compare the logits: enough for arithmetic that differs to
# show, and few enough for the time to the first token.
COMPARED_COLUMNS = 32

# Runs the columns from one to another of a prompt with these input_ids; None if both ways to do it differ.
Read = Callable[[Prompt, Tensor, int, int], TargetOutput | None]
# The columns of a pass, and how it is run.
Part = tuple[int, int, Read]


class Prefill:
    """The prompt pass of one call.

    Args:
        runner: has the two ways to run the passes, by modules and directly.
        prompt_kwargs: inputs that ``generate`` prepared, if the prompt is more than text (images, audio).

    Attributes:
        offset: number of columns of the prompt before the first column of ``input_ids``, which is shorter
            than ``inputs_embeds`` or empty.
        position_ids: positions of a prompt that is more than text; None if they count the tokens before.
        restored: auxiliary hidden states of the columns that the cache holds, by part; needed if they are
            recorded.
    """

    def __init__(self, runner: PassRunner, prompt_kwargs: dict[str, Any] | None):
        self._runner, self._modules = runner, runner.modules
        self._cache = self._modules.cache
        self._prompt_kwargs = prompt_kwargs
        self._name = type(self._modules.model).__name__
        self._chunk: int | None = None  # the most columns that one pass reads
        self._embeddings: Tensor | None = None  # the prompt as embeddings, read instead of its ids
        self.offset = 0
        self.position_ids: Tensor | None = (prompt_kwargs or {}).get("position_ids")
        self.restored: list[Sequence[Tensor]] = []

    def admit(
        self, input_ids: Tensor, model_kwargs: dict[str, Any], config: GenerationConfig
    ) -> Tensor | None:
        """Check the inputs, before anything runs; see :meth:`Target.admit`."""
        self._chunk = _prefill_chunk(config)
        self._embeddings = model_kwargs.get("inputs_embeds")
        text, name = self._text(input_ids)
        rows, columns = text.shape[:2]
        self.offset = columns - input_ids.shape[1]
        mask = model_kwargs.get("attention_mask")
        all_ones = mask is not None and bool((mask == 1).all())
        if self.offset and all_ones:
            mask = None  # transformers made it from the ids, which are shorter than the embeddings
        if mask is not None:
            masked = tuple(mask.shape)
        else:
            masked = (rows, columns if self.offset else masked_columns(config, columns))
        if masked != (rows, columns):
            raise ValueError(
                f"attention_mask has shape {masked} and {name} {(rows, columns)}; pass the whole text as "
                f"{name}, including the part that is in {CACHE}"
            )
        if all_ones:
            mask = None
        if self._prompt_kwargs is None:
            _check_positions(model_kwargs.get("position_ids"), mask, text)
        elif self._chunk is not None:
            raise ValueError(
                f"prefill_chunk_size={self._chunk} can't be combined with a prompt that is more than text "
                f"({', '.join(beyond_text(self._prompt_kwargs))}); leave prefill_chunk_size out"
            )
        return mask

    def _text(self, input_ids: Tensor) -> tuple[Tensor, str]:
        """Return the prompt as the model reads it, ``[rows, columns, ...]``, and its name in ``forward``."""
        if self._embeddings is None:
            return input_ids, "input_ids"
        return self._embeddings, "inputs_embeds"

    def prompt(self, input_ids: Tensor, attention_mask: Tensor | None) -> Prompt:
        """Return the prompt, checked against the caller's cache.

        Raises:
            ValueError: for a cache or padding with which the layers would compute something wrong.
        """
        text, _ = self._text(input_ids)
        prompt = Prompt.of(text, attention_mask, self._cached_slots())
        rows = len(prompt.valid)
        cached = next((len(layer.key_buffer) for layer in self._cache.layers if layer.length), rows)
        if cached != rows:
            raise ValueError(
                f"{CACHE} holds {cached} rows and input_ids {rows}; select or repeat the rows of the "
                "cache first (batch_select_indices, batch_repeat_interleave)"
            )
        if prompt.holes and (self._cache.states or self._prompt_kwargs is not None):
            where = (
                "its recurrent states" if self._cache.states else "a prompt that is more than text"
            )
            raise ValueError(
                f"attention_mask has padding after or between tokens, which {self._name} would read into "
                f"{where}; pad on the left (tokenizer.padding_side='left')"
            )
        if prompt.holes and any(layer.dropped for layer in self._cache.layers):
            raise ValueError(
                f"{CACHE} comes from a sliding-window cache that has dropped old tokens, and "
                "attention_mask has padding between tokens, so a window may reach back to dropped tokens; "
                f"run the whole text without {CACHE}"
            )
        return prompt

    def _cached_slots(self) -> int:
        """Return the number of slots that are filled in the caller's cache."""
        slots, states = self._cache.length, self._cache.states
        if not self._cache.layers and states.filled:
            raise ValueError(
                f"{CACHE} of {self._name} holds recurrent states only, which do not tell how many "
                f"tokens they have read; run the whole text without {CACHE}"
            )
        if slots and self._modules.griffin_blocks and not states.filled:
            raise ValueError(
                f"{CACHE} holds no recurrent states, because {self._name} kept them in its modules; "
                f"run the whole text without {CACHE}"
            )
        return slots

    def passes(self, prompt: Prompt, input_ids: Tensor) -> Iterator[TargetOutput | None]:
        """Run the columns that are not in the cache yet, one pass for each value of the iterator.

        The last value is the output, see :meth:`Target.prefill`; those before it are None.
        """
        output: TargetOutput | None = None
        if self._can_read_directly(prompt):
            output = yield from self._read(prompt, input_ids, self._direct_parts(prompt))
            if output is None:
                self._runner.direct = None
                self._cache.set_length(prompt.past, self._cache.layers[0].slack)
                yield None
        if output is None:
            chunks = prompt.chunks(self._chunk, only_tokens=bool(self._cache.states))
            parts = [(begin, end, self._by_modules) for begin, end in chunks]
            output = yield from self._read(prompt, input_ids, parts)
        yield output

    def _can_read_directly(self, prompt: Prompt) -> bool:
        rows, columns = prompt.valid.shape
        return (
            self._runner.direct is not None
            and self._embeddings is None
            and prompt.holes == 0
            # Where rotations depend on the longest text of a pass, parts of the prompt would have others.
            and rotation_change(self._modules.config, Span(rows, 0, columns)) is None
        )

    def _direct_parts(self, prompt: Prompt) -> Iterator[Part]:
        """Yield the columns of each direct pass, and how it is run.

        Two parts of a prompt are also read by modules: the first tokens of all rows, in the model's first
        prompt; and the last columns, in its first prompt of about this length, because a sliding window or
        an error that adds up shows only there.
        """
        model, columns, begin = self._modules.model, prompt.valid.shape[1], prompt.past
        sections: list[tuple[int, Read]] = []  # where each ends
        if not is_agreed(model, PROMPT):
            behind_padding = max(begin, int(prompt.first.max()))
            stop = min(behind_padding + COMPARED_COLUMNS, columns)
            sections.append((stop, partial(self._both_ways, PROMPT)))
        kind = end_of_prompt(columns)
        if columns >= 4 * COMPARED_COLUMNS and not is_agreed(model, kind):
            sections.append((columns - COMPARED_COLUMNS, self._directly))
            sections.append((columns, partial(self._both_ways, kind)))
        sections.append((columns, self._directly))
        for stop, read in sections:
            while begin < stop:
                end = min(begin + (self._chunk or DIRECT_COLUMNS), stop)
                yield begin, end, read
                begin = end

    def _both_ways(
        self, kind: str, prompt: Prompt, input_ids: Tensor, begin: int, end: int
    ) -> TargetOutput | None:
        """Run these columns by modules and directly; None if the logits differ."""
        model, direct = self._modules.model, self._runner.direct
        assert direct is not None
        by_modules = self._by_modules(prompt, input_ids, begin, end)
        self._cache.set_length(begin, self._cache.layers[0].slack)
        # What it writes to the cache replaces what the modules have written.
        output = self._directly(prompt, input_ids, begin, end)
        begun = prompt.first < end  # what is computed for padding depends on the attention
        logits = output.logits[begun], by_modules.logits[begun]
        same = not begun.any() or agrees(model, direct, kind, *logits)
        return output if same else None

    def _read(
        self, prompt: Prompt, input_ids: Tensor, parts: Iterable[Part]
    ) -> Generator[None, None, TargetOutput | None]:
        """Run the columns that are not in the cache yet, part by part; yield between passes.

        Returns None if a part returns None.
        """
        logits: Tensor | None = None
        states = [*self.restored]
        for begin, end, read in parts:
            done = read(prompt, input_ids, begin, end)
            if done is None:
                return None
            output = done
            if logits is not None:  # rows padded on the right may have ended in an earlier chunk
                output.logits = torch.where(
                    (prompt.last < begin)[:, None, None], logits, output.logits
                )
            logits = output.logits
            if states or end < prompt.valid.shape[1]:
                # Copies, because the states of all layers of a direct pass are one tensor.
                states.append([state.clone() for state in output.aux_hidden_states])
                output.aux_hidden_states = ()
            if end < prompt.valid.shape[1]:
                yield None
        columns = prompt.valid.shape[1]
        if any(layer.length != columns for layer in self._cache.layers if layer.is_initialized):
            raise NotAcceleratedError(
                f"{self._name} did not write the prompt to its cache, so drafts can't be verified; use "
                "model.generate"
            )
        if states:
            output.aux_hidden_states = tuple(
                torch.cat(chunks, dim=1) for chunks in zip(*states, strict=True)
            )
        return output

    def _directly(self, prompt: Prompt, input_ids: Tensor, begin: int, end: int) -> TargetOutput:
        """Run these columns with ``ops.decoder_layers``; no row has padding between its tokens."""
        assert self._runner.direct is not None
        block = PromptBlock(prompt.first, begin - prompt.first, end)
        with inference_mode():
            logits, states = self._runner.direct(
                input_ids[:, begin:end],
                prompt.positions[:, begin:end],
                block,
                self._cache.layers,
                1,  # all rows end together
                self._modules.recorder.reads_last_layer,
            )
            return TargetOutput(logits, self._modules.recorder.chosen(*states))

    def _by_modules(self, prompt: Prompt, input_ids: Tensor, begin: int, end: int) -> TargetOutput:
        """Run these columns; ``logits [rows, 1, vocab]`` are valid for rows that end among them."""
        block = prompt.visibility(begin, end)
        ends = prompt.ends(begin, end) or [end - begin - 1]
        kept = torch.tensor(ends, device=input_ids.device)
        keep: dict[str, Any] = {}
        if "logits_to_keep" in self._modules.parts.parameters:
            # For 1, Gemma 4 runs its last layers for one column only, and the states of the others are lost.
            one = ends == [end - begin - 1] and not self._modules.recorder.layers
            keep["logits_to_keep"] = 1 if one else kept
        if self._prompt_kwargs is not None:
            inputs = self._prepared(input_ids, self._prompt_kwargs)
        else:
            text, name = self._text(input_ids)
            inputs = {
                name: text[:, begin:end],
                "position_ids": prompt.positions[:, begin:end],
                "attention_mask": (
                    prompt.valid[:, :end].long() if prompt.padded and block is None else None
                ),
            }
        output = self._modules(block, max_rows=0, past=begin > 0, **inputs, **keep)
        self._cache.take_layers()
        output.logits = _pick_columns(output.logits, prompt.last - begin, kept)
        return output

    def _prepared(self, input_ids: Tensor, prompt_kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the model's inputs for a prompt that is more than text, as transformers prepares them."""
        modules = self._modules
        prepare: Any = modules.model.prepare_inputs_for_generation
        kwargs = {"use_cache": True, **prompt_kwargs, modules.cache_name: self._cache.cache}
        ours = {modules.cache_name, "logits_to_keep", *modules.forward_kwargs}
        prepared = prepare(input_ids, is_first_iteration=True, **kwargs)
        return {name: value for name, value in prepared.items() if name not in ours}


def _check_positions(
    position_ids: Tensor | None, attention_mask: Tensor | None, text: Tensor
) -> None:
    """Refuse positions that do not count the unpadded tokens before: rollback relies on that count."""
    if position_ids is None:
        return
    columns = text.shape[1]
    # For a filled cache without a mask, transformers prepares more positions than there are columns.
    given = position_ids[..., :columns]
    if given.shape[-1] == columns:
        if attention_mask is None:
            wrong = given != torch.arange(columns, device=text.device)
        else:
            valid = attention_mask.bool()
            wrong = (given != valid.cumsum(dim=1) - 1) & valid
        if not wrong.any():
            return
    raise ValueError(
        "position_ids do not count the unpadded tokens of each row from 0. Other positions are not "
        "supported; leave position_ids out"
    )


def _prefill_chunk(config: GenerationConfig) -> int | None:
    size = config.prefill_chunk_size
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
        raise ValueError(
            f"prefill_chunk_size is {size!r}; expected the largest number of prompt columns in one pass, at "
            "least 1, or None for all at once"
        )
    return size


def _pick_columns(logits: Tensor, wanted: Tensor, kept: Tensor) -> Tensor:
    """Pick column ``wanted[r]`` of each row: ``[rows, columns, vocab]`` -> ``[rows, 1, vocab]``.

    ``kept`` lists the columns whose logits were requested; some models return those of all columns.
    """
    if logits.shape[1] == 1:
        return logits
    index = torch.searchsorted(kept, wanted).clamp(max=len(kept) - 1)
    if logits.shape[1] != len(kept):  # the model returned the logits of all columns
        index = kept[index]
    return logits[torch.arange(len(logits), device=logits.device), index][:, None]
