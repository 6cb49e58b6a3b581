"""Streamers that print text token by token and can mark accepted draft tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from specdec_ext.display.console import printable
from specdec_ext.display.detokenize import IncrementalDecoder

if TYPE_CHECKING:
    from torch import BoolTensor, LongTensor
    from transformers import PreTrainedTokenizerBase

# Accepted drafts are styled on a terminal and put in brackets elsewhere.
DRAFTED_STYLE = "underline green"
OPENING, CLOSING = "⟦", "⟧"


class TextStreamer:
    """Prints one text as it is generated.

    Args:
        console: the console to print on.
        tokenizer: the model's tokenizer.
        mark_drafted: mark the tokens that came from accepted drafts.
    """

    def __init__(
        self, console: Console, tokenizer: PreTrainedTokenizerBase, mark_drafted: bool = False
    ):
        self._console = console
        self._decoder = IncrementalDecoder(tokenizer)
        self._pieces: list[str] = []
        self._mark = mark_drafted
        self._brackets = mark_drafted and not console.is_terminal
        self._inside = False
        self._space = ""  # white space that is not printed yet
        self._space_drafted = True  # whether all of it was drafted
        self._prompt_seen = False

    @property
    def text(self) -> str:
        """The generated text so far, without an unfinished character until :meth:`end`."""
        return "".join(self._pieces)

    def put(self, tokens: LongTensor) -> None:
        """Receive the prompt ``[1, length]``, which is not printed, then one token ``[1]`` per call.

        Plain decoding passes its tokens here; :meth:`put_drafted` takes those of speculative decoding.
        """
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        self._print(self._decoder.feed(int(tokens[0])), drafted=False)

    def put_drafted(self, tokens: LongTensor, drafted: BoolTensor) -> None:
        """Receive one generated token ``[1]`` and whether it came from an accepted draft ``[1]``."""
        self._print(self._decoder.feed(int(tokens[0])), drafted=bool(drafted[0]))

    def end(self) -> None:
        self._print(self._decoder.flush(), drafted=self._inside)
        if self._brackets:
            self._write((CLOSING if self._inside else "") + self._space)

    def _print(self, text: str, drafted: bool) -> None:
        self._pieces.append(text)
        if self._brackets:
            self._print_in_brackets(text, drafted)
        elif text:
            self._write(text, DRAFTED_STYLE if self._mark and drafted else "")

    def _print_in_brackets(self, text: str, drafted: bool) -> None:
        """Put brackets around words: white space at the edges of a draft stays outside them."""
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
        if self._console.is_terminal:  # a pipe gets the text unchanged
            text = printable(text)
        self._console.print(Text(text, style=style), end="", soft_wrap=True)
        self._console.file.flush()


def legend(console: Console) -> Text:
    """Explain how accepted drafts are marked on this console."""
    if console.is_terminal:
        return Text.assemble(
            ("underlined green", DRAFTED_STYLE),
            ": accepted drafts; the target added the rest itself",
        )
    return Text(f"{OPENING}in brackets{CLOSING}: accepted drafts; the target added the rest itself")
