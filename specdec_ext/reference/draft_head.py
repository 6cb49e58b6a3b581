"""Specification of ``draft_head``: a draft head reads the committed text and drafts a tree.

A row's text is x[0] .. x[T]. The target has computed features g[0] .. g[T-1] of all tokens but the last.
Element t of the head's sequence is the pair (embedding of x[t+1], g[t]) at position t, so the head knows
which token the target sampled. There are two phases:

    extend   The head runs on the new elements and adds them to its cache. The output of the last element,
             T-1, gives the distribution of x[T+1], the children of the root x[T].
    draft    A node at depth d runs at position T+d-1 as the element (embedding of its token, feedback of its
             parent). It sees the committed elements, its ancestors and itself, and gives the distribution of
             its children.

The computation for an element with embedding e (Li et al. 2024, 2025; DeepSeek-AI 2024;
:mod:`specdec_ext.reference.draft_head_layers`)::

    h = fc(cat(e, g))                           eagle1; drafting: fc(cat(e, feedback))
    h = fc(cat(embedding_norm(e), hidden_norm(g)))    mtp; drafting: the same of the feedback
    h = fc(fc_norm_i(input_norm(g)_i))          eagle3; drafting: feedback. Without fc: h is the normed g
    h = h + attention(h)                        eagle1, layer 0
    h = r + attention(cat(input_layernorm(e), hidden_norm(h)))    eagle3, layer 0, with
        r = hidden_norm(h) if norm_before_residual else h
    h = h + attention(input_layernorm(h))       other layers, and layer 0 of mtp
    h = h + down(silu(gate(u)) * up(u)), u = post_attention_layernorm(h)    every layer
    eagle1: logits = lm_head(h), feedback = h
    eagle3: logits = lm_head(norm(h)), feedback = norm(h) if norm_output else h
    mtp:    logits = lm_head(norm(h)), feedback = norm(h)

P-EAGLE (arXiv 2602.01469) drafts without feedback. All nodes at depth d > 0 have the same distribution of
children, the output of mask element d: (embedding of the mask token, ``mask_hidden``) at position T+d-1. Mask
elements come after the committed elements and attend causally.

:mod:`specdec_ext.reference.draft_head_tree` specifies which nodes are drafted. In a row with noise,
:func:`specdec_ext.reference.couple_logits.couple_logits` is applied to the logits first.

Numerics: activations have the dtype of the weights. Norms, rotation, attention scores and weights, and logits
are float32, or float64 if the weights are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec_ext.heads.config import DraftHead
from specdec_ext.ops.couple_logits import DraftNoise
from specdec_ext.reference.couple_logits import couple_logits
from specdec_ext.reference.draft_head_layers import HeadLayers, wide
from specdec_ext.reference.draft_head_tree import Level, dynamic_tree, static_tree
from specdec_ext.tree.config import TreeConfig
from specdec_ext.tree.draft_tree import INACTIVE, ROOT_PARENT

# Number of new elements that run at a time; the attention scores of a long prompt would not fit in memory.
CHUNK = 256


def draft_head(
    head: DraftHead,
    embedding: Tensor,
    lm_head: Tensor,
    cosines: Tensor,
    sines: Tensor,
    keys: Tensor,
    values: Tensor,
    tokens: Tensor,
    features: Tensor,
    counts: Tensor,
    lengths: Tensor,
    positions: Tensor,
    roots: Tensor,
    tree: TreeConfig,
    noise: DraftNoise | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Extend the head's cache and draft. All floating tensors but the two rope tables have the same dtype.

    The other arguments and the outputs are those of :func:`specdec_ext.ops.draft_head`. ``tokens`` holds
    x[t+1] and ``features`` g[t] of each new element.

    Args:
        head: the head.
        embedding: ``[vocab, hidden]``, the head's own or the target's.
        lm_head: ``[draft_vocab, hidden]``, the head's own or the target's.
    """
    assert tree.num_nodes is not None
    shape = len(roots), tree.num_nodes
    drafted_tokens, drafted_parents = roots.new_zeros(shape), roots.new_full(shape, INACTIVE)
    scores = torch.full(shape, -torch.inf, dtype=wide(keys.dtype), device=keys.device)
    drafted_tokens[:, 0], drafted_parents[:, 0], scores[:, 0] = roots, ROOT_PARENT, 0
    for row, (count, length, position, root) in enumerate(
        torch.stack([counts, lengths, positions, roots], dim=1).tolist()
    ):
        if count == 0:
            continue
        cache = keys[:, row], values[:, row]
        layers = HeadLayers(head, cosines, sines, *cache, first_position=position - length)
        own_noise = None if noise is None else noise.of_rows(roots.new_tensor([row]))
        draft = _Draft(head, layers, embedding, lm_head, length, position, own_noise)
        level = draft.extend(tokens[row, :count], features[row, :count])
        if head.config.mask_token_id is not None:
            draft.run_masks(head.config.mask_token_id, tree.depth - 1)
        if tree.links:
            drafted = static_tree(draft, level, root, tree.links)
        else:
            drafted = dynamic_tree(draft, level, root, tree)
        size = len(drafted[0])
        for whole, part in zip((drafted_tokens, drafted_parents, scores), drafted, strict=True):
            whole[row, :size] = part
    return drafted_tokens, drafted_parents, scores


