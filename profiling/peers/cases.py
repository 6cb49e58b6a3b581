"""What is measured: :data:`CASES`, each of one or two kinds of calls.

Decoding is the difference of two calls of the same prompts: many new tokens, and the first alone.
"""

from __future__ import annotations

from dataclasses import dataclass

NEW = 128  # tokens of decoding and of a whole call
PROMPT, LONG_PROMPT = 128, 1024
BATCHES = (4, 16)


@dataclass(frozen=True)
class Work:
    """A call: rows of prompts of one length, and new tokens of each row."""

    rows: int
    prompt: int
    new: int


@dataclass(frozen=True)
class Case:
    """Kinds of calls that are measured together.

    Attributes:
        works: the calls.
        prompts: how many batches of prompts each call is measured with.
        of_text: only for the bundled model, since the text of random weights says nothing about drafts.
    """

    works: tuple[Work, ...]
    prompts: int = 1
    of_text: bool = False


def _decoding(rows: int) -> Case:
    return Case((Work(rows, PROMPT, 1), Work(rows, PROMPT, 1 + NEW)))


CASES = {
    "ttft": Case((Work(1, PROMPT, 1), Work(1, LONG_PROMPT, 1))),
    "decode": _decoding(1),
    **{f"batch{rows}": _decoding(rows) for rows in BATCHES},
    "call": Case((Work(1, PROMPT, NEW),), prompts=5, of_text=True),
}
