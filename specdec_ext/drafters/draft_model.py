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
from specdec_ext.drafters.draft_cache import DraftCache, check_support
from specdec_ext.drafters.vocabulary import Vocabulary, match_vocabularies
from specdec_ext.models import TargetOutput, supports
from specdec_ext.pretrained import vocab_size
from specdec_ext.tree.config import Shape, TreeConfig
from specdec_ext.tree.draft_tree import DraftTree
from specdec_ext.verify.sampler import Accepted

# Length of a chain if the caller does not choose one.
DEFAULT_DRAFT_TOKENS = 4

# What is known about draft models from earlier calls, because a call may make its own drafter: the attention
# implementation with which a model was found to be supported, and its number of parameters.
_checked: WeakKeyDictionary[PreTrainedModel, str] = WeakKeyDictionary()
_sizes: WeakKeyDictionary[PreTrainedModel, int] = WeakKeyDictionary()


class DraftModelDrafter(Drafter):
    """Drafts a chain with a Hugging Face causal language model.

    A row that has reached the draft model's ``max_position_embeddings`` continues without drafts, with a
    warning. Rows may join a running batch, unless ``sampled``.

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
        self.joinable = not sampled  # an engine verifies by the match rule

    def start(self, context: Context, model: PreTrainedModel, output: TargetOutput) -> None:
        if model.device != self.model.device:
            raise ValueError(
                f"the draft model is on {self.model.device}, the target on {model.device}; move one of them "
                "to the device of the other"
            )
        if _checked.get(self.model) != self.model.config._attn_implementation:
            check_support(self.model, supports(self.model))
            _checked[self.model] = self.model.config._attn_implementation
        self._target_size = vocab_size(model)
        self._take_vocabulary(output)
        config = self.model.config.get_text_config(decoder=True)
        self._max_positions = getattr(config, "max_position_embeddings", None)
        self._warned = False
        # For each row, the number of generated tokens of the target that are in the draft cache.
        self._cached: dict[int, int] = {}
        self._drafts: list[list[int]] = []  # of the current step, per row of the draft cache
        # The prompts, which are read before the first draft.
        self._unread = self._prompts(context, context.rows)
        expansion = self._vocabulary.expansion
        width = max(map(len, self._unread.values()), default=0)
        growth = (context.max_length - context.prompt_columns) * expansion
        max_slots = width + growth + self.num_draft_tokens
        self._cache = DraftCache(self.model, max_slots, len(context.generated))

    def join(self, context: Context, rows: Sequence[int], output: TargetOutput) -> None:
        self._take_vocabulary(output)
        self._begin()
        self._cache.drop(rows)  # what earlier rows with these numbers have left
        for row, text in self._prompts(context, rows).items():
            self._cache.join(row, text)

    def _take_vocabulary(self, output: TargetOutput) -> None:
        """Compare the vocabularies, if none of these sizes were compared before."""
        self._num_logits = output.logits.shape[-1]
        # Drafted tokens must be valid as input and as output of the target.
        sizes = min(self._target_size, self._num_logits), vocab_size(self.model)
        if sizes not in self._vocabularies:
            self._vocabularies[sizes] = match_vocabularies(
                *sizes, *self._tokenizers, self.model.device
            )
        self._vocabulary = self._vocabularies[sizes]

    def _prompts(self, context: Context, rows: Sequence[int]) -> dict[int, list[int]]:
        """The prompts of rows that begin, as the draft model reads them, without those that leave no room."""
        texts = {}
        for row in rows:
            self._cached[row] = 0
            # A prompt of embeddings has no text, so the draft model begins with an arbitrary token.
            text = self._vocabulary.read(context.prompt(row) or [0])
            if self._room(len(text) + len(self._pending(context, row))) > 0:
                texts[row] = text
        return texts

    def _begin(self) -> None:
        """Read the prompts of the rows that have begun together."""
        if self._unread:
            self._cache.begin(self._unread)
            self._unread = {}

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

    def _pending(self, context: Context, row: int) -> list[int]:
        """The tokens of a row after its prompt that are not in the draft cache yet."""
        return self._vocabulary.read(context.generated[row][self._cached[row] :])

    def _room(self, length: int) -> int:
        """Number of tokens that can be drafted after a text of this length; 0 or less is warned of."""
        if self._max_positions is None:
            return self.num_draft_tokens
        room = self._max_positions - length
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
        texts = self._unread_texts(context)
        if not texts:
            return DraftTree.root(context.roots)
        cache, rows = self._cache, [*texts]
        room = min(self._room(cache.lengths[row] + len(text)) for row, text in texts.items())
        logits = cache.read([*texts.values()])
        for row in rows:
            self._cached[row] = len(context.generated[row])
        # All rows draft in step, and superfluous tokens are cut later. So the draft of a row, and under rules
        # 2 to 4 its text, does not depend on other rows.
        length = min(self._asked(context), max(context.remaining) - 1, room)
        places = [context.rows.index(row) for row in rows]
        root_positions = [context.root_positions[place] for place in places]
        chain: list[Tensor] = []
        distributions: list[Tensor] = []
        going = torch.ones(len(logits), dtype=torch.bool, device=logits.device)
        counts = torch.zeros_like(going, dtype=torch.long)
        for depth in range(length):
            if depth:
                # One token per row. Only a row with NaN can have drafted a token that becomes several.
                logits = cache.read([self._vocabulary.read([x])[-1:] for x in chain[-1].tolist()])
            scores = self._vocabulary.for_target(logits)
            tokens, probs = self._draw(context, scores, depth, rows, root_positions)
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
        if rows != context.rows:
            counts, drafts = (_at(places, each, len(context.rows)) for each in (counts, drafts))
            if draft_probs is not None:
                draft_probs = _at(places, draft_probs, len(context.rows))
        return DraftTree.chain(context.roots, drafts, counts, draft_probs)

    def _unread_texts(self, context: Context) -> dict[int, list[int]]:
        """What the draft model has not read, for each row in its cache; rows without room leave it."""
        cache = self._cache
        self._begin()
        cache.follow(context.rows)
        cache.read_prompts()
        texts = {row: self._pending(context, row) for row in cache.rows}
        full = [
            row for row, text in texts.items() if self._room(cache.lengths[row] + len(text)) < 1
        ]
        cache.drop(full)
        return {row: texts[row] for row in cache.rows}

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

    def _draw(
        self,
        context: Context,
        logits: Tensor,
        depth: int,
        rows: Sequence[int],
        root_positions: Sequence[int],
    ) -> tuple[Tensor, Tensor | None]:
        """Draw the tokens below nodes at ``depth``; with ``sampled``, also return their distributions."""
        if self.sampled:
            return context.sample(logits, depth, root_positions, rows)
        positions = [position + depth + 1 for position in root_positions]
        return context.draw(logits, positions, rows), None

    def commit(self, context: Context, accepted: Accepted, output: TargetOutput) -> None:
        """Remove drafts from the cache that are not part of the text.

        The verified tree may contain more than this chain, or less, so the emitted tokens decide. The cache
        holds the root and all drafts but the last; drafts that are a prefix of the emitted tokens stay. The
        new root is read again even if it was drafted, because the next draft needs the logits after it.
        """
        if not self._drafts:
            return
        rows, written = self._cache.rows, len(self._drafts[0]) - 1
        emitted = dict(zip(context.rows, accepted.emitted, strict=True))
        kept = [
            _common_prefix(drafts[:written], emitted[row][:-1])
            for row, drafts in zip(rows, self._drafts, strict=True)
        ]
        self._drafts = []
        self._cache.rewind([written - count for count in kept])
        for row, count in zip(rows, kept, strict=True):
            self._cached[row] += count


def _at(places: Sequence[int], values: Tensor, size: int) -> Tensor:
    """``size`` rows, of which row ``places[i]`` is ``values[i]`` and the others are zero."""
    index = torch.tensor(places, device=values.device)
    return values.new_zeros(size, *values.shape[1:]).index_copy_(0, index, values)


def _common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    differ = (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    return next(differ, min(len(first), len(second)))
