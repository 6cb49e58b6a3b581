"""The ops written in PyTorch, the baselines of ``bench_ops.py``.

They are written to be fast: batched over rows and nodes, and without host synchronisation except in
``verify_recursive``, whose walk has no fixed length. They need valid inputs (no inactive rows, trees of at
most ``LEVELS`` levels) and return only the outputs that cost time. A test compares them with the ops.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

LEVELS = 8  # levels of the benchmark's trees, root included


def tree_mask(parents: Tensor, root_positions: Tensor) -> tuple[Tensor, ...]:
    """Ancestors (as booleans), depths, positions, first_child, next_sibling, paths."""
    batch, nodes = parents.shape
    order = torch.arange(nodes, device=parents.device)
    is_child = parents[:, None, :] == order[:, None]  # [batch, parent, child]
    reached = (is_child.mT | (order[:, None] == order)).float()
    for _ in range((LEVELS - 1).bit_length()):
        reached = (reached @ reached).clamp(max=1)
    ancestors = reached > 0
    depths = ancestors.sum(-1) - 1
    later = (parents[:, :, None] == parents[:, None, :]) & (order > order[:, None])
    slots = torch.where(ancestors, depths[:, None, :], nodes)
    paths = torch.full((batch, nodes, nodes + 1), -1, device=parents.device)
    paths.scatter_(2, slots, order.expand(batch, nodes, nodes))
    positions = root_positions[:, None] + depths
    return ancestors, depths, positions, _first(is_child), _first(later), paths[..., :nodes]


def _first(flags: Tensor) -> Tensor:
    """Index of the first True in the last dimension, or -1."""
    return torch.where(flags.any(-1), flags.int().argmax(-1), -1)


def build_dynamic_tree(
    scores: Tensor, tokens: Tensor, parents: Tensor, root_tokens: Tensor, nodes: int
) -> tuple[Tensor, Tensor, Tensor]:
    chosen = scores.topk(nodes - 1).indices.sort().values
    batch, candidates = scores.shape
    node_of = torch.zeros(batch, candidates + 1, dtype=torch.int64, device=scores.device)
    node_of.scatter_(1, chosen, torch.arange(1, nodes, device=scores.device).expand_as(chosen))
    # Parent -1, the root, indexes the extra entry at the end, which is node 0.
    tree_parents = node_of.gather(1, parents.gather(1, chosen) % (candidates + 1))
    return (
        torch.cat([root_tokens[:, None], tokens.gather(1, chosen)], 1),
        torch.cat([torch.full_like(root_tokens, -1)[:, None], tree_parents], 1),
        chosen,
    )


def merge_trees(
    tokens: Sequence[Tensor], parents: Sequence[Tensor], nodes: int
) -> tuple[Tensor, Tensor]:
    joined = torch.cat([tokens[0], *(each[:, 1:] for each in tokens[1:])], 1)
    links, offset = [parents[0].clamp(min=0)], parents[0].shape[1] - 1
    for each in parents[1:]:  # node i > 0 of this tree is number i + offset
        links.append(torch.where(each[:, 1:] > 0, each[:, 1:] + offset, 0))
        offset += each.shape[1] - 1
    link = torch.cat(links, 1)
    order = torch.arange(offset + 1, device=joined.device)
    paths = torch.zeros_like(joined)  # a hash of the tokens on the way to a node
    for _ in range(LEVELS - 1):
        paths = torch.where(order > 0, paths.gather(1, link) * 6364136223846793005 + joined + 1, 0)
    first = (paths[:, :, None] == paths[:, None, :]).int().argmax(-1)
    number = (first == order).cumsum(1) - 1
    places = torch.where((first == order) & (number < nodes), number, nodes)
    tree_tokens = joined.new_zeros(len(joined), nodes + 1).scatter(1, places, joined)
    above = number.gather(1, first.gather(1, link)).where(order > 0, -1)
    tree_parents = joined.new_full((len(joined), nodes + 1), -2).scatter(1, places, above)
    return tree_tokens[:, :nodes], tree_parents[:, :nodes]


def ngram_draft(
    tokens: Tensor, lengths: Tensor, nodes: int, min_ngram: int, max_ngram: int, num_branches: int
) -> tuple[Tensor, Tensor, Tensor]:
    """A chain, whatever ``num_branches`` is."""
    capacity = tokens.shape[1]
    order = torch.arange(capacity, device=tokens.device)
    last = lengths[:, None] - 1
    agree = order < last
    matched = torch.zeros_like(tokens)
    for n in range(max_ngram):
        suffix = tokens.gather(1, (last - n).clamp(min=0))
        agree &= functional.pad(tokens[:, : capacity - n], (n, 0), value=-1) == suffix
        matched += agree
    keys = torch.where(matched >= min_ngram, matched * capacity + order, -1)
    best, end = keys.max(1, keepdim=True)
    found = best >= 0
    places = end + 1 + torch.arange(nodes - 1, device=tokens.device) % (last - end).clamp(min=1)
    drafts = torch.where(found, tokens.gather(1, places.clamp(max=capacity - 1)), 0)
    parents = torch.where(found, torch.arange(nodes - 1, device=tokens.device), -2)
    return (
        torch.cat([tokens.gather(1, last), drafts], 1),
        functional.pad(parents, (1, 0), value=-1),
        torch.where(found, best // capacity, 0)[:, 0],
    )


def verify_match_greedy(
    logits: Tensor, tokens: Tensor, parents: Tensor, *_: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns ``num_accepted`` and ``next_token``."""
    return _walk(logits.argmax(-1), tokens, parents)