class _Draft:
    """The draft of one row.

    Args:
        length: number of slots in use.
        position: position of the next element.
        noise: of this row, or None.
    """

    def __init__(
        self,
        head: DraftHead,
        layers: HeadLayers,
        embedding: Tensor,
        lm_head: Tensor,
        length: int,
        position: int,
        noise: DraftNoise | None = None,
    ):
        self._head, self._layers = head, layers
        self._embedding, self._lm_head = embedding, lm_head
        self._used, self._position = length, position
        self._noise = noise
        self._mask_log_probs: list[Tensor] | None = None

    def extend(self, tokens: Tensor, features: Tensor) -> Level:
        """Append committed elements; returns the level of the root, which belongs to the last element."""
        for chunk, chunk_features in zip(tokens.split(CHUNK), features.split(CHUNK), strict=True):
            embeddings = self._embedding[chunk]
            hidden = self._layers.combine(embeddings, chunk_features)
            output, seen = self._append(embeddings, hidden)
        return self._level(output[-1:], seen[-1:], [self._position - 1])

    def run_masks(self, token: int, count: int) -> None:
        """Run the mask elements of P-EAGLE, so that :meth:`run` uses their distributions."""
        mask = torch.full((count,), token, device=self._embedding.device)
        embeddings = self._embedding[mask]
        features = self._head.tensors["mask_hidden"].expand(count, -1)
        first = self._position
        output, seen = self._append(embeddings, self._layers.combine(embeddings, features))
        level = self._level(output, seen, range(first, first + count))
        self._mask_log_probs = list(level.log_probs.split(1))

    def _append(self, embeddings: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Run consecutive elements; returns ``(output, slots that each element sees)``."""
        new, device = len(hidden), hidden.device
        slots = self._used + torch.arange(new, device=device)
        positions = self._position + torch.arange(new, device=device)
        self._used, self._position = self._used + new, self._position + new
        seen = torch.arange(self._used, device=device) <= slots[:, None]
        return self._layers.forward(embeddings, hidden, slots, positions, seen), seen

    def run(self, level: Level, parents: Sequence[int], tokens: Tensor) -> Level:
        """Run the next level, whose node i has token ``tokens[i]`` and parent ``parents[i]`` in ``level``."""
        new, device = len(tokens), tokens.device
        if self._mask_log_probs is not None:
            log_probs = self._mask_log_probs.pop(0).expand(new, -1)
            return Level(log_probs, level.feedback, level.seen)
        embeddings = self._embedding[tokens]
        hidden = self._layers.feed_back(embeddings, level.feedback[parents])
        slots = self._used + torch.arange(new, device=device)
        positions = torch.full((new,), self._position, device=device)
        self._used, self._position = self._used + new, self._position + 1
        itself = torch.eye(new, dtype=torch.bool, device=device)
        seen = torch.cat([level.seen[parents], itself], dim=1)
        output = self._layers.forward(embeddings, hidden, slots, positions, seen)
        return self._level(output, seen, positions.tolist())

    def _level(self, output: Tensor, seen: Tensor, positions: Sequence[int]) -> Level:
        """The level of elements with these outputs, positions and visible slots."""
        logits, feedback = self._layers.logits(output, self._lm_head)
        if self._noise is not None:
            # An element at position t has the token of position t + 1, and its children are at t + 2.
            rows = torch.zeros(len(positions), dtype=torch.long, device=logits.device)
            children = torch.tensor(positions, device=logits.device) + 2
            mapping = self._head.tensors.get("draft_to_target")
            logits = couple_logits(logits, self._noise.of_rows(rows), children, mapping)
        logits = torch.where(logits.isnan(), -torch.inf, logits)
        return Level(logits.log_softmax(dim=-1), feedback, seen)

    def target_ids(self, ids: Tensor) -> Tensor:
        """Map ids of the draft vocabulary to ids of the target."""
        mapping = self._head.tensors.get("draft_to_target")
        return ids if mapping is None else mapping[ids]
