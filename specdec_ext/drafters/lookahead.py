"""Lookahead decoding: the target itself generates n-grams to propose, by Jacobi iteration beside the text.

Source: Fu et al. 2024, "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding". A
*window* of ``window`` columns and up to ``ngram - 1`` levels holds guesses of the next tokens, with older
levels first. Element j of level l is a guess of the (1 + j + l)-th token after the root. Level 0 is a chain
below the root; element j of each further level is a child of element j of the level before. This gives the
paper's mask::

    root - a0 - a1 - a2        level 0
            |    |    |
            b0   b1   b2       level 1; b1 sees root, a0, a1

After each step, the target's choices at the last level become a new level, and each complete column of
``ngram`` tokens is added to a *pool*, which holds the latest n-grams for each first token. The oldest level
is then removed. N-grams from the pool that begin with the root are the proposals, as further branches of the
same tree.

Everything is one ``DraftTree``, and every node may be accepted, also those of the window. A proposal that is
right to its end also gives the token after it, which the published implementation computes and discards.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import torch
from transformers import PreTrainedModel

from specdec_ext.context import Context
from specdec_ext.drafters.base import Drafter
from specdec_ext.models import TargetOutput
from specdec_ext.pretrained import vocab_size
from specdec_ext.tree.draft_tree import DraftTree, TreeBuilder
from specdec_ext.verify.sampler import Accepted


class Window:
    """The Jacobi window of one row.

    Args:
        text: the tokens from which the first guesses are drawn at random.
        columns: number of columns of the full window.
        ngram: number of tokens of a finished column.

    Attributes:
        levels: the oldest level first. Until there are ``ngram - 1`` levels, each step removes the first
            column instead of a level, so that the guesses stay aligned with the text.
    """

    def __init__(self, text: Sequence[int], columns: int, ngram: int):
        self._num_levels = ngram - 1
        self.levels = [random.Random(0).choices(text, k=columns + ngram - 2)]

    @property
    def depth(self) -> int:
        """Depth of the last element below the root."""
        return len(self.levels[0]) + len(self.levels) - 1

    def add_to(self, tree: TreeBuilder) -> list[int]:
        """Add the window below the root; returns the nodes of the last level."""
        nodes, last = [], 0
        for token in self.levels[0]:
            last = tree.add([token], last)
            nodes.append(last)
        for level in self.levels[1:]:
            nodes = [tree.add([token], node) for token, node in zip(level, nodes, strict=True)]
        return nodes

    def advance(self, level: list[int]) -> list[tuple[int, ...]]:
        """Append the target's choices as a new level; returns the columns that are now finished."""
        self.levels.append(level)
        if len(self.levels) <= self._num_levels:
            self.levels = [each[1:] for each in self.levels]
            return []
        finished = list(zip(*self.levels, strict=True))
        self.levels = self.levels[1:]
        return finished


class NgramPool:
    """The latest n-grams for each first token.

    Args:
        ngram: length of the n-grams.
        size: number of n-grams kept for each first token.
    """

    def __init__(self, ngram: int, size: int):
        self._ngram, self._size = ngram, size
        self._rests: dict[int, dict[tuple[int, ...], None]] = {}  # in order, the latest last

    def add(self, ngram: Sequence[int]) -> None:
        """Add an n-gram; it replaces the oldest one if there are too many."""
        first, rest = ngram[0], tuple(ngram[1:])
        rests = self._rests.setdefault(first, {})
        rests.pop(rest, None)
        rests[rest] = None
        if len(rests) > self._size:
            del rests[next(iter(rests))]

    def add_text(self, text: Sequence[int]) -> None:
        """Add all n-grams of a text."""
        for start in range(len(text) - self._ngram + 1):
            self.add(text[start : start + self._ngram])

    def guesses(self, first: int) -> list[tuple[int, ...]]:
        """The continuations of ``first``, the latest one first."""
        return list(reversed(self._rests.get(first, {})))


