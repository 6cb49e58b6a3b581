"""Specification of ``verify_rejection``, ``verify_recursive`` and ``verify_block``: rules 2, 4 and 3.

The rules are written for sequences of any numbers. With float64 they are compared with the compiled ops; with
fractions, tests enumerate all branches and compute the exact distribution of the text. All randomness of a
walk comes from ``accept(depth, ordinal, target, draft)``, which returns whether ``u * draft < target`` for a
uniform number u of the child number ``ordinal`` of the node at ``depth``.

The compiled ops compute in float32, and keep a scale per node instead of normalised distributions
(``residual.h``). A decision may differ if u is within about 1e-6 of its threshold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from specdec_ext.reference import rng
from specdec_ext.reference.verify_match import BadLogits, check_logits
from specdec_ext.tree.draft_tree import ROOT_PARENT

Distribution = Sequence[Any]  # probability of each token, float or Fraction
Distributions = Callable[[int], Distribution]  # node -> distribution
Accept = Callable[[int, int, Any, Any], bool]
Walk = tuple[list[int], Distribution]  # accepted nodes, distribution of the next token
Stream = tuple[Tensor, Tensor, Tensor]  # seed, row id, root position
Rule = Callable[[list[int], list[int], Distributions, Distributions, Accept], Walk]


def _rejection_walk(
    max_children: int | None,
    tokens: list[int],
    parents: list[int],
    target: Distributions,
    draft: Distributions,
    accept: Accept,
) -> Walk:
    """Rules 2 and 4: siblings were drawn without replacement and are tried in the order of the draws.

    Args:
        max_children: number of children of a node that are tried; None for all.
        tokens: token of each node.
        parents: parent of each node.
        target: ``target(node)`` is the distribution to preserve; it may raise to end the walk.
        draft: ``draft(node)`` is the distribution from which the children of a node were drawn, or all zeros.
        accept: the random decision; see the module's docstring.
    """
    path = [0]
    while True:
        node, depth = path[-1], len(path) - 1
        children = _children(parents, node)[:max_children]
        residual = target(node)
        remaining = draft(node) if children else []
        for ordinal, child in enumerate(children):
            token = tokens[child]
            if not _can_be_drawn(token, remaining):
                continue
            if accept(depth, ordinal, residual[token], remaining[token]):
                path.append(child)
                break
            residual = _normalised_difference(residual, remaining)
            remaining = _without(remaining, token)
        else:
            return path, residual


rejection: Rule = partial(_rejection_walk, 1)  # rule 2
recursive: Rule = partial(_rejection_walk, None)  # rule 4


def block(
    tokens: list[int],
    parents: list[int],
    target: Distributions,
    draft: Distributions,
    accept: Accept,
) -> Walk:
    """Rule 3: accept the longest prefix i of the chain of first children with u_i < h_i (Sun et al. 2024)."""
    path, keeps, targets = [0], [1], [target(0)]
    at_end = False
    while not at_end and keeps[-1] > 0:
        node, keep, probs = path[-1], keeps[-1], targets[-1]
        children = _children(parents, node)[:1]
        if not children or not _can_be_drawn(tokens[children[0]], draft(node)):
            at_end = True
        else:
            token = tokens[children[0]]
            path.append(children[0])
            keeps.append(min(keep * probs[token] / draft(node)[token], 1))
            targets.append(target(path[-1]) if keeps[-1] > 0 else [])
    if at_end and (len(path) == 1 or accept(len(path) - 2, 0, keeps[-1], 1)):
        return path, targets[-1]
    if len(path) > 1:
        path.pop()  # not accepted, or of target probability 0
    while True:
        keep, probs = keeps[len(path) - 1], targets[len(path) - 1]
        residual = _positive_difference([keep * t for t in probs], draft(path[-1]))
        mass = sum(residual)
        total = mass + 1 - keep
        if len(path) == 1 or total == 0 or accept(len(path) - 2, 0, mass, total):
            return path, [r / mass for r in residual] if mass > 0 else probs
        path.pop()


def _children(parents: list[int], node: int) -> list[int]:
    return [child for child in range(node + 1, len(parents)) if parents[child] == node]


def _can_be_drawn(token: int, remaining: Distribution) -> bool:
    return 0 <= token < len(remaining) and remaining[token] > 0


def _positive_difference(target: Distribution, draft: Distribution) -> Distribution:
    return [max(t - d, 0) for t, d in zip(target, draft, strict=True)]


def _normalised_difference(target: Distribution, draft: Distribution) -> Distribution:
    """max(target - draft, 0), normalised; the target itself if the difference is 0 everywhere."""
    difference = _positive_difference(target, draft)
    mass = sum(difference)
    return [d / mass for d in difference] if mass > 0 else target


def _without(draft: Distribution, token: int) -> Distribution:
    """The draft distribution without a token, normalised; all zeros if nothing is left."""
    rest = [0 if v == token else d for v, d in enumerate(draft)]
    mass = sum(rest)
    return [d / mass for d in rest] if mass > 0 else rest


def _verify(
    rule: Rule,
    logits: Tensor,
    draft_probs: Tensor,
    tokens: Tensor,
    parents: Tensor,
    root_positions: Tensor,
    seeds: Tensor,
    row_ids: Tensor,
) -> tuple[Tensor, ...]:
    """Apply a rule to tensors, with the random numbers of the ops."""
    batch, nodes, vocab = logits.shape
    path = parents.new_full((batch, nodes), -1)
    num_accepted, next_token = parents.new_full((batch,), -1), parents.new_full((batch,), -1)
    status = parents.new_zeros(batch)
    for row in range(batch):
        if parents[row, 0] != ROOT_PARENT:
            continue
        stream: Stream = (seeds[row], row_ids[row], root_positions[row])
        examined: list[int] = []

        def target(node: int, row: int = row, examined: list[int] = examined) -> Distribution:
            probs = target_distribution(logits[row, node])
            examined.append(node)
            return probs

        def draft(node: int, row: int = row) -> Distribution:
            return draft_distribution(draft_probs[row, node]).tolist()

        def accept(depth: int, ordinal: int, t: float, d: float, stream: Stream = stream) -> bool:
            bits = rng.round_bits(*stream, depth, rng.PURPOSE_ACCEPT, 4 * ordinal + 1)
            return bool(rng.accept_uniform(bits[-1]).double() * d < t)

        try:
            accepted, probs = rule(
                tokens[row].tolist(), parents[row].tolist(), target, draft, accept
            )
        except BadLogits as error:
            status[row], accepted = error.status, examined
        else:
            bits = rng.round_bits(*stream, len(accepted) - 1, rng.PURPOSE_RESIDUAL, vocab)
            next_token[row] = race(bits.new_tensor(probs, dtype=torch.float64), bits)
        num_accepted[row] = len(accepted) - 1
        path[row, : len(accepted)] = path.new_tensor(accepted)
    return path, num_accepted, next_token, status


# Arguments and outputs are those of the ops of the same names.
verify_rejection = partial(_verify, rejection)
verify_recursive = partial(_verify, recursive)
verify_block = partial(_verify, block)


def target_distribution(logits: Tensor) -> Distribution:
    """The target's distribution: softmax in float64, where +inf counts as the largest float32."""
    logits = logits.float()
    check_logits(logits)
    return logits.clamp(max=torch.finfo(torch.float32).max).double().softmax(dim=-1).tolist()


