"""Specification of n-gram drafting: copy what followed an earlier occurrence of the last tokens.

The rule for a text ``t[0..L)``:

1. An *occurrence* of length n is a position ``end < L - 1`` at which the last n tokens of the text also end.
   Occurrences are considered in descending order of n (from ``max_ngram`` to ``min_ngram``), for equal n the
   most recent one first. No position is considered twice, and at most ``MAX_OCCURRENCES`` are.
2. The *continuation* of an occurrence is ``t[end + 1], t[end + 2], ...``. At the end of the text it continues
   with its own tokens (the overlapping copy of LZ77), so it never ends.
3. Continuations are merged into a trie below the root, the last token of the text. The first one is branch 1.
   Each further continuation that leaves the trie before a leaf adds a branch. A branch adds at most half of
   the free nodes (rounded up). After ``num_branches`` branches, or when there is no further node or
   occurrence, the remaining free nodes extend the first branch.

The op ``ngram_draft`` searches the text; the index ``specdec_ext._host.NgramIndex`` gives the same drafts
without a search.
Source: prompt lookup decoding (Saxena 2023), which copies a single chain from the first occurrence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

MAX_OCCURRENCES = 64


def propose(
    text: Sequence[int], min_ngram: int, max_ngram: int, num_tokens: int, num_branches: int
) -> tuple[list[int], list[int]]:
    """Draft at most ``num_tokens`` nodes on at most ``num_branches`` paths.

    Returns ``(tokens, parents)`` of the draft nodes, without the root: entry i is tree node i + 1, and a
    parent is 0 (the root) or the number of an earlier node. Both are empty if the last ``min_ngram`` tokens
    did not occur before.
    """
    trie = _Trie()
    num_paths = 0
    ends = find_occurrences(text, min_ngram, max_ngram)[:MAX_OCCURRENCES]
    for end in ends:
        num_free = num_tokens - len(trie.tokens)
        if num_free == 0 or num_paths == num_branches:
            break
        num_shared, leaf_reached = trie.match(continuation(text, end, num_tokens))
        if not leaf_reached:
            trie.insert(continuation(text, end, num_shared + (num_free + 1) // 2))
            num_paths += 1
    if ends:
        num_free = num_tokens - len(trie.tokens)
        num_shared, _ = trie.match(continuation(text, ends[0], num_tokens))
        trie.insert(continuation(text, ends[0], num_shared + num_free))
    return trie.tokens, trie.parents


def find_occurrences(text: Sequence[int], min_ngram: int, max_ngram: int) -> list[int]:
    """End positions of all earlier occurrences of the last tokens, in the order of rule 1."""
    text = list(text)
    ends: list[int] = []
    for n in range(min(max_ngram, len(text)), min_ngram - 1, -1):
        for end in range(len(text) - 2, n - 2, -1):
            if text[end - n + 1 : end + 1] == text[-n:] and end not in ends:
                ends.append(end)
    return ends


def match_length(text: Sequence[int], min_ngram: int, max_ngram: int) -> int:
    """The length of the first occurrence; 0 if there is none."""
    lengths = range(max_ngram, min_ngram - 1, -1)
    return next((n for n in lengths if find_occurrences(text, n, n)), 0)


def continuation(text: Sequence[int], end: int, length: int) -> list[int]:
    """The ``length`` tokens after position ``end``, copied one by one, as the copy may overlap itself."""
    grown = list(text)
    for source in range(end + 1, end + 1 + length):
        grown.append(grown[source])
    return grown[len(text) :]


class _Trie:
    """A trie with nodes in order of creation; node 0 is the root and has no entry."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []

    def match(self, path: Sequence[int]) -> tuple[int, bool]:
        """The number of leading tokens of ``path`` in the trie, and whether they end in a leaf."""
        nodes = list(self._walk(path))
        return len(nodes), bool(nodes) and nodes[-1] not in self.parents

    def insert(self, path: Sequence[int]) -> None:
        nodes = [0, *self._walk(path)]
        for token in path[len(nodes) - 1 :]:
            self.tokens.append(token)
            self.parents.append(nodes[-1])
            nodes.append(len(self.tokens))

    def _walk(self, path: Sequence[int]) -> Iterator[int]:
        edges = zip(self.parents, self.tokens, strict=True)
        children = {edge: node for node, edge in enumerate(edges, start=1)}
        node = 0
        for token in path:
            if (node, token) not in children:
                return
            node = children[node, token]
            yield node
