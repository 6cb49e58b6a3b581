"""``specdec export``: write files with which other programs speculate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specdec_ext.cli.shared.common import DrafterOption, SpeculationOption, user_errors
from specdec_ext.display.console import PlainConsole


def custom_generate(
    folder: Annotated[
        Path, typer.Argument(help="Folder of a model, or any other; created if missing.")
    ],
    drafter: DrafterOption = "auto",
    speculation: SpeculationOption = "auto",
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the files if they exist.")
    ] = False,
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
