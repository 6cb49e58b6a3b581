"""``specdec watch``: what a running server drafts, and whether it is well."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specdec_ext.cli.shared.common import user_errors
from specdec_ext.cli.shared.lock import read_lock
from specdec_ext.display.console import PlainConsole
from specdec_ext.watch.limits import LIMITS

if TYPE_CHECKING:
    from specdec_ext import PairLock
    from specdec_ext.watch.judge import Reference
    from specdec_ext.watch.report import Report


def watch(
    url: Annotated[
        str,
        typer.Argument(
            help="Address of specdec serve or vLLM, such as http://127.0.0.1:8000, or of its page of metrics."
        ),
    ],
    lock: Annotated[
        Path | None,
        typer.Option(
            "--lock",
            exists=True,
            dir_okay=False,
            help="pair.lock with the target and draft that the server must have, and the acceptance that is "
            "expected; default: the acceptance in the lock with which the server was started.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Name of the model; default: the only one that the server has."),
    ] = None,
    once: Annotated[
        bool,
        typer.Option(
            "--once",
            help="Judge once and exit: all that the server has counted since it began or, with --window, "
            "what it counts in that time.",
        ),
    ] = False,
    interval: Annotated[
        float, typer.Option(min=0.1, help="Seconds between two looks at the server.")
    ] = 5.0,
    window: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            help=f"Seconds over which the server is judged; default: {LIMITS.window_seconds:g}, as in the "
            "rules for Prometheus.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a line of JSON for each look.")
    ] = False,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="SPECDEC_API_KEY",
            show_envvar=True,
            help="The server's key. specdec serve needs it for /pair with --lock, and not for its metrics.",
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=0.001, help="Most seconds for an answer of the server.")
    ] = 10.0,
) -> None:
    """Watch the acceptance of a server, and find a dead head, drift, and speculation that does not pay.

    A terminal shows tables, and a pipe gets a line for each look. Ctrl-C ends it. The exit status is that of
    the last look: 0 if nothing is wrong, 1 for a warning (no drafts, drift, does not pay), 3 if something is
    broken (a dead head, another pair than in --lock, no answer); 2 is a wrong call, or an address without
    such metrics.
    """
    with user_errors():
        from specdec_ext.watch.watcher import Watcher

        locked = read_lock(lock)
        seconds = LIMITS.window_seconds if window is None else window
        if seconds < interval:
            raise ValueError(
                f"--window {seconds:g} is shorter than --interval {interval:g}, so nothing could be compared"
            )
        watcher = Watcher(
            url,
            model=model,
            reference=None if locked is None else _reference(locked, lock),
            lock=locked,
            limits=replace(LIMITS, window_seconds=seconds),
            api_key=api_key,
            timeout=timeout,
        )
    report = None
    with watcher, _display(as_json, once) as show, user_errors("URL"):
        try:
            if once and window is None:
                report = watcher.look_at_all()
            else:
                for report in watcher.looks(
                    seconds if once else interval, seconds if once else None
                ):
                    if not once:
                        show(report)
        except KeyboardInterrupt:
            pass
        if once and report is not None:
            show(report)
    raise typer.Exit(0 if report is None else report.status)


def _reference(lock: PairLock, path: Path | None) -> Reference:
    """The acceptance in the lock of this file.

    Raises:
        ValueError: if it has none.
    """
    from specdec_ext.watch.judge import Reference

    known = lock.reference
    if known is None or not known.accepted_per_position:
        raise ValueError(
            f"--lock {path} has no acceptance, because its pair was not measured; specdec rollout measures it"
        )
    return Reference(known.reached, known.accepted_per_position)


@contextmanager
def _display(as_json: bool, once: bool) -> Iterator[Callable[[Report], None]]:
    """How reports are shown: as tables, which replace each other on a terminal, or as one line each."""
    console = PlainConsole()
    now = datetime.now
    if as_json:
        at = partial(now, timezone.utc)
        yield lambda report: typer.echo(
            json.dumps({"time": at().isoformat(timespec="seconds"), **report.record()})
        )
    elif once:
        yield lambda report: console.blocks(*report.tables())
    elif not console.is_terminal:
        yield lambda report: console.sentence(f"{now():%H:%M:%S} {report}")
    else:
        from rich.console import Group
        from rich.live import Live

        with Live(console=console, auto_refresh=False) as live:
            yield lambda report: live.update(Group(*report.tables()), refresh=True)
