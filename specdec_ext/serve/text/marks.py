"""``Marks``: which parts of a text were drafted, for readers that divide the text in another way."""

from __future__ import annotations

from typing import TypedDict


class Part(TypedDict):
    """A part of a text, in the form in which clients get it.

    Attributes:
        text: the part; not empty.
        drafted: whether its tokens are accepted drafts.
    """

    text: str
    drafted: bool


class Marks:
    """A text whose parts are added as they are decoded, and taken as they are told to a client.

    Between the two, text may be held back, divided in another way, or left out.
    """

    def __init__(self) -> None:
        self._parts: list[Part] = []

    def add(self, parts: list[Part]) -> None:
        """Add the next parts of the text."""
        for part in parts:
            append(self._parts, part)

    def take(self, text: str) -> list[Part]:
        """The parts of ``text``, which is what a client is told next; joined, they are ``text``.

        What was added before it is dropped: the client is not told of it. A text that was not added has one
        part, which is not drafted.
        """
        if not text:
            return []
        start = "".join(part["text"] for part in self._parts).find(text)
        if start < 0:
            return [Part(text=text, drafted=False)]
        self._cut(start)
        return self._cut(len(text))

    def _cut(self, length: int) -> list[Part]:
        """Remove the first ``length`` characters and return their parts."""
        taken: list[Part] = []
        while length > 0:
            part = self._parts.pop(0)
            head, tail = part["text"][:length], part["text"][length:]
            taken.append(Part(text=head, drafted=part["drafted"]))
            if tail:
                self._parts.insert(0, Part(text=tail, drafted=part["drafted"]))
            length -= len(head)
        return taken


def append(parts: list[Part], part: Part) -> None:
    """Add a part to a list in which neighbours differ in ``drafted``."""
    if not part["text"]:
        return
    if parts and parts[-1]["drafted"] == part["drafted"]:
        part = Part(text=parts.pop()["text"] + part["text"], drafted=part["drafted"])
    parts.append(part)