def draft_distribution(draft_probs: Tensor) -> Tensor:
    """The draft distribution: ``[..., vocab]`` in float64, normalised; invalid or negative entries are 0.

    It is all zeros if the sum is outside 2^-64 .. 2^64; then no token counts as drawn.
    """
    probs = draft_probs.double()
    probs = torch.where((probs > 0) & probs.isfinite(), probs, 0)
    mass = probs.sum(dim=-1, keepdim=True)
    return torch.where((mass >= 2.0**-64) & (mass <= 2.0**64), probs / mass, 0)


def race(probs: Tensor, bits: Tensor) -> Tensor:
    """Draw a token: the arg-max of probability / exponential noise, ties to the lowest token.

    Tokens of probability 0 are never drawn. The descending order of the quotients is a sequence of draws
    without replacement.
    """
    quotients = probs / rng.exponential(bits).double()
    return quotients.max(dim=-1).indices


def draw_drafts(
    draft_probs: Tensor,
    count: int,
    depth: int,
    root_positions: Tensor,
    seeds: Tensor,
    row_ids: Tensor,
) -> Tensor:
    """Draw the children of a node without replacement, in the order that the verification needs.

    The result is the tokens with the largest ``draft_probs / exponential noise``, the largest first. Nodes of
    a row at the same depth may share their noise, because a walk visits only one of them.

    Args:
        draft_probs: ``[batch, ..., vocab]``; the distribution that is passed to the verification for the
            node.
        count: number of children to draw.
        depth: depth of the node.
        root_positions: ``[batch]``; positions of the roots of the round, as for the verification.
        seeds: ``[batch]``.
        row_ids: ``[batch]``.

    Returns:
        ``[batch, ..., count]`` int64; -1 where fewer tokens have a positive probability.
    """
    vocab = draft_probs.shape[-1]
    bits = rng.round_bits(seeds, row_ids, root_positions, depth, rng.PURPOSE_DRAFT, vocab)
    bits = bits.view(len(bits), *[1] * (draft_probs.ndim - 2), vocab)
    weights = draft_distribution(draft_probs)
    quotients, order = (weights / rng.exponential(bits).double()).sort(
        dim=-1, descending=True, stable=True
    )
    drawn = torch.where(quotients > 0, order, -1)[..., :count]
    return torch.nn.functional.pad(drawn, (0, count - drawn.shape[-1]), value=-1)
