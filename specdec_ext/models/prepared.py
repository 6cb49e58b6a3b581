"""``PreparedTarget``: a model whose inputs transformers prepares, as in its own decoding loop.

It serves every model that :class:`SlotTarget` can't lay out itself: encoder-decoder models, inputs other than
text in every pass, caches of a model's own class, no cache at all. Only a batch of one row is speculated on;
the rows of a larger batch advance together, one token at a time.

How a rejected chain is undone depends on the cache. A cache of key/value slots is cut to its length. Any
other cache is copied before the pass and restored after it; the accepted tokens are then *unread*, and are
read again in front of the next block. A tree runs on a copy of the cache with one row for each of its
branches (``branches.py``), and that copy is discarded.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, GenerationConfig, PreTrainedModel
from transformers.utils import ModelOutput

from specdec_ext.errors import NotAcceleratedError
from specdec_ext.models.base import MAX_UNREAD, NO_LIMIT, HostPaths, Target, TargetOutput
from specdec_ext.models.cache.adoption import adopt_cache, unserved_layers
from specdec_ext.models.cache.copies import has_row_dimension, mapped, restored
from specdec_ext.models.cache.layers import RollbackLayer
from specdec_ext.models.compat import CACHE_ARGUMENTS, LinearAttentionCacheLayerMixin
from specdec_ext.models.passes.branches import Branches, padded
from specdec_ext.models.passes.hidden_states import HiddenStateRecorder, concatenated
from specdec_ext.models.passes.linears import row_invariant, row_invariant_linears
from specdec_ext.models.support import Support
from specdec_ext.tree.draft_tree import DraftTree


@dataclass
class _Pass:
    """A pass that ``forward`` has run and ``commit`` has not settled yet.

    Attributes:
        tree: the tree that it scored.
        tokens: ``[rows, nodes]`` the tokens that it read, with those of rows that have ended.
        lengths: lengths of the layers before the pass.
        saved: copies of the caches from before the pass.
        outputs: the model's outputs; without any if the pass ran on a copy of the cache.
    """

    tree: DraftTree
    tokens: Tensor
    lengths: list[int]
    saved: dict[str, Any] = field(default_factory=dict)
    outputs: Any = field(default_factory=ModelOutput)


class PreparedTarget(Target):
    """A model whose inputs ``prepare_inputs_for_generation`` prepares in every pass.

    Args:
        model: any Hugging Face model that generates text.
        support: what can be done exactly with the model (``supports``).
        model_kwargs: inputs as ``generate`` prepared them: cache, masks, positions, encoder outputs, images.
        config: generation config of the call.
        forward_kwargs: passed to every forward pass (``output_hidden_states`` and the like).

    Raises:
        ValueError: for ``forward_kwargs`` that record outputs of a model without a cache.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        support: Support,
        model_kwargs: dict[str, Any],
        config: GenerationConfig,
        forward_kwargs: dict[str, Any] | None = None,
    ):
        super().__init__(model, support)
        if support.rollback == "recompute" and forward_kwargs:
            raise NotAcceleratedError(
                f"{' and '.join(forward_kwargs)} can't be recorded: {type(model).__name__} runs the whole "
                "text in every pass, so transformers returns outputs of the whole text for every token; use "
                "model.generate"
            )
        self._generation_config = config
        self._kwargs = {"use_cache": True, **model_kwargs, **(forward_kwargs or {})}
        self._encodes = model.config.is_encoder_decoder
        self._linears = row_invariant(model)
        self._recorder = HiddenStateRecorder(model, self.config, ())
        # The layers of the cache, if all of it can be cut to a length.
        self._layers: list[RollbackLayer] | None = None
        self._cached = 0  # number of columns in the cache
        # The last token of rows that have just ended, by row; the model has not read it.
        self._ended: dict[int, Tensor] = {}
        self._scored: _Pass | None = None
        # The arguments before the last commit, and the number of columns added since.
        self._before: tuple[dict[str, Any], int] = ({}, 0)

    @property
    def cache(self) -> Any:
        return next((self._kwargs[name] for name in CACHE_ARGUMENTS if name in self._kwargs), None)

    @property
    def start(self) -> int:
        return self._ids.shape[1] + self.offset

    @property
    def windows(self) -> list[int | None] | None:
        return None if self._layers is None else [layer.window for layer in self._layers]

    @property
    def draft_room(self) -> list[int]:
        unread = self.start - self._cached if self.support.rollback == "snapshot" else 0
        free = self.support.chain and len(self._ids) == 1 and unread < MAX_UNREAD
        if self._layers is None and self._kwargs.get("output_attentions"):
            free = False  # attentions of several tokens over a model's own cache can't be cut to each token
        return [NO_LIMIT if free else 0] * len(self._rows)

    def record_hidden_states(self, layers: Sequence[int]) -> None:
        self._recorder = HiddenStateRecorder(self.model, self.config, layers)

    def admit(
        self, input_ids: Tensor, model_kwargs: dict[str, Any], config: GenerationConfig
    ) -> Tensor | None:
        embeddings = None if self._encodes else model_kwargs.get("inputs_embeds")
        columns = input_ids.shape[1] if embeddings is None else embeddings.shape[1]
        self.offset = columns - input_ids.shape[1]
        mask = model_kwargs.get("decoder_attention_mask" if self._encodes else "attention_mask")
        shape = (len(input_ids), columns)
        if mask is None or mask.shape != shape or bool((mask == 1).all()):
            return None
        return mask

    def prefill(self, input_ids: Tensor, attention_mask: Tensor | None) -> TargetOutput:
        self._ids, self._rows = input_ids, list(range(len(input_ids)))
        self._layers = self._adopted_layers()
        self.begun = True
        with torch.no_grad(), self._recorder.recording() as states:
            outputs: Any = self.model._prefill(input_ids, self._generation_config, self._kwargs)  # type: ignore[operator]
        self._kwargs = self._advanced(self._kwargs, outputs, 1)
        self._layers = self._adopted_layers()  # models that run layers in loops have appended some
        self._cached = self.start
        recorded = self._kwargs.get("output_attentions")  # recorded by slot, which branches share
        if len(self._ids) == 1 and (recorded or not has_row_dimension(self._caches())):
            self.support = replace(self.support, tree=False)
        return self._output(outputs, states, None, self._rows)

    def _adopted_layers(self) -> list[RollbackLayer] | None:
        """Adopt the cache and return its layers if they are all key/value slots, else None."""
        if self.support.rollback != "snapshot":
            return None
        cache = self.cache
        if isinstance(cache, EncoderDecoderCache):
            cache = cache.self_attention_cache
        if type(cache) is not DynamicCache or cache.offloading or unserved_layers(cache):
            return None
        if any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in cache.layers):
            return None
        layers = adopt_cache(cache, self.config).layers
        return [layer for layer in layers if isinstance(layer, RollbackLayer)]

    def _advanced(self, kwargs: dict[str, Any], outputs: Any, tokens: int) -> dict[str, Any]:
        """Update the prepared arguments with the caches of ``outputs`` and for ``tokens`` more columns."""
        # One by one, as transformers' own loop does: for some inputs several at once give something else.
        for _ in range(tokens):
            kwargs = self.model._update_model_kwargs_for_generation(  # type: ignore[operator]
                outputs, dict(kwargs), is_encoder_decoder=self._encodes
            )
            outputs = ModelOutput()
        return kwargs

    def _caches(self) -> dict[str, Any]:
        """Return the model's caches by the name of their argument."""
        named = {name: self._kwargs.get(name) for name in CACHE_ARGUMENTS}
        return {name: cache for name, cache in named.items() if cache is not None}

    def _output(
        self, outputs: Any, recorded: list[Tensor], nodes: int | None, rows: list[int]
    ) -> TargetOutput:
        """Select rows and the last ``nodes`` columns of a pass; None keeps all columns but only the last
        logits (prompt)."""

        def last(states: Any, dim: int) -> tuple[Tensor, ...]:
            picked = [state[rows] for state in states or () if state is not None]
            if nodes is None:
                return tuple(picked)
            return tuple(state.narrow(dim, state.shape[dim] - nodes, nodes) for state in picked)

        prefix = "decoder_" if self._encodes else ""
        logits = outputs.logits[rows]
        if logits.shape[1] < (nodes or 1):
            raise RuntimeError(
                f"{type(self.model).__name__} was given {nodes} tokens and returned the logits of only "
                f"{logits.shape[1]}, so drafts can't be verified; pass drafter=None"
            )
        return TargetOutput(
            logits[:, -(nodes or 1) :],
            concatenated(last(recorded, 1)),
            last(outputs.get(f"{prefix}hidden_states"), 1),
            last(outputs.get(f"{prefix}attentions"), 2),
            last(outputs.get("cross_attentions"), 2),
        )

    def forward(self, tree: DraftTree) -> TargetOutput:
        tokens = self._of_all_rows(tree.tokens)
        lengths = [layer.length for layer in self._layers or ()]
        scored = self._scored = _Pass(tree, tokens, lengths)
        if not tree.is_chain:
            return self._score_branches(Branches.of(tree, [[]]))
        drafts = tree.num_nodes - 1
        if drafts and self._layers is None and self.support.rollback == "snapshot":
            with torch.no_grad():
                scored.saved = copy.deepcopy(self._caches())
        kwargs = self._advanced(self._kwargs, ModelOutput(), drafts)
        with self._recorder.recording() as states:
            scored.outputs = self._run(
                torch.cat([self._ids, tokens], dim=1), kwargs, tree.num_nodes
            )
        return self._output(scored.outputs, states, tree.num_nodes, self._rows)

    def _score_branches(self, branches: Branches) -> TargetOutput:
        """Score the tree of the single row, one row per branch, on a copy of the cache."""
        tokens = padded(branches.tokens, self._ids.device)
        rows, columns = tokens.shape
        kwargs = self._advanced(self._kwargs, ModelOutput(), columns - 1)
        # transformers repeats the rows of encoder outputs in place, so pass it shallow copies.
        kwargs = {
            name: copy.copy(value) if isinstance(value, ModelOutput) else value
            for name, value in kwargs.items()
        }
        ids, kwargs = self.model._expand_inputs_for_generation(  # type: ignore[operator]
            expand_size=rows, is_encoder_decoder=self._encodes, input_ids=self._ids, **kwargs
        )
        with torch.no_grad():
            kwargs |= mapped(self._caches(), lambda state: state.repeat_interleave(rows, dim=0))
        with self._recorder.recording() as states:
            outputs = self._run(torch.cat([ids, tokens], dim=1), kwargs, columns)
        return branches.nodes(self._output(outputs, states, columns, [*range(rows)]))

    def _of_all_rows(self, tokens: Tensor) -> Tensor:
        """Extend ``tokens`` to all rows; rows that ended read their last token once, then padding."""
        pad = getattr(self._generation_config, "_pad_token_tensor", None)
        rows = tokens.new_full((len(self._ids), tokens.shape[1]), 0 if pad is None else int(pad))
        rows[self._rows] = tokens
        for row, token in self._ended.items():
            rows[row] = token
        self._ended = {}
        return rows

    @torch.no_grad()
    def _run(self, ids: Tensor, kwargs: dict[str, Any], logits: int) -> Any:
        """Run the part of ``ids`` that is not in the cache; return the last ``logits`` logits."""
        columns = None
        if self.support.rollback != "recompute" and kwargs["use_cache"]:
            columns = ids.shape[1] + self.offset - self._cached
        inputs = self.model.prepare_inputs_for_generation(  # type: ignore[operator]
            ids, next_sequence_length=columns, **kwargs
        )
        # Some models' own preparation always requests only the last logits.
        if inputs.get("logits_to_keep") is not None:
            inputs["logits_to_keep"] = logits
        with row_invariant_linears(self._linears):
            return self.model(**inputs, return_dict=True)

    def commit(self, path: Tensor, num_accepted: Tensor, on_host: HostPaths | None = None) -> None:
        scored, self._scored = self._scored, None
        if scored is None:
            return  # the prompt needs no rollback
        outputs, tree = scored.outputs, scored.tree
        kept = (int(num_accepted[0]) if on_host is None else on_host[1][0]) + 1
        self._ids = torch.cat([self._ids, scored.tokens[:, path[0, :kept]]], dim=1)
        if tree.is_chain and (kept == tree.num_nodes or self._layers is not None):
            read, self._cached = self.start - self._cached, self.start
            for layer, before in zip(self._layers or (), scored.lengths, strict=True):
                if layer.length > before:  # layers that hold an image do not grow
                    layer.length = before + read
        else:
            for name, saved in scored.saved.items():
                self._kwargs[name] = restored(self._kwargs[name], saved)
            outputs = ModelOutput()
        self._before = self._kwargs, kept - 1
        self._kwargs = self._advanced(self._kwargs, outputs, kept)

    def reorder(self, order: Sequence[int], active: int, last_tokens: Tensor | None = None) -> None:
        # Rows keep their places: transformers runs the finished ones, too.
        if not active:
            return
        going = order[:active]
        if last_tokens is not None:
            ended = set(range(len(self._rows))) - set(going)
            self._ended = {self._rows[i]: last_tokens[i] for i in ended}
        self._rows = [self._rows[i] for i in going]

    def finish(self, last_tokens: Tensor, columns: Sequence[int]) -> None:
        if self.support.rollback == "snapshot" and self._cached < self.start:
            before, tokens = self._before
            self._run(self._ids, self._advanced(before, ModelOutput(), tokens), 1)
