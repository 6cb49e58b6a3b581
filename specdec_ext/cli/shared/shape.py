"""The options that shape drafts: ``--draft-length`` and ``--tree``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from specdec_ext.cli.shared.lists import naturals

if TYPE_CHECKING:
    from specdec_ext import TreeConfig

DraftLengthOption = Annotated[
    int | None, typer.Option("--draft-length", min=1, help="Draft chains of this many tokens.")
]
TreeOption = Annotated[
    str | None,
    typer.Option(
        "--tree",
        help="Shape of the dynamic trees of draft heads, as DEPTHxTOP_KxNODES, such as 6x10x60.",
    ),
]
DraftLengthsOption = Annotated[
    str,
    typer.Option("--draft-length", help="Draft chains of these numbers of tokens, such as 1,3,5."),
]
TreesOption = Annotated[
    str,
    typer.Option(
        "--tree",
        help="Shapes of the dynamic trees of draft heads, as DEPTHxTOP_KxNODES, such as 6x10x60,4x4x16.",
    ),
]


def shapes_of(draft_lengths: str, trees: str) -> dict[str, TreeConfig]:
    """The shapes that --draft-length and --tree ask for, by their names; empty for the drafter's own."""
    from specdec_ext import TreeConfig

    lengths = naturals(draft_lengths, "--draft-length") if draft_lengths else []
    chains = {f"chain {length}": TreeConfig(depth=length) for length in lengths}
    listed = [each.strip() for each in trees.split(",")] if trees else []
    return {**chains, **{f"tree {each}": _tree(each) for each in listed}}


def shape_of(draft_length: int | None, tree: str | None) -> TreeConfig | None:
    """The shape that --draft-length and --tree ask for; None for the drafter's own."""
    from specdec_ext import TreeConfig

    if tree is None:
        return None if draft_length is None else TreeConfig(depth=draft_length)
    if draft_length is not None:
        raise ValueError("--draft-length and --tree both shape the drafts; pass only one of them")
    return _tree(tree)


def _tree(text: str) -> TreeConfig:
    from specdec_ext import TreeConfig

    numbers = text.split("x")
    if len(numbers) != 3 or not all(number.isdecimal() for number in numbers):
        raise ValueError(f"--tree {text}: expected DEPTHxTOP_KxNODES, such as 6x10x60")
    depth, top_k, num_nodes = map(int, numbers)
    return TreeConfig(depth=depth, top_k=top_k, num_nodes=num_nodes)
