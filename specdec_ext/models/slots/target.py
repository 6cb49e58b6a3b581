"""``SlotTarget``: the ``Target`` of a model whose cache slots, masks and positions this package lays out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache

from specdec_ext.models.base import (
    NO_LIMIT,
    CommittedKeys,
    CommittedRound,
    FixedDraft,
    HostPaths,
    RoundTexts,
    Target,
    TargetOutput,
)
from specdec_ext.models.cache.adoption import attention_windows
from specdec_ext.models.cache.slot_cache import SlotCache, emptied
from specdec_ext.models.findings import Findings
from specdec_ext.models.graphs import GraphRunner
from specdec_ext.models.passes.direct.direct_pass import usable
from specdec_ext.models.passes.hidden_states import HiddenStateRecorder
from specdec_ext.models.passes.modules import ModulePass
from specdec_ext.models.slots.layout import RowLayout
from specdec_ext.models.slots.prefill import Prefill
from specdec_ext.models.slots.prompt_part import PromptPart
from specdec_ext.models.slots.replay import Replay
from specdec_ext.models.slots.round_state import RoundState
from specdec_ext.models.slots.runner import PassRunner
from specdec_ext.models.support import Support
from specdec_ext.ops import MatchResult
from specdec_ext.tree.draft_tree import DraftTree

T = TypeVar("T")
# Slots reserved after the prompt at the start. The buffers of longer calls grow in steps, because max_length
# is rarely reached.
FIRST_SLOTS = 2048
# Types of devices on which passes are recorded by default.
RECORDING_DEVICES = ("cuda",)


class SlotTarget(Target):
    """A decoder-only causal language model with a cache that can be rolled back.

    Args:
        model: a model with sdpa or eager attention, recurrent layers, or both.
        cache: the caller's cache or None; its layers are replaced in place.
        max_slots: the most cache slots that the call may need, including the last block.
        support: what can be done exactly with the model and the inputs of the call.
        findings: about the model.
        forward_kwargs: passed to every forward pass (``output_hidden_states`` and the like).
        prompt_kwargs: inputs that ``generate`` prepared, if the prompt is more than text (images, audio).
        graphs: whether passes are recorded (:mod:`specdec_ext.models.graphs`): "auto" on CUDA where possible,
            True everywhere, False nowhere.

    Attributes:
        cache: the ``DynamicCache``; after the call it is laid out like ``sequences[:, :-1]``.
        runner: runs the passes after the prompt.

    Raises:
        ValueError: for an unsupported cache; the message names it and the way out.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: Cache | None,
        max_slots: int,
        support: Support,
        findings: Findings,
        forward_kwargs: dict[str, Any] | None = None,
        prompt_kwargs: dict[str, Any] | None = None,
        graphs: bool | str = False,
    ):
        super().__init__(model, support)
        self._max_slots = max_slots
        self._slots = SlotCache(cache, self.config)
        self.cache = self._slots.cache
        assert findings.parts is not None
        self._modules = ModulePass(model, findings.parts, self._slots, forward_kwargs)
        # Only the model's own modules can process images or record hidden states and attentions.
        plain = not (forward_kwargs or prompt_kwargs or findings.parts.patches)
        direct = usable(model, findings.direct) if plain else None
        recorded = graphs is True or (graphs == "auto" and model.device.type in RECORDING_DEVICES)
        self.runner: PassRunner = PassRunner(
            self._modules,
            direct,
            GraphRunner(self._modules, max_slots, required=graphs is True) if recorded else None,
        )
        self._prefill = Prefill(self.runner, prompt_kwargs)
        self._replay: Replay | None = None
        if self._slots.states:
            recorded = bool(self._modules.forward_kwargs.get("output_attentions"))
            self._replay = Replay(self.runner, self._slots, draftable=not recorded)
        self._scored: DraftTree | None = None  # the tree of a pass that commit has not settled yet
        self._features: Sequence[Tensor] = ()  # the auxiliary hidden states of that pass
        self._state: RoundState | None = None  # while rounds are committed on the device
        self._idle_state: RoundState | None = None  # while the host commits them

    @property
    def draft_room(self) -> list[int]:
        rows = len(self._rows.ends)
        return [NO_LIMIT] * rows if self._replay is None else self._replay.draft_room(rows)

    @property
    def start(self) -> int:
        return self._rows.start

    @property
    def windows(self) -> list[int | None]:
        return attention_windows(self.cache, self.config)

    @property
    def recorded_layers(self) -> tuple[int, ...]:
        """The layers given to :meth:`record_hidden_states`."""
        return self._modules.recorder.layers

    def record_hidden_states(self, layers: Sequence[int]) -> None:
        self._modules.recorder = HiddenStateRecorder(self.model, self.config, layers)

    def committed_keys(self, layer: int, reach: int | None = None) -> CommittedKeys:
        stored, rows = self.cache.layers[layer], self._rows
        first, stop = stored.dropped, rows.start
        if reach is not None:
            first = max(first, stop - reach - rows.slack)
        numbers = rows.numbers
        slots = torch.arange(first, stop, device=rows.slot_valid.device)
        visible = rows.slot_valid[:, first:stop] & (slots < numbers.ends[:, None])
        if reach is not None:
            distances = numbers.root_positions[:, None] - rows.slot_positions[:, first:stop]
            visible &= distances <= reach
        keys, values = (
            buffer[: len(visible), :, first:stop]
            for buffer in (stored.key_buffer, stored.value_buffer)
        )
        return CommittedKeys(keys, values, visible)

    def admit(
        self, input_ids: Tensor, model_kwargs: dict[str, Any], config: GenerationConfig
    ) -> Tensor | None:
        mask = self._prefill.admit(input_ids, model_kwargs, config)
        self.offset = self._prefill.offset
        return mask

    def prefill(self, input_ids: Tensor, attention_mask: Tensor | None) -> TargetOutput:
        *_, output = self.prefill_passes(input_ids, attention_mask)
        assert output is not None
        return output

    def prefill_passes(
        self, input_ids: Tensor, attention_mask: Tensor | None, room: int | None = None
    ) -> Iterator[TargetOutput | None]:
        """:meth:`prefill` in passes of ``prefill_chunk_size`` columns; all values but the last are None.

        ``room`` is the number of slots that are reserved after the prompt; None for ``FIRST_SLOTS``.
        """
        room = FIRST_SLOTS if room is None else room
        prompt = self._prefill.prompt(input_ids, attention_mask)
        rows, columns = prompt.valid.shape
        max_slots = self._max_slots + self.offset
        self._rows = RowLayout.of(prompt, max_slots, self.staging, self._prefill.position_ids)
        self._prompt_rows = self._rows  # all rows, in the order of the prompt
        if self._replay is not None:
            self._replay.start(rows)
        self._slots.reserve(min(max_slots, columns + room), self._rows.slack)
        self.begun = True
        yield from self._prefill.passes(prompt, input_ids)

    def prompt_part(self, begin: int, end: int, output: TargetOutput) -> PromptPart:
        """Copy what the pass over a prompt of one row without padding has computed for some of its columns.

        Args:
            begin, end: the columns.
            output: of the prompt.
        """
        slots = [[each.clone() for each in layer] for layer in self._slots.read(begin, end)]
        states = [each[:, begin:end].clone() for each in output.aux_hidden_states]
        layers = [emptied(layer) for layer in self.cache.layers]
        return PromptPart(end - begin, layers, slots, states)

    def restore(self, parts: Sequence[PromptPart], columns: int) -> None:
        """Begin with the first parts of a prompt; :meth:`prefill_passes` reads the rest.

        Args:
            parts: of the prompt's first tokens, from a target of the same model that records the same hidden
                states.
            columns: number of columns of the whole prompt.
        """
        self._slots.extend(parts[0].layers)
        self._slots.reserve(columns, 0)
        begin = 0
        for part in parts:
            self._slots.write(0, begin, part.slots, num_rows=1)
            begin += part.num_tokens
        self._slots.set_length(begin, 0)
        self._prefill.restored = [part.aux_hidden_states for part in parts]

    def adopt(self, newcomer: SlotTarget, row: int, num_rows: int) -> None:
        """Let the only row of ``newcomer`` be the last active row.

        Args:
            newcomer: a target of the same model with as many ``max_slots``, which has run its prompt and is
                not used any more. Neither of them has recurrent states.
            row: number of active rows before it. With 0, the batch begins anew.
            num_rows: the most rows that this target will have.
        """
        assert self._replay is None and newcomer._replay is None
        self._slots.adopt(row, newcomer._slots, num_rows)
        new = replace(newcomer._rows, staging=self.staging)
        self._rows = self._rows.joined(new) if row else new
        self._move_ends(self._rows.ends)

    def forward(self, tree: DraftTree) -> TargetOutput:
        self._scored = tree
        scores = self.runner if self._replay is None else self._replay
        output = scores.score(tree, self._rows)
        self._features = output.aux_hidden_states
        return output

    def commit(self, path: Tensor, num_accepted: Tensor, on_host: HostPaths | None = None) -> None:
        tree, self._scored = self._scored, None
        rows, state = self._rows, self._state
        if tree is None and state is None:
            return  # the prompt needs no rollback
        paths, counts = on_host or (path.tolist(), num_accepted.tolist())
        if tree is None:
            assert state is not None  # it has committed the round
            self._move_ends(_advanced(rows.ends, counts), state.layout_of_rows(len(counts)))
            return
        if self._replay is not None:
            path, num_accepted, counts = self._replay.commit(tree, paths, counts)
        # Accepted nodes of a chain (states read nothing else) are in place if the row ends at the block.
        if not (rows.aligned and (self._replay is not None or tree.is_chain)):
            numbers = rows.numbers
            self._slots.compact(path, num_accepted, numbers.block_starts, numbers.ends)
        self._move_ends(_advanced(rows.ends, counts))

    def clear_rejected(self) -> None:
        """Zero what rejected tokens have left behind the ends of rows; masked layers may read NaN there."""
        self._slots.clear(self._rows.ends)

    @property
    def commits_rounds(self) -> bool:
        graphs, device = self.runner.graphs, self.staging.device
        if graphs is None or graphs.reason:
            return False
        return all(each.device == device for each in self._slots.buffers(1))

    def begin_rounds(self, texts: RoundTexts) -> None:
        state, graphs = self._state or self._idle_state, self.runner.graphs
        if state is None or not state.has_room(*texts.room):
            assert len(texts.new) == len(texts.lengths)  # a new state knows no text
            assert graphs is not None
            state = graphs.state_with(*texts.room, RoundState.empty)
            state.restart()
        self._state, self._idle_state = state, None
        ends = self.staging.stage([texts.lengths, texts.limits])
        state.begin(self._rows.packed_numbers, ends.tensor, texts)
        self._rows.move_ends(self._rows.ends, state.layout_of_rows(len(texts.lengths)))

    def end_rounds(self) -> None:
        self._state, self._idle_state = None, self._state
        self._move_ends(self._rows.ends)

    def verify_round(self, tree: DraftTree, logits: Tensor) -> MatchResult:
        assert self._state is not None
        return self._state.verify(tree, logits)

    def commit_round(
        self, verdict: MatchResult, match_lengths: Tensor | None = None
    ) -> CommittedRound:
        tree, self._scored = self._scored, None
        assert tree is not None and self._state is not None
        caches = self._slots.buffers(tree.num_rows)
        return self._state.commit(caches, tree, verdict, self._features, match_lengths)

    def round_launched(self, committed: CommittedRound) -> CommittedRound:
        assert self._state is not None
        return self._state.launched(committed)

    def tell_round_reason(self, reason: str) -> None:
        if self.runner.graphs is not None:
            self.runner.graphs.tell_round_reason(reason)

    def run_round(self, fixed: FixedDraft | str, num_nodes: int, compute: Callable[[], T]) -> T:
        state, graphs = self._state, self.runner.graphs
        assert state is not None and graphs is not None
        if isinstance(fixed, str):
            graphs.tell_round_reason(fixed)
            return compute()
        rows, limit = len(self._rows.ends), self.runner.invariant_rows
        key = fixed.key, state.has_filters
        memory = *state.memory, *fixed.memory
        return graphs.run_round(rows, num_nodes, limit, FixedDraft(key, memory), compute)

    def runs_ahead(self, num_nodes: int, emitted: int) -> bool:
        graphs, rows = self.runner.graphs, self._rows
        if self._state is None or graphs is None:
            return False
        stop = rows.start + emitted + num_nodes  # slots and positions are below this
        if self._max_positions is not None and stop > self._max_positions:
            return False
        invariant_rows = self.runner.invariant_rows
        return graphs.has_recorded(len(rows.ends), num_nodes, stop, invariant_rows)

    def rewind(self, counts: Sequence[int]) -> None:
        """Discard the last ``counts[r]`` committed tokens of each active row; no recurrent states allowed."""
        assert self._replay is None
        self._move_ends([end - count for end, count in zip(self._rows.ends, counts, strict=True)])

    def _move_ends(self, ends: list[int], on_device: Tensor | None = None) -> None:
        """Set the ends of the rows, and cut the cache to the largest of them."""
        self._rows.move_ends(ends, on_device)
        self._slots.set_length(self._rows.start, self._rows.slack)

    def reorder(self, order: Sequence[int], active: int, last_tokens: Tensor | None = None) -> None:
        going = list(order[:active])
        moved = [i for i, row in enumerate(order) if i != row]
        index = self.staging.stage(going)
        if moved:
            to, source = self.staging.stage([moved, [order[i] for i in moved]]).tensor
            self._slots.move_rows(to, source)
            if self._state is not None:
                self._state.move_rows(to, source)
        if self._replay is not None:
            self._replay.reorder(order, active)
        if active and going != list(range(len(self._rows.ends))):
            self._rows = self._rows.select(going, index.tensor)
            on_device = None if self._state is None else self._state.keep_rows(active)
            self._move_ends(self._rows.ends, on_device)

    def finish(self, last_tokens: Tensor, columns: Sequence[int]) -> None:
        columns = [each + self.offset for each in columns]
        width = max(columns)
        early = [each < width for each in columns]
        if self._replay is not None or any(early):
            self._rows = self._prompt_rows
            if self._replay is not None:
                self._read_unread(self._replay, last_tokens, columns, early)
            else:
                # The last token of a row that ended early has not been read; the next turn needs its keys.
                self._move_ends([each - 1 for each in columns])
                self.forward(DraftTree.root(last_tokens))
                roots = torch.zeros_like(last_tokens)
                self.commit(roots[:, None], roots, ([[0] for _ in columns], [0] * len(columns)))
            self._slots.clear(self._rows.ends, self._rows.start)
        self._slots.set_length(width - 1, 0)
        if self.runner.graphs is not None:
            self.runner.graphs.finish()

    def _read_unread(
        self, replay: Replay, last_tokens: Tensor, columns: list[int], early: list[bool]
    ) -> None:
        """Read the unread tokens, and the last tokens of rows that ended early."""
        replay.reorder(range(len(columns)), len(columns))
        unread = replay.unread
        self._move_ends([end - 1 - len(row) for end, row in zip(columns, unread, strict=True)])
        for row, last, is_early in zip(unread, last_tokens.tolist(), early, strict=True):
            row += [last] * is_early
        roots = DraftTree.root(last_tokens)
        while any(unread):
            replay.read_unread(self._rows, last_tokens.device)
            self._scored = roots
            self.withdraw(roots)
        self._slots.states.release()


def _advanced(ends: Sequence[int], counts: Sequence[int]) -> list[int]:
    """The ends of rows that keep their root and ``counts[r]`` nodes below it; -1 keeps nothing."""
    return [end + count + 1 for end, count in zip(ends, counts, strict=True)]
