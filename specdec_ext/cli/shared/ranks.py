"""The processes of ``torchrun`` that share a tensor-parallel model: how they start and end."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from specdec_ext.preflight.extras import require

if TYPE_CHECKING:
    from specdec_ext.engine.parallel import ParallelEngine


def is_rank() -> bool:
    """Whether ``torchrun`` has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def rank() -> int:
    """The number of this process among those that ``torchrun`` has started."""
    return int(os.environ["RANK"])


def check_ranks(tp: int) -> None:
    """Refuse to start with another number of processes than ``torchrun`` has started.

    Raises:
        ValueError: for another number.
        ImportError: accelerate is missing, with which transformers spreads a model.
    """
    require("accelerate", "--tp")
    started = int(os.environ["WORLD_SIZE"]) if is_rank() else tp
    if started != tp:
        raise ValueError(
            f"--tp {tp}: torchrun has started {started} processes; pass --tp {started}, or call specdec "
            "without torchrun"
        )


def start_ranks(tp: int, arguments: Sequence[str]) -> NoReturn:
    """Replace this process by ``torchrun``, which runs the command in ``tp`` processes on this machine.

    Args:
        tp: number of processes.
        arguments: the words behind ``specdec``.
    """
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={tp}"]
    os.execv(sys.executable, [*run, "-m", "specdec_ext.cli", *arguments])


def make_parallel_engine(model: Any, **options: Any) -> ParallelEngine:
    """The engine of this process; if it fails on rank 0, the server is asked to end."""
    from specdec_ext.engine.parallel import ParallelEngine

    return ParallelEngine(model, on_failure=lambda: signal.raise_signal(signal.SIGTERM), **options)


def end_ranks(engine: Any) -> None:
    """Wait on other ranks than 0 until the server has ended, and leave the processes' group.

    Args:
        engine: that of :func:`make_parallel_engine`.

    Raises:
        RuntimeError: the engine has failed.
    """
    from torch import distributed

    if engine.rank:
        # Signals reach all processes. Rank 0 tells the others when to end.
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, signal.SIG_IGN)
        engine.follow()
    if engine.failure is not None:
        raise RuntimeError("the engine has failed") from engine.failure
    distributed.destroy_process_group()
