"""``specdec rollout``: whether a candidate may replace a baseline."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specdec_ext.cli.shared.common import (
    DeviceOption,
    DrafterOption,
    DtypeOption,
    MaxNewTokensOption,
    SpeculationOption,
    user_errors,
    warn_if_busy,
)
from specdec_ext.cli.shared.lists import naturals
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
from specdec_ext.preflight.extras import require

if TYPE_CHECKING:
    from specdec_ext import PairLock
    from specdec_ext.evaluate.benchmark.client import Server
    from specdec_ext.rollout.gates import Gate
    from specdec_ext.rollout.stages import Rollout

NO_BASELINE, OWN = "none", "auto"
# Options of the server that --candidate auto starts.
_OF_OWN_SERVER = ("drafter", "speculation", "dtype", "device")


def rollout(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(
            help="With --candidate auto: folder or hub id of the model that is served; default: the bundled "
            "model. Else the name of the model on the servers; default: their only one."
        ),
    ] = None,
    baseline: Annotated[
        str,
        typer.Option(
            help="Address of the server to be replaced; none: the candidate itself, without drafts."
        ),
    ] = NO_BASELINE,
    candidate: Annotated[
        str,
        typer.Option(
            help="Address of the server that is to replace it; auto: one that is started for MODEL with "
            "--drafter and --speculation, and ended afterwards."
        ),
    ] = OWN,
    gate: Annotated[
        str,
        typer.Option(
            "--gate",
            help="Gates with commas between them: speedup, acceptance (mean acceptance length), equal and "
            "failed (shares), and p50, p90 or p99 with _ttft, _tpot, _itl or _chunk_gap. A bound ends with x "
            "for a ratio to the baseline, or with ms. Default: speedup>=1.1,p99_itl<=1.05x,equal>=1.0. "
            "failed<=0 is always a gate.",
        ),
    ] = "",
    concurrency: Annotated[
        str,
        typer.Option(
            "--concurrency", help="Requests at a time, one number for each stage, such as 1,4,16."
        ),
    ] = "1",
    drafter: DrafterOption = "auto",
    speculation: SpeculationOption = "auto",
    prompts: ConversationsOption = None,
    category: CategoryOption = None,
    count: CountOption = None,
    turns: TurnsOption = None,
    chat: ChatOption = None,
    max_new_tokens: MaxNewTokensOption = 128,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="Temperature of the sampling; 0 is greedy.")
    ] = 0.0,
    repeats: Annotated[
        int, typer.Option(min=1, help="Turns of each of the two in a stage, over all prompts.")
    ] = 5,
    out: Annotated[
        list[Path] | None,
        typer.Option(
            "--out",
            "-o",
            dir_okay=False,
            help="Write a report (.html), all results (.json), or, if the candidate passes, the lock of its "
            "pair (.lock) to this file. May be repeated.",
        ),
    ] = None,
    api_key: ApiKeyOption = None,
    timeout: TimeoutOption = 600.0,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
) -> None:
    """Compare a candidate with a baseline in stages, and judge it by gates: PASS, HOLD or FAIL.

    In each stage, the two answer all prompts in turn, --concurrency requests at a time. A gate passes if the
    whole 95 % interval of the measured number fulfils it, fails if no part does, and holds in between. The
    first stage that fails is the last one. The exit code is 0 for PASS, 1 for HOLD, and 2 for FAIL, or if
    nothing could be measured.

    The equal gate compares texts. Greedy texts that differ where two tokens are equally probable, within
    rounding, are near-ties and count as equal.
    """
    with user_errors():
        from specdec_ext.evaluate.benchmark.client import Server
        from specdec_ext.evaluate.benchmark.files import check_file
        from specdec_ext.evaluate.benchmark.served import ServedContestant, ask, connect, remarks_on
        from specdec_ext.rollout.gates import DEFAULT_GATES, parse_gates
        from specdec_ext.rollout.own_server import own_server
        from specdec_ext.rollout.report import LOCK, SUFFIXES, write
        from specdec_ext.rollout.stages import roll_out

        require("httpx2", "specdec rollout")
        _check_mode(context, candidate)
        gates = parse_gates(gate or DEFAULT_GATES)
        streams = naturals(concurrency, "--concurrency")
        for path in out or []:
            check_file(path, "--out", SUFFIXES)
        is_bundled = candidate == OWN and model in (None, BUNDLED)
        conversations = conversations_of(prompts, is_bundled, category, count, turns)
    console, paths = PlainConsole(), out or []
    with user_errors(), ExitStack() as stack:
        is_own = candidate == OWN
        servers, options = [], (None if is_own else model, api_key, timeout)
        if baseline != NO_BASELINE:
            servers.append(stack.enter_context(Server(baseline, *options, "--baseline")))
        if is_own:
            arguments = [
                *(model or BUNDLED, "--drafter", drafter, "--speculation", speculation),
                *("--dtype", dtype, "--device", device),
                *("--max-rows", str(max(streams)), "--prefix-tokens", "0"),
            ]
            candidate = stack.enter_context(own_server(arguments, api_key))
        servers.append(stack.enter_context(Server(candidate, *options, "--candidate")))
        connect(servers, conversations, chat)
        _check_servers(servers, gates, temperature)
        first, last = servers[0], servers[-1]
        pair = _pair(last) if any(path.suffix == LOCK for path in paths) else None
        warnings = warn_if_busy(console)
        asked, cut = ask(first, conversations, max_new_tokens)
        found = roll_out(
            ServedContestant(first, {"speculation": "none"} if first is last else {}),
            ServedContestant(last, {}),
            asked,
            gates,
            streams=streams,
            max_new_tokens=max_new_tokens,
            repeats=repeats,
            temperature=temperature,
            policy=speculation if is_own else "drafts as the server was started",
        )
        for report in found.reports:
            report.remarks += [*remarks_on(servers, cut), *warnings]
        written = write(found, paths, pair)
    _show(console, found)
    for path in paths:
        if path not in written:
            console.sentence(f"{path} is not written, because the candidate does not pass")
    raise typer.Exit(found.exit_status)


def _check_mode(context: typer.Context, candidate: str) -> None:
    """Refuse options that have no effect on a server that runs already.

    Raises:
        ValueError: with the option.
    """
    if candidate == NO_BASELINE:
        raise ValueError("--candidate none: expected the address of a server, or auto")
    for name in _OF_OWN_SERVER if candidate != OWN else ():
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise ValueError(
                f"--{name} is for a server that is started here; {candidate} generates as it was started, so "
                "leave the option out, or pass --candidate auto"
            )


def _check_servers(servers: Sequence[Server], gates: Sequence[Gate], temperature: float) -> None:
    """Refuse servers that can't be judged by these gates.

    Raises:
        ValueError: with the reason.
    """
    candidate = servers[-1]
    if len(servers) == 1:
        if not candidate.is_ours:
            raise ValueError(
                f"--baseline none: {candidate.name} is not specdec serve, so it can't be asked to decode "
                "without drafts; pass the address of a server that does as --baseline"
            )
        for gate in gates:
            if gate.needs_baseline_drafts:
                raise ValueError(
                    f"--gate {gate.name} is a ratio to the drafts of the baseline, which has none; leave out "
                    "the x, or pass a --baseline that drafts"
                )
    judges_texts = any(gate.metric == "equal" for gate in gates)
    if temperature and judges_texts and not all(server.is_ours for server in servers):
        raise ValueError(
            "--gate equal: at a temperature above 0, only specdec serve writes the same text for the same "
            "seed; pass other gates, or --temperature 0"
        )


def _pair(server: Server) -> PairLock:
    """The lock of a server's pair, without a reference.

    Raises:
        ValueError: if the server does not tell it.
    """
    from specdec_ext import PairLock

    try:
        return PairLock.from_record(server.told("/pair"), f"{server.name}/pair")
    except ValueError as error:
        raise ValueError(
            f"--out: a lock needs the files of the candidate's pair, which specdec serve tells; {error}"
        ) from error


def _show(console: PlainConsole, found: Rollout) -> None:
    for report in found.reports[:1]:
        console.sentence(report.machine)
    console.blocks(*found.tables())
    for text in (f"{found}", *found.sentences()):
        console.sentence(text)
