"""Classic draft model: a smaller language model (Leviathan et al. 2023; Chen et al. 2023).

By default, tokens are drawn with the target's processing and the target's noise (``Context.draw``). So also
when sampling, the draft is the token that the target would emit wherever the two distributions agree. The
match rule verifies such drafts. With ``sampled=True``, tokens are drawn independently from known
probabilities (``Context.sample``), for the other rules.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec_ext.context import Context
from specdec_ext.drafters.base import Drafter
from specdec_ext.drafters.vocabulary import Vocabulary, match_vocabularies
from specdec_ext.models import TargetOutput, make_target, supports
from specdec_ext.models.passes.prompt import left_padded
from specdec_ext.models.slots import SlotTarget
from specdec_ext.models.support import Support
from specdec_ext.pretrained import vocab_size
from specdec_ext.tree.config import Shape, TreeConfig
from specdec_ext.tree.draft_tree import DraftTree
from specdec_ext.verify.sampler import Accepted

# Length of a chain if the caller does not choose one.
DEFAULT_DRAFT_TOKENS = 4
# Largest number of tokens that the draft model reads in one pass after the prompt.
BLOCK_TOKENS = 256
# Largest number of tokens of a pass for which the row-invariant matrix product is used, which is faster for
# few tokens. Losslessness does not depend on how drafts are rounded.
INVARIANT_ROWS = 128

# What is known about draft models from earlier calls, because a call may make its own drafter: the attention
# implementation with which a model was found to be supported, and its number of parameters.
_checked: WeakKeyDictionary[PreTrainedModel, str] = WeakKeyDictionary()
_sizes: WeakKeyDictionary[PreTrainedModel, int] = WeakKeyDictionary()


class DraftModelDrafter(Drafter):
    """Drafts a chain with a Hugging Face causal language model.

    When a row reaches the draft model's ``max_position_embeddings``, the call continues without drafts, with
    a warning.

    Args:
        model: the draft model.
        num_draft_tokens: length of the chain, or the longest length that the controller may choose.
        sampled: draw independently of the target's noise and return the probabilities, for
            ``generate(verification="rejection")`` or ``"block"``.
        min_confidence: a row's draft ends with the first token whose probability under the draft model
            (softmax of the unprocessed logits) is lower than this; 0 never ends it.
        tokenizer: the draft model's tokenizer.
        target_tokenizer: the target's tokenizer. If the two differ, only tokens of both vocabularies are
            drafted, and the draft model reads the text of other tokens with its own tokenizer. Without
            tokenizers, ids are assumed to have the same meaning in both models.

    Raises:
        ValueError: for an argument out of its range, or only one of the two tokenizers.
    """

    low_acceptance_hint = (
        "Check that both models have the same tokenizer (otherwise pass tokenizer= and target_tokenizer= to "
        "DraftModelDrafter), that the draft model's weights were loaded, that it was trained on the language "
        "and chat template of the prompt, and that the sampling temperature is not too high."
    )

    def __init__(
        self,
        model: PreTrainedModel,
        num_draft_tokens: int = DEFAULT_DRAFT_TOKENS,
        *,
        sampled: bool = False,
        min_confidence: float = 0.0,
        tokenizer: Any = None,
        target_tokenizer: Any = None,
    ):
        if num_draft_tokens < 1:
            raise ValueError(f"num_draft_tokens must be at least 1, got {num_draft_tokens}")
        if not 0 <= min_confidence <= 1:
            raise ValueError(
                f"min_confidence is a probability and must be in [0, 1] (0: off), got {min_confidence}"
            )
        if (tokenizer is None) != (target_tokenizer is None):
            raise ValueError(
                "tokenizer and target_tokenizer must be passed together, to compare the two vocabularies; "
                "pass both, or neither if draft model and target have the same tokenizer"
            )
        self.model = model
        self.num_draft_tokens = num_draft_tokens
        self._tokenizers = (target_tokenizer, tokenizer)
        self._vocabularies: dict[
            tuple[int, ...], Vocabulary
        ] = {}  # by sizes of target and draft model
        self.sampled, self.min_confidence = sampled, min_confidence

    def start(self, context: Context, model: PreTrainedModel, output: TargetOutput) -> None:
        if model.device != self.model.device:
            raise ValueError(
                f"the draft model is on {self.model.device}, the target on {model.device}; move one of them "
                "to the device of the other"
            )
        self._num_logits = output.logits.shape[-1]
        self._vocabulary = self._match_vocabularies(model)
        # A prompt of embeddings has no text, so the draft model begins with an arbitrary token.
        texts = [self._vocabulary.read(context.prompt(row) or [0]) for row in context.rows]
        width = max(map(len, texts))
        growth = (context.max_length - context.prompt_columns) * self._vocabulary.expansion
        if _checked.get(self.model) != self.model.config._attn_implementation:
            _check_support(self.model, supports(self.model))
            _checked[self.model] = self.model.config._attn_implementation
        self._max_slots = width + growth + self.num_draft_tokens
        config = self.model.config.get_text_config(decoder=True)
        self._max_positions = getattr(config, "max_position_embeddings", None)
        self._warned = False
        self._rows = list(context.rows)
        self._layout = list(context.rows)
        # For each row, the number of tokens in the draft cache, and the number of generated tokens of the
        # target that they represent.
        self._lengths = dict(zip(context.rows, map(len, texts), strict=True))
        self._cached = {row: 0 for row in context.rows}
        self._drafts: list[list[int]] = []  # of the current step, per active row
        self._in_room = self._room(self._pending(context)) > 0
        self._unread = texts  # the prompts, which are read before the first draft

    def shapes(self, context: Context) -> Sequence[Shape]:
        return [TreeConfig(depth=depth) for depth in range(1, self.num_draft_tokens + 1)]

    @property
    def identity(self) -> Hashable:
        model = self.model
        if (size := _sizes.get(model)) is None:
            size = _sizes[model] = model.num_parameters()
        return (
            super().identity,
            type(model).__name__,
            model.config._name_or_path,
            size,
            self.sampled,
        )

    def _match_vocabularies(self, target: PreTrainedModel) -> Vocabulary:
        # Drafted tokens must be valid as input and as output of the target.
        sizes = min(vocab_size(target), self._num_logits), vocab_size(self.model)
        if sizes not in self._vocabularies:
            self._vocabularies[sizes] = match_vocabularies(
                *sizes, *self._tokenizers, self.model.device
            )
        return self._vocabularies[sizes]

    def _pending(self, context: Context) -> list[list[int]]:
        """The tokens of each active row that are not in the draft cache yet."""
        new = [context.generated[row][self._cached[row] :] for row in context.rows]
        return [self._vocabulary.read(tokens) for tokens in new]

    def _room(self, pending: list[list[int]]) -> int:
        """Number of tokens that can be drafted until the longest row uses up the model's positions."""
        if self._max_positions is None:
            return self.num_draft_tokens
        lengths = [
            self._lengths[row] + len(new) for row, new in zip(self._rows, pending, strict=True)
        ]
        room = self._max_positions - max(lengths)
        if room < 1 and not self._warned:
            self._warned = True
            warnings.warn(
                f"the draft model {type(self.model).__name__} has {self._max_positions} positions, and the "
                "text is longer: the rest is decoded without drafts. Use drafter='ngram' or a draft model "
                "with a longer context.",
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
        # Rows share a forward pass and the longest row only grows, so this does not change back.
        self._in_room = room > 0
        if not self._in_room:
            return DraftTree.root(context.roots)
        logits = self._catch_up(pending)
        for row in context.rows:
            self._cached[row] = len(context.generated[row])
        # All rows draft in step, and superfluous tokens are cut later. So the draft of a row, and under rules
        # 2 to 4 its text, does not depend on other rows.
        length = min(self._asked(context), max(context.remaining) - 1, room)
        chain: list[Tensor] = []
        distributions: list[Tensor] = []
        going = torch.ones(len(logits), dtype=torch.bool, device=logits.device)
        counts = torch.zeros_like(going, dtype=torch.long)
        for depth in range(length):
            if depth:
                # One token per row. Only a row with NaN can have drafted a token that becomes several.
                read = [self._vocabulary.read([token])[-1:] for token in chain[-1].tolist()]
                logits = self._advance(read)
            scores = self._vocabulary.for_target(logits)
            tokens, probs = self._draw(context, scores, depth)
            going = going & (tokens >= 0)
            counts += going
            chain.append(tokens.clamp(min=0))
            distributions.extend([] if probs is None else [probs])
            if self.min_confidence:
                confidence = scores.float().softmax(dim=-1).gather(1, chain[-1][:, None])[:, 0]
                going = going & (confidence >= self.min_confidence)
            if not going.any():
                break
        if not chain:
            return DraftTree.root(context.roots)
        drafts = torch.stack(chain, dim=1)
        self._drafts = drafts.tolist()
        draft_probs = torch.stack(distributions, dim=1) if distributions else None
        if draft_probs is not None and (never_read := self._num_logits - draft_probs.shape[-1]):
            draft_probs = torch.nn.functional.pad(draft_probs, (0, never_read))
        return DraftTree.chain(context.roots, drafts, counts, draft_probs)

    def _read_prompts(self) -> None:
        target = make_target(self.model, self._max_slots)
        _check_support(self.model, target.support)
        assert isinstance(target, SlotTarget)
        target.runner.invariant_rows = INVARIANT_ROWS
        self._target = target
        self._target.prefill(*left_padded(self._unread, self.model.device))
        self._unread = []

    def _asked(self, context: Context) -> int:
        """Length of the chain that this step requests."""
        shape = context.shape
        if not isinstance(shape, TreeConfig):
            return self.num_draft_tokens
        if shape.top_k > 1:
            raise ValueError(
                f"{type(self).__name__} drafts only chains, but {shape!r} was requested; pin shapes "
                "with top_k=1"
            )
        return len(shape.links)

    def _draw(self, context: Context, logits: Tensor, depth: int) -> tuple[Tensor, Tensor | None]:
        """Draw the tokens below nodes at ``depth``; with ``sampled``, also return their distributions."""
        if self.sampled:
            return context.sample(logits, depth, context.root_positions, context.rows)
        positions = [position + depth + 1 for position in context.root_positions]
        return context.draw(logits, positions, context.rows), None

    def _catch_up(self, pending: list[list[int]]) -> Tensor:
        """Read the tokens that were committed since the last draft; returns the logits after the last one.

        Usually these are a few per row; after steps without a draft there may be many.
        """
        after: list[Tensor | None] = [None] * len(pending)
        for begin in range(0, max(map(len, pending)), BLOCK_TOKENS):
            block = [new[begin : begin + BLOCK_TOKENS] for new in pending]
            for i, logits in enumerate(self._advance(block)):
                after[i] = logits if block[i] else after[i]
        return torch.stack([logits for logits in after if logits is not None])

    def _advance(self, tokens: list[list[int]]) -> Tensor:
        """Read these tokens of each row; returns ``[rows, vocab]`` logits after the last one.

        The logits of a row without tokens are arbitrary.
        """
        width = max(map(len, tokens))
        device = self.model.device
        padded = torch.tensor([new + [0] * (width - len(new)) for new in tokens], device=device)
        counts = torch.tensor([len(new) for new in tokens], device=device)
        # A row without tokens runs a padding token, which is not committed.
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
        """Remove drafts from the cache that are not part of the text.

        The verified tree may contain more than this chain, or less, so the emitted tokens decide. The cache
        holds the root and all drafts but the last; drafts that are a prefix of the emitted tokens stay. The
        new root is read again even if it was drafted, because the next draft needs the logits after it.
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
        """Reorder the draft cache so that the active rows come first."""
        if rows == self._rows:
            return
        places = {row: i for i, row in enumerate(self._layout)}
        order = [places.pop(row) for row in rows]
        order += places.values()
        self._layout = [self._layout[i] for i in order]
        self._target.reorder(order, len(rows))
        self._rows = list(rows)


def _check_support(model: PreTrainedModel, support: Support) -> None:
    """Raise ValueError for a model whose cache can't be rolled back token by token."""
    if not support.by_slots or support.rollback != "compact":
        raise ValueError(
            f"{type(model).__name__} can't be a draft model, because its cache can't be rolled back token by "
            f"token: {'; '.join(support.reasons)}"
        )


def _common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    differ = (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    return next(differ, min(len(first), len(second)))
