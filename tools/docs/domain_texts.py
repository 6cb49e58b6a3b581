"""Write the texts of the example in ``docs/guide/train-a-head.md``: topics of Python's language reference.

    python tools/docs/domain_texts.py

The text comes from ``pydoc_data.topics``, which is part of every Python. ``build/domain/train.jsonl`` has the
training texts, and ``build/domain/prompts.json`` the beginnings of the held-out topics. Topics quote each
other, so a paragraph of a held-out topic is never in a training text.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from pydoc_data.topics import topics

FOLDER = Path("build/domain")
# Every third topic of the longer ones is held out, but not one of the six longest.
HELD_OUT = slice(6, 42, 3)
PIECE = 900  # characters of a training text, at least
PROMPT = 800  # characters of a prompt, at most


def split(texts: list[str]) -> tuple[list[str], list[str]]:
    """Return the training texts and the held-out topics."""
    ranked = sorted(texts, key=len, reverse=True)
    held_out = ranked[HELD_OUT]
    used = {paragraph for text in held_out for paragraph in text.split("\n\n")}
    pieces = []
    for text in ranked:
        piece: list[str] = []
        for paragraph in text.split("\n\n"):
            if paragraph not in used:
                used.add(paragraph)
                piece.append(paragraph)
            if sum(map(len, piece)) >= PIECE:
                pieces.append("\n\n".join(piece))
                piece = []
    return pieces, held_out


def main() -> None:
    pieces, held_out = split(list(topics.values()))
    prompts = [text[:PROMPT].rpartition("\n")[0] for text in held_out]
    FOLDER.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps({"text": piece}) + "\n" for piece in pieces)
    (FOLDER / "train.jsonl").write_text(lines, "utf-8")
    (FOLDER / "prompts.json").write_text(json.dumps(prompts, indent=1) + "\n", "utf-8")
    print(f"{FOLDER}: {len(pieces)} training texts, {len(prompts)} prompts")


if __name__ == "__main__":
    sys.exit(main())
