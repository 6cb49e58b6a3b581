"""``specdec inspect``: show the format and memory of a draft head, and whether it fits a target."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specdec_ext.cli.shared.common import (
    DeviceOption,
    DtypeOption,
    Model,
    encode,
    load_target,
    user_errors,
)
from specdec_ext.cli.shared.lock import LockOption, read_lock
from specdec_ext.display import Table
from specdec_ext.display.console import PlainConsole

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from specdec_ext import PairLock
    from specdec_ext.evaluate.calibrate import Calibration
    from specdec_ext.heads.config import DraftHead
    from specdec_ext.heads.medusa import MedusaHeads
    from specdec_ext.heads.record import HeadRecord

# Tokens of the calibration text; more would cost time and add little certainty.
_MAX_TOKENS = 512


def inspect(
    path: Annotated[str, typer.Argument(help="Folder, weight file or hub id of a draft head.")],
    target: Annotated[
        str | None, typer.Option(help="Folder or hub id of the model that the head drafts for.")
    ] = None,
    calibrate: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="Text file on which to try the possible readings of the head's config; needs --target.",
        ),
    ] = None,
    lock: LockOption = None,
    show_all: Annotated[
        bool, typer.Option("--all", help="Also show every option of the head's config.")
    ] = False,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
) -> None:
    """Show a draft head's format, memory and target; with --target, check whether the two fit.

    With --lock, the files of the head, and of the target if it is given, are compared with those of a
    pair.lock. The exit code is 1 if head and target can't work together, or differ from the lock. The
    target's weights are read only for --calibrate and --lock, or if the head records a fingerprint of them.
    --dtype and --device apply to --calibrate.
    """
    if calibrate is not None and target is None:
        raise typer.BadParameter("--calibrate needs --target: the head drafts for that model")
    import specdec_ext
    from specdec_ext.heads.config import DraftHead

    console, locked = PlainConsole(), read_lock(lock)
    with user_errors("PATH"):
        head = specdec_ext.load_draft(path)
    if calibrate is not None and not isinstance(head, DraftHead):
        raise typer.BadParameter(
            f"{path} holds Medusa heads, which have nothing to calibrate; leave out --calibrate"
        )
    loaded, works = None, True
    if target is not None:
        if calibrate is not None:
            loaded = load_target(target, dtype, device, "--target")
        works = _verdict(console, head, target, loaded)
    if calibrate is not None and isinstance(head, DraftHead):
        assert loaded is not None
        with user_errors():
            text = calibrate.read_text("utf-8")
        found = _calibrated(head, text, *loaded)
        console.blocks(*found.tables())
        console.sentence(f"{found}\n")
        works = True
    if locked is not None:
        works &= _is_locked(console, locked, head, target)
    console.print(*head.tables())
    if show_all:
        console.print()
        console.print(_config(head))
    if not works:
        raise typer.Exit(1)


def _config(head: DraftHead | MedusaHeads) -> Table:
    rows = []
    for field in fields(head.config):
        value: Any = getattr(head.config, field.name)
        text = ", ".join(f"{k}={v}" for k, v in value.items()) if hasattr(value, "items") else value
        rows.append((field.name, str(text)))
    return Table(rows, ("option", "value"))


def _verdict(
    console: PlainConsole,
    head: DraftHead | MedusaHeads,
    target: str,
    loaded: tuple[Model, PreTrainedTokenizerBase] | None,
) -> bool:
    """Print every problem with the pair; return False if it can't work."""
    from specdec_ext.heads.checkpoints import check_pair

    with user_errors("--target"):
        model, tokenizer = loaded or _compared_with(head.record, target)
    try:
        doubts = check_pair(head, model, tokenizer)
    except ValueError as error:
        console.sentence(f"can't work: {error}", style="red")
        return False
    for doubt in doubts:
        console.sentence(f"looks wrong: {doubt}", style="yellow")
    if not doubts:
        console.sentence(f"fits {target}")
    return True


def _is_locked(
    console: PlainConsole, lock: PairLock, head: DraftHead | MedusaHeads, target: str | None
) -> bool:
    """Print every difference from a lock; return False if there is one."""
    with user_errors("--lock"):
        differences = lock.differences(target, head)
    for difference in differences:
        console.sentence(f"not the locked pair: {difference}", style="red")
    if not differences:
        console.sentence(f"as locked: {lock}")
    return not differences


def _compared_with(record: HeadRecord, target: str) -> tuple[Model, PreTrainedTokenizerBase | None]:
    """Load the parts of the target that the head's record can be compared with.

    Weights are loaded only if the head records their fingerprint, and the tokenizer likewise.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from specdec_ext.heads.checkpoints.language_model import load_language_model, load_tokenizer
    from specdec_ext.heads.checkpoints.storage.hub import on_disk

    if record.target_fingerprint is not None:
        model: Model = load_language_model(target, torch.bfloat16, "cpu")
    else:
        config = AutoConfig.from_pretrained(on_disk(target) or target)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    recorded = record.tokenizer_fingerprint is not None
    return model, load_tokenizer(target) if recorded else None


def _calibrated(
    head: DraftHead, text: str, model: Model, tokenizer: PreTrainedTokenizerBase
) -> Calibration:
    from specdec_ext.evaluate.calibrate import calibrate

    with user_errors():
        return calibrate(head, model, encode(tokenizer, text, model.device)[:, :_MAX_TOKENS])
