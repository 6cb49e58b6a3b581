"""``UnreadText``: the committed text that a head has not read yet, with the target's hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec_ext.context import Context
from specdec_ext.models import TargetOutput
from specdec_ext.models.base import CommittedRound
from specdec_ext.models.passes.hidden_states import LayerStates
from specdec_ext.verify.sampler import Accepted

# Limits of the features that are kept while no drafts are requested. After this many nodes the features of
# the accepted ones are copied into one tensor, because a step keeps the features of all of its nodes, and
# perhaps of all layers.
MERGED_NODES = 256
# If the merged tokens of any row reach this number, the head reads them.
MAX_PENDING = 512


@dataclass
class PendingFeatures:
    """Committed text of some rows that the head has not read yet, with the target's features.

    An element of a row is the pair (token, features of the token before it).

    Attributes:
        rows: original row numbers.
        tokens: the tokens of each row's elements.
        aux_hidden_states: ``[rows, new, width]`` each; concatenated, they are the features. Columns after a
            row's elements are arbitrary.
        committed: the round that these are the elements of, if it was committed on the device, as the latest
            one.
        order: ``[rows, new]``, the columns of ``aux_hidden_states`` that hold the elements; None for 0, 1,
            ... They are gathered only when the features are read.
    """

    rows: list[int]
    tokens: list[list[int]]
    aux_hidden_states: Sequence[Tensor]
    order: Tensor | None = None
    committed: CommittedRound | None = None

    @property
    def features(self) -> Tensor:
        """The features, ``[rows, new, width]``."""
        states = self.aux_hidden_states
        if self.order is not None:
            states = [at_columns(state, self.order) for state in states]
        return torch.cat(list(states), dim=-1) if len(states) > 1 else states[0]

    @property
    def counts(self) -> list[int]:
        """Number of elements of each row."""
        return [len(row) for row in self.tokens]

    def without(self, rows: Sequence[int]) -> PendingFeatures:
        """These elements without those of ``rows``."""
        pairs = zip(self.rows, self.tokens, strict=True)
        return replace(self, tokens=[[] if row in rows else new for row, new in pairs])

    @property
    def even(self) -> bool:
        """Whether every column of ``aux_hidden_states`` is an element of every row, in order."""
        width = self.aux_hidden_states[0].shape[1]
        return self.order is None and all(count == width for count in self.counts)


class Step(NamedTuple):
    """A step whose hidden states are kept: little more than references, because most steps keep it.

    Attributes:
        rows: original row numbers.
        emitted: the emitted tokens of each row.
        aux_hidden_states: of all nodes, ``[rows, nodes, width]`` each.
        accepted: the accepted nodes; None for a step without drafts.
        committed: the round on the device, if it was committed there.
    """

    rows: list[int]
    emitted: list[list[int]]
    aux_hidden_states: Sequence[Tensor]
    accepted: Accepted | None
    committed: CommittedRound | None

    @classmethod
    def of(cls, rows: list[int], accepted: Accepted, states: Sequence[Tensor]) -> Step:
        drafted = accepted if accepted.path.shape[1] > 1 else None
        return cls(rows, accepted.emitted, states, drafted, accepted.committed)

    def latest(self) -> PendingFeatures | None:
        """The elements of a round that was committed on the device, or None. No round has been since."""
        committed = self.committed
        if committed is None or committed.new_features is None:
            return None
        new = committed.new_features[:, : max(map(len, self.emitted))]
        return PendingFeatures(self.rows, self.emitted, [new], committed=committed)

    def elements(self) -> PendingFeatures:
        """The emitted tokens with the features of the tokens before them."""
        tokens, states = self.emitted, self.aux_hidden_states
        width = max(map(len, tokens))
        if self.accepted is not None:
            # The path of a chain or of a tree's first branch is nodes 0, 1, 2, ..., which need no gather.
            visited = zip(self.accepted.paths, tokens, strict=True)
            if any(nodes[: len(row)] != [*range(len(row))] for nodes, row in visited):
                nodes = self.accepted.path[:, :width].clamp(min=0)
                states = [at_columns(state, nodes) for state in states]
            elif isinstance(states, LayerStates):
                states = states.first(width)
            else:
                states = [state[:, :width] for state in states]
        return PendingFeatures(self.rows, tokens, states)


def at_columns(state: Tensor, columns: Tensor) -> Tensor:
    """``[rows, n, hidden]``, the values of ``state`` in these ``columns [rows, n]``."""
    return state.gather(1, columns[..., None].expand(-1, -1, state.shape[2]))


def of_active_rows(
    pending: Sequence[PendingFeatures], active: list[int], num_rows: int
) -> PendingFeatures:
    """Join the elements of several steps, for all rows of the batch; ended rows get none."""
    runs = [_joined(list(run)) for _, run in groupby(pending, _kind)]
    everyone = list(range(num_rows))
    if len(runs) == 1 and runs[0].rows == active == everyone:
        return runs[0]
    tokens: list[list[int]] = [[] for _ in everyone]
    pieces: list[list[Tensor]] = [[] for _ in everyone]
    for part in runs:
        for i, (row, new) in enumerate(zip(part.rows, part.tokens, strict=True)):
            if row in active:
                tokens[row] += new
                pieces[row].append(part.features[i, : len(new)])
    longest, like = max(map(len, tokens)), runs[0].features
    features = like.new_zeros(num_rows, longest, like.shape[2])
    for row, parts in enumerate(pieces):
        if parts:
            features[row, : len(tokens[row])] = torch.cat(parts) if len(parts) > 1 else parts[0]
    return PendingFeatures(everyone, tokens, [features])


def _kind(part: PendingFeatures) -> tuple[Any, ...]:
    """A key that is equal for steps that can be concatenated: those with the same rows that are ``even``."""
    return part.rows, len(part.aux_hidden_states), part.even or id(part)


def _joined(parts: list[PendingFeatures]) -> PendingFeatures:
    """Concatenate parts of one kind; the result has a single tensor of features."""
    first = parts[0]
    if len(parts) == 1:
        return PendingFeatures(first.rows, first.tokens, [first.features])
    tokens = [list(chain(*new)) for new in zip(*(part.tokens for part in parts), strict=True)]
    states = [part.aux_hidden_states for part in parts]
    passes = [each for each in states if isinstance(each, LayerStates)]
    joined: Sequence[Tensor]
    if len(passes) == len(states):
        joined = LayerStates.joined(passes)
    else:
        joined = [torch.cat(each, dim=1) for each in zip(*states, strict=True)]
    return PendingFeatures(first.rows, tokens, [torch.cat(list(joined), dim=-1)])


class UnreadText:
    """The committed text that a head has not read yet, with the target's hidden states.

    A call that never drafts should cost nothing, so whatever can wait is done when the head reads.

    Args:
        num_rows: number of rows of the batch.
    """

    def __init__(self, num_rows: int):
        self._everyone = list(range(num_rows))
        # Rows, and the auxiliary hidden states of their prompts.
        self._prompts: list[tuple[Sequence[int], Sequence[Tensor]]] = []
        self._merged: list[PendingFeatures] = []
        self._num_merged = 0  # largest number of merged tokens of a row, without the prompt
        self._steps: list[Step] = []
        self._num_nodes = 0  # of ``_steps``

    def __bool__(self) -> bool:
        return bool(self._prompts or self._merged or self._steps)

    def join(self, context: Context, rows: Sequence[int], states: Sequence[Tensor]) -> None:
        """Keep the prompts of rows that begin; what earlier rows with their numbers have left is dropped.

        Args:
            context: the text, in which these rows are active.
            rows: their numbers.
            states: auxiliary hidden states of their prompts, ``[rows, columns run, width]`` each.
        """
        if self._steps or self._merged:
            others = [row for row in context.rows if row not in rows]
            self._merge(context, others)
            self._merged = [part.without(rows) for part in self._merged]
        self._prompts = [
            (kept, of_kept) for kept, of_kept in self._prompts if not set(kept) <= set(rows)
        ]
        if rows:
            self._prompts.append((rows, states))

    def forget(self) -> None:
        self._prompts = []
        self._merged, self._num_merged = [], 0
        self._take_steps()

    def add(self, context: Context, accepted: Accepted, output: TargetOutput) -> bool:
        """Keep what a step has committed; returns whether it is so much that the head must read it now."""
        self._steps.append(Step.of(context.rows, accepted, output.aux_hidden_states))
        self._num_nodes += output.logits.shape[1]
        if self._num_nodes < MERGED_NODES:
            return False
        self._merge(context, context.rows)
        return self._num_merged >= MAX_PENDING

    def _merge(self, context: Context, rows: list[int]) -> None:
        """Copy the features of the accepted nodes of these rows into one tensor."""
        taken = [step.elements() for step in self._take_steps()]
        if taken:
            new = of_active_rows(taken, rows, len(self._everyone))
            self._merged.append(new)
            self._num_merged += max(new.counts)

    def _take_steps(self) -> list[Step]:
        steps, self._steps, self._num_nodes = self._steps, [], 0
        return steps

    def take_latest(self, context: Context) -> PendingFeatures | None:
        """Remove and return the elements if they are on the device: those of all rows, of one step."""
        if self._prompts or self._merged or len(self._steps) != 1:
            return None
        (step,) = self._steps
        latest = step.latest() if step.rows == context.rows == self._everyone else None
        if latest is not None:
            self._take_steps()
        return latest

    def take(self, context: Context) -> PendingFeatures:
        """Remove and join the elements of all rows; rows that have ended have none."""
        taken = [_prompt_features(context, *prompt) for prompt in self._prompts]
        taken += [*self._merged, *(step.elements() for step in self._take_steps())]
        self.forget()
        return of_active_rows(taken, context.rows, len(self._everyone))


def _prompt_features(
    context: Context, rows: Sequence[int], states: Sequence[Tensor]
) -> PendingFeatures:
    """The elements of the prompts of ``rows``, with each row's first generated token.

    Args:
        context: the prompts and the text.
        rows: all rows of a batch with padding, or any rows of one without.
        states: auxiliary hidden states, ``[rows, columns run, hidden]`` each, of the last columns of the
            prompt.
    """
    rows = list(rows)
    first = [context.generated[row][:1] for row in rows]
    if context.offset:
        # The tokens of embeddings are unknown, so the head begins at the last column of the prompt.
        last = [context.last_columns(states[0].shape[1])[row] for row in rows]
        return PendingFeatures(rows, first, [state[rows, last][:, None] for state in states])
    order = None
    if context.attention_mask is None:
        before = [len(context.prompt(row)) - states[0].shape[1] for row in rows]
    else:
        cached = context.prompt_columns - states[0].shape[1]
        valid = context.attention_mask.bool()
        before = valid[:, :cached].sum(dim=1).tolist()
        # Paddings are left out: the features of each row move to the left.
        longest = int(valid[:, cached:].sum(dim=1).max())
        order = (~valid[:, cached:]).long().argsort(dim=1, stable=True)[:, :longest]
    texts = [context.prompt(row)[count:] for row, count in zip(rows, before, strict=True)]
    tokens = [text[1:] + last for text, last in zip(texts, first, strict=True)]
    return PendingFeatures(rows, tokens, states, order)
