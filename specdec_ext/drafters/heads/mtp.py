"""``MtpDrafter``: drafts with the target's own heads for multi-token prediction (MTP).

Element t of layer k's sequence is the pair (token x[t+1+k], output of layer k-1 for element t), where the
output of "layer -1" is the target's hidden state (:mod:`specdec_ext.heads.mtp`). The last element whose token
is committed gives the distribution of a drafted token; the elements after it contain drafted tokens, and are
run anew in every draft. Level d of a tree is drafted by layer d - 1, and all further levels by the last
layer, which takes its own output in place of the previous layer's, as an EAGLE head does.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from specdec_ext.context import Context
from specdec_ext.drafters.base import Drafter
from specdec_ext.drafters.heads.coupling import (
    RowNoise,
    best_children,
    check_temperature,
    draft_noise,
)
from specdec_ext.drafters.heads.growth import grow_tree
from specdec_ext.drafters.heads.head import default_tree, offered_shapes
from specdec_ext.drafters.heads.unread import UnreadText
from specdec_ext.heads.mtp import MtpHeads, MtpLayerModel, passing_states
from specdec_ext.models import TargetOutput, make_target
from specdec_ext.models.patching.changes import inference_mode
from specdec_ext.models.slots import SlotTarget
from specdec_ext.tree.config import MAX_NODES, Shape, TreeConfig
from specdec_ext.tree.draft_tree import INACTIVE, DraftTree
from specdec_ext.verify.sampler import Accepted

# Largest number of elements of a row that a layer reads in one pass after the first.
BLOCK = 256


class Elements(NamedTuple):
    """Elements of some rows of a layer's sequence.

    Attributes:
        tokens: ``[rows, n]``.
        states: ``[rows, n, hidden]``, the outputs of the layer before.
        counts: number of elements of each row; the columns after them are arbitrary.
    """

    tokens: Tensor
    states: Tensor
    counts: list[int]

    def of_rows(self, rows: list[int]) -> Elements:
        index = torch.tensor(rows, device=self.tokens.device)
        return Elements(self.tokens[index], self.states[index], [self.counts[row] for row in rows])

    def of_row(self, row: int) -> Elements:
        """The elements of one row, without further columns."""
        count = self.counts[row]
        return Elements(self.tokens[row, None, :count], self.states[row, None, :count], [count])

    def span(self, begins: list[int], ends: list[int]) -> Elements:
        """Elements ``begins[r]`` to ``ends[r]`` of each row."""
        spans = [*zip(begins, ends, strict=True)]
        tokens, states = (
            pad_sequence([each[a:b] for each, (a, b) in zip(part, spans, strict=True)], True)
            for part in (self.tokens, self.states)
        )
        return Elements(tokens, states, [b - a for a, b in spans])

    def after(self, first: Elements) -> Elements:
        """The elements of ``first``, and then these."""
        tokens, states = (
            _joined([(old, first.counts), (new, self.counts)])
            for old, new in ((first.tokens, self.tokens), (first.states, self.states))
        )
        return Elements(tokens, states, [*map(sum, zip(first.counts, self.counts, strict=True))])

    def below(self, rows: Elements) -> Elements:
        """The elements of these ``rows``, and then those of the rows of this object."""
        tokens, states = (
            pad_sequence([*first, *last], batch_first=True)
            for first, last in ((rows.tokens, self.tokens), (rows.states, self.states))
        )
        return Elements(tokens, states, rows.counts + self.counts)


class Drafted(NamedTuple):
    """The elements of a layer that contain drafted tokens, level by level.

    Attributes:
        tokens: ``[rows, n]``.
        parents: ``[rows, n]``, the place of each node's parent among these nodes; -1 is the root.
        states: ``[rows, n, hidden]``.
    """

    tokens: Tensor
    parents: Tensor
    states: Tensor


class Outputs(NamedTuple):
    """What a layer computes.

    Attributes:
        unread: ``[rows, n, hidden]``, for the elements that the layer had not read.
        drafted: ``[rows, 1 + nodes, hidden]``, for the last of these and for each drafted element.
        logits: ``[rows, 1 + nodes, vocab]``, for the same.
    """

    unread: Tensor
    drafted: Tensor
    logits: Tensor


class LayerReader:
    """One MTP layer and its cache, which holds all committed elements but the last.

    Args:
        model: the layer.
        max_slots: the most cache slots that a row may need.

    Attributes:
        unread: the committed elements that are not in the cache; None before the first ones.
    """

    _target: SlotTarget

    def __init__(self, model: MtpLayerModel, max_slots: int):
        self.unread: Elements | None = None
        self._model, self._max_slots = model, max_slots
        target = make_target(model, max_slots)
        assert isinstance(target, SlotTarget)  # MtpHeads has checked its support
        self._target = target
        target.record_hidden_states((-1,))

    @property
    def begun(self) -> bool:
        """Whether the cache holds elements."""
        return self._target.begun

    def add(self, elements: Elements) -> None:
        """Append committed elements, which the next :meth:`run` reads."""
        self.unread = elements if self.unread is None else elements.after(self.unread)

    def add_rows(self, elements: Elements) -> None:
        """Append rows, which are read together with the others: the cache holds none of their elements."""
        self.unread = elements if self.unread is None else elements.below(self.unread)

    def join(self, elements: Elements, num_rows: int) -> Elements:
        """Append a row whose elements but the last are read at once, with a cache of their own.

        Args:
            elements: of one row, at least two. The cache of this layer has begun.
            num_rows: the most rows.

        Returns:
            The elements of the next layer.
        """
        assert self.unread is not None
        own = LayerReader(self._model, self._max_slots)
        own.add(elements)
        outputs, counts = own._read_first(elements)
        self._target.adopt(own._target, len(self.unread.counts), num_rows)
        assert own.unread is not None
        self.add_rows(own.unread)
        return Elements(elements.tokens[:, 1:], outputs, counts)

    @property
    def ready(self) -> bool:
        """Whether the layer can run: the cache begins with one element, and the last is never in it."""
        if self.unread is None:
            return False
        return self.begun or min(self.unread.counts) > 1

    def keep(self, rows: list[int]) -> None:
        """Continue with these rows, at least one, of those that continued until now."""
        if self.unread is None:
            return
        if self.begun:
            ended = [row for row in range(len(self.unread.counts)) if row not in rows]
            self._target.reorder([*rows, *ended], len(rows))
        self.unread = self.unread.of_rows(rows)

    def run(self, drafted: Drafted | None) -> Outputs:
        """Read the unread elements, and run drafted ones after them."""
        assert self.unread is not None
        read: list[tuple[Tensor, list[int]]] = []
        while not self.begun or max(self.unread.counts) > BLOCK:
            read.append(self._read_first(self.unread))
        unread = self.unread
        width, device = unread.tokens.shape[1], unread.tokens.device
        last = torch.tensor(unread.counts, device=device)[:, None] - 1
        order = torch.arange(width, device=device).expand(len(last), -1)
        tokens, states = unread.tokens, unread.states
        parents = torch.where(order <= last, order - 1, INACTIVE)
        if drafted is not None:
            below = torch.where(drafted.parents < 0, last, drafted.parents + width)
            tokens = torch.cat([tokens, drafted.tokens], dim=1)
            states = torch.cat([states, drafted.states], dim=1)
            parents = torch.cat([parents, below], dim=1)
        output = self._score(DraftTree(tokens, parents), states, [n - 1 for n in unread.counts])
        (outputs,) = output.aux_hidden_states
        read.append((outputs[:, :width], unread.counts))
        self.unread = unread.span([n - 1 for n in unread.counts], unread.counts)
        nodes = torch.arange(width, tokens.shape[1], device=device).expand(len(last), -1)
        rows, index = torch.arange(len(last), device=device)[:, None], torch.cat([last, nodes], 1)
        return Outputs(_joined(read), outputs[rows, index], output.logits[rows, index])

    def _read_first(self, unread: Elements) -> tuple[Tensor, list[int]]:
        """Read the first unread elements, but not the last of a row; return outputs and their numbers."""
        begun = self.begun
        counts = [min(n - 1, BLOCK) if begun else n - 1 for n in unread.counts]
        first = unread.span([0] * len(counts), counts)
        self.unread = unread.span(counts, unread.counts)
        device, width = first.tokens.device, max(counts)
        numbers = torch.tensor(counts, device=device)[:, None]
        order = torch.arange(width, device=device).expand(len(counts), -1)
        if begun:
            parents = torch.where(order < numbers, order - 1, INACTIVE)
            output = self._score(DraftTree(first.tokens, parents), first.states, counts)
            return output.aux_hidden_states[0], counts
        source = order - (width - numbers)  # prompts are padded on the left
        rows, mask = torch.arange(len(counts), device=device)[:, None], (source >= 0).long()
        source = source.clamp(min=0)
        with inference_mode(), passing_states(first.states[rows, source]):
            output = self._target.prefill(first.tokens[rows, source], mask)
        (outputs,) = output.aux_hidden_states
        back = (order + (width - numbers)).clamp(max=width - 1)
        return outputs[rows, back], counts

    def _score(self, tree: DraftTree, states: Tensor, kept: list[int]) -> TargetOutput:
        """Run a pass, and keep the first ``kept[r]`` nodes of each row in the cache."""
        with inference_mode(), passing_states(states):
            output = self._target.forward(tree)
        width = tree.num_nodes
        numbers = torch.tensor(kept, device=tree.tokens.device)
        path = torch.arange(width, device=numbers.device).expand(len(kept), -1)
        path = torch.where(path < numbers[:, None], path, -1)
        paths = [[*range(count), *[-1] * (width - count)] for count in kept]
        self._target.commit(path, numbers - 1, (paths, [count - 1 for count in kept]))
        return output


class _Draft:
    """The growth of one batch of trees.

    Args:
        layers: the layers; the first one is ready.
        ranks: number of guesses after each node.
        noise: of the rows, or None.
    """

    def __init__(self, layers: Sequence[LayerReader], ranks: int, noise: RowNoise | None):
        self._waiting = list(layers)  # layers that have not run in this draft
        self._ranks, self._noise = ranks, noise
        self._drafted: Drafted | None = None
        self._layer: LayerReader  # the last that has run, and what it computed
        self._outputs: Outputs
        self._first = -1  # place of the last level's first node among the drafted ones
        self._level = 0

    def first_level(self) -> tuple[Tensor, Tensor]:
        """The best children of the roots, ``[rows, 1, ranks]`` each."""
        self._run(next_layer=True)
        return self._best(self._outputs.logits[:, :1])

    def __call__(self, parents: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The best children of the nodes of a level, as :class:`specdec_ext.drafters.heads.growth.Guess`."""
        if self._level == 0:
            return self.first_level()
        # The number of a node is its place among the drafted ones; -1 is the root.
        places = parents + self._first
        known = self._drafted
        if known is not None:
            tokens, places = (
                torch.cat([known.tokens, tokens], 1),
                torch.cat([known.parents, places], 1),
            )
        new = parents.shape[1]
        self._first = tokens.shape[1] - new
        next_layer = bool(self._waiting) and self._waiting[0].ready
        # A layer continues the outputs of the one before; the last one its own, for the new nodes.
        own = 0 if known is None or next_layer else self._first
        index = places[:, own:, None] + 1
        outputs = self._outputs.drafted
        states = outputs.gather(1, index.expand(-1, -1, outputs.shape[2]))
        if own:
            assert known is not None
            states = torch.cat([known.states, states], dim=1)
        self._drafted = Drafted(tokens, places, states)
        self._run(next_layer)
        return self._best(self._outputs.logits[:, -new:])

    def _run(self, next_layer: bool) -> None:
        if not next_layer:
            self._outputs = self._layer.run(self._drafted)
            return
        self._layer = self._waiting.pop(0)
        unread = self._layer.unread
        assert unread is not None
        self._outputs = self._layer.run(self._drafted)
        if self._waiting:
            # The next layer's elements have the tokens that follow.
            counts = [count - 1 for count in unread.counts]
            self._waiting[0].add(
                Elements(unread.tokens[:, 1:], self._outputs.unread[:, :-1], counts)
            )

    def _best(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        self._level += 1
        return best_children(logits, self._ranks, self._noise, self._level)


class MtpDrafter(Drafter):
    """Drafts with the MTP heads of the target's checkpoint, as transformers' ``generate(use_mtp=True)``.

    The layers run as modules of PyTorch. More levels than there are layers are drafted by the last layer. In
    a call that samples, drafts are coupled, as in :class:`specdec_ext.HeadDrafter`. A cache of
    the caller contains no hidden states of its text, so the heads begin after it.

    Args:
        heads: the heads of the target; None reads them from its checkpoint when the first call begins.
        tree: the only shape to draft; None for the shapes that the controller chooses.
        temperature: the temperature of drafts in a call that samples, relative to the one that the call
            suggests (``Context.noise``); 0 drafts without noise, as in greedy decoding.

    Raises:
        TypeError: for ``heads`` of another type.
        ValueError: ``temperature`` is out of range; when a call begins, the target has no MTP heads, or their
            caches can't be rolled back.
        OSError, RuntimeError: when a call begins, the weights can't be read.
    """

    joinable = True
    low_acceptance_hint = (
        "Check that the checkpoint's MTP layers belong to exactly these weights of the target (not to those "
        "from before a fine-tuning), and that the sampling temperature is not too high."
    )

    def __init__(
        self,
        heads: MtpHeads | None = None,
        tree: TreeConfig | None = None,
        temperature: float = 1.0,
    ):
        if heads is not None and not isinstance(heads, MtpHeads):
            raise TypeError(
                f"heads is a {type(heads).__name__}; expected MtpHeads(model), or None to read them from the "
                "target's checkpoint"
            )
        check_temperature(temperature)
        self.heads, self.tree, self.temperature = heads, tree, temperature

    def feature_layers(self, model: PreTrainedModel) -> tuple[int, ...]:
        """Return the index of the last hidden state. The first call reads the heads.

        Raises:
            ValueError: the heads belong to another target.
        """
        if self.heads is None:
            self.heads = MtpHeads(model)
        self.heads.check(model)
        return (-1,)

    def start(self, context: Context, model: PreTrainedModel, output: TargetOutput) -> None:
        assert self.heads is not None
        self._tree = self.tree or default_tree(model.device, len(context.generated))
        self._max_slots = context.offset + context.max_length + MAX_NODES
        self._unread = UnreadText(len(context.generated))
        self._layers: list[LayerReader] = []
        self._rows: list[int] = []  # whose elements the layers have got
        self._resting = False
        self.join(context, context.rows, output)

    def join(self, context: Context, rows: Sequence[int], output: TargetOutput) -> None:
        self._noise = draft_noise(context, self.temperature, context.device)
        if self._resting:
            return
        self._unread.join(context, rows, output.aux_hidden_states)
        self._keep([row for row in self._rows if row not in rows])

    def shapes(self, context: Context) -> Sequence[Shape]:
        return [self.tree] if self.tree else offered_shapes(self._tree)

    @property
    def identity(self) -> Hashable:
        return super().identity, self.temperature

    def commit(self, context: Context, accepted: Accepted, output: TargetOutput) -> None:
        if not self._resting and self._unread.add(context, accepted, output):
            draft = self._begin(context, 1)
            if draft is not None:
                draft.first_level()

    def rest(self, resting: bool) -> None:
        self._resting = resting
        if resting:
            self._unread.forget()
            self._keep([])

    def propose(self, context: Context) -> DraftTree:
        if not self._unread or max(context.remaining) < 2:  # the last token of a row needs no draft
            return DraftTree.root(context.roots)
        tree = context.shape if isinstance(context.shape, TreeConfig) else self._tree
        draft = self._begin(context, tree.top_k)
        return (
            DraftTree.root(context.roots)
            if draft is None
            else grow_tree(context.roots, tree, draft)
        )

    def _begin(self, context: Context, ranks: int) -> _Draft | None:
        """Pass the unread text to the layers and begin a draft; None if a row is too short for one."""
        self._keep([row for row in context.rows if row in self._rows])
        if self._is_too_short_to_join(context):
            return None
        self._read(context)
        if not self._layers[0].ready:
            return None
        return _Draft(self._layers, ranks, RowNoise.of(context, self._noise))

    def _keep(self, rows: list[int]) -> None:
        """Continue with these rows of the layers."""
        if rows == self._rows:
            return
        places = [self._rows.index(row) for row in rows]
        self._rows = rows
        if not rows:
            self._layers = []
        for layer in self._layers:
            layer.keep(places)

    def _is_too_short_to_join(self, context: Context) -> bool:
        """Whether a row can't join the layers yet: each that has begun must read one of its elements."""
        begun = sum(layer.begun for layer in self._layers)
        # A row that joins has an element for each token but the first.
        positions = zip(context.rows, context.root_positions, strict=True)
        return any(row not in self._rows and position <= begun for row, position in positions)

    def _read(self, context: Context) -> None:
        """Pass what is new to the layers."""
        assert self.heads is not None
        new = self._unread.take(context)
        if not self._layers:
            self._layers = [LayerReader(model, self._max_slots) for model in self.heads.layers]
        states = new.features.to(self.heads.dtype)
        tokens = [torch.tensor(row, device=states.device, dtype=torch.long) for row in new.tokens]
        elements = Elements(pad_sequence(tokens, batch_first=True), states, new.counts)
        joining = [row for row in context.rows if row not in self._rows]
        if self._rows:
            self._layers[0].add(elements.of_rows(self._rows))
        if joining and not self._layers[0].begun:
            self._layers[0].add_rows(elements.of_rows(joining))
        else:
            for row in joining:
                self._join(elements.of_row(row), len(context.generated))
        self._rows += joining

    def _join(self, elements: Elements, num_rows: int) -> None:
        """Let a row join the layers that have begun; the next one reads it together with other rows."""
        for layer in self._layers:
            if not layer.begun:
                layer.add_rows(elements)
                return
            elements = layer.join(elements, num_rows)


def _joined(parts: Sequence[tuple[Tensor, list[int]]]) -> Tensor:
    """Concatenate the first columns of each row of several tensors; each comes with the numbers of them."""
    if len(parts) == 1:
        return parts[0][0]
    per_row = zip(*(zip(tensor, counts, strict=True) for tensor, counts in parts), strict=True)
    return pad_sequence([torch.cat([x[:n] for x, n in row]) for row in per_row], batch_first=True)
