"""``specdec breakeven``: from which acceptance speculation pays, and which draft length is best."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specdec_ext.cli.shared.common import (
    DRAFTER_HELP,
    DeviceOption,
    DtypeOption,
    MaxNewTokensOption,
    PromptsOption,
    check_outputs,
    load_drafter,
    load_target,
    read_prompts,
    user_errors,
    warn_if_busy,
)
from specdec_ext.cli.shared.lists import NUMBER, naturals, numbers
from specdec_ext.defaults import BUNDLED
from specdec_ext.display.console import PlainConsole

if TYPE_CHECKING:
    from specdec_ext.planning.costs import StepCosts
    from specdec_ext.planning.traffic import Traffic

_KIND = re.compile(rf"(?:({NUMBER}):)?({NUMBER}(?:,{NUMBER})*)")


def breakeven(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Folder or hub id of a model whose steps are measured, or 'bundled'; without it, costs are "
            "given."
        ),
    ] = None,
    drafter: Annotated[
        str, typer.Option("--drafter", help=f"Drafter that is measured. {DRAFTER_HELP}")
    ] = "head",
    costs: Annotated[
        Path | None,
        typer.Option(
            "--costs",
            exists=True,
            dir_okay=False,
            help="Costs from the --json file of an earlier run, or written by hand.",
        ),
    ] = None,
    draft_cost: Annotated[
        float | None,
        typer.Option("--draft-cost", min=0, help="Time of each draft token, in plain steps."),
    ] = None,
    node_cost: Annotated[
        float,
        typer.Option(
            "--node-cost", min=0, help="Time of each further token of a pass, in plain steps."
        ),
    ] = 0.0,
    acceptance: Annotated[
        list[str] | None,
        typer.Option(
            "--acceptance",
            help="Acceptance of positions 1, 2, ... given that the position before was accepted, as "
            "A1,A2,...; the last one holds for later positions. Repeat it as SHARE:A1,A2,... for traffic of "
            "several kinds, with its share of the tokens. Default: measured.",
        ),
    ] = None,
    unconditional: Annotated[
        bool,
        typer.Option(
            "--unconditional",
            help="The numbers of --acceptance are shares of all drafts, as vLLM counts per position.",
        ),
    ] = False,
    batch: Annotated[str, typer.Option("--batch", help="Numbers of rows, such as 1,4,16.")] = "1",
    draft_length: Annotated[
        str, typer.Option("--draft-length", help="Draft lengths, such as 1,3,5,7.")
    ] = "1,2,3,4,5,6,7,8",
    speed_up: Annotated[
        str, typer.Option("--speed-up", help="Also show the acceptance for these, such as 2,3.")
    ] = "",
    prompts: PromptsOption = None,
    max_new_tokens: MaxNewTokensOption = 128,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the simulation.")] = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", dir_okay=False, help="Write all results to this file.")
    ] = None,
    plot_file: Annotated[
        Path | None,
        typer.Option("--plot", dir_okay=False, help="Write a figure to this file (PNG)."),
    ] = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
) -> None:
    """Show the speed-up by draft length and rows, break-even acceptance, and the tail of the latency.

    Costs are measured on MODEL, read from --costs, or given with --draft-cost and --node-cost. The acceptance
    is measured with MODEL, or given with --acceptance. Latencies are simulated.
    """
    with user_errors():
        check_outputs(json_file, plot_file)
        rows, lengths = naturals(batch, "--batch"), naturals(draft_length, "--draft-length")
        speed_ups = numbers(speed_up, "--speed-up")
        traffic = _traffic(acceptance, unconditional) if acceptance else None
        given = _given_costs(costs, draft_cost, node_cost, rows, lengths)
        if (model is None) == (given is None):
            raise ValueError(
                "pass either MODEL, whose steps are measured, or costs: --costs FILE or --draft-cost"
            )
        if model is None and traffic is None:
            raise ValueError(
                "--acceptance is missing; without MODEL there is nothing to measure it with"
            )
        from specdec_ext.planning.break_even import break_even

    console = PlainConsole()
    if model is not None:
        where = None if model == BUNDLED else model
        given, traffic = _measured(
            console, where, drafter, prompts, rows, lengths, max_new_tokens, traffic, dtype, device
        )
    assert given is not None and traffic is not None
    with user_errors():
        found = break_even(
            given,
            traffic,
            lengths,
            rows,
            speed_ups=speed_ups,
            new_tokens=max(2, max_new_tokens),
            seed=seed,
        )
    if json_file is not None:
        json_file.write_text(json.dumps(found.record(), indent=1) + "\n")
    if plot_file is not None:
        found.plot(plot_file)
    console.blocks(*found.tables())
    for sentence in found.sentences():
        console.sentence(sentence)


def _traffic(given: list[str], unconditional: bool) -> Traffic:
    """The kinds of text that ``--acceptance`` describes."""
    from specdec_ext.planning.traffic import TextKind, Traffic, conditional

    kinds = []
    for text in given:
        found = _KIND.fullmatch(text.replace(" ", ""))
        if found is None or (found[1] is None and len(given) > 1):
            shape = "A1,A2,..." if len(given) == 1 else "SHARE:A1,A2,... for each of several kinds"
            raise ValueError(f"--acceptance {text}: expected {shape}")
        rates = [float(each) for each in found[2].split(",")]
        rates = conditional(rates) if unconditional else rates
        kinds.append(TextKind(1.0 if found[1] is None else float(found[1]), tuple(rates)))
    return Traffic(tuple(kinds))


def _given_costs(
    file: Path | None,
    draft_cost: float | None,
    node_cost: float,
    rows: list[int],
    lengths: list[int],
) -> StepCosts | None:
    """The costs that options give; None if the model is to be measured."""
    if file is None and draft_cost is None:
        if node_cost:
            raise ValueError("--node-cost needs --draft-cost")
        return None
    from specdec_ext.heads.checkpoints.storage.files import read_json
    from specdec_ext.planning.costs import StepCosts

    if draft_cost is not None:
        if file is not None:
            raise ValueError("--costs and --draft-cost both give the costs; pass only one of them")
        return StepCosts.relative(draft_cost, node_cost, rows, max(lengths))
    assert file is not None
    record = read_json(file)
    return StepCosts.from_record(record.get("costs", record), str(file))


def _measured(
    console: PlainConsole,
    model: str | None,
    drafter: str,
    prompts: Path | None,
    rows: list[int],
    lengths: list[int],
    max_new_tokens: int,
    traffic: Traffic | None,
    dtype: Any,
    device: str,
) -> tuple[StepCosts, Traffic]:
    """Measure the costs and, unless it is given, the acceptance."""
    from specdec_ext import assets
    from specdec_ext.planning.measure import measured_acceptance, measured_costs
    from specdec_ext.planning.traffic import Traffic

    with user_errors():
        if prompts is None and model is not None:
            raise ValueError("pass --prompts FILE: the bundled prompts are for the bundled model")
        if prompts is None:
            texts = [each["prompt"] for each in assets.held_out_prompts()]
        else:
            texts = [text for _, text in read_prompts(prompts)]
    target, tokenizer = load_target(model, dtype, device)
    proposer = load_drafter(drafter, target, tokenizer)
    with user_errors():
        warn_if_busy(console)
        ids = [
            tokenizer(text, return_tensors="pt")["input_ids"].to(target.device) for text in texts
        ]
        if traffic is None:
            rates = measured_acceptance(target, ids, proposer, max(lengths), max_new_tokens)
            traffic = Traffic.uniform(rates)
        longest = max(ids, key=lambda each: each.shape[1])
        calls = {each: [longest.expand(each, -1)] for each in rows}
        return measured_costs(target, calls, proposer, lengths, max_new_tokens), traffic
