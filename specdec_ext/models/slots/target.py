"""``SlotTarget``: a model whose cache slots, attention masks and positions this package lays out itself.

Layout of a ragged batch: cache slots are the columns of ``generate``'s ``sequences``, including the padding
of the prompt, which is marked invalid. Every block of tokens is written at one common slot, which is the
largest committed length of the active rows. ``commit`` then moves each row's accepted nodes to the end of
that row. Active rows are the first rows of the buffers; a finished row is swapped to a place after them.

The *held* slots of a row are those whose tokens its cache has read and keeps. Keys and values can be cut to
any length, so a row holds all of its text except the last token, which is the root of its next tree.
Recurrent states can't be cut. A row with a rejected draft gets back the states from before the pass, and the
tokens that it has accepted since then are *unread*. They are put in front of the next block as a chain that
is known to be correct, so no extra pass is needed to read them.

Siblings in a tree can't share a recurrent state either. For a model with recurrent states, every branch of a
tree is a separate row of the pass, with a copy of its row's states (``branches.py``). If the whole branch was
accepted, the row takes over the states of that branch.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache

from specdec_ext import ops
from specdec_ext.errors import NotAcceleratedError
from specdec_ext.models import compat
from specdec_ext.models.base import NO_LIMIT, HostPaths, Target, TargetOutput
from specdec_ext.models.cache.adoption import adopt_cache, attention_windows
from specdec_ext.models.cache.layers import RollbackLayer
from specdec_ext.models.cache.states import States
from specdec_ext.models.compat import LinearAttentionCacheLayerMixin, masked_columns
from specdec_ext.models.families.griffin import held_in, holding_states
from specdec_ext.models.families.patches import placed, placements
from specdec_ext.models.families.scans import continuing, stateless_scans
from specdec_ext.models.passes.attention import IMPLEMENTATION, TreeBlock
from specdec_ext.models.passes.branches import Branches, padded
from specdec_ext.models.passes.direct import agrees, direct_pass, is_agreed
from specdec_ext.models.passes.features import side_by_side
from specdec_ext.models.passes.linears import MAX_PROMPT_ROWS, row_invariant_linears
from specdec_ext.models.passes.masks import BlockVisibility, SlotVisibility, visibility
from specdec_ext.models.passes.prompt import Prompt
from specdec_ext.models.patching.changes import inference_mode, joined_changes
from specdec_ext.models.support import Support, beyond_text
from specdec_ext.tree.draft_tree import DraftTree

# Slots reserved after the prompt at the start. The buffers of longer calls grow in steps, because max_length
# is rarely reached.
FIRST_SLOTS = 2048
# With this many unread tokens a row reads them without further drafts: a longer block costs more.
MAX_UNREAD = 16
# Attributes with one entry per row that are set by the prompt: tensors on the device, lists on the host.
_ROW_TENSORS = ("_slot_valid", "_slot_positions", "_position_shift")
_ROW_LISTS = ("_holes_before", "_first_slot")


class _RowNumbers(NamedTuple):
    """Positions and lengths of the rows of a block, ``[rows]`` int64 each on the device.

    Attributes:
        root_positions: position of the first token of the block.
        slots: number of slots that each row holds; ``commit`` moves the next token to this slot.
        first_slots: slot of the first token of each row.
        lengths: number of committed tokens.
        block_starts: slot of node 0, the same for all rows.
    """

    root_positions: Tensor
    slots: Tensor
    first_slots: Tensor
    lengths: Tensor
    block_starts: Tensor


@dataclass
class _Block:
    """A pass that ``forward`` has run and ``commit`` has not settled yet.

    Attributes:
        tree: the tree that was run, with the unread tokens in front.
        drafts: the tree that ``forward`` was given.
        undoable: whether the recurrent states were saved before the pass.
        branches: the branches of ``drafts``, which are the rows of ``tree``; None if no row has several.
    """

    tree: DraftTree
    drafts: DraftTree
    undoable: bool
    branches: Branches | None = None


class SlotTarget(Target):
    """A decoder-only causal language model with a cache that can be rolled back.

    Args:
        model: a model with sdpa or eager attention, recurrent layers, or both.
        past_key_values: the caller's cache or None; its layers are replaced in place.
        max_slots: the most cache slots that the call may need, including the last block.
        support: what can be done exactly with the model (``supports``).
        forward_kwargs: passed to every forward pass (``output_hidden_states`` and the like).
        prompt_kwargs: inputs that ``generate`` prepared, if the prompt is more than text (images, audio).

    Attributes:
        cache: the ``DynamicCache``; after the call it is laid out like ``sequences[:, :-1]``.
        invariant_rows: the largest number of tokens in a pass after the prompt for which linear layers are
            computed row-invariantly. Only with no limit are a token's bits the same in every pass; a draft
            model does not need that.

    Raises:
        ValueError: for an unsupported cache; the message names it and the way out.
    """

    invariant_rows: float = math.inf

    def __init__(
        self,
        model: PreTrainedModel,
        past_key_values: Cache | None,
        max_slots: int,
        support: Support,
        forward_kwargs: dict[str, Any] | None = None,
        prompt_kwargs: dict[str, Any] | None = None,
    ):
        super().__init__(model, support, forward_kwargs)
        self._prompt_kwargs = prompt_kwargs
        self.cache = adopt_cache(past_key_values, self.config)
        self._layers = [layer for layer in self.cache.layers if isinstance(layer, RollbackLayer)]
        self._states = States(
            [x for x in self.cache.layers if isinstance(x, LinearAttentionCacheLayerMixin)]
        )
        self._scans = stateless_scans(model) if self._states else []
        self._griffin_blocks = holding_states(model) if self._states else []
        self._patches = placements(model)
        # Only the model's own modules can process images in a prompt or record hidden states and attentions.
        plain = not (forward_kwargs or prompt_kwargs or self._patches)
        self._direct = direct_pass(model) if plain else None
        if self._direct is not None and not self._direct.serves(self.cache.layers):
            self._direct = None
        self._parameters = inspect.signature(model.forward).parameters
        self._cache_name = (
            "cache_params" if "cache_params" in self._parameters else "past_key_values"
        )
        self._max_slots = max_slots
        self._chunk: int | None = None  # the most columns of the prompt that one pass reads
        self._embeddings: Tensor | None = None  # the prompt as embeddings, read instead of its ids
        self._start = 0  # the common slot of the next block
        self._unread: list[list[int]] = []  # unread tokens of all rows, roots not included
        self._block: _Block | None = None

    @property
    def _numbers(self) -> _RowNumbers:
        return _RowNumbers(*self._staged_numbers.tensor.unbind())

    @property
    def windows(self) -> list[int | None]:
        return attention_windows(self.cache, self.config)

    @property
    def start(self) -> int:
        return self._start

    @property
    def draft_room(self) -> list[int]:
        lengths = [len(tokens) for tokens in self._unread[: self._active]]
        if not self._states or max(lengths) < MAX_UNREAD:
            # Attentions are recorded by slot, and unread tokens have no final slot yet.
            undraftable = self._states and self._forward_kwargs.get("output_attentions")
            return [0 if undraftable else NO_LIMIT] * len(lengths)
        # The row with the most unread tokens reads them and its root, and then has none left.
        return [max(lengths) - length for length in lengths]

    def admit(
        self, input_ids: Tensor, model_kwargs: dict[str, Any], config: GenerationConfig
    ) -> Tensor | None:
        self._chunk = _prefill_chunk(config)
        self._embeddings = model_kwargs.get("inputs_embeds")
        text, name = self._text(input_ids)
        rows, columns = text.shape[:2]
        self.offset = columns - input_ids.shape[1]
        self._max_slots += self.offset
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
                f"{name}, including the part that is in past_key_values"
            )
        if all_ones:
            mask = None
        if self._prompt_kwargs is None:
            self._check_positions(model_kwargs.get("position_ids"), mask, text)
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

    def _check_positions(
        self, position_ids: Tensor | None, attention_mask: Tensor | None, text: Tensor
    ) -> None:
        """Refuse positions that do not count the unpadded tokens before: rollback relies on that count."""
        if position_ids is None:
            return
        rows, columns = text.shape[:2]
        expected = torch.arange(columns, device=text.device).expand(rows, -1)
        valid = torch.ones_like(expected, dtype=torch.bool)
        if attention_mask is not None:
            valid = attention_mask.bool()
            expected = valid.cumsum(dim=1) - 1
        # For a filled cache without a mask, transformers prepares more positions than there are columns.
        given = position_ids[..., :columns]
        if given.shape[-1] < columns or not (given == expected)[..., valid].all():
            raise ValueError(
                "position_ids do not count the unpadded tokens of each row from 0. Other positions are not "
                "supported; leave position_ids out"
            )

    def prefill(self, input_ids: Tensor, attention_mask: Tensor | None) -> TargetOutput:
        text, _ = self._text(input_ids)
        prompt = Prompt.of(text, attention_mask, self._held_slots())
        self._check_cache(prompt)
        self._lay_out(prompt)
        columns = text.shape[1]
        for layer in self._layers:
            layer.reserve(min(self._max_slots, columns + FIRST_SLOTS))
            layer.slack = self._holes
        logits: Tensor | None = None
        taps = []
        for begin, end in prompt.chunks(self._chunk, only_tokens=bool(self._states)):
            output = self._read_prompt(prompt, input_ids, begin, end)
            if logits is not None:  # rows padded on the right may have ended in an earlier chunk
                output.logits = torch.where(
                    (prompt.last < begin)[:, None, None], logits, output.logits
                )
            logits = output.logits
            taps.append(output.taps)
        if any(layer.length != columns for layer in self._layers if layer.is_initialized):
            raise NotAcceleratedError(
                f"{type(self.model).__name__} did not write the prompt to its cache, so drafts can't be "
                "verified; use model.generate"
            )
        if len(taps) > 1:
            output.taps = tuple(torch.cat(chunks, dim=1) for chunks in zip(*taps, strict=True))
        return output

    def _check_cache(self, prompt: Prompt) -> None:
        """Refuse a cache or padding with which the layers would compute something wrong."""
        rows = len(prompt.valid)
        held = next((len(layer.key_buffer) for layer in self._layers if layer.length), rows)
        if held != rows:
            raise ValueError(
                f"past_key_values holds {held} rows and input_ids {rows}; select or repeat the rows of the "
                "cache first (batch_select_indices, batch_repeat_interleave)"
            )
        if prompt.holes and (self._states or self._prompt_kwargs is not None):
            where = "its recurrent states" if self._states else "a prompt that is more than text"
            raise ValueError(
                f"attention_mask has padding after or between tokens, which {type(self.model).__name__} "
                f"would read into {where}; pad on the left (tokenizer.padding_side='left')"
            )
        if prompt.holes and any(layer.dropped for layer in self._layers):
            raise ValueError(
                "past_key_values comes from a sliding-window cache that has dropped old tokens, and "
                "attention_mask has padding between tokens, so a window may reach back to dropped tokens; "
                "run the whole text without past_key_values"
            )

    def _lay_out(self, prompt: Prompt) -> None:
        """Set validity and position of every slot for the whole call; generated tokens fill the columns in
        order."""
        rows, columns = prompt.valid.shape
        future = torch.arange(
            max(0, self._max_slots + 1 - columns), device=prompt.valid.device
        ).expand(rows, -1)
        self._slot_valid = torch.cat([prompt.valid, torch.ones_like(future).bool()], dim=1)
        self._slot_positions = torch.cat(
            [prompt.positions, prompt.lengths[:, None] + future], dim=1
        )
        lengths, self._first_slot = torch.stack([prompt.lengths, prompt.first]).tolist()
        self._holes_before = [columns - length for length in lengths]
        prepared = (self._prompt_kwargs or {}).get("position_ids", prompt.positions)
        self._position_shift = (prepared[..., -1] + 1 - prompt.lengths).view(-1, rows).T
        self._whole_batch = {name: getattr(self, name) for name in (*_ROW_TENSORS, *_ROW_LISTS)}
        self._row_slots = [columns] * rows
        self._unread, self._active = [[] for _ in range(rows)], rows
        self._start, self._aligned = columns, True
        self._padded, self._holes = prompt.padded, prompt.holes
        self._stage()
        self._by_op = self._attends_by_op()

    def _read_prompt(self, prompt: Prompt, input_ids: Tensor, begin: int, end: int) -> TargetOutput:
        """Run columns ``begin`` to ``end``; ``logits [rows, 1, vocab]`` are valid for rows that end there."""
        block = prompt.visibility(begin, end)
        ends = prompt.ends(begin, end) or [end - begin - 1]
        kept = torch.tensor(ends, device=input_ids.device)
        keep: dict[str, Any] = {}
        if "logits_to_keep" in self._parameters:
            keep["logits_to_keep"] = 1 if ends == [end - begin - 1] else kept
        mask = prompt.valid[:, :end].long() if prompt.padded and block is None else None
        text, name = self._text(input_ids)
        inputs: dict[str, Any] = {
            name: text[:, begin:end],
            "position_ids": prompt.positions[:, begin:end],
            "attention_mask": mask,
        }
        if self._prompt_kwargs is not None:
            inputs = self._prepared(input_ids, self._prompt_kwargs)
        output = self._forward(
            block,
            MAX_PROMPT_ROWS,
            past=begin > 0,
            **inputs,
            **keep,
        )
        output.logits = _pick_columns(output.logits, prompt.last - begin, kept)
        return output

    def _prepared(self, input_ids: Tensor, prompt_kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the model's inputs for a prompt that is more than text, as transformers prepares them."""
        prepare: Any = self.model.prepare_inputs_for_generation
        kwargs = {"use_cache": True, **prompt_kwargs, self._cache_name: self.cache}
        ours = {self._cache_name, "logits_to_keep", *self._forward_kwargs}
        prepared = prepare(input_ids, is_first_iteration=True, **kwargs)
        return {name: value for name, value in prepared.items() if name not in ours}

    def _held_slots(self) -> int:
        """Return the number of slots that are filled in the caller's cache."""
        held = max((layer.length for layer in self._layers), default=0)
        if not self._layers and self._states.filled:
            raise ValueError(
                f"past_key_values of {type(self.model).__name__} holds recurrent states only, which do not "
                "tell how many tokens they have read; run the whole text without past_key_values"
            )
        if held and self._griffin_blocks and not self._states.filled:
            raise ValueError(
                f"past_key_values holds no recurrent states, because {type(self.model).__name__} kept them "
                "in its modules; run the whole text without past_key_values"
            )
        return held

    def _forward(
        self,
        block: BlockVisibility | None,
        max_rows: float = math.inf,
        past: bool = True,
        **inputs: Any,
    ) -> TargetOutput:
        """Run one forward pass of the model.

        Args:
            block: which slots the tokens may attend to; None uses transformers' own masks.
            max_rows: up to this many tokens, linear layers are computed row-invariantly.
            past: whether the cache holds tokens before these.
            inputs: passed to the model's forward.
        """
        given = (inputs.get(name) for name in ("input_ids", "inputs_embeds"))
        rows, columns = next(text.shape[:2] for text in given if text is not None)
        if compat.NEEDS_MASK and self._layers and inputs.get("attention_mask") is None:
            slots = self._layers[0].length + columns
            inputs["attention_mask"] = torch.ones(rows, slots, device=self.model.device).long()
        if "position_ids" not in self._parameters:
            inputs.pop("position_ids", None)
        # Inference mode makes small ops faster. Tensors that the caller may keep are allocated outside of it:
        # the cache (RollbackLayer._allocate, States.release) and recorded outputs (Recorder copies them).
        self.begun = True
        with ExitStack() as stack:
            stack.enter_context(
                joined_changes()
            )  # outside of a call, the changes end with this pass
            stack.enter_context(inference_mode())
            if block is not None:
                stack.enter_context(visibility(block))
                stack.enter_context(placed(self._patches))
            if rows * columns <= max_rows:
                stack.enter_context(row_invariant_linears(self._linears))
            if past and self._scans:
                stack.enter_context(continuing(self._scans))
            if self._griffin_blocks:
                stack.enter_context(held_in(self.cache, self._griffin_blocks))
            features = stack.enter_context(self._tap.recording())
            output: Any = self.model(
                **{self._cache_name: self.cache}, **inputs, **self._forward_kwargs
            )
        if block is not None and self._layers and not block.consulted:
            raise RuntimeError(
                f"{type(self.model).__name__} made its attention masks without transformers' mask interface, "
                "so the attention mask of a draft can't be set; pass drafter=None or use model.generate"
            )
        logits = output.logits
        return TargetOutput(
            # transformers' own loop rounds float64 logits in the same way
            logits.float() if logits.dtype == torch.float64 else logits,
            side_by_side([each.to(logits.device) for each in features]),
            tuple(output.get("hidden_states") or ()),
            tuple(output.get("attentions") or ()),
        )

    def forward(self, tree: DraftTree) -> TargetOutput:
        if not self._states:
            self._block = _Block(tree, tree, undoable=False)
            return self._score(tree)
        unread = self._unread[: self._active]
        branches = Branches.of(tree, unread)
        # Without drafts, and with equally many unread tokens in each row, every row keeps the whole block.
        kept_whole = tree.num_nodes == 1 and len(set(map(len, unread))) == 1
        output = self._read(branches, tree, undoable=not kept_whole)
        return output if tree.is_chain and not any(unread) else branches.nodes(output)

    def _read(self, branches: Branches, drafts: DraftTree, undoable: bool) -> TargetOutput:
        """Score a chain for each branch; outputs after the end of a shorter chain are arbitrary."""
        device = drafts.tokens.device
        chains = padded(branches.tokens, device)
        counts = torch.tensor([len(tokens) - 1 for tokens in branches.tokens], device=device)
        tree = DraftTree.chain(chains[:, 0], chains[:, 1:], counts)
        origins = torch.tensor(branches.origins, device=device)
        self._block = _Block(tree, drafts, undoable, branches if branches.split else None)
        if undoable:
            with inference_mode():
                self._states.branch(origins)
        if not branches.split:
            return self._score(tree)
        for layer in self._layers:
            layer.branch(origins, tree.num_nodes)
        names = (*_ROW_TENSORS, *_ROW_LISTS, "_row_slots", "_staged_numbers")
        ours = {name: getattr(self, name) for name in names}
        self._select(branches.origins, origins)
        try:
            return self._score(tree)
        finally:
            vars(self).update(ours)

    def _select(self, rows: Sequence[int], index: Tensor) -> None:
        """Move row ``rows[i]`` to row i in all per-row attributes; ``index`` is ``rows`` as a tensor."""
        for name in _ROW_TENSORS:
            setattr(self, name, getattr(self, name)[index])
        for name in (*_ROW_LISTS, "_row_slots"):
            old = getattr(self, name)
            setattr(self, name, [old[row] for row in rows])
        self._stage()

    def _stage(self) -> None:
        """Add the positions and lengths of the rows to the next copy to the device."""
        rows = list(zip(self._row_slots, self._holes_before, self._first_slot, strict=True))
        self._staged_numbers = self.staging.stage(
            [
                [slots - holes for slots, holes, _ in rows],
                self._row_slots,
                self._first_slot,
                [slots - first for slots, _, first in rows],
                [self._start] * len(rows),
            ]
        )

    def _score(self, tree: DraftTree) -> TargetOutput:
        """Run one pass over the nodes of ``tree``; its root is the first token that a row does not hold."""
        numbers, by_op = self._numbers, self._by_op
        root_positions = numbers.root_positions
        if tree.num_nodes == 1 and self._aligned and not (self._padded or by_op):
            # Plain decoding without padding: transformers' own masks are correct.
            return self._forward(
                None,
                input_ids=tree.tokens,
                position_ids=self._model_positions(root_positions[:, None]),
            )
        ancestors, _, positions, *_ = ops.tree_mask(tree.parents, root_positions)
        by_tree = None
        if by_op:
            by_tree = TreeBlock(
                ancestors, numbers.first_slots, numbers.lengths, numbers.block_starts, self._start
            )
        if by_tree is None or self._direct is None or tree.tokens.numel() > self.invariant_rows:
            return self._score_by_modules(tree, by_tree, ancestors, positions)
        if not (is_agreed(self.model) or self._ways_agree(tree, by_tree, ancestors, positions)):
            self._direct = None
            return self._score_by_modules(tree, by_tree, ancestors, positions)
        return self._score_directly(tree, by_tree, positions)

    def _ways_agree(
        self, tree: DraftTree, by_tree: TreeBlock, ancestors: Tensor, positions: Tensor
    ) -> bool:
        """Run this pass directly and by modules, and compare the logits; the cache stays as it was."""
        slack = self._layers[0].slack
        by_modules = self._score_by_modules(tree, by_tree, ancestors, positions)
        self._hold(self._start, slack)
        directly = self._score_directly(tree, by_tree, positions)
        self._hold(self._start, slack)
        return agrees(self.model, directly.logits, by_modules.logits)

    @inference_mode()
    def _score_directly(self, tree: DraftTree, block: TreeBlock, positions: Tensor) -> TargetOutput:
        """Run the pass with ``ops.decoder_layers`` instead of the model's modules."""
        assert self._direct is not None
        self.begun = True
        logits, states = self._direct(tree.tokens, positions, block, self._layers)
        return TargetOutput(logits, self._tap.chosen(*states))

    def _score_by_modules(
        self, tree: DraftTree, by_tree: TreeBlock | None, ancestors: Tensor, positions: Tensor
    ) -> TargetOutput:
        """Run the pass with the model's modules, and with masks that show each node its own past."""
        block = SlotVisibility(
            tree=by_tree,
            ancestors=ancestors,
            query_positions=positions,
            start=self._start,
            row_slots=self._numbers.slots,
            aligned=self._aligned,
            slot_valid=self._slot_valid,
            slot_positions=self._slot_positions,
            window=self._cache_window(),
        )
        return self._forward(
            block,
            self.invariant_rows,
            input_ids=tree.tokens,
            position_ids=self._model_positions(positions),
        )

    def _model_positions(self, positions: Tensor) -> Tensor:
        """Return ``position_ids`` of tokens with ``positions [rows, nodes]`` tokens before them.

        After a prompt with images they may be shifted, and may have several axes: ``[axes, rows, nodes]``.
        """
        if self._prompt_kwargs is None:
            return positions
        shifted = positions + self._position_shift.T[..., None]
        return shifted if len(shifted) > 1 else shifted[0]

    def _cache_window(self) -> int | None:
        """Return the window if all layers with keys and values have the same one, else None."""
        windows = {layer.window for layer in self._layers}
        return windows.pop() if len(windows) == 1 else None

    def _attends_by_op(self) -> bool:
        """Whether ``tree_attention`` computes attention, which needs text without padding between tokens."""
        return (
            bool(self._layers)
            and self._holes == 0
            and self.config._attn_implementation == IMPLEMENTATION
        )

    def commit(self, path: Tensor, num_accepted: Tensor, on_host: HostPaths | None = None) -> None:
        block, self._block = self._block, None
        if block is None:
            return  # the prompt needs no rollback
        paths, counts = on_host or (path.tolist(), num_accepted.tolist())
        if self._states:
            path, num_accepted, counts = self._commit_states(block, paths, counts)
        if not (block.tree.is_chain and self._aligned):
            self._compact(path, num_accepted)
        self._row_slots = [
            slots + count + 1 for slots, count in zip(self._row_slots, counts, strict=True)
        ]
        self._settle()

    def _compact(self, path: Tensor, num_accepted: Tensor) -> None:
        """Move each row's accepted nodes to the end of the row, on every device that holds layers."""
        places = path, num_accepted, self._numbers.block_starts, self._numbers.slots
        buffers = [buffer[: len(path)] for layer in self._layers for buffer in layer.buffers]
        for device in {buffer.device for buffer in buffers}:
            ops.kv_compact(
                [buffer for buffer in buffers if buffer.device == device],
                *(each.to(device) for each in places),
            )

    def _commit_states(
        self, block: _Block, paths: list[list[int]], num_accepted: list[int]
    ) -> tuple[Tensor, Tensor, list[int]]:
        """Restore the states of rows that did not accept the whole block (in a tree: a whole branch).

        Returns:
            Path and number of accepted nodes in ``block.tree``, -1 for rows whose states were restored, and
            these numbers as a list.
        """
        device, width, branches = block.tree.tokens.device, block.tree.num_nodes, block.branches
        settled, rows = [], list(range(len(paths)))
        for row, (tokens, path, accepted) in enumerate(
            zip(block.drafts.token_lists, paths, num_accepted, strict=True)
        ):
            unread = self._unread[row]
            unread += [tokens[node] for node in path[: accepted + 1]]
            settled.append(len(unread) >= width)
            if settled[-1]:
                del unread[:width]
            if branches is not None:
                rows[row] = branches.rows[row][path[accepted]]
        kept, origins = torch.tensor(settled, device=device), torch.tensor(rows, device=device)
        if branches is not None or not all(settled):
            assert block.undoable
            with inference_mode():
                self._states.join(origins, kept)
        if branches is not None:
            for layer in self._layers:
                layer.join(origins, width)
        whole = torch.arange(width, device=device).expand(len(settled), -1)
        counts = [width - 1 if each else -1 for each in settled]
        return whole, torch.where(kept, width, 0) - 1, counts

    def rewind(self, counts: Sequence[int]) -> None:
        """Discard the last ``counts[r]`` committed tokens of each active row; no recurrent states allowed."""
        assert not self._states
        self._row_slots = [
            slots - count for slots, count in zip(self._row_slots, counts, strict=True)
        ]
        self._settle()

    def _settle(self) -> None:
        self._start, shortest = max(self._row_slots), min(self._row_slots)
        self._aligned = shortest == self._start
        self._hold(self._start, self._holes + self._start - shortest)
        self._stage()

    def _hold(self, slots: int, slack: int) -> None:
        """Set the number of filled slots of the cache, and the slack of its windows."""
        for layer in self._layers:
            layer.length, layer.slack = slots, slack
        compat.cut_positions(self.cache, slots)

    def reorder(self, order: Sequence[int], active: int, last_tokens: Tensor | None = None) -> None:
        going = list(order[:active])
        moved = [i for i, row in enumerate(order) if i != row]
        index = self.staging.stage(going)
        if moved:
            to, source = self.staging.stage([moved, [order[i] for i in moved]]).tensor
            for layer in self._layers:
                layer.move_rows(to, source)
        if self._states:
            with inference_mode():
                self._states.reorder(order, active)
        if going != list(range(len(self._row_slots))):
            self._select(going, index.tensor)
        self._unread, self._active = [self._unread[i] for i in order], active
        if active:
            self._settle()

    def finish(self, last_tokens: Tensor, columns: Sequence[int]) -> None:
        columns = [each + self.offset for each in columns]
        width = max(columns)
        early = [each < width for each in columns]
        if self._states or any(early):
            vars(self).update(self._whole_batch)
            self._active = len(columns)
            if self._states:
                self._finish_states(last_tokens, early, columns)
            else:
                # The last token of a row that ended early has not been read; the next turn needs its keys.
                self._row_slots = [each - 1 for each in columns]
                self._settle()
                self.forward(DraftTree.root(last_tokens))
                roots = torch.zeros_like(last_tokens)
                self.commit(roots[:, None], roots, ([[0] for _ in columns], [0] * len(columns)))
            self._clear()
        self._hold(width - 1, 0)

    def _finish_states(self, last_tokens: Tensor, early: list[bool], columns: list[int]) -> None:
        """Read the unread tokens, and the last tokens of rows that ended early."""
        with inference_mode():
            self._states.reorder(range(self._active), self._active)
        self._row_slots = [
            count - 1 - len(tokens) for count, tokens in zip(columns, self._unread, strict=True)
        ]
        self._settle()
        ended = zip(self._unread, last_tokens.tolist(), early, strict=True)
        for tokens, last, is_early in ended:
            tokens += [last] * is_early
        drafts = DraftTree.root(last_tokens)
        while any(self._unread):
            width = min(len(tokens) for tokens in self._unread if tokens)
            chains = [tokens[:width] for tokens in self._unread]
            self._read(Branches.known(chains), drafts, undoable=True)
            self.withdraw(drafts)
        self._states.release()

    def _clear(self) -> None:
        """Zero the slots after the end of each row: rejected tokens may have left NaN there.

        Masked slots do no harm here, because ``tree_attention`` does not read them. The caller's next use of
        the cache may read them.
        """
        for buffer in (buffer for layer in self._layers for buffer in layer.buffers):
            for row, end in enumerate(self._row_slots):
                buffer[row, :, end : self._start] = 0


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
