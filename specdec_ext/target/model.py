"""``Target``: a Hugging Face causal language model that scores token trees and rolls its cache back.

Layout of a ragged batch: slots of the cache are the columns of ``generate``'s ``sequences`` (paddings
of the prompt included, marked invalid). Every block is written at one common slot, the largest
committed length of the active rows; ``commit`` moves each row's accepted nodes to the row's own end.
Active rows are the first rows of the buffers; a finished row is swapped behind them.

Only this package knows transformers' internals.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache

from specdec_ext import ops
from specdec_ext.target.attention import IMPLEMENTATION, TreeBlock
from specdec_ext.target.cache import RollbackLayer, adopt_cache
from specdec_ext.target.features import FeatureTap
from specdec_ext.target.linears import (
    MAX_PROMPT_ROWS,
    MAX_ROWS,
    plain_linears,
    row_invariant_linears,
)
from specdec_ext.target.masks import (
    SUPPORTED_IMPLEMENTATIONS,
    BlockVisibility,
    unpack_ancestors,
    visibility,
)
from specdec_ext.tree import DraftTree

# Slots reserved beyond the prompt at first; longer calls grow in steps instead of paying up front for a
# max_length that is rarely reached.
FIRST_SLOTS = 2048
# What Target knows of each row from the prompt on.
_PER_ROW = ("_slot_valid", "_slot_positions", "_first_position", "_first_slot")


@dataclass
class TargetOutput:
    """One pass of the target.

    Attributes:
        logits: ``[rows, nodes, vocab]``, of a prompt ``[rows, 1, vocab]`` at each row's last token.
        features: ``[rows, nodes, width]``, the hidden states that :meth:`Target.tap` asked for side by
            side; of a prompt ``[rows, columns, width]`` for the columns that were run (not those that a
            given cache held already), with paddings.
        hidden_states: ``[rows, nodes, hidden]`` of every layer, if asked for.
        attentions: ``[rows, heads, nodes, keys]`` of every layer, if asked for and given.
    """

    logits: Tensor
    features: Tensor | None = None
    hidden_states: tuple[Tensor, ...] = ()
    attentions: tuple[Tensor, ...] = ()


class Target:
    """One model with its cache during one ``generate`` call.

    Args:
        model: a decoder-only causal language model with sdpa or eager attention.
        past_key_values: the caller's cache or None; its layers are replaced in place.
        max_slots: slots the call may need at most, the last block included.
        forward_kwargs: passed to every forward (``output_hidden_states`` and the like).

    Attributes:
        cache: the ``DynamicCache``; after the call laid out like ``sequences[:, :-1]``.
        tree_refusal: why only plain decoding is exact for this model, or None.

    Raises:
        ValueError: for a model or cache that can't be served, naming it and the way out.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        past_key_values: Cache | None,
        max_slots: int,
        forward_kwargs: dict[str, Any] | None = None,
    ):
        self.model = model
        self.config = model.config.get_text_config(decoder=True)
        self._check_model()
        self._linears = plain_linears(model)
        self.cache, self.tree_refusal = adopt_cache(past_key_values, self.config)
        self.tree_refusal = self.tree_refusal or _slot_attention(self.config)
        # What can be rolled back: all layers or, for a refused cache, none.
        self._layers = [
            layer
            for layer in self.cache.layers
            if isinstance(layer, RollbackLayer) and self.tree_refusal is None
        ]
        self._max_slots = max_slots
        self._forward_kwargs = {"use_cache": True, "return_dict": True, **(forward_kwargs or {})}
        self._tap = FeatureTap(model, self.config, ())
        self._start = 0  # the common slot of the next block
        self._block: DraftTree | None = None

    def _check_model(self) -> None:
        name = type(self.model).__name__
        if self.model.config.is_encoder_decoder:
            raise ValueError(
                f"{name} is an encoder-decoder model; only decoder-only models are served"
            )
        if "position_ids" not in inspect.signature(self.model.forward).parameters:
            raise ValueError(
                f"{name}.forward takes no position_ids, which trees and ragged rows need; use model.generate"
            )
        implementation = self.config._attn_implementation
        if implementation not in SUPPORTED_IMPLEMENTATIONS:
            raise ValueError(
                f"{name} uses attention {implementation!r}, which takes no tree mask; load it with "
                f"attn_implementation='sdpa' (supported: {', '.join(SUPPORTED_IMPLEMENTATIONS)})"
            )

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def row_positions(self) -> Tensor:
        """``[rows]`` position of the root of the next block, the last committed token of each active row."""
        return self._first_position + self._row_slots - self._prompt_length

    @property
    def windows(self) -> list[int | None]:
        """Sliding window of each attention layer, None for full attention."""
        return [getattr(layer, "window", None) for layer in self.cache.layers]

    @property
    def start(self) -> int:
        """The slot at which the next block begins."""
        return self._start

    def tap(self, layers: Sequence[int]) -> None:
        """Let every pass return these hidden states as ``TargetOutput.features``.

        Args:
            layers: indices into transformers' ``hidden_states``: 0 the embeddings, i the input of layer
                i, -1 the last hidden state after the final norm, which is what ``lm_head`` reads.
        """
        self._tap = FeatureTap(self.model, self.config, layers)

    def check_positions(
        self, position_ids: Tensor | None, attention_mask: Tensor | None, input_ids: Tensor
    ) -> None:
        """Refuse positions other than those that count the tokens before, which rollback relies on."""
        if position_ids is None:
            return
        rows, columns = input_ids.shape
        expected = torch.arange(columns, device=input_ids.device).expand(rows, -1)
        valid = torch.ones_like(input_ids, dtype=torch.bool)
        if attention_mask is not None:
            valid = attention_mask.bool()
            expected = valid.cumsum(dim=1) - 1
        # With a filled cache and no mask transformers prepares more positions than columns.
        given = position_ids[..., :columns]
        if given.shape[-1] < columns or not torch.equal(
            given.expand_as(expected)[valid], expected[valid]
        ):
            raise ValueError(
                "position_ids do not count the unpadded tokens of each row from 0; other positions are not "
                "supported, leave position_ids out"
            )

    def prefill(self, input_ids: Tensor, attention_mask: Tensor | None) -> TargetOutput:
        """Run the prompt, or what of it the cache does not hold yet.

        Args:
            input_ids: ``[rows, columns]``, the whole text so far.
            attention_mask: ``[rows, columns]``, 0 where a column is padding; left, right or anywhere.

        Returns:
            The pass with ``logits [rows, 1, vocab]`` at each row's last token.
        """
        rows, columns = input_ids.shape
        device = input_ids.device
        past = self.cache.get_seq_length()
        if past >= columns:
            raise ValueError(
                f"past_key_values holds {past} tokens and input_ids {columns}; pass the whole text, the part "
                "in the cache included, with at least one new token"
            )
        held = next((len(layer.key_buffer) for layer in self._layers if layer.length), rows)
        if held != rows:
            raise ValueError(
                f"past_key_values holds {held} rows, input_ids {rows}; select or repeat the rows of the "
                "cache first (batch_select_indices, batch_repeat_interleave)"
            )
        valid = torch.ones_like(input_ids, dtype=torch.bool)
        if attention_mask is not None:
            valid = attention_mask.to(torch.bool)
            if not valid.any(dim=1).all():
                raise ValueError(
                    f"attention_mask row {int((~valid.any(1)).nonzero()[0])} has no token"
                )
        last = columns - 1 - valid.flip(1).long().argmax(dim=1)
        if int(last.min()) < past:
            raise ValueError(
                f"row {int(last.argmin())} has no token after the {past} that past_key_values holds; give "
                "every row a new token, or run the whole text without past_key_values"
            )
        lengths = valid.sum(dim=1)
        padded = int(lengths.min()) < columns
        positions = (valid.cumsum(dim=1) - 1).clamp(min=0)

        # Everything per slot is known for the whole call: generated tokens follow column by column.
        future = torch.arange(max(0, self._max_slots + 1 - columns), device=device)
        self._slot_valid = torch.cat(
            [valid, torch.ones_like(future).bool().expand(rows, -1)], dim=1
        )
        self._slot_positions = torch.cat([positions, lengths[:, None] + future], dim=1)
        self._prompt_length = columns
        self._first_position = lengths
        self._first_slot = valid.long().argmax(dim=1)
        self._whole_batch = [getattr(self, name) for name in _PER_ROW]
        self._row_slots = torch.full_like(lengths, columns)
        self._start, self._padded = columns, padded
        self._aligned = True
        # A window counts tokens, slots also count paddings between a row's tokens.
        self._holes = int((columns - self._first_slot - lengths).max()) if padded else 0

        block: BlockVisibility | None = None
        if padded and (past or self._holes) and self.tree_refusal is None:
            # transformers would apply windows by column; ours counts tokens
            causal = torch.ones(
                columns - past, columns - past, dtype=torch.bool, device=device
            ).tril()
            own = torch.eye(columns - past, dtype=torch.bool, device=device)
            block = BlockVisibility(
                committed=valid[:, :past],
                block=causal & valid[:, None, past:] | own,
                query_positions=positions[:, past:],
                key_positions=positions,
            )
        if self._holes and any(layer.dropped for layer in self._layers):
            raise ValueError(
                "past_key_values comes from a sliding-window cache that has dropped old tokens, and "
                "attention_mask has paddings between tokens, so that a window may reach back to what was "
                "dropped; run the whole text without past_key_values"
            )
        for layer in self._layers:
            layer.reserve(min(self._max_slots, columns + FIRST_SLOTS))
            layer.slack = self._holes
        kept = torch.unique(last) - past
        output = self._forward(
            block,
            MAX_PROMPT_ROWS,
            input_ids=input_ids[:, past:],
            position_ids=positions[:, past:],
            attention_mask=attention_mask if padded and block is None else None,
            **self._logits_to_keep(kept if padded else None),
        )
        if self.tree_refusal is None and self.cache.get_seq_length() != columns:
            raise ValueError(
                f"{type(self.model).__name__} keeps no keys and values in its cache, so every token would "
                "need the whole text again; use model.generate"
            )
        output.logits = _pick_columns(output.logits, last - past, kept)
        return output

    def _logits_to_keep(self, columns: Tensor | None) -> dict[str, Any]:
        if "logits_to_keep" not in inspect.signature(self.model.forward).parameters:
            return {}
        return {
            "logits_to_keep": 1
            if columns is None or (len(columns) == 1 and self._holes == 0)
            else columns
        }

    def _forward(
        self, block: BlockVisibility | None, max_rows: int = MAX_ROWS, **inputs: Any
    ) -> TargetOutput:
        """One pass of the model; of up to ``max_rows`` tokens with row-invariant linears."""
        # Inference mode saves a part of every small op. What the caller may keep is allocated outside of it:
        # the cache (RollbackLayer._allocate) and recorded outputs (Recorder copies them).
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode())
            if block is not None:
                stack.enter_context(visibility(block))
            if inputs["input_ids"].numel() <= max_rows:
                stack.enter_context(row_invariant_linears(self._linears))
            features = stack.enter_context(self._tap.recording())
            output: Any = self.model(past_key_values=self.cache, **inputs, **self._forward_kwargs)
        return TargetOutput(
            output.logits,
            torch.cat(features, dim=-1) if features else None,
            tuple(output.get("hidden_states") or ()),
            tuple(output.get("attentions") or ()),
        )

    def forward(self, tree: DraftTree) -> TargetOutput:
        """Score every node of ``tree``, ``[rows, nodes]``."""
        nodes, start = tree.num_nodes, self._start
        self._block = tree
        root_positions = self.row_positions
        by_op = self._attends_by_op()
        if nodes == 1 and self._aligned and (self.tree_refusal or not (self._padded or by_op)):
            # Plain decoding: transformers' own masks, none where there is no padding.
            mask = self._slot_valid[:, : start + 1].long() if self._padded else None
            return self._forward(
                None,
                input_ids=tree.tokens,
                position_ids=root_positions[:, None],
                attention_mask=mask,
            )
        if self.tree_refusal is not None:
            raise ValueError(
                f"{type(self.model).__name__} can't be speculated on: {self.tree_refusal}. "
                "Pass drafter=None for plain decoding."
            )
        ancestors, _, positions, *_ = ops.tree_mask(tree.parents, root_positions)
        committed = self._slot_valid[:, :start]
        if not self._aligned:
            committed = committed & (
                torch.arange(start, device=committed.device) < self._row_slots[:, None]
            )
        block = BlockVisibility(
            committed=committed,
            block=unpack_ancestors(ancestors, nodes),
            query_positions=positions,
            key_positions=torch.cat([self._slot_positions[:, :start], positions], dim=1),
            tree=TreeBlock(ancestors, self._first_slot, self._row_slots - self._first_slot, start)
            if by_op
            else None,
        )
        return self._forward(block, input_ids=tree.tokens, position_ids=positions)

    def _attends_by_op(self) -> bool:
        """Whether ``tree_attention`` computes attention: it takes text without holes only."""
        return (
            self.tree_refusal is None
            and self._holes == 0
            and self.config._attn_implementation == IMPLEMENTATION
        )

    def commit(self, path: Tensor, num_accepted: Tensor) -> None:
        """Keep the root and the accepted nodes of the block just scored, forget the rest.

        Args:
            path: ``[rows, nodes]`` node visited at each depth (``verify_match``).
            num_accepted: ``[rows]`` accepted drafts; the root is kept in addition.
        """
        tree, self._block = self._block, None
        if tree is None:
            return  # the prompt needs no rollback
        if not (tree.is_chain and self._aligned):
            buffers = [
                buffer
                for layer in self._layers
                for buffer in (layer.key_buffer, layer.value_buffer)
                if buffer is not None
            ]
            rows = len(path)
            ops.kv_compact(
                [buffer[:rows] for buffer in buffers],
                path,
                num_accepted,
                torch.full_like(self._row_slots, self._start),
                self._row_slots,
            )
        self._row_slots = self._row_slots + num_accepted + 1
        self._settle()

    def rewind(self, counts: Tensor) -> None:
        """Forget the last ``counts[r]`` committed tokens of each active row."""
        self._row_slots = self._row_slots - counts
        self._settle()

    def _settle(self) -> None:
        lengths = self._row_slots.tolist()
        self._start = max(lengths)
        self._aligned = min(lengths) == self._start
        for layer in self._layers:
            layer.length = self._start
            layer.slack = self._holes + self._start - min(lengths)

    def reorder(self, order: Sequence[int], active: int) -> None:
        """Row i of the cache becomes what row ``order[i]`` was; the first ``active`` rows go on."""
        device = self._row_slots.device
        index = torch.tensor(order, device=device)
        for layer in self._layers:
            layer.reorder_rows(index)
        kept = index[:active]
        for name in (*_PER_ROW, "_row_slots"):
            setattr(self, name, getattr(self, name)[kept])
        if active:
            self._settle()

    def finish(self, last_tokens: Tensor, columns: Tensor) -> None:
        """Leave the cache laid out like ``sequences[:, :-1]``.

        Args:
            last_tokens: ``[rows]`` of the whole batch, in the order the rows have in the cache now, which
                must be that of the prompt.
            columns: ``[rows]`` columns of each row, its last token included.
        """
        width = int(columns.max())
        if int(columns.min()) < width:
            # Nobody has read the last token of a row that ended early; the next turn needs its keys.
            for name, tensor in zip(_PER_ROW, self._whole_batch, strict=True):
                setattr(self, name, tensor)
            self._row_slots = columns - 1
            self._settle()
            self.forward(DraftTree.root(last_tokens))
            self.commit(torch.zeros_like(columns)[:, None], torch.zeros_like(columns))
        for layer in self._layers:
            layer.length, layer.slack = width - 1, 0


def _slot_attention(config: PreTrainedConfig) -> str | None:
    """Why attention depends on where in the cache a token lies, if it does: then siblings can't share it."""
    if getattr(config, "alibi", False):
        return "it biases attention by the distance of cache slots (ALiBi)"
    if "local" in getattr(config, "attention_layers", ()):
        return "its local attention counts cache slots"
    return None


def _pick_columns(logits: Tensor, wanted: Tensor, kept: Tensor) -> Tensor:
    """``[rows, columns, vocab]`` -> ``[rows, 1, vocab]`` at ``wanted[r]`` of the columns ``kept``."""
    if logits.shape[1] == 1:
        return logits
    if logits.shape[1] == len(kept):
        wanted = torch.searchsorted(kept, wanted)
    return logits[torch.arange(len(logits), device=logits.device), wanted][:, None]