def verify_match_sampled(
    logits: Tensor, tokens: Tensor, parents: Tensor, *_: Tensor
) -> tuple[Tensor, Tensor]:
    noise = torch.empty_like(logits, dtype=torch.float32).exponential_().log_()
    return _walk((logits - noise).argmax(-1), tokens, parents)


def _walk(picks: Tensor, tokens: Tensor, parents: Tensor) -> tuple[Tensor, Tensor]:
    node = torch.zeros_like(picks[:, :1])
    accepted = torch.zeros_like(picks[:, 0])
    for _ in range(LEVELS - 1):
        carries = (parents == node) & (tokens == picks.gather(1, node))
        found = carries.any(1)
        node = torch.where(found[:, None], carries.int().argmax(1, keepdim=True), node)
        accepted += found
    return accepted, picks.gather(1, node)[:, 0]


def verify_rejection(
    logits: Tensor, draft_probs: Tensor, tokens: Tensor, *_: Tensor
) -> tuple[Tensor, Tensor]:
    """A chain: accept while u * draft < target, then draw from the residual."""
    target = logits.float().softmax(-1)
    of_token, of_draft = _chain_probs(target, draft_probs, tokens)
    accepted = (torch.rand_like(of_token) * of_draft < of_token).int().cumprod(1).sum(1)
    return accepted, _correction(target, draft_probs, accepted, torch.ones_like(target[..., 0]))


def verify_block(
    logits: Tensor, draft_probs: Tensor, tokens: Tensor, *_: Tensor
) -> tuple[Tensor, Tensor]:
    """A chain by block verification (Sun et al. 2024): accept the last i with u_i < h_i."""
    target = logits.float().softmax(-1)
    of_token, of_draft = _chain_probs(target, draft_probs, tokens)
    keep = torch.ones_like(target[..., 0])
    for i in range(of_token.shape[1]):
        keep[:, i + 1] = (keep[:, i] * of_token[:, i] / of_draft[:, i]).clamp(max=1)
    residual = (keep[..., None] * target - draft_probs).clamp(min=0).sum(-1)[:, 1:-1]
    bound = torch.cat([residual / (residual + 1 - keep[:, 1:-1]), keep[:, -1:]], 1)
    passed = torch.rand_like(bound) < bound.nan_to_num(1.0)
    order = torch.arange(1, bound.shape[1] + 1, device=bound.device)
    accepted = (passed * order).amax(1)
    return accepted, _correction(target, draft_probs, accepted, keep)


