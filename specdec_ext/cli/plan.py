"""``specdec plan``: the memory of a target with a drafter, from configs alone, and what fits on a device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from specdec_ext.cli.shared.common import Dtype, check_outputs, torch_dtype, user_errors
from specdec_ext.cli.shared.shape import DraftLengthOption, TreeOption, shape_of
from specdec_ext.display.console import PlainConsole


def plan(
    target: Annotated[
        str,
        typer.Argument(
            help="Folder, config.json or hub id of the target; only its config is read or downloaded."
        ),
    ],
    draft: Annotated[
        str | None, typer.Option(help="The same for a draft head or a draft model.")
    ] = None,
    context: Annotated[
        int, typer.Option(min=2, help="Tokens of each row, prompt and new tokens together.")
    ] = 4096,
    rows: Annotated[int, typer.Option(min=1, help="Rows of the batch.")] = 1,
    new_tokens: Annotated[
        int, typer.Option("--new-tokens", min=1, help="Tokens of the context that are generated.")
    ] = 256,
    draft_length: DraftLengthOption = None,
    tree: TreeOption = None,
    dtype: Annotated[
        Dtype,
        typer.Option("--dtype", help="Type of weights and activations; auto: as in the config."),
    ] = "auto",
    quantisation: Annotated[
        str,
        typer.Option(
            "--quantisation",
            help="Format of the target's matrices: auto (as in the config), none, float8, int8 or int4; for "
            "the CPU also with a group size and with offsets, such as int4:128 and int4:128:offsets.",
        ),
    ] = "auto",
    draft_quantisation: Annotated[
        str, typer.Option("--draft-quantisation", help="The same for the draft.")
    ] = "auto",
    sample: Annotated[
        bool, typer.Option("--sample", help="Plan for sampled text, whose scores are in float32.")
    ] = False,
    gpu: Annotated[
        str | None, typer.Option("--gpu", help="Name of a GPU, such as H100 or A100-40GB.")
    ] = None,
    mig: Annotated[
        str | None, typer.Option("--mig", help="MIG profile of a part of a GPU, such as 3g.40gb.")
    ] = None,
    size: Annotated[
        str | None, typer.Option("--bytes", help="Memory, in bytes or such as 24GiB.")
    ] = None,
    share: Annotated[
        float, typer.Option("--share", min=0.01, max=1, help="Share of the memory to plan with.")
    ] = 0.9,
    device: Annotated[
        Literal["cuda", "cpu"], typer.Option("--device", help="Kind of device to plan for.")
    ] = "cuda",
    graphs: Annotated[
        bool, typer.Option(help="Whether passes are recorded on a GPU, which needs another cache.")
    ] = True,
    json_file: Annotated[
        Path | None, typer.Option("--json", dir_okay=False, help="Write the plan to this file.")
    ] = None,
    plot_file: Annotated[
        Path | None,
        typer.Option("--plot", dir_okay=False, help="Write a figure of the memory by part (PNG)."),
    ] = None,
) -> None:
    """Show the memory of a target and a draft, part by part and phase by phase, without loading them.

    With --gpu, --mig or --bytes, it also shows whether it fits or how much is missing, and the largest
    number of rows and the longest context that fit. The exit code is 1 if it does not fit.
    """
    with user_errors():
        check_outputs(json_file, plot_file)
        given = [each for each in (gpu, mig, size) if each is not None]
        if len(given) > 1:
            raise ValueError("--gpu, --mig and --bytes all name the memory; pass only one of them")
        from specdec_ext.planning.capacity import capacity_of

        if given:
            capacity_of(
                given[0]
            )  # a wrong name is told before the seconds that torch takes to import
        from specdec_ext.planning.memory import plan as planned

        found = planned(
            target,
            draft,
            context=context,
            rows=rows,
            new_tokens=new_tokens,
            tree=shape_of(draft_length, tree),
            dtype=torch_dtype(dtype),
            quantisation=quantisation,
            draft_quantisation=draft_quantisation,
            do_sample=sample,
            memory=given[0] if given else None,
            share=share,
            device=device,
            graphs=graphs,
        )
    if json_file is not None:
        json_file.write_text(json.dumps(found.record(), indent=1) + "\n")
    if plot_file is not None:
        found.plot(plot_file)
    console = PlainConsole()
    console.blocks(*found.tables())
    for sentence in found.sentences():
        console.sentence(sentence)
    if found.fits is False:
        raise typer.Exit(1)
