"""Options of commands that measure: which prompts, and how servers are asked."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from specdec_ext.evaluate.benchmark.prompts import Conversation

ConversationsOption = Annotated[
    Path | None,
    typer.Option(
        "--prompts",
        exists=True,
        dir_okay=False,
        help="File of prompts (JSON list or JSONL, such as those of MT-bench, HumanEval, GSM8K and "
        "Spec-Bench) or of one prompt (text); default: bundled prompts.",
    ),
]
CategoryOption = Annotated[
    list[str] | None,
    typer.Option("--category", help="Only prompts of this category. May be repeated."),
]
CountOption = Annotated[
    int | None, typer.Option("--count", min=1, help="Most prompts, of all categories alike.")
]
TurnsOption = Annotated[
    int | None, typer.Option("--turns", min=1, help="Most turns of a conversation; default: all.")
]
ChatOption = Annotated[
    bool | None,
    typer.Option(
        "--chat/--no-chat",
        help="Give prompts as messages of a chat, or as texts to be continued; default: as messages if "
        "the file has turns and the model has a chat template.",
    ),
]
ApiKeyOption = Annotated[
    str | None,
    typer.Option(
        "--api-key", envvar="SPECDEC_API_KEY", show_envvar=True, help="Key of the server."
    ),
]
TimeoutOption = Annotated[
    float,
    typer.Option("--timeout", min=0.001, help="Most seconds for a request to a server."),
]


def conversations_of(
    prompts: Path | None,
    is_bundled: bool,
    categories: list[str] | None,
    count: int | None,
    turns: int | None,
) -> list[Conversation]:
    """The conversations that these options select.

    Args:
        prompts: the file; None for the bundled prompts.
        is_bundled: whether these are for the bundled model.
        categories, count, turns: as for :func:`specdec_ext.evaluate.benchmark.prompts.chosen`.

    Raises:
        ValueError, OSError: as reading and choosing them.
    """
    from specdec_ext.evaluate.benchmark.prompts import bundled, chosen, general, read_conversations

    default = bundled if is_bundled else general
    found = default() if prompts is None else read_conversations(prompts)
    return chosen(found, categories or [], count, turns)