def _chain_probs(target: Tensor, draft_probs: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    drafted = tokens[:, 1:, None]
    return target[:, :-1].gather(2, drafted)[..., 0], draft_probs[:, :-1].gather(2, drafted)[..., 0]


def _correction(target: Tensor, draft_probs: Tensor, node: Tensor, keep: Tensor) -> Tensor:
    """A token from the residual at ``node``, or from the target at the last node."""
    rows = torch.arange(len(node), device=node.device)
    is_last = node == target.shape[1] - 1
    draft = torch.where(is_last[:, None], 0, draft_probs[rows, node])
    residual = (keep[rows, node, None] * target[rows, node] - draft).clamp(min=0)
    return (residual / torch.empty_like(residual).exponential_()).argmax(-1)


def verify_recursive(
    logits: Tensor, draft_probs: Tensor, tokens: Tensor, parents: Tensor, *_: Tensor
) -> tuple[list[int], list[int]]:
    """Goes row by row and sibling by sibling; the host reads the result of every test."""
    target = logits.float().softmax(-1)
    walked = [
        _walk_recursively(target[row], draft_probs[row], tokens[row], parents[row])
        for row in range(len(tokens))
    ]
    return [accepted for accepted, _ in walked], [token for _, token in walked]


def _walk_recursively(
    target: Tensor, draft_probs: Tensor, tokens: Tensor, parents: Tensor
) -> tuple[int, int]:
    node, depth = 0, 0
    ids, links = tokens.tolist(), parents.tolist()
    while True:
        residual, draft = target[node], draft_probs[node].clone()
        for child in (i for i, parent in enumerate(links) if parent == node):
            token = ids[child]
            if bool(torch.rand((), device=residual.device) * draft[token] < residual[token]):
                node, depth = child, depth + 1
                break
            rest = (residual - draft).clamp(min=0)
            residual = rest / rest.sum()
            draft[token] = 0
            draft /= draft.sum()
        else:
            return depth, int(torch.multinomial(residual, 1))


def sample_filter(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """All four filters on, after one sort."""
    scores = logits.float() / temperature[:, None]
    ordered, order = scores.sort(dim=-1, descending=True)
    ordered = ordered.masked_fill(ordered < ordered.gather(1, top_k[:, None] - 1), -torch.inf)
    probs = ordered.softmax(-1)
    ordered = ordered.masked_fill(probs.cumsum(-1) - probs >= top_p[:, None], -torch.inf)
    probs = ordered.softmax(-1)
    ordered = ordered.masked_fill(probs < min_p[:, None] * probs[:, :1], -torch.inf)
    return torch.empty_like(scores).scatter_(1, order, ordered)


def adjust_logits(
    logits: Tensor,
    tokens: Tensor,
    parents: Tensor,
    text: Tensor,
    penalty: Tensor,
    size: int,
    bias: Tensor,
    suppressed: Tensor,
) -> Tensor:
    """A bias, a repetition penalty, a ban of n-grams and suppressed tokens; all rows have the same length."""
    columns, vocab = text.shape[1], logits.shape[-1]
    _, depths, *_, paths = tree_mask(parents, torch.zeros_like(parents[:, 0]))
    path = tokens[:, None].expand_as(paths).gather(2, paths.clamp(min=0))[..., 1:LEVELS]
    shape = (*tokens.shape, columns)
    padding = torch.full_like(path, vocab)
    texts = torch.cat([padding, text[:, None].expand(shape), path], -1)
    # A node of depth d leaves out the first d columns, so that all texts end in the last column.
    order = torch.arange(columns + path.shape[-1], device=text.device)
    ids = texts.gather(2, depths[..., None] + order)
    scores = functional.pad(logits.float() + bias, (0, 1))
    chosen = scores.gather(2, ids)
    scores.scatter_(2, ids, torch.where(chosen < 0, chosen * penalty, chosen / penalty))
    windows = ids.unfold(2, size, 1)
    repeats = (windows[..., :-1] == ids[:, :, None, order[-size + 1 :]]).all(-1)
    banned = torch.zeros_like(scores, dtype=torch.bool)
    banned.scatter_(2, torch.where(repeats, windows[..., -1], vocab), True)
    return scores.masked_fill(banned | functional.pad(suppressed, (0, 1)), -torch.inf)[..., :vocab]


def kv_compact(
    caches: Sequence[Tensor],
    path: Tensor,
    source_starts: Tensor,
    target_starts: Tensor,
    page_table: Tensor | None,
) -> None:
    """``path`` holds only accepted tokens, equally many in all rows, so the host must know their number."""
    steps = torch.arange(path.shape[1], device=path.device)
    sources, targets = source_starts[:, None] + path, target_starts[:, None] + steps
    rows = torch.arange(len(path), device=path.device)[:, None]
    for cache in caches:
        if page_table is None:
            cache[rows, :, targets] = cache[rows, :, sources]
        else:
            size = cache.shape[2]
            moved = cache[page_table[rows, sources // size], :, sources % size]
            cache[page_table[rows, targets // size], :, targets % size] = moved


def tree_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, page_table: Tensor | None, scale: float
) -> Tensor:
    """Under a ready mask ``[batch, 1, nodes, keys]``; pages are gathered first."""
    if page_table is not None:
        slots = mask.shape[-1]
        key, value = (
            pool[page_table].transpose(1, 2).flatten(2, 3)[:, :, :slots] for pool in (key, value)
        )
    attended = functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scale, enable_gqa=True
    )
    return attended.transpose(1, 2)


linear = functional.linear
