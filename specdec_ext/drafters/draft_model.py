"""Classic draft model (Leviathan et al. 2023; Chen et al. 2023): a smaller model of the same vocabulary.

Its draws use the target's processing and the target's own noise (``Context.draw``), so in sampling, too,
it proposes the token that the target would emit wherever the two distributions agree; verification is the
match rule in both cases.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec_ext.context import Context
from specdec_ext.drafters.base import Drafter
from specdec_ext.sampler import Accepted
from specdec_ext.target import Target, TargetOutput
from specdec_ext.tree import DraftTree


class DraftModelDrafter(Drafter):
    """Drafts a chain with a Hugging Face causal language model.

    Rows that have grown to the draft model's ``max_position_embeddings`` are no longer drafted for; a
    warning says so.

    Args:
        model: the draft model; same tokenizer as the target.
        num_draft_tokens: length of the chain.
    """

    def __init__(self, model: PreTrainedModel, num_draft_tokens: int = 4):
        if num_draft_tokens < 1:
            raise ValueError(f"num_draft_tokens must be at least 1, got {num_draft_tokens}")
        self.model = model
        self.num_draft_tokens = num_draft_tokens

    def start(self, context: Context, model: PreTrainedModel, output: TargetOutput) -> None:
        vocabularies = [
            each.config.get_text_config(decoder=True).vocab_size for each in (model, self.model)
        ]
        if model.device != self.model.device:
            raise ValueError(
                f"the draft model is on {self.model.device}, the target on {model.device}; move one of them"
            )
        # Embeddings are often padded to different sizes; only tokens that both know are drafted.
        self._vocab_size = min(vocabularies)
        self._target = Target(self.model, None, context.max_length + self.num_draft_tokens)
        if self._target.tree_refusal is not None:
            raise ValueError(
                f"{type(self.model).__name__} can't be a draft model: {self._target.tree_refusal}"
            )
        self._max_positions = getattr(self._target.config, "max_position_embeddings", None)
        self._warned = False
        self._rows = list(context.rows)
        self._layout = list(context.rows)
        self._drafts = self._room(context) > 0
        if self._drafts:
            self._target.prefill(self._legal(context.input_ids), context.attention_mask)
        # Tokens of each row that the draft cache holds, counted from the first generated one.
        self._cached = {row: 0 for row in context.rows}
        self._drafted = 0

    def _legal(self, tokens: Tensor) -> Tensor:
        """A token the draft model has no embedding for can't be read; the draft is a guess anyway."""
        return tokens.clamp(max=self._vocab_size - 1)

    def _room(self, context: Context) -> int:
        """How many tokens can be drafted before the longest row runs out of the model's positions."""
        if self._max_positions is None:
            return self.num_draft_tokens
        room = self._max_positions - 1 - max(context.root_positions)
        if room < 1 and not self._warned:
            self._warned = True
            warnings.warn(
                f"the draft model {type(self.model).__name__} has {self._max_positions} positions and the "
                "text is longer: from here on it is decoded without drafts. Use drafter='ngram' or a draft "
                "model with a longer context.",
                stacklevel=2,
            )
        return room

    def propose(self, context: Context) -> DraftTree:
        room = self._room(context)
        # The longest row only grows and rows share a forward pass: once out of room, out for good.
        self._drafts = self._drafts and room > 0
        if not self._drafts:
            self._drafted = 0
            return DraftTree.root(context.roots)
        self._follow_rows(context.rows)
        logits = self._catch_up(context)
        # All rows draft in step: one that has no room left must not ask for positions beyond its last.
        length = min(self.num_draft_tokens, min(context.remaining) - 1, room)
        positions = torch.tensor(context.root_positions, device=context.device)
        drafts: list[Tensor] = []
        for step in range(length):
            tokens = context.draw(
                logits[:, : self._vocab_size], (positions + step + 1).tolist(), context.rows
            )
            drafts.append(tokens)
            if step + 1 < length:
                logits = self._advance(DraftTree.root(tokens))
        # Of a chain of n drafts the first n - 1 are in the draft cache now, after the root.
        self._drafted = length
        roots = context.roots
        if not drafts:
            return DraftTree.root(roots)
        return DraftTree.chain(roots, torch.stack(drafts, dim=1))

    def _catch_up(self, context: Context) -> Tensor:
        """Read the tokens committed since the last call; logits after the last of them."""
        pending = [context.generated[row][self._cached[row] :] for row in context.rows]
        width = max(map(len, pending))
        padded = torch.tensor(
            [new + [0] * (width - len(new)) for new in pending], device=context.device
        )
        counts = torch.tensor([len(new) for new in pending], device=context.device)
        tree = DraftTree.chain(self._legal(padded[:, 0]), self._legal(padded[:, 1:]), counts - 1)
        for row, new in zip(context.rows, pending, strict=True):
            self._cached[row] += len(new)
        return self._advance(tree, counts - 1)

    def _advance(self, tree: DraftTree, last: Tensor | None = None) -> Tensor:
        """Run a chain and keep its first ``last[r] + 1`` nodes; ``[rows, vocab]`` logits after them."""
        if last is None:
            last = torch.zeros(tree.num_rows, dtype=torch.long, device=tree.tokens.device)
        logits = self._target.forward(tree).logits
        path = torch.arange(tree.num_nodes, device=last.device).expand(tree.num_rows, -1)
        self._target.commit(torch.where(path <= last[:, None], path, -1), last)
        return logits[torch.arange(len(last), device=last.device), last]

    def commit(self, context: Context, accepted: Accepted, output: TargetOutput) -> None:
        """Rejected drafts leave the draft cache; it holds the root and all drafts but the last."""
        if self._drafted < 1:
            return
        written = self._drafted - 1
        kept = accepted.num_accepted.clamp(max=written)
        self._target.rewind(written - kept)
        for row, count in zip(context.rows, kept.tolist(), strict=True):
            self._cached[row] += count

    def _follow_rows(self, rows: list[int]) -> None:
        """Rows that ended leave the draft cache, too."""
        if rows == self._rows:
            return
        order = [self._layout.index(row) for row in rows]
        order += [i for i in range(len(self._layout)) if i not in order]
        self._layout = [self._layout[i] for i in order]
        self._target.reorder(order, len(rows))
        self._rows = list(rows)
