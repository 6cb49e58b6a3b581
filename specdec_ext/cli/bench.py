"""``specdec bench``: the speed and latency of a model with each drafter, or of servers."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specdec_ext.cli.shared.common import (
    DRAFTER_HELP,
    DeviceOption,
    DtypeOption,
    MaxNewTokensOption,
    Model,
    check_outputs,
    load_drafter,
    load_target,
    user_errors,
    warn_if_busy,
)
from specdec_ext.cli.shared.lists import naturals, numbers, split
from specdec_ext.cli.shared.shape import DraftLengthsOption, TreesOption, shapes_of
from specdec_ext.cli.shared.workload import (
    ApiKeyOption,
    CategoryOption,
    ChatOption,
    ConversationsOption,
    CountOption,
    TimeoutOption,
    TurnsOption,
    conversations_of,
)
from specdec_ext.defaults import BUNDLED
from specdec_ext.display.console import PlainConsole

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from specdec_ext import TreeConfig
    from specdec_ext.evaluate.benchmark import Report
    from specdec_ext.evaluate.breakdown import Breakdown

# Options that only one of the two kinds of contestants has.
_OF_MODELS = {
    "drafter": "--drafter",
    "draft_length": "--draft-length",
    "tree": "--tree",
    "transformers_too": "--transformers",
    "assisted": "--assisted",
    "breakdown": "--breakdown",
    "dtype": "--dtype",
    "device": "--device",
}
INTERRUPTED = 130  # exit status after Ctrl-C, as of shells: 128 and the number of SIGINT
_OF_SERVERS = {"api_key": "--api-key", "timeout": "--timeout"}


def bench(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(
            help="Folder or hub id of a causal language model; default: the bundled model. With --url, the "
            "name of the model on the server; default: its only one."
        ),
    ] = None,
    url: Annotated[
        list[str] | None,
        typer.Option(
            "--url",
            help="Measure the server at this address (OpenAI's API, such as http://127.0.0.1:8000). May be "
            "repeated: servers take turns and are compared with the first.",
        ),
    ] = None,
    drafter: Annotated[
        list[str], typer.Option("--drafter", help=f"{DRAFTER_HELP} May be repeated.")
    ] = ["auto"],  # noqa: B006  (typer copies it)
    batch: Annotated[
        str,
        typer.Option(
            "--batch", help="Prompts per call, or requests at a time with --url, such as 1,4,16."
        ),
    ] = "1",
    draft_length: DraftLengthsOption = "",
    tree: TreesOption = "",
    temperature: Annotated[
        str, typer.Option("--temperature", help="Temperatures such as 0,0.8; 0 is greedy.")
    ] = "0",
    speculation: Annotated[
        str,
        typer.Option(
            "--speculation",
            help="auto: draft only where it saves time; fixed: draft in every step; or fixed,auto. Default: "
            "auto, or as the server was started.",
        ),
    ] = "",
    prompts: ConversationsOption = None,
    category: CategoryOption = None,
    count: CountOption = None,
    turns: TurnsOption = None,
    chat: ChatOption = None,
    max_new_tokens: MaxNewTokensOption = 128,
    repeats: Annotated[
        int, typer.Option(min=1, help="Calls per prompt, of which the median is used.")
    ] = 3,
    transformers_too: Annotated[
        bool,
        typer.Option(
            "--transformers/--no-transformers",
            help="Also measure Hugging Face's ways to generate.",
        ),
    ] = True,
    assisted: Annotated[
        str | None,
        typer.Option(
            "--assisted",
            help="Also measure Hugging Face's assisted decoding with this draft model (folder, hub id or "
            "draft).",
        ),
    ] = None,
    out: Annotated[
        list[Path] | None,
        typer.Option(
            "--out",
            "-o",
            dir_okay=False,
            help="Write all results to this file (.json, .jsonl, .csv, .md or .html). May be repeated.",
        ),
    ] = None,
    plot_file: Annotated[
        Path | None,
        typer.Option("--plot", dir_okay=False, help="Write a bar chart to this file (PNG)."),
    ] = None,
    details: Annotated[
        bool,
        typer.Option(
            "--details",
            help="Show all percentiles, prompt and generation apart, categories, acceptance by position.",
        ),
    ] = False,
    breakdown: Annotated[
        bool,
        typer.Option(
            "--breakdown",
            help="Show where the time of a step goes for each drafter; with --plot, in a second chart.",
        ),
    ] = False,
    api_key: ApiKeyOption = None,
    timeout: TimeoutOption = 600.0,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
) -> None:
    """Compare the speed and latency of each drafter with plain decoding, or measure servers.

    All combinations of the values of --drafter, --draft-length or --tree, --speculation, --batch and
    --temperature are measured, and plain decoding always is. All take turns on every prompt after a call
    that is not counted, and medians are reported. End-of-sequence tokens are ignored, so that every text has
    --max-new-tokens tokens. Ratios have 95 % confidence intervals over prompts.

    TTFT is the time to the first token. TPOT is the mean time of a request per token after the first. ITL is
    the time between two arrivals divided among the tokens that arrive, and the chunk gap is that time itself:
    with speculation, several tokens arrive at once.

    What fails is a row with its error, and everything else is measured; the exit status is then 1. Ctrl-C
    ends the measurement: what was measured is written and shown, and the exit status is 130.
    """
    with user_errors():
        _check_mode(context, url)
        check_outputs(None, plot_file)
        _check_files(out or [])
        sizes, temperatures = naturals(batch, "--batch"), numbers(temperature, "--temperature")
        if not temperatures:
            raise ValueError("--temperature is empty; expected numbers such as 0,0.8")
        policies = split(speculation, "--speculation", "auto|fixed", "auto, fixed or fixed,auto")
        shapes = shapes_of(draft_length, tree)
        # The bundled model knows only Python.
        is_bundled = model in (None, BUNDLED) and not url
        conversations = conversations_of(prompts, is_bundled, category, count, turns)
    console = PlainConsole()
    common: dict[str, Any] = {"max_new_tokens": max_new_tokens, "repeats": repeats}
    steps: list[Breakdown] = []
    if url:
        with user_errors(), ExitStack() as stack:
            from specdec_ext.evaluate.benchmark.client import Server
            from specdec_ext.evaluate.benchmark.served import compare_servers

            servers = [stack.enter_context(Server(each, model, api_key, timeout)) for each in url]
            warnings = warn_if_busy(console)
            reports = compare_servers(
                servers,
                conversations,
                streams=sizes,
                temperatures=temperatures,
                speculation=policies,
                chat=chat,
                **common,
            )
    else:
        from specdec_ext.evaluate import benchmark

        target, tokenizer = load_target(model, dtype, device)
        with user_errors():
            drafters = _drafters(drafter, shapes, target, tokenizer)
            assistant = None if assisted is None else _assistant(assisted, target, tokenizer)
            warnings = warn_if_busy(console)
            workloads = benchmark.workloads(
                target, tokenizer, conversations, sizes, temperatures, max_new_tokens, chat
            )
            if breakdown:
                steps = _breakdowns(target, list(workloads[0].prompts), drafters, max_new_tokens)
            reports = benchmark.compare_all(
                target,
                workloads,
                drafters,
                assistant=assistant,
                speculation=policies or ["auto"],
                transformers_too=transformers_too,
                **common,
            )
    for report in reports:
        report.remarks += warnings
    _publish(console, reports, steps, out or [], plot_file, details)
    if any(report.is_interrupted for report in reports):
        raise typer.Exit(INTERRUPTED)
    if not all(report.is_whole for report in reports):
        raise typer.Exit(1)


def _check_mode(context: typer.Context, url: list[str] | None) -> None:
    """Refuse options that have no effect on what is measured.

    Raises:
        ValueError: with the option.
    """
    others = _OF_MODELS if url else _OF_SERVERS
    for name, option in others.items():
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise ValueError(
                f"{option} is for a model; a server generates as it was started, so leave it out with --url"
                if url
                else f"{option} is for servers; it needs --url"
            )
    if url and len(set(url)) < len(url):
        raise ValueError("--url names a server twice")


def _check_files(out: list[Path]) -> None:
    from specdec_ext.evaluate.benchmark.files import check_file

    for path in out:
        check_file(path, "--out")


def _drafters(
    names: list[str],
    shapes: dict[str, TreeConfig],
    target: Model,
    tokenizer: PreTrainedTokenizerBase,
) -> dict[str, Any]:
    """The drafters in all shapes; if there are several shapes, their names say which."""
    found = {}
    for name in names:
        for shape, config in shapes.items() or [("", None)]:
            full = f"{name}, {shape}" if len(shapes) > 1 else name
            found[full] = _shaped(name, load_drafter(name, target, tokenizer), config)
    return found


def _publish(
    console: PlainConsole,
    reports: list[Report],
    steps: list[Breakdown],
    out: list[Path],
    plot_file: Path | None,
    details: bool,
) -> None:
    """Write and show results: first the files, so that nothing is lost."""
    from specdec_ext.evaluate import benchmark
    from specdec_ext.evaluate.benchmark import files

    files.write(reports, out, steps)
    console.sentence(reports[0].machine)
    for report in reports:
        console.blocks(*report.tables(), *(report.details() if details else ()))
    for note in benchmark.joint_notes(reports):
        console.sentence(note)
    if not details:
        console.sentence(
            "--details shows all percentiles, prompt and generation apart, categories and acceptance by "
            "position"
        )
    for each in steps:
        console.blocks(*each.sentences(), *each.tables())
    if plot_file is not None:
        benchmark.plot(reports, plot_file)
        if steps:
            steps[0].plot(plot_file.with_stem(f"{plot_file.stem}_breakdown"), steps[1:])


def _breakdowns(
    target: Model, prompts: list[Any], drafters: dict[str, Any], max_new_tokens: int
) -> list[Breakdown]:
    """Break down greedy decoding without a drafter and with each one; with padded batches, only the first."""
    from specdec_ext.evaluate.breakdown import breakdown

    inputs: dict[str, Any] = {}
    if len(prompts[0]["input_ids"]) > 1:
        prompts, inputs = prompts[:1], {"attention_mask": prompts[0]["attention_mask"]}
    ids = [prompt["input_ids"] for prompt in prompts]
    return [
        breakdown(target, ids, each, max_new_tokens, name, **inputs)
        for name, each in {"none": None, **drafters}.items()
    ]


def _shaped(name: str, drafter: Any, shape: TreeConfig | None) -> Any:
    """Return a drafter that drafts in this shape.

    Raises:
        ValueError: if the drafter cannot draft in it.
    """
    from specdec_ext import DraftModelDrafter, HeadDrafter, MedusaDrafter, NgramDrafter

    if shape is None or drafter is None:
        return drafter
    if isinstance(drafter, HeadDrafter):
        return HeadDrafter(drafter.head, shape, drafter.weights)
    if isinstance(drafter, MedusaDrafter):
        return MedusaDrafter(drafter.heads, shape)
    if shape.top_k == 1 and isinstance(drafter, (NgramDrafter, DraftModelDrafter)):
        drafter.num_draft_tokens = shape.depth
        return drafter
    option = "--draft-length" if shape.top_k == 1 else "--tree"
    able = "ngram, draft models and draft heads" if shape.top_k == 1 else "draft heads"
    raise ValueError(
        f"{option} works with {able}, not with --drafter {name}; leave out one of the two options"
    )


def _assistant(name: str, target: Model, tokenizer: PreTrainedTokenizerBase) -> Any:
    from specdec_ext import DraftModelDrafter

    found = load_drafter(name, target, tokenizer)
    if not isinstance(found, DraftModelDrafter):
        raise ValueError(
            f"--assisted {name}: expected a draft model; assisted decoding takes no other drafter"
        )
    return found.model
