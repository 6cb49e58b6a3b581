"""Lookahead decoding: the target itself collects n-grams to guess with, by Jacobi iteration beside the text.

Fu et al. 2024 "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding". A *window* of
``window`` columns and up to ``ngram - 1`` levels holds guesses of the next tokens, older levels first:
element j of level l is meant for the (1 + j + l)-th token after the root. Level 0 is a chain below the root,
and element j of a further level is the child of element j of the level before: the mask of the paper::

    root - a0 - a1 - a2        level 0
            |    |    |
            b0   b1   b2       level 1; b1 sees root, a0, a1

The target's choice at the last level becomes the next one, the first level leaves, and every column that had
all ``ngram`` tokens goes to a *pool*: for each first token the n-grams that were seen last. Those that begin
with the root are the guesses: further branches of the same tree.

So all of it is one ``DraftTree``, any node of which may be accepted: the window's too, and the token after a
guess that is right to its end, which the published implementation computes and drops.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import torch
from transformers import PreTrainedModel

from specdec_ext.context import Context
from specdec_ext.drafters.base import Drafter
from specdec_ext.models import TargetOutput, vocab_size
from specdec_ext.tree.draft_tree import DraftTree, TreeBuilder
from specdec_ext.verify.sampler import Accepted


class Window:
    """The Jacobi window of one row.

    Args:
        text: where the first guesses are drawn from, as good as any.
        columns: of the full window.
        ngram: tokens of a finished column.

    Attributes:
        levels: oldest first. Until there are ``ngram - 1`` of them a column leaves at every step instead of a
            level, so that the rest stays in step with the text.
    """

    def __init__(self, text: Sequence[int], columns: int, ngram: int):
        self._num_levels = ngram - 1
        self.levels = [random.Random(0).choices(text, k=columns + ngram - 2)]

    @property
    def depth(self) -> int:
        """Of the last element below the root."""
        return len(self.levels[0]) + len(self.levels) - 1

    def add_to(self, tree: TreeBuilder) -> list[int]:
        """Put the window below the root; the nodes of the last level."""
        nodes, last = [], 0
        for token in self.levels[0]:
            last = tree.add([token], last)
            nodes.append(last)
        for level in self.levels[1:]:
            nodes = [tree.add([token], node) for token, node in zip(level, nodes, strict=True)]
        return nodes

    def advance(self, level: list[int]) -> list[tuple[int, ...]]:
        """Append the target's choices after the last level; the columns that are finished now."""
        self.levels.append(level)
        if len(self.levels) <= self._num_levels:
            self.levels = [each[1:] for each in self.levels]
            return []
        finished = list(zip(*self.levels, strict=True))
        self.levels = self.levels[1:]
        return finished


class NgramPool:
    """For each token the n-grams that begin with it and were seen last.

    Args:
        ngram: their length.
        size: n-grams kept for each first token.
    """

    def __init__(self, ngram: int, size: int):
        self._ngram, self._size = ngram, size
        self._rests: dict[int, dict[tuple[int, ...], None]] = {}  # ordered, the latest last

    def add(self, ngram: Sequence[int]) -> None:
        first, rest = ngram[0], tuple(ngram[1:])
        rests = self._rests.setdefault(first, {})
        rests.pop(rest, None)
        rests[rest] = None
        if len(rests) > self._size:
            del rests[next(iter(rests))]

    def add_text(self, text: Sequence[int]) -> None:
        """Every n-gram of a text."""
        for start in range(len(text) - self._ngram + 1):
            self.add(text[start : start + self._ngram])

    def guesses(self, first: int) -> list[tuple[int, ...]]:
        """What followed ``first``, the latest first."""
        return list(reversed(self._rests.get(first, {})))


class LookaheadDrafter(Drafter):
    """Proposes n-grams that the target produced beside the text, and goes on producing them.

    A step scores up to ``1 + (ngram - 1) * (window + guesses)`` nodes, 31 by default, and takes the arg-max
    of ``window`` rows of logits. That pays where scoring nodes is nearly free, on a GPU at batch 1; there
    larger windows find more. The n-grams of prompt and output are guesses, too.

    Args:
        window: columns of the window, 0 for none: guesses from prompt and output alone.
        ngram: tokens of an n-gram; ``ngram - 1`` of them are guessed.
        guesses: n-grams guessed at a time, and kept for each first token.
    """

    whole = True  # the window goes on from nodes at all depths

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
        texts = [context.text(row) for row in range(len(context.generated))]
        self._windows = [Window(text, self.window, self.ngram) for text in texts]
        self._pools = [NgramPool(self.ngram, self.guesses) for _ in texts]
        for pool, text in zip(self._pools, texts, strict=True):
            pool.add_text(text)
        self._vocab_size = vocab_size(model)
        self._known = [len(generated) for generated in context.generated]
        # (row, node) of every last element of the tree under way, one window after the other.
        self._last: list[tuple[int, int]] = []

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
            # A window that would be cut at the end of the row could not go on.
            window = self._windows[row]
            if self.window and window.depth < room:
                self._advancing.append(row)
                self._last += [(i, node) for node in window.add_to(trees[-1])]
        tree = DraftTree.from_builders(trees)
        self._num_nodes = tree.num_nodes
        return tree

    def _learn(self, context: Context, row: int) -> None:
        """The n-grams that end in what was emitted since the last step."""
        new = context.generated[row][self._known[row] :]
        self._known[row] += len(new)
        before = self.ngram - 1
        generated = len(context.generated[row])
        if generated - len(new) >= before:
            self._pools[row].add_text(context.generated[row][generated - len(new) - before :])
        else:
            self._pools[row].add_text(context.text(row)[-(len(new) + before) :])

    def commit(self, context: Context, accepted: Accepted, output: TargetOutput) -> None:
        if not self._last:  # no window, or nobody asked for this tree
            return
        if output.logits.shape[1] < self._num_nodes:  # it was not verified
            self._last = []
            return
        rows, nodes = torch.tensor(self._last, device=output.logits.device).unbind(dim=1)
        self._last = []
        # What the target would write, of what it also reads.
        choices = output.logits[rows, nodes, : self._vocab_size].argmax(dim=-1).tolist()
        ends = [0]
        for row in self._advancing:
            ends.append(ends[-1] + len(self._windows[row].levels[0]))
        for row, (begin, end) in zip(self._advancing, pairwise(ends), strict=True):
            for ngram in self._windows[row].advance(choices[begin:end]):
                self._pools[row].add(ngram)
