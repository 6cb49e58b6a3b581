"""Options of the commands that sample."""

from __future__ import annotations

from typing import Annotated, Any

import typer

SampleOption = Annotated[
    bool, typer.Option("--sample", help="Sample instead of decoding greedily.")
]
TemperatureOption = Annotated[
    float | None, typer.Option("--temperature", help="Sampling temperature; needs --sample.")
]
TopPOption = Annotated[
    float | None, typer.Option("--top-p", help="Nucleus probability; needs --sample.")
]
TopKOption = Annotated[
    int | None,
    typer.Option("--top-k", help="Sample among the K most likely tokens; needs --sample."),
]
SeedOption = Annotated[
    int | None,
    typer.Option("--seed", help="Seed; the same seed gives the same text; needs --sample."),
]


def sampling_kwargs(sample: bool, **options: Any) -> dict[str, Any]:
    """Keywords of ``generate`` for greedy decoding or sampling; options without effect are refused."""
    given = {name: value for name, value in options.items() if value is not None}
    if given and not sample:
        names = ", ".join("--" + name.replace("_", "-") for name in given)
        raise typer.BadParameter(f"{names} needs --sample: greedy decoding draws nothing")
    return {"do_sample": sample, **given}
