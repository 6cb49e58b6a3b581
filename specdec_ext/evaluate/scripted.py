"""``Script``: a drafter that knows the right text and drafts right and wrong tokens as a check needs them."""

from __future__ import annotations

from collections.abc import Callable

from specdec_ext.context import Context
from specdec_ext.drafters.base import Drafter
from specdec_ext.tree.draft_tree import DraftTree

# (next right tokens, size of the vocabulary, number of drafts so far) -> paths of the tree
Shape = Callable[[list[int], int, int], list[list[int]]]

# Draft tokens in one path; longer passes would show no other errors.
DEPTH = 4


class Script(Drafter):
    """Drafts the paths that ``shape`` makes from the next right tokens of each row.

    Args:
        answers: for each row, all right tokens.
        vocab: size of the vocabulary, from which wrong tokens are taken.
        shape: function that returns the paths, such as :func:`branches`.
        depth: number of tokens in a path.
    """

    def __init__(self, answers: list[list[int]], vocab: int, shape: Shape, depth: int = DEPTH):
        self._answers, self._vocab, self._shape, self._depth = answers, vocab, shape, depth
        self._drafts = 0

    def propose(self, context: Context) -> DraftTree:
        paths = []
        for row in context.rows:
            done = len(context.generated[row])
            answer = self._answers[row][done : done + self._depth]
            paths.append(self._shape(answer, self._vocab, self._drafts + row))
        self._drafts += 1
        return DraftTree.from_paths(context.roots, paths)


def right(answer: list[int], vocab: int, turn: int) -> list[list[int]]:
    """The right chain."""
    return [answer]


def mixed(answer: list[int], vocab: int, turn: int) -> list[list[int]]:
    """In turn: a wrong chain, a chain whose first half is right, and a right chain."""
    half = len(answer) // 2
    chains = [wrong(answer, vocab), answer[:half] + wrong(answer[half:], vocab), answer]
    return [chains[turn % 3]]


def branches(answer: list[int], vocab: int, turn: int) -> list[list[int]]:
    """The right branch, in a changing place, and two wrong ones: one from the start, one after a token."""
    others = [wrong(answer, vocab, 2), answer[:1] + wrong(answer[1:], vocab)]
    others.insert(turn % 3, answer)
    return others


def mixed_branches(answer: list[int], vocab: int, turn: int) -> list[list[int]]:
    """The chain of :func:`mixed` between two wrong branches."""
    (chain,) = mixed(answer, vocab, turn)
    return [wrong(answer, vocab, 2), chain, answer[:1] + wrong(answer[1:], vocab, 3)]


def wrong(tokens: list[int], vocab: int, by: int = 1) -> list[int]:
    """Other tokens in place of these; another ``by`` gives others."""
    return [(token + by) % vocab for token in tokens]
