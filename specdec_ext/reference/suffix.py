"""Specification of suffix decoding: draft what followed the last tokens most often.

A *source* is a list of documents: the text of the request so far, or the outputs of past requests. For each
source, the request's first, and each m from ``max_match`` down to 1:

1. The *match* is the last m tokens of the request, where the source has it. An occurrence counts if a token
   of the same document follows it. Of m + 1 and m with the same occurrences only m + 1 is of interest.
2. The draft grows from the match as root. Below a node, whose string (match and path) has n occurrences,
   a token that follows k of them has probability ``P(node) * k / n``; the root has 1. Tokens with less than
   ``min_probability`` are not candidates. Repeatedly the candidate with the highest probability becomes a
   node (among equals the one found first; the candidates below a node are found in the order: most frequent
   first; among equals the one that last occurred later, or, for more than ``MAX_TIED`` occurrences, the
   smaller token). Without ``tree`` only the first candidate below a node is one.
3. It has at most ``min(num_draft_tokens, floor(factor * m + offset))`` nodes; match and path together have
   at most ``DEPTH`` tokens.
4. Its score is the sum of its probabilities: the number of tokens that would be accepted if the counts were
   the law. The draft with the highest score wins, among equals the one that was found first.

The compiled form is ``csrc/host/suffix_draft.h``. Source: SuffixDecoding (Oliaro et al. 2024), whose n counts
occurrences that nothing follows, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

DEPTH = 64
MAX_TIED = 16

Documents = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Rule:
    """How much is drafted; the arguments of ``specdec_ext.SuffixDrafter``."""

    num_draft_tokens: int
    max_match: int
    factor: float = 1.0
    offset: float = 0.0
    min_probability: float = 0.1
    tree: bool = True


@dataclass
class Draft:
    """Entry i is tree node i + 1; parent 0 is the root."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    match_length: int = 0
    score: float = 0.0


def propose(request: Sequence[int], outputs: Documents, rule: Rule) -> Draft:
    """The draft for the tokens after ``request``; ``outputs`` are those of past requests, oldest first."""
    best = Draft()
    for source in ([request], outputs):
        longer = 0
        for length in range(min(rule.max_match, len(request)), 0, -1):
            match = list(request[-length:])
            occurrences = sum(map(len, _continuations(source, match).values()))
            if occurrences > longer:
                draft = _grow(source, match, rule)
                best = max(best, draft, key=lambda draft: draft.score)
            longer = occurrences
    return best


def _grow(source: Documents, match: list[int], rule: Rule) -> Draft:
    budget = min(rule.num_draft_tokens, math.floor(rule.factor * len(match) + rule.offset))
    draft = Draft(match_length=len(match))
    strings = [match]
    candidates = _candidates(source, match, 1.0, 0, rule)
    while candidates and len(draft.tokens) < budget:
        best = max(candidates, key=lambda candidate: candidate[0])
        candidates.remove(best)
        probability, parent, token = best
        draft.tokens.append(token)
        draft.parents.append(parent)
        draft.score += probability
        strings.append([*strings[parent], token])
        candidates += _candidates(source, strings[-1], probability, len(draft.tokens), rule)
    return draft


def _candidates(
    source: Documents, string: list[int], probability: float, node: int, rule: Rule
) -> list[tuple[float, int, int]]:
    """(probability, parent, token) of what may follow ``string``, in the order of rule 2."""
    followers = _continuations(source, string)
    if len(string) >= DEPTH or not followers:
        return []

    def order(token: int) -> tuple[int, tuple[int, int], int]:
        found = followers[token]
        document, start = max(found) if len(found) <= MAX_TIED else (0, 0)
        return -len(found), (-document, -start), token

    total = sum(map(len, followers.values()))
    shares = [
        (probability * (len(followers[token]) / total), node, token)
        for token in sorted(followers, key=order)
    ]
    likely = [share for share in shares if share[0] >= rule.min_probability]
    return likely if rule.tree else likely[:1]


def _continuations(source: Documents, string: list[int]) -> dict[int, list[tuple[int, int]]]:
    """For each token that follows ``string``: the (document, position) pairs where that happens."""
    found: dict[int, list[tuple[int, int]]] = {}
    for number, document in enumerate(source):
        for start in range(len(document) - len(string)):
            if list(document[start : start + len(string)]) == string:
                found.setdefault(document[start + len(string)], []).append((number, start))
    return found
