"""Translation between the token ids of a target and of a draft model with another tokenizer.

If the vocabularies differ, only tokens of both are drafted (token-level intersection; Timor et al. 2025,
"Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for Heterogeneous Vocabularies").
This does not change the distribution of the text: a token that is never drafted has draft probability 0.

Two tokens are the same if they are special tokens with the same role (end of sequence, unknown, ...) or the
same string, or other tokens for the same bytes. Byte-level and metaspace vocabularies write the same bytes
differently: ``Ġthe`` and ``▁the`` both mean " the".
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

# A target token without counterpart is read as at most this many draft-model tokens; of more, the last ones.
MAX_EXPANSION = 8
ROLES = ("bos", "eos", "unk", "pad", "sep", "cls", "mask")


class Vocabulary:
    """A vocabulary with the same ids on both sides. Embeddings are often padded to different sizes.

    Args:
        target_size: number of ids that the target can both read and write; only these can be drafted.
        draft_size: number of ids that the draft model can read.

    Attributes:
        expansion: largest number of draft-model tokens that one target token is read as.
    """

    expansion = 1

    def __init__(self, target_size: int, draft_size: int):
        self.target_size, self.draft_size = target_size, draft_size

    def read(self, tokens: Sequence[int]) -> list[int]:
        """The ids that the draft model reads for these target tokens: at least one id for one or more tokens.

        A token without an embedding is read as the last id; drafts need not be right.
        """
        return [min(token, self.draft_size - 1) for token in tokens]

    def for_target(self, logits: Tensor) -> Tensor:
        """``[n, any]`` logits -> ``[n, target_size]``, -inf where the draft model has no token."""
        return _resized(logits, self.target_size)


class SharedVocabulary(Vocabulary):
    """Two vocabularies with different ids: translates common tokens, and tokenizes the text of others again.

    Args:
        target_size: number of ids that the target can both read and write; only these can be drafted.
        draft_size: number of ids that the draft model can read.
        target_tokenizer: the target's tokenizer, from transformers.
        draft_tokenizer: the draft model's tokenizer, from transformers.
        device: device of the logits.

    Raises:
        ValueError: the two vocabularies have no common token.
    """

    expansion = MAX_EXPANSION

    def __init__(
        self,
        target_size: int,
        draft_size: int,
        target_tokenizer: Any,
        draft_tokenizer: Any,
        device: torch.device,
    ):
        super().__init__(target_size, draft_size)
        self._target_tokenizer, self._draft_tokenizer = target_tokenizer, draft_tokenizer
        drafts = token_keys(draft_tokenizer, draft_size)
        self._to_draft = {
            token: drafts[key]
            for key, token in token_keys(target_tokenizer, target_size).items()
            if key in drafts
        }
        if not self._to_draft:
            raise ValueError(
                "the tokenizers of the draft model and the target have no common token; use another draft "
                "model, or drafter='ngram'"
            )
        self._target_ids = torch.tensor(list(self._to_draft), device=device)
        self._draft_ids = torch.tensor(list(self._to_draft.values()), device=device)
        wanted = (draft_tokenizer.unk_token_id, draft_tokenizer.eos_token_id, 0)
        self._filler = next(token for token in wanted if token is not None)

    @property
    def num_shared(self) -> int:
        """Number of tokens that can be drafted."""
        return len(self._to_draft)

    def read(self, tokens: Sequence[int]) -> list[int]:
        """As in the base class. Runs of tokens without counterpart are decoded and tokenized again."""
        ids: list[int] = []
        for known, group in groupby(tokens, key=self._to_draft.__contains__):
            run = list(group)
            ids.extend(
                [self._to_draft[token] for token in run] if known else self._tokenized_again(run)
            )
        return ids

    def _tokenized_again(self, run: list[int]) -> list[int]:
        text = self._target_tokenizer.decode(run, skip_special_tokens=True)
        try:
            ids = self._draft_tokenizer.encode(text, add_special_tokens=False)
        except Exception:  # tokenizers raises this for text that it can't encode
            ids = []
        ids = [token for token in ids if token < self.draft_size]
        return ids[-MAX_EXPANSION * len(run) :] or [self._filler]

    def for_target(self, logits: Tensor) -> Tensor:
        translated = logits.new_full((len(logits), self.target_size), -torch.inf)
        translated[:, self._target_ids] = _resized(logits, self.draft_size)[:, self._draft_ids]
        return translated


def _resized(logits: Tensor, size: int) -> Tensor:
    missing = size - logits.shape[1]
    if missing > 0:
        return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
    return logits[:, :size]


def match_vocabularies(
    target_size: int,
    draft_size: int,
    target_tokenizer: Any,
    draft_tokenizer: Any,
    device: torch.device,
) -> Vocabulary:
    """A :class:`Vocabulary` if ids have the same meaning on both sides, else a :class:`SharedVocabulary`.

    Without tokenizers (None), ids are assumed to have the same meaning.
    """
    if target_tokenizer is None:
        return Vocabulary(target_size, draft_size)
    both = min(target_size, draft_size)
    target, draft = (
        {token: text for text, token in tokenizer.get_vocab().items() if token < both}
        for tokenizer in (target_tokenizer, draft_tokenizer)
    )
    if target == draft:
        return Vocabulary(target_size, draft_size)
    return SharedVocabulary(target_size, draft_size, target_tokenizer, draft_tokenizer, device)


def token_keys(tokenizer: Any, size: int) -> dict[Hashable, int]:
    """Meaning -> token, for tokens below ``size``. Tokens of two tokenizers with equal keys are the same."""
    keys: dict[Hashable, int] = {}
    used = set()
    for role in ROLES:
        token = getattr(tokenizer, f"{role}_token_id")
        if token is not None and token < size and token not in used:
            keys["role", role] = token
            used.add(token)
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    special = set(tokenizer.all_special_ids)
    spelling = _spelling(vocabulary)
    for text, token in sorted(vocabulary.items(), key=lambda entry: entry[1]):
        if token < size and token not in used:
            key = ("special", text) if token in special else ("text", spelling(text))
            keys.setdefault(key, token)
    return keys


def _spelling(vocabulary: Iterable[str]) -> Any:
    """The function ``token string -> bytes`` for the spelling of this vocabulary."""
    starts = [text[:1] for text in vocabulary]
    byte_level, metaspace = starts.count("Ġ"), starts.count("▁")
    if byte_level > metaspace:
        return _byte_level
    return _metaspace if metaspace else str.encode


def _byte_level(text: str) -> bytes:
    if all(character in _BYTE_ALPHABET for character in text):
        return bytes(_BYTE_ALPHABET[character] for character in text)
    return text.encode()  # added tokens are written as plain text


def _metaspace(text: str) -> bytes:
    if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        return bytes([int(text[3:5], 16)])
    return text.replace("▁", " ").encode()


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 for the same bytes, U+0100 and up for the others in order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    shifted = {chr(256 + i): byte for i, byte in enumerate(others)}
    return {chr(byte): byte for byte in printable} | shifted


_BYTE_ALPHABET = _byte_alphabet()
