"""``Target``: the interface between the decoding loop and a model with its cache."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache

from specdec_ext.models.context_limit import max_positions
from specdec_ext.models.support import Support
from specdec_ext.ops import STATUS_ILLEGAL_NUMBERS, MatchResult, RoundEntry, RoundNumbers
from specdec_ext.pretrained import vocab_size
from specdec_ext.transfer import Arriving, Staging
from specdec_ext.tree.draft_tree import DraftTree

# ``path`` and ``num_accepted`` of a verification, as lists.
HostPaths = tuple[list[list[int]], list[int]]
# The target does not limit the depth of a draft.
NO_LIMIT = 2**31
T = TypeVar("T")
# Unread tokens are accepted tokens that the cache could not keep. A row with this many reads them without
# further drafts, because a longer block costs more.
MAX_UNREAD = 16


@dataclass(eq=False)
class CommittedRound:
    """A round that was committed on the device. The host may read it later.

    Attributes:
        tree: the trees of the round, on the device. All tensors here are valid on the device until the next
            round is launched, which may write at the same addresses.
        verdict: their verification.
        numbers: the numbers of the rows.
        text: ``[rows, columns]``, the text with its paddings, ``numbers.text_lengths`` columns of each row.
        new_tokens: ``[rows, nodes or more]``, the emitted tokens of each row.
        new_features: ``[rows, nodes or more, width]``, the features of the tokens before them; None if no
            features were gathered.
        result: what the host reads: the entry, then the tokens and parents of the tree if the host does not
            know them, and ``match_lengths``.
        match_lengths: ``[rows]``, the lengths of the matches that the tree was copied after; None if nothing
            was copied.
        number: number of the round, from 1 on.
        arriving: ``result`` on its way to the host; None before the round is launched.
        is_overwritten: whether a later replay has overwritten ``verdict``.
    """

    tree: DraftTree
    verdict: MatchResult
    numbers: RoundNumbers
    text: Tensor
    new_tokens: Tensor
    new_features: Tensor | None
    result: Tensor
    match_lengths: Tensor | None = None
    number: int = 0
    arriving: Arriving | None = None
    is_overwritten: bool = False

    def launched(self, number: int) -> CommittedRound:
        """Begin to copy what the host reads about this round, which has been launched as this number."""
        # A recording returns the same tensors after every replay, so nothing of them may be kept as lists.
        tree = self.tree if self.tree.is_known else DraftTree(self.tree.tokens, self.tree.parents)
        return replace(self, tree=tree, number=number, arriving=Arriving(self.result))

    @cached_property
    def _read(self) -> Tensor:
        assert self.arriving is not None
        return self.arriving.values

    @cached_property
    def entry(self) -> RoundEntry:
        """What the host reads about the round; waits for it. If a row has a status, nothing was committed.

        Raises:
            RuntimeError: a number of the state is out of range.
        """
        rows, nodes = self.tree.tokens.shape
        entry = RoundEntry.of(self._read, rows, nodes)
        if entry.round != self.number or STATUS_ILLEGAL_NUMBERS in entry.status:
            raise RuntimeError(
                f"the state of round {self.number} on the device is damaged: {entry}. Another stream or "
                "thread may have written to it; please report this with the model and the call"
            )
        return entry

    @cached_property
    def tree_on_host(self) -> DraftTree:
        """``tree`` on the CPU; waits for it."""
        if self.tree.is_known:
            return self.tree.on_host()
        rows, nodes = self.tree.tokens.shape
        begin = RoundEntry.size(rows, nodes)
        return DraftTree(*self._read[begin : begin + 2 * rows * nodes].view(2, rows, nodes))

    @cached_property
    def match_lengths_on_host(self) -> list[int]:
        """``match_lengths`` as a list; waits for it. Only if something was copied."""
        assert self.match_lengths is not None
        lengths: list[int] = self._read[-len(self.match_lengths) :].tolist()
        return lengths


class RowRule(NamedTuple):
    """How ops verify a row: its noise, and the arguments of ``ops.sample_filter``.

    Attributes:
        seed, stream: of the noise.
        stochastic: whether tokens are sampled.
        temperature, top_k, top_p, min_p: the filters; by default they are off.
    """

    seed: int
    stream: int
    stochastic: bool
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def is_filtered(self) -> bool:
        """Whether ``ops.sample_filter`` changes anything."""
        return self != RowRule(self.seed, self.stream, self.stochastic)


class RoundTexts(NamedTuple):
    """The text of the active rows, from which rounds on the device go on.

    Attributes:
        new: ``[new rows, columns]`` int64, the text of the last active rows, paddings included. The device
            has the text of those before them.
        lengths: number of columns of each active row.
        limits: the number of columns at which each active row ends.
        eos: end-of-sequence ids of all rows.
        room: the most rows and columns that the text may have.
        rules: how ops verify each active row; None if the host has to call the ops.
    """

    new: Tensor
    lengths: list[int]
    limits: list[int]
    eos: list[int]
    room: tuple[int, int]
    rules: list[RowRule] | None


class FixedDraft(NamedTuple):
    """What a recording of a draft depends on, besides the contents of tensors.

    Attributes:
        key: equal for drafts that launch the same work.
        memory: the tensors and other objects at whose addresses the draft reads and writes, apart from those
            of the last round. A recording keeps them alive.
    """

    key: Hashable
    memory: tuple[object, ...] = ()


@dataclass
class TargetOutput:
    """The output of one forward pass of the target.

    Attributes:
        logits: ``[rows, nodes, vocab]``; for a prompt ``[rows, 1, vocab]`` at each row's last token.
        aux_hidden_states: the hidden states of the layers that :meth:`Target.record_hidden_states` was
            given, ``[rows, nodes, width]`` each; one tensor may hold several layers side by side. For a
            prompt they are ``[rows, columns, width]``: padding is included, columns that were in the caller's
            cache already are not.
        hidden_states: ``[rows, nodes, hidden]`` of every layer, if requested.
        attentions: ``[rows, heads, nodes, keys]`` of every layer, if requested and returned by the model.
        cross_attentions: ``[rows, heads, nodes, encoder columns]`` of every layer with cross-attention, under
            the same conditions.
        is_lent: whether the tensors belong to a recording, whose next replay overwrites them.
    """

    logits: Tensor
    aux_hidden_states: Sequence[Tensor] = ()
    hidden_states: tuple[Tensor, ...] = ()
    attentions: tuple[Tensor, ...] = ()
    cross_attentions: tuple[Tensor, ...] = ()
    is_lent: bool = False

    @cached_property
    def features(self) -> Tensor | None:
        """``aux_hidden_states`` concatenated, ``[rows, nodes, width]``; None if there are none."""
        return torch.cat(list(self.aux_hidden_states), dim=-1) if self.aux_hidden_states else None

    def of_row(self, row: int, nodes: int) -> TargetOutput:
        """The logits of the first nodes of this row."""
        return TargetOutput(self.logits[row : row + 1, :nodes])

    def of_nodes(self, nodes: int) -> TargetOutput:
        """Logits and auxiliary hidden states of the first nodes of all rows, lent by a recording."""
        states = tuple(state[:, :nodes] for state in self.aux_hidden_states)
        return TargetOutput(self.logits[:, :nodes], states, is_lent=True)

    def copied(self) -> TargetOutput:
        """A copy of logits and auxiliary hidden states, which are all that a pass of fixed shape returns."""
        states = tuple(state.clone() for state in self.aux_hidden_states)
        return TargetOutput(self.logits.clone(), states)

    def at(self, rows: Tensor, columns: Tensor) -> TargetOutput:
        """Gather this output at ``(rows[i, j], columns[i, j])``; both indices are ``[rows, nodes]``."""

        def pick(tensor: Tensor, dim: int) -> Tensor:
            where = rows.to(tensor.device), columns.to(tensor.device)
            return tensor.transpose(1, dim)[where].transpose(1, dim)

        return TargetOutput(
            pick(self.logits, 1),
            tuple(pick(state, 1) for state in self.aux_hidden_states),
            tuple(pick(layer, 1) for layer in self.hidden_states),
            tuple(pick(layer, 2) for layer in self.attentions),
            tuple(pick(layer, 2) for layer in self.cross_attentions),
        )


class CommittedKeys(NamedTuple):
    """Keys and values of committed tokens in one attention layer. The last token of a row is not read yet.

    Attributes:
        keys, values: ``[rows, heads, slots, dim]``, views of the cache.
        visible: ``[rows, slots]`` bool, which slots hold a committed token of the row.
    """

    keys: Tensor
    values: Tensor
    visible: Tensor


class Target(ABC):
    """One model with its cache during one ``generate`` call.

    "Rows" are the active rows of the batch, in the order of the last :meth:`reorder`.

    Args:
        model: a Hugging Face model that generates text.
        support: what can be done exactly with the model (``supports``).

    Attributes:
        config: config of the model's text decoder.
        cache: the cache after the call.
        begun: whether the cache has been written to.
        staging: copies numbers that a pass needs from the host to the device.
        offset: number of cache slots before the first column of ``sequences``. It is the difference between
            the length of ``inputs_embeds`` and that of ``input_ids``, which may be empty.
    """

    cache: Any
    offset: int = 0
    begun: bool = False

    def __init__(self, model: PreTrainedModel, support: Support):
        self.model, self.support = model, support
        self.config = model.config.get_text_config(decoder=True)
        self._max_positions = max_positions(self.config)
        self.staging = Staging(model.device)

    @cached_property
    def vocab_size(self) -> int:
        """Number of token ids that the model can read, see :func:`specdec_ext.pretrained.vocab_size`."""
        return vocab_size(self.model)

    @property
    @abstractmethod
    def draft_room(self) -> list[int]:
        """Maximum depth of the next tree of each row; 0 means plain decoding."""

    def context_room(self, position: int) -> int:
        """Return the maximum depth of a tree whose root is at ``position``, by the model's last position.

        Beyond the last position there is no limit for drafts: plain decoding fails there as well, or the
        positions do not end (rotary embeddings).
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

        None instead of a list: recorded attention weights have the shape of plain decoding already.
        """

    @abstractmethod
    def record_hidden_states(self, layers: Sequence[int]) -> None:
        """Make every pass return auxiliary hidden states, as ``TargetOutput.aux_hidden_states``.

        Args:
            layers: numbered as in :meth:`specdec_ext.Drafter.feature_layers`.
        """

    def committed_keys(self, layer: int, reach: int | None = None) -> CommittedKeys:
        """Return keys and values of the committed tokens, valid until the next pass.

        Args:
            layer: number of an attention layer with keys of its own.
            reach: number of tokens, the last ones of each row; None for all.

        Raises:
            ValueError: transformers lays out the cache of this model.
        """
        raise ValueError(
            f"the drafter reads keys and values of the target, but transformers lays out the cache of "
            f"{type(self.model).__name__} ({'; '.join(self.support.reasons)}); use another drafter"
        )

    @abstractmethod
    def admit(
        self, input_ids: Tensor, model_kwargs: dict[str, Any], config: GenerationConfig
    ) -> Tensor | None:
        """Check the inputs that ``generate`` prepared, before anything runs.

        Returns:
            ``[rows, offset + columns]`` mask of the prompt, 0 at padding; None if there is no padding.

        Raises:
            ValueError: for unsupported masks or positions.
        """

    @abstractmethod
    def prefill(self, input_ids: Tensor, attention_mask: Tensor | None) -> TargetOutput:
        """Run the part of the prompt that is not in the cache yet, in chunks if the call asks for them.

        Args:
            input_ids: ``[rows, columns]``, the whole text so far. If :meth:`admit` was given embeddings, they
                are run instead.
            attention_mask: the value that :meth:`admit` returned.

        Returns:
            The output with ``logits [rows, 1, vocab]`` at each row's last token. Hidden states and attentions
            are those of the last chunk, as in transformers.
        """

    @abstractmethod
    def forward(self, tree: DraftTree) -> TargetOutput:
        """Score every node of ``tree``, ``[rows, nodes]``; node 0 is the last committed token."""

    @abstractmethod
    def commit(self, path: Tensor, num_accepted: Tensor, on_host: HostPaths | None = None) -> None:
        """Keep the root and the accepted nodes of the tree just scored, and discard the others.

        Args:
            path: ``[rows, nodes]`` node visited at each depth (``verify_match``).
            num_accepted: ``[rows]`` number of accepted draft tokens, the root not counted. -1 discards the
                root as well.
            on_host: ``path`` and ``num_accepted`` as lists; None copies them from the device.
        """

    @property
    def commits_rounds(self) -> bool:
        """Whether this target can commit rounds on the device."""
        return False

    def begin_rounds(self, texts: RoundTexts) -> None:
        """Commit the next rounds on the device. Available if it :attr:`commits_rounds`."""
        raise NotImplementedError(f"{type(self).__name__} can't commit rounds on the device")

    def end_rounds(self) -> None:
        """Let the host commit the next rounds. It has read all rounds before."""
        raise NotImplementedError(f"{type(self).__name__} can't commit rounds on the device")

    def verify_round(self, tree: DraftTree, logits: Tensor) -> MatchResult:
        """Verify the tree just scored by the rules of :meth:`begin_rounds`."""
        raise NotImplementedError(f"{type(self).__name__} can't commit rounds on the device")

    def commit_round(
        self, verdict: MatchResult, match_lengths: Tensor | None = None
    ) -> CommittedRound:
        """Commit the tree just scored on the device, and cut the emitted tokens at the end of a row.

        When the host has read the round, it calls :meth:`commit`, which then only takes note of the lengths.
        Available after :meth:`begin_rounds`.

        Args:
            verdict: the verification of the tree.
            match_lengths: ``[rows]``, what the host has to know of the draft; None for nothing.
        """
        raise NotImplementedError(f"{type(self).__name__} can't commit rounds on the device")

    def round_launched(self, committed: CommittedRound) -> CommittedRound:
        """Count a round that was committed or replayed, and begin to copy its result to the host."""
        raise NotImplementedError(f"{type(self).__name__} can't commit rounds on the device")

    def tell_round_reason(self, reason: str) -> None:
        """Log why some rounds are not recorded as a whole, if passes are; ``reason`` is a clause."""
        return

    def run_round(self, fixed: FixedDraft | str, num_nodes: int, compute: Callable[[], T]) -> T:
        """Compute a round that needs nothing from the host, as one recording if possible.

        Args:
            fixed: what the recording of its draft depends on; a clause that says why there can't be one.
            num_nodes: number of nodes of its trees.
            compute: drafts, scores, verifies and commits. It changes nothing on the host, and its value is
                made of tensors; a replay returns the same tensors with new contents.
        """
        return compute()

    def runs_ahead(self, num_nodes: int, emitted: int) -> bool:
        """Whether the next tree can be scored before the host has read the last round.

        Args:
            num_nodes: number of nodes of the next tree.
            emitted: the most tokens that a row may have emitted in the last round.
        """
        return False

    def withdraw(self, tree: DraftTree) -> None:
        """Discard the tree just scored, including its roots, as if it had not been scored."""
        nothing = torch.full_like(tree.parents[:, 0], -1)
        self.commit(tree.parents, nothing, (tree.parent_lists, [-1] * tree.num_rows))

    @abstractmethod
    def reorder(self, order: Sequence[int], active: int, last_tokens: Tensor | None = None) -> None:
        """Move row ``order[i]`` to row i; the first ``active`` rows continue, the others are finished.

        Args:
            order: a number for each row, finished rows included. It is a permutation if finished rows are
                needed again.
            active: number of rows that continue.
            last_tokens: ``[rows]`` last token of each row that was active until now. The model has not read
                the last token of a row that finishes.
        """

    @abstractmethod
    def finish(self, last_tokens: Tensor, columns: Sequence[int]) -> None:
        """Lay out the cache like ``sequences[:, :-1]`` at the end of the call.

        Args:
            last_tokens: ``[rows]`` last token of each row of the whole batch. The rows must be back in the
                order of the prompt.
            columns: number of columns of each row, its last token included.
        """

    def abandon(self) -> None:
        """Empty the cache after an exception, because it may hold drafts that were not verified.

        If nothing has run yet, the cache stays as the caller gave it.
        """
        if not self.begun:
            return
        if isinstance(self.cache, DynamicCache):
            self.cache.layers = DynamicCache(config=self.config).layers
        elif isinstance(self.cache, Cache):
            self.cache.reset()
