"""``specdec export``: write files with which other programs speculate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from specdec_ext.cli.shared.common import DrafterOption, SpeculationOption, user_errors
from specdec_ext.display.console import PlainConsole

OverwriteOption = Annotated[
    bool, typer.Option("--overwrite", help="Replace the files if they exist.")
]


def head(
    path: Annotated[str, typer.Argument(help="Folder, weight file or hub id of a draft head.")],
    folder: Annotated[Path, typer.Argument(help="Folder for its files; created if missing.")],
    engine: Annotated[
        Literal["vllm", "sglang", "speculators"],
        typer.Option("--for", help="Program that reads the head."),
    ],
    overwrite: OverwriteOption = False,
) -> None:
    """Write a draft head in the layout of another engine, and print how that engine is started with it.

    An option of the head that the engine does not know is an error, because the engine would compute
    something else.
    """
    from specdec_ext.heads.checkpoints.export import export_head

    with user_errors():
        written = export_head(path, folder, engine, overwrite=overwrite)
    console = PlainConsole()
    console.print(f"{written.folder}: {written.layout} layout", soft_wrap=True)
    if written.command:
        console.print(written.command, soft_wrap=True)


def custom_generate(
    folder: Annotated[
        Path, typer.Argument(help="Folder of a model, or any other; created if missing.")
    ],
    drafter: DrafterOption = "auto",
    speculation: SpeculationOption = "auto",
    overwrite: OverwriteOption = False,
) -> None:
    """Write custom_generate/generate.py, with which transformers speculates.

    A model that is loaded from the folder with trust_remote_code=True speculates in model.generate, pipeline
    and transformers serve; for other models, pass custom_generate=FOLDER to model.generate.
    """
    from specdec_ext import write_custom_generate

    with user_errors():
        written = write_custom_generate(
            folder, drafter, overwrite=overwrite, speculation=speculation
        )
    console = PlainConsole()
    for path in written:
        console.print(str(path), soft_wrap=True)
