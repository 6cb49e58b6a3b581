"""``Target``: what the loop asks of a model and its cache, whatever keeps the past of the model's text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache

from specdec_ext.models.context_limit import max_positions
from specdec_ext.models.passes.features import FeatureTap
from specdec_ext.models.passes.linears import plain_linears
from specdec_ext.models.support import Support
from specdec_ext.transfer import Staging
from specdec_ext.tree.draft_tree import DraftTree

# ``path`` and ``num_accepted`` of a verification as lists.
HostPaths = tuple[list[list[int]], list[int]]
# A draft may be as deep as its drafter likes.
NO_LIMIT = 2**31


@dataclass
class TargetOutput:
    """One pass of the target.

    Attributes:
        logits: ``[rows, nodes, vocab]``, of a prompt ``[rows, 1, vocab]`` at each row's last token.
        taps: the hidden states that :meth:`Target.tap` asked for, ``[rows, nodes, width]`` each, one or
            several of them in each; of a prompt ``[rows, columns, width]`` for the columns that were run (not
            those that a given cache held already), with paddings.
        hidden_states: ``[rows, nodes, hidden]`` of every layer, if asked for.
        attentions: ``[rows, heads, nodes, keys]`` of every layer, if asked for and given.
        cross_attentions: ``[rows, heads, nodes, encoder columns]`` of every layer with such, likewise.
    """

    logits: Tensor
    taps: Sequence[Tensor] = ()
    hidden_states: tuple[Tensor, ...] = ()
    attentions: tuple[Tensor, ...] = ()
    cross_attentions: tuple[Tensor, ...] = ()

    @cached_property
    def features(self) -> Tensor | None:
        """``taps`` side by side, ``[rows, nodes, width]``; None without any."""
        return torch.cat(list(self.taps), dim=-1) if self.taps else None

    def at(self, rows: Tensor, columns: Tensor) -> TargetOutput:
        """What this pass computed in these places: for ``[rows, nodes]``, the row and column of each."""

        def pick(tensor: Tensor, dim: int) -> Tensor:
            where = rows.to(tensor.device), columns.to(tensor.device)
            return tensor.transpose(1, dim)[where].transpose(1, dim)

        return TargetOutput(
            pick(self.logits, 1),
            tuple(pick(tap, 1) for tap in self.taps),
            tuple(pick(layer, 1) for layer in self.hidden_states),
            tuple(pick(layer, 2) for layer in self.attentions),
            tuple(pick(layer, 2) for layer in self.cross_attentions),
        )


def vocab_size(model: PreTrainedModel) -> int:
    """How many token ids a model reads: a draft, which is read to be scored, must be below.

    These are the rows of the embedding in front of its text decoder. Neither the config nor the logits need
    to be of this size: Moshi reads one more id than it writes, and either matrix may be padded.
    """
    config = model.config
    decoder: Any = model.get_decoder() if config.is_encoder_decoder else model
    try:
        weight = getattr(decoder.get_input_embeddings(), "weight", None)
    except (AttributeError, NotImplementedError):  # it has none that transformers knows of
        weight = None
    # A packed weight has another shape.
    if isinstance(weight, Tensor) and weight.is_floating_point() and weight.ndim == 2:
        return len(weight)
    return config.get_text_config(decoder=True).vocab_size


class Target(ABC):
    """One model with its cache during one ``generate`` call.

    Rows are the active ones, in the order in which :meth:`reorder` last put them.

    Args:
        model: a Hugging Face model that generates text.
        support: what it is known to do exactly.
        forward_kwargs: passed to every forward (``output_hidden_states`` and the like).

    Attributes:
        config: of the model's text decoder.
        cache: what ``past_key_values`` is after the call.
        begun: whether the cache has been written to.
        staging: takes what a pass needs of the host's numbers to the device of the text.
        offset: slots of the cache in front of the columns of ``sequences``: what a prompt of embeddings is
            longer than its ``input_ids``, which may be none.
    """

    cache: Any
    offset: int = 0
    begun: bool = False

    def __init__(
        self,
        model: PreTrainedModel,
        support: Support,
        forward_kwargs: dict[str, Any] | None = None,
    ):
        self.model, self.support = model, support
        self.config = model.config.get_text_config(decoder=True)
        self._forward_kwargs = {"use_cache": True, "return_dict": True, **(forward_kwargs or {})}
        self._tap = FeatureTap(model, self.config, ())
        self._linears = plain_linears(model)
        self._max_positions = max_positions(self.config)
        self.staging = Staging(model.device)

    @cached_property
    def vocab_size(self) -> int:
        """How many token ids the model reads, see :func:`vocab_size`."""
        return vocab_size(self.model)

    @property
    @abstractmethod
    def draft_room(self) -> list[int]:
        """How deep the next tree of each row may be; 0 is plain decoding."""

    def context_room(self, position: int) -> int:
        """How deep a tree below ``position`` may be without reaching behind the model's positions.

        Behind the last one there is an error without drafts, too, or no limit (rotary embeddings).
        """
        limit = self._max_positions
        return NO_LIMIT if limit is None or position >= limit else limit - 1 - position

    @property
    @abstractmethod
    def start(self) -> int:
        """The slot of the next tree's root."""

    @property
    @abstractmethod
    def windows(self) -> list[int | None] | None:
        """Sliding window of each attention layer, None for full attention.

        None for all: the weights of a pass are those of plain decoding already.
        """

    def tap(self, layers: Sequence[int]) -> None:
        """Let every pass return these hidden states as ``TargetOutput.features``.

        Args:
            layers: indices into transformers' ``hidden_states``: 0 the embeddings, i the input of layer
                i, -1 the last hidden state after the final norm, which is what ``lm_head`` reads.
        """
        self._tap = FeatureTap(self.model, self.config, layers)

    @abstractmethod
    def admit(
        self, input_ids: Tensor, model_kwargs: dict[str, Any], config: GenerationConfig
    ) -> Tensor | None:
        """Check what ``generate`` prepared, before anything runs.

        Returns:
            ``[rows, offset + columns]`` mask of the prompt, 0 where it is padding, or None if nothing is.

        Raises:
            ValueError: for masks or positions that can't be served.
        """

    @abstractmethod
    def prefill(self, input_ids: Tensor, attention_mask: Tensor | None) -> TargetOutput:
        """Run the prompt, or what of it the cache does not hold yet, in chunks if the call asks for them.

        Args:
            input_ids: ``[rows, columns]``, the whole text so far; embeddings that :meth:`admit` was given run
                in its place.
            attention_mask: what :meth:`admit` returned.

        Returns:
            The pass with ``logits [rows, 1, vocab]`` at each row's last token. Hidden states and attentions
            are those of the last chunk, as in transformers.
        """

    @abstractmethod
    def forward(self, tree: DraftTree) -> TargetOutput:
        """Score every node of ``tree``, ``[rows, nodes]``; node 0 is the last committed token."""

    @abstractmethod
    def commit(self, path: Tensor, num_accepted: Tensor, on_host: HostPaths | None = None) -> None:
        """Keep the root and the accepted nodes of the tree just scored, forget the rest.

        Args:
            path: ``[rows, nodes]`` node visited at each depth (``verify_match``).
            num_accepted: ``[rows]`` accepted drafts; the root is kept in addition. -1: not even the root.
            on_host: both as lists; None copies them.
        """

    def withdraw(self, tree: DraftTree) -> None:
        """Forget the tree just scored, its roots included, as if it had not been scored."""
        nothing = torch.full_like(tree.parents[:, 0], -1)
        self.commit(tree.parents, nothing, (tree.parent_lists, [-1] * tree.num_rows))

    @abstractmethod
    def reorder(self, order: Sequence[int], active: int, last_tokens: Tensor | None = None) -> None:
        """Row i becomes what row ``order[i]`` was; the first ``active`` rows go on.

        Args:
            order: of all rows, the finished ones included.
            active: how many go on.
            last_tokens: ``[rows]``, of the rows that were active until now. Who has ended was not read to its
                end yet.
        """

    @abstractmethod
    def finish(self, last_tokens: Tensor, columns: Sequence[int]) -> None:
        """Leave the cache laid out like ``sequences[:, :-1]``.

        Args:
            last_tokens: ``[rows]`` of the whole batch, in the order the rows have in the cache now, which
                must be that of the prompt.
            columns: of each row, its last token included.
        """

    def abandon(self) -> None:
        """Leave the cache empty, after an exception: nobody may go on from a block that was not judged.

        What was refused before it ran leaves the cache as it was.
        """
        if not self.begun:
            return
        if isinstance(self.cache, DynamicCache):
            self.cache.layers = DynamicCache(config=self.config).layers
        elif isinstance(self.cache, Cache):
            self.cache.reset()
