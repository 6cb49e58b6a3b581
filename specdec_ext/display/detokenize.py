"""``IncrementalDecoder``: the text of a growing list of tokens, piece by piece."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Stands for bytes that are not a whole character.
_REPLACEMENT = "\ufffd"
# A character has at most four bytes, and a token at least one. So with this many tokens after the last whole
# character, all but the last four can't become one.
_MOST_OPEN = 4
_MOST_HELD = 16


class IncrementalDecoder:
    """Turns a growing list of tokens into pieces of text whose concatenation is the decoded list.

    A token's text may depend on the tokens before it (leading spaces), and a character may span tokens. Each
    piece is therefore the difference between two decodings of a short window, and it is held back while it
    ends in the middle of a character. Same rule as ``decode_token`` in Hugging Face's
    text-generation-inference. Bytes that never become a character are released later, so the window stays
    short.

    Args:
        tokenizer: the model's tokenizer.
        skip_special_tokens: whether special tokens have no text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, skip_special_tokens: bool = True):
        self._tokenizer, self._skip_special_tokens = tokenizer, skip_special_tokens
        self._tokens: list[int] = []  # from the start of the window on
        self._told = 0  # number of tokens of the window whose text was returned

    def feed(self, token: int) -> str:
        """Add ``token`` and return the text that it completes, possibly empty."""
        self._tokens.append(token)
        text = self._untold(len(self._tokens))
        if text and not text.endswith(_REPLACEMENT):
            self._tell(len(self._tokens))
            return text
        if len(self._tokens) - self._told <= _MOST_HELD:
            return ""
        end = len(self._tokens) - _MOST_OPEN
        certain = self._untold(end)
        if not certain:
            del self._tokens[self._told : end]  # special tokens, which have no text
        elif text.startswith(certain):
            self._tell(end)
            return certain
        return ""

    def flush(self) -> str:
        """Return the text held back because it ends in the middle of a character."""
        text = self._untold(len(self._tokens))
        self._tell(len(self._tokens))
        return text

    def _tell(self, end: int) -> None:
        del self._tokens[: self._told]
        self._told = end - self._told

    def _untold(self, end: int) -> str:
        told = self._decode(self._tokens[: self._told])
        return self._decode(self._tokens[:end])[len(told) :]

    def _decode(self, tokens: list[int]) -> str:
        text = self._tokenizer.decode(tokens, skip_special_tokens=self._skip_special_tokens)
        assert isinstance(text, str)  # decode returns a list only for a batch
        return text