class LookaheadDrafter(Drafter):
    """Proposes n-grams that the target generates beside the text, and n-grams of the prompt and output.

    A step scores up to ``1 + (ngram - 1) * (window + guesses)`` nodes, 31 by default, and takes the arg-max
    of ``window`` rows of logits. This pays where further nodes are almost free, as on a GPU at batch 1.
    Larger windows find more n-grams.

    Args:
        window: number of columns of the window; 0 proposes n-grams of the prompt and output only.
        ngram: number of tokens of an n-gram, of which ``ngram - 1`` are proposed.
        guesses: number of n-grams proposed in a step, and kept for each first token.

    Raises:
        ValueError: for an argument out of its range.
    """

    joinable = True
    whole = True  # the window needs the logits at its deepest nodes

    def __init__(self, window: int = 5, ngram: int = 4, guesses: int = 5):
        for name, value, least in (
            ("window", window, 0),
            ("ngram", ngram, 2),
            ("guesses", guesses, 1),
        ):
            if value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        self.window, self.ngram, self.guesses = window, ngram, guesses

    def start(self, context: Context, model: PreTrainedModel, output: TargetOutput) -> None:
        # By row. A row is added at its first draft, so a call without drafts does not read the prompt.
        self._windows: dict[int, Window] = {}
        self._pools: dict[int, NgramPool] = {}
        self._known: dict[int, int] = {}  # number of generated tokens that the pool has read
        self._vocab_size = vocab_size(model)
        # (row, node) of the last level of each window in the current tree.
        self._last: list[tuple[int, int]] = []

    def join(self, context: Context, rows: Sequence[int], output: TargetOutput) -> None:
        for row in rows:
            for kept in (self._windows, self._pools, self._known):
                kept.pop(row, None)

    def propose(self, context: Context) -> DraftTree:
        trees = []
        self._last = []
        self._advancing: list[int] = []
        for i, (row, room) in enumerate(zip(context.rows, context.remaining, strict=True)):
            self._learn(context, row)
            root = context.generated[row][-1]
            trees.append(TreeBuilder(root))
            for guess in self._pools[row].guesses(root):
                trees[-1].add(guess)
            # A window must not be cut at the end of the row, because it could not be continued.
            window = self._windows[row]
            if self.window and window.depth < room:
                self._advancing.append(row)
                self._last += [(i, node) for node in window.add_to(trees[-1])]
        tree = DraftTree.from_builders(trees)
        self._num_nodes = tree.num_nodes
        return tree

    def _learn(self, context: Context, row: int) -> None:
        """Add the n-grams that end in a token emitted since the last draft."""
        if row not in self._pools:
            self._pools[row] = NgramPool(self.ngram, self.guesses)
            self._windows[row] = Window(context.text(row), self.window, self.ngram)
            self._known[row] = -len(context.prompt(row))  # not even the prompt
        generated = context.generated[row]
        first = self._known[row] - (self.ngram - 1)
        self._known[row] = len(generated)
        self._pools[row].add_text(
            generated[first:] if first >= 0 else context.text(row)[first - len(generated) :]
        )

    def commit(self, context: Context, accepted: Accepted, output: TargetOutput) -> None:
        if not self._last:  # there is no window, or this step did not draft
            return
        if output.logits.shape[1] < self._num_nodes:  # it was not verified
            self._last = []
            return
        rows, nodes = torch.tensor(self._last, device=output.logits.device).unbind(dim=1)
        self._last = []
        # The target's choices among the tokens that it can also read.
        choices = output.logits[rows, nodes, : self._vocab_size].argmax(dim=-1).tolist()
        ends = [0]
        for row in self._advancing:
            ends.append(ends[-1] + len(self._windows[row].levels[0]))
        for row, (begin, end) in zip(self._advancing, pairwise(ends), strict=True):
            for ngram in self._windows[row].advance(choices[begin:end]):
                self._pools[row].add(ngram)
