"""Classic draft model (Leviathan et al. 2023; Chen et al. 2023): a smaller model.

By default its draws use the target's processing and the target's own noise (``Context.draw``), so in
sampling, too, it proposes the token that the target would emit wherever the two distributions agree; the
match rule verifies them. Opt-in are independent draws from known probabilities (``Context.sample``), which
the other rules verify.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec_ext.context import Context
from specdec_ext.drafters.base import Drafter
from specdec_ext.drafters.vocabulary import Vocabulary, match_vocabularies
from specdec_ext.models import TargetOutput, make_target, supports, vocab_size
from specdec_ext.models.slots import SlotTarget
from specdec_ext.tree.config import Shape, TreeConfig
from specdec_ext.tree.draft_tree import DraftTree
from specdec_ext.verify.sampler import Accepted

# How many tokens the draft model reads in one pass after the prompt.
BLOCK_TOKENS = 256
# Tokens of a pass up to which row-invariant products are taken, which are faster for few. What is promised
# does not depend on how drafts are rounded.
INVARIANT_ROWS = 128


class DraftModelDrafter(Drafter):
    """Drafts a chain with a Hugging Face causal language model.

    Rows that have grown to the draft model's ``max_position_embeddings`` are no longer drafted for; a
    warning says so.

    Args:
        model: the draft model.
        num_draft_tokens: length of the chain, or of the longest where the controller chooses.
        sampled: draw independently of the target's noise and say from which probabilities, for
            ``generate(verification="rejection")`` or ``"block"``.
        min_confidence: a row's draft ends with the first token to which the draft model gives less than this
            probability (softmax of its logits before any processing); 0 never ends it.
        tokenizer: of the draft model.
        target_tokenizer: of the target. Where the two differ, only tokens that both have are drafted, and
            the draft model reads the text of others with its own tokenizer. Without tokenizers the ids are
            taken to mean the same to both models.
    """

    dead_draft_advice = (
        "Check that both models have the same tokenizer (otherwise pass tokenizer= and target_tokenizer= to "
        "DraftModelDrafter), that the draft model's weights were loaded, that it knows the language and the "
        "chat template of the prompt, and that sampling is not so hot that nothing can be foreseen."
    )

    def __init__(
        self,
        model: PreTrainedModel,
        num_draft_tokens: int = 4,
        *,
        sampled: bool = False,
        min_confidence: float = 0.0,
        tokenizer: Any = None,
        target_tokenizer: Any = None,
    ):
        if num_draft_tokens < 1:
            raise ValueError(f"num_draft_tokens must be at least 1, got {num_draft_tokens}")
        if not 0 <= min_confidence <= 1:
            raise ValueError(f"min_confidence is a probability, 0 (off) to 1, got {min_confidence}")
        if (tokenizer is None) != (target_tokenizer is None):
            raise ValueError(
                "tokenizer and target_tokenizer are needed together, to compare the two vocabularies; pass "
                "both, or neither if draft model and target have the same tokenizer"
            )
        self.model = model
        self.num_draft_tokens = num_draft_tokens
        self._tokenizers = (target_tokenizer, tokenizer)
        self._vocabularies: dict[tuple[int, ...], Vocabulary] = {}  # made once per pair of sizes
        self.sampled, self.min_confidence = sampled, min_confidence

    def start(self, context: Context, model: PreTrainedModel, output: TargetOutput) -> None:
        if model.device != self.model.device:
            raise ValueError(
                f"the draft model is on {self.model.device}, the target on {model.device}; move one of them"
            )
        self._num_logits = output.logits.shape[-1]
        self._vocabulary = self._match_vocabularies(model)
        # A prompt of embeddings has no text: the model begins with any token.
        texts = [self._vocabulary.read(context.prompt(row) or [0]) for row in context.rows]
        width = max(map(len, texts))
        growth = (context.max_length - context.prompt_columns) * self._vocabulary.expansion
        support = supports(self.model)
        if not support.by_slots or support.rollback != "compact":
            raise ValueError(
                f"{type(self.model).__name__} can't be a draft model, whose drafts are taken back token by "
                f"token: {'; '.join(support.reasons)}"
            )
        self._max_slots = width + growth + self.num_draft_tokens
        config = self.model.config.get_text_config(decoder=True)
        self._max_positions = getattr(config, "max_position_embeddings", None)
        self._warned = False
        self._rows = list(context.rows)
        self._layout = list(context.rows)
        # Of each row: tokens in the draft cache, and generated tokens of the target that they stand for.
        self._lengths = dict(zip(context.rows, map(len, texts), strict=True))
        self._cached = {row: 0 for row in context.rows}
        self._drafts: list[list[int]] = []  # of the step under way, per active row
        self._in_room = self._room(self._pending(context)) > 0
        self._unread = texts  # prompts, until somebody asks for a draft

    def shapes(self, context: Context) -> Sequence[Shape]:
        return [TreeConfig(depth=depth) for depth in range(1, self.num_draft_tokens + 1)]

    @property
    def identity(self) -> Hashable:
        named = self.model.config._name_or_path, self.model.num_parameters()
        return super().identity, type(self.model).__name__, *named, self.sampled

    def _match_vocabularies(self, target: PreTrainedModel) -> Vocabulary:
        # What can be drafted is both read and written by the target.
        sizes = min(vocab_size(target), self._num_logits), vocab_size(self.model)
        if sizes not in self._vocabularies:
            self._vocabularies[sizes] = match_vocabularies(
                *sizes, *self._tokenizers, self.model.device
            )
        return self._vocabularies[sizes]

    def _pending(self, context: Context) -> list[list[int]]:
        """What each active row's draft cache does not hold yet."""
        new = [context.generated[row][self._cached[row] :] for row in context.rows]
        return [self._vocabulary.read(tokens) for tokens in new]

    def _room(self, pending: list[list[int]]) -> int:
        """How many tokens can be drafted before the longest row runs out of the model's positions."""
        if self._max_positions is None:
            return self.num_draft_tokens
        lengths = [
            self._lengths[row] + len(new) for row, new in zip(self._rows, pending, strict=True)
        ]
        room = self._max_positions - max(lengths)
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
        if not self._in_room:
            return DraftTree.root(context.roots)
        if self._unread:
            self._read_prompts()
        self._follow_rows(context.rows)
        pending = self._pending(context)
        room = self._room(pending)
        # The longest row only grows and rows share a forward pass: once out of room, out for good.
        self._in_room = room > 0
        if not self._in_room:
            return DraftTree.root(context.roots)
        logits = self._catch_up(pending)
        for row in context.rows:
            self._cached[row] = len(context.generated[row])
        # All rows draft in step. What a row has no use for is cut later, so no row's draft, and with it no
        # text under a rule that depends on drafts, depends on another's.
        length = min(self._asked(context), max(context.remaining) - 1, room)
        chain: list[Tensor] = []
        laws: list[Tensor] = []
        going = torch.ones(len(logits), dtype=torch.bool, device=logits.device)
        counts = torch.zeros_like(going, dtype=torch.long)
        for depth in range(length):
            if depth:
                # One token each: only a row without a choice (NaN) can have drafted one to be spelt out.
                read = [self._vocabulary.read([token])[-1:] for token in chain[-1].tolist()]
                logits = self._advance(read)
            scores = self._vocabulary.for_target(logits)
            tokens, law = self._draw(context, scores, depth)
            going = going & (tokens >= 0)
            counts += going
            chain.append(tokens.clamp(min=0))
            laws.extend([] if law is None else [law])
            if self.min_confidence:
                confidence = scores.float().softmax(dim=-1).gather(1, chain[-1][:, None])[:, 0]
                going = going & (confidence >= self.min_confidence)
            if not going.any():
                break
        if not chain:
            return DraftTree.root(context.roots)
        drafts = torch.stack(chain, dim=1)
        self._drafts = drafts.tolist()
        draft_probs = torch.stack(laws, dim=1) if laws else None
        if draft_probs is not None and (never_read := self._num_logits - draft_probs.shape[-1]):
            draft_probs = torch.nn.functional.pad(draft_probs, (0, never_read))
        return DraftTree.chain(context.roots, drafts, counts, draft_probs)

    def _read_prompts(self) -> None:
        width, device = max(map(len, self._unread)), self.model.device
        ids = [[0] * (width - len(text)) + text for text in self._unread]
        mask = [[0] * (width - len(text)) + [1] * len(text) for text in self._unread]
        target = make_target(self.model, None, self._max_slots)
        assert isinstance(target, SlotTarget)
        target.invariant_rows = INVARIANT_ROWS
        self._target = target
        self._target.prefill(torch.tensor(ids, device=device), torch.tensor(mask, device=device))
        self._unread = []

    def _asked(self, context: Context) -> int:
        """Length of the chain of this step."""
        shape = context.shape
        if not isinstance(shape, TreeConfig):
            return self.num_draft_tokens
        if shape.top_k > 1:
            raise ValueError(
                f"{type(self).__name__} drafts chains and was asked for {shape}; pin shapes with top_k=1"
            )
        return len(shape.links)

    def _draw(self, context: Context, logits: Tensor, depth: int) -> tuple[Tensor, Tensor | None]:
        """The drafts below nodes at ``depth`` and, of sampled ones, their law."""
        if self.sampled:
            return context.sample(logits, depth, context.root_positions, context.rows)
        positions = [position + depth + 1 for position in context.root_positions]
        return context.draw(logits, positions, context.rows), None

    def _catch_up(self, pending: list[list[int]]) -> Tensor:
        """Read the tokens committed since the last call; logits after the last of them.

        That is a handful per row, or many after steps in which nobody asked for a draft.
        """
        after: list[Tensor | None] = [None] * len(pending)
        for begin in range(0, max(map(len, pending)), BLOCK_TOKENS):
            block = [new[begin : begin + BLOCK_TOKENS] for new in pending]
            for i, logits in enumerate(self._advance(block)):
                after[i] = logits if block[i] else after[i]
        return torch.stack([logits for logits in after if logits is not None])

    def _advance(self, tokens: list[list[int]]) -> Tensor:
        """Read these tokens of each row; ``[rows, vocab]`` logits after the last (none read: garbage)."""
        width = max(map(len, tokens))
        device = self.model.device
        padded = torch.tensor([new + [0] * (width - len(new)) for new in tokens], device=device)
        counts = torch.tensor([len(new) for new in tokens], device=device)
        # A row that reads nothing runs one token, too, which is not committed.
        tree = DraftTree.chain(padded[:, 0], padded[:, 1:], (counts - 1).clamp(min=0))
        logits = self._target.forward(tree).logits
        path = torch.arange(width, device=device).expand(len(tokens), -1)
        path = torch.where(path < counts[:, None], path, -1)
        lengths = [len(new) for new in tokens]
        chains = [[*range(length), *[-1] * (width - length)] for length in lengths]
        self._target.commit(path, counts - 1, (chains, [length - 1 for length in lengths]))
        for row, new in zip(self._rows, tokens, strict=True):
            self._lengths[row] += len(new)
        return logits[torch.arange(len(tokens), device=device), (counts - 1).clamp(min=0)]

    def commit(self, context: Context, accepted: Accepted, output: TargetOutput) -> None:
        """Drafts that the text does not go on with leave the draft cache.

        The tree that was verified may hold more than this chain, or less. What was emitted decides: the
        cache holds the root and all drafts but the last, and those at the head of the new text stay. The
        new root is read again even if it was drafted: the next draft needs the logits after it.
        """
        if not self._drafts:
            return
        written = len(self._drafts[0]) - 1
        kept = [
            _common_prefix(drafts[:written], emitted[:-1])
            for drafts, emitted in zip(self._drafts, accepted.emitted, strict=True)
        ]
        self._drafts = []
        self._target.rewind([written - count for count in kept])
        for row, count in zip(context.rows, kept, strict=True):
            self._cached[row] += count
            self._lengths[row] -= written - count

    def _follow_rows(self, rows: list[int]) -> None:
        """Rows that ended leave the draft cache, too."""
        if rows == self._rows:
            return
        places = {row: i for i, row in enumerate(self._layout)}
        order = [places.pop(row) for row in rows]
        order += places.values()
        self._layout = [self._layout[i] for i in order]
        self._target.reorder(order, len(rows))
        self._rows = list(rows)


def _common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens the two begin with in common."""
    differ = (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    return next(differ, min(len(first), len(second)))
