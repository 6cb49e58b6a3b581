"""Specification of suffix decoding: draft what followed the last tokens most often.

A *source* is a list of documents: the text of the request so far, or the outputs of past requests. The
following is done for both sources, the request first, and for each m from ``max_match`` down to 1:

1. The *match* is the string of the last m tokens of the request. Its occurrences in the source count if
   another token of the same document follows. If m + 1 has as many occurrences as m, then m is skipped.
2. The draft is a tree with the match as its root. Let n be the number of occurrences of a node's string
   (match and path). A token that follows k of them is a candidate child with probability ``P(node) * k / n``,
   where P(root) is 1. Candidates with less than ``min_probability`` are ignored. The candidate with the
   highest probability becomes the next node, and so on; among equals, the candidate that was added first.
   Candidates below a node are added in descending order of frequency. Equally frequent ones are ordered by
   their last occurrence, the latest first, or by token if they have more than ``MAX_TIED`` occurrences.
   Without ``tree``, each node has only its first candidate.
3. A draft has at most ``min(num_draft_tokens, floor(factor * m + offset))`` nodes. Match and path together
   have at most ``DEPTH`` tokens.
4. The score of a draft is the sum of its probabilities: the expected number of accepted tokens, if the counts
   gave the true distribution. The draft with the highest score is proposed; among equals, the first one.

The compiled form is ``csrc/retrieval/suffix_draft.h``. Source: SuffixDecoding (Oliaro et al. 2024), where n
also counts occurrences without a following token.
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
    """The parameters of the rule, which are arguments of ``specdec_ext.SuffixDrafter``."""

    num_draft_tokens: int
    max_match: int
    factor: float = 1.0
    offset: float = 0.0
    min_probability: float = 0.1
    tree: bool = True


@dataclass
class Draft:
    """A draft. Entry i of ``tokens`` and ``parents`` is tree node i + 1; parent 0 is the root."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    match_length: int = 0
    score: float = 0.0


def propose(request: Sequence[int], outputs: Documents, rule: Rule) -> Draft:
    """Draft the tokens after ``request``; ``outputs`` are those of past requests, the oldest first."""
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
    """(probability, parent, token) of the candidates after ``string``, in the order of rule 2."""
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
    """Token -> the (document, position) pairs at which it follows ``string``."""
    found: dict[int, list[tuple[int, int]]] = {}
    for number, document in enumerate(source):
        for start in range(len(document) - len(string)):
            if list(document[start : start + len(string)]) == string:
                found.setdefault(document[start + len(string)], []).append((number, start))
    return found
