"""Log probabilities in the two forms of OpenAI's API."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from openai.types.chat.chat_completion_token_logprob import (
    ChatCompletionTokenLogprob,
    TopLogprob,
)
from openai.types.completion_choice import Logprobs

from specdec_ext.engine import TokenLogprobs

Scored = Sequence[tuple[int, TokenLogprobs]]


class Texts:
    """The text and the bytes of single tokens."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer

    def text(self, token: int) -> str:
        text: str = self._tokenizer.decode([token], skip_special_tokens=False)
        return text

    def bytes(self, token: int) -> list[int]:
        """The bytes of a token, also of a part of a character."""
        text = self.text(token)
        if "\ufffd" not in text:
            return list(text.encode())
        name = self._tokenizer.convert_ids_to_tokens(token)
        if name.startswith("<0x") and name.endswith(">"):
            return [int(name[1:-1], 16)]
        table = _byte_of_character()
        return [table[each] for each in name] if all(each in table for each in name) else []


def chat_logprobs(texts: Texts, scored: Scored, count: int) -> list[ChatCompletionTokenLogprob]:
    """The entries of ``choices.logprobs.content``, with ``count`` most probable tokens each."""
    return [
        ChatCompletionTokenLogprob(
            token=texts.text(token),
            bytes=texts.bytes(token),
            logprob=each.logprob,
            top_logprobs=[
                TopLogprob(token=texts.text(other), bytes=texts.bytes(other), logprob=value)
                for other, value in each.top[:count]
            ],
        )
        for token, each in scored
    ]


def completion_logprobs(texts: Texts, scored: Scored, offset: int) -> Logprobs:
    """``choices.logprobs`` of a completion.

    Args:
        offset: number of characters before the first of these tokens.
    """
    found = Logprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
    assert found.tokens is not None and found.token_logprobs is not None
    assert found.top_logprobs is not None and found.text_offset is not None
    for token, each in scored:
        text = texts.text(token)
        found.tokens.append(text)
        found.token_logprobs.append(each.logprob)
        top = {texts.text(other): value for other, value in each.top}
        found.top_logprobs.append({text: each.logprob, **top})
        found.text_offset.append(offset)
        offset += len(text)
    return found


@functools.cache
def _byte_of_character() -> dict[str, int]:
    """The bytes that the characters of byte-level BPE stand for (GPT-2).

    Bytes that print as a character of Latin-1 stand for themselves, the others follow from U+0100 on.
    """
    printing = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printing)
    return {chr(byte): byte for byte in printing} | {
        chr(0x100 + i): byte for i, byte in enumerate(others)
    }
