"""Streamers: text appears token by token, accepted drafts marked if wanted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from specdec_ext.cli._console import printable

if TYPE_CHECKING:
    from torch import BoolTensor, LongTensor
    from transformers import PreTrainedTokenizerBase

# An accepted draft: by style on a terminal, by brackets where there are no styles.
DRAFTED_STYLE = "underline green"
OPENING, CLOSING = "⟦", "⟧"


class IncrementalDecoder:
    """Turns a growing list of tokens into pieces of text whose concatenation is the decoded list.

    A token's text may depend on the tokens before it (leading spaces) and a character may span tokens, so
    each piece is the difference between two decodings of a short window, held back while it ends in the
    middle of a character. The rule of Hugging Face's text-generation-inference (``decode_token``).
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._window_start = 0
        self._told = 0

    def feed(self, token: int) -> str:
        """The text that ``token`` completes, possibly none."""
        self._tokens.append(token)
        told = self._decode(self._tokens[self._window_start : self._told])
        text = self._decode(self._tokens[self._window_start :])
        if len(text) <= len(told) or text.endswith("\ufffd"):
            return ""
        self._window_start, self._told = self._told, len(self._tokens)
        return text[len(told) :]

    def flush(self) -> str:
        """What was held back: the text ended in the middle of a character."""
        told = self._decode(self._tokens[self._window_start : self._told])
        text = self._decode(self._tokens[self._window_start :])
        self._window_start = self._told = len(self._tokens)
        return text[len(told) :]

    def _decode(self, tokens: list[int]) -> str:
        text = self._tokenizer.decode(tokens, skip_special_tokens=True)
        assert isinstance(text, str)  # a list only for a batch
        return text


class TextStreamer:
    """Prints one text as it is generated.

    Args:
        console: where to.
        tokenizer: of the model.
        mark_drafted: show which tokens came from accepted drafts.
    """

    def __init__(
        self, console: Console, tokenizer: PreTrainedTokenizerBase, mark_drafted: bool = False
    ):
        self._console = console
        self._decoder = IncrementalDecoder(tokenizer)
        self._mark = mark_drafted
        self._brackets = mark_drafted and not console.is_terminal
        self._inside = False
        self._space, self._space_drafted = (
            "",
            True,
        )  # not printed yet, and whether all of it was drafted
        self._prompt_seen = False

    def put(self, tokens: LongTensor) -> None:
        """The prompt ``[1, length]``, which is not printed; then, from plain decoders, ``[1]`` per token."""
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        self._print(self._decoder.feed(int(tokens[0])), drafted=False)

    def put_drafted(self, tokens: LongTensor, drafted: BoolTensor) -> None:
        """One generated token ``[1]`` and whether it came from an accepted draft ``[1]``."""
        self._print(self._decoder.feed(int(tokens[0])), drafted=bool(drafted[0]))

    def end(self) -> None:
        self._print(self._decoder.flush(), drafted=self._inside)
        if self._brackets:
            self._write((CLOSING if self._inside else "") + self._space)

    def _print(self, text: str, drafted: bool) -> None:
        if self._brackets:
            self._print_in_brackets(text, drafted)
        elif text:
            self._write(text, DRAFTED_STYLE if self._mark and drafted else "")

    def _print_in_brackets(self, text: str, drafted: bool) -> None:
        """Brackets stand around words: space at the edges of what was drafted is outside them."""
        words = text.strip()
        if not words:
            self._space += text
            self._space_drafted &= drafted
            return
        before, _, after = text.partition(words)
        space = self._space + before
        if drafted and self._inside and self._space_drafted:
            self._write(space)
        else:
            self._write((CLOSING if self._inside else "") + space + (OPENING if drafted else ""))
        self._write(words)
        self._inside = drafted
        self._space, self._space_drafted = after, drafted

    def _write(self, text: str, style: str = "") -> None:
        if self._console.is_terminal:  # a pipe gets the text to the byte
            text = printable(text)
        self._console.print(Text(text, style=style), end="", soft_wrap=True)
        self._console.file.flush()


def legend(console: Console) -> Text:
    """How accepted drafts look on this console."""
    if console.is_terminal:
        return Text.assemble(
            ("underlined green", DRAFTED_STYLE),
            ": accepted drafts; the rest the target added itself",
        )
    return Text(f"{OPENING}in brackets{CLOSING}: accepted drafts; the rest the target added itself")
