"""``--lock``: refuse any target and draft but those of a ``pair.lock``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specdec_ext.cli.shared.common import user_errors

if TYPE_CHECKING:
    from specdec_ext import PairLock

OPTION = "--lock"
LockOption = Annotated[
    Path | None,
    typer.Option(
        OPTION,
        exists=True,
        dir_okay=False,
        help="Refuse any target, draft and policy but those of this pair.lock (specdec rollout writes it).",
    ),
]


def read_lock(path: Path | None) -> PairLock | None:
    """The lock in the file of ``--lock``, before anything is loaded."""
    if path is None:
        return None
    from specdec_ext import PairLock

    with user_errors(OPTION):
        return PairLock.load(path)


def check_lock(lock: PairLock | None, target: Any, drafter: Any, speculation: str) -> None:
    """Refuse a loaded pair that is not the locked one."""
    if lock is not None:
        with user_errors(OPTION):
            lock.verify(target, drafter, speculation)
