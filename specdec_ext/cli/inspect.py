"""``specdec inspect``: show the format and memory of a draft head, and whether it fits a target."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from specdec_ext.cli._common import (
    DeviceOption,
    Dtype,
    DtypeOption,
    Model,
    encode,
    load_target,
    user_errors,
)
from specdec_ext.display.console import PlainConsole

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from specdec_ext.evaluate.calibrate import Calibration
    from specdec_ext.heads.config import DraftHead, HeadRecord
    from specdec_ext.heads.medusa import MedusaHeads

# Tokens of the calibration text; more would cost time and add little certainty.
_MAX_TOKENS = 512
_UNKNOWN = "not recorded"
# If no reading predicts this share of first tokens, the head was made for another target.
_LEAST_AGREEMENT = 0.02
_MEDUSA_ROWS = {"keys and values": "none", "hidden states read": "the last one"}


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
    show_all: Annotated[
        bool, typer.Option("--all", help="Also show every option of the head's config.")
    ] = False,
    dtype: DtypeOption = Dtype.auto,
    device: DeviceOption = "auto",
) -> None:
    """Show a draft head's format, memory and target; with --target, check whether the two fit.

    The exit code is 1 if head and target can't work together. The target's weights are read only for
    --calibrate, or if the head records a fingerprint of them. --dtype and --device apply to --calibrate.
    """
    if calibrate is not None and target is None:
        raise typer.BadParameter("--calibrate needs --target: the head drafts for that model")
    import specdec_ext
    from specdec_ext.heads.config import DraftHead

    console = PlainConsole()
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
        with console.status("calibrating"):
            found = _calibrated(head, text, *loaded)
        console.print(_trials(found, head))
        works = True
    console.print(_summary(head))
    if show_all:
        console.print(_config(head))
    if not works:
        raise typer.Exit(1)


def _summary(head: DraftHead | MedusaHeads) -> Table:
    from specdec_ext.heads.config import DraftHead

    storages = {tensor.data_ptr(): tensor for tensor in head.tensors.values()}
    weights = [tensor for tensor in storages.values() if tensor.is_floating_point()]
    count, size = sum(tensor.numel() for tensor in weights), weights[0].element_size()
    rows = {
        "parameters": f"{count:,}",
        "weights": f"{_bytes(count * size)} ({str(weights[0].dtype).removeprefix('torch.')})",
        "format": head.record.format,
        **(_head_rows(head, size) if isinstance(head, DraftHead) else _MEDUSA_ROWS),
        "made for": _made_for(head.record),
    }
    if head.record.ignored:
        rows["unused tensors"] = ", ".join(head.record.ignored)
    if head.record.ambiguous:
        rows["ambiguous"] = f"{', '.join(head.record.ambiguous)}; --calibrate decides"
    table = Table(show_header=False, title=head.source, title_justify="left")
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _head_rows(head: DraftHead, size: int) -> dict[str, str]:
    config, record = head.config, head.record
    per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * size
    layers = config.feature_layers
    states = (
        f"{', '.join(map(str, layers))} ({record.layers_from})" if layers else record.layers_from
    )
    return {
        "keys and values": f"{_bytes(per_token)} per token",
        "hidden states read": states,
    }


def _made_for(record: HeadRecord) -> str:
    """The recorded ones of the target's name, revision and fingerprint."""
    known = {
        "": record.target_name,
        "revision ": record.target_revision,
        "weights ": record.target_fingerprint,
    }
    return ", ".join(f"{what}{value}" for what, value in known.items() if value) or _UNKNOWN


def _bytes(count: int) -> str:
    value, units = float(count), iter(("B", "KiB", "MiB", "GiB"))
    unit = next(units)
    while value >= 1024 and (larger := next(units, None)) is not None:
        value, unit = value / 1024, larger
    return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"


def _config(head: DraftHead | MedusaHeads) -> Table:
    table = Table("option", "value")
    for field in fields(head.config):
        value: Any = getattr(head.config, field.name)
        text = ", ".join(f"{k}={v}" for k, v in value.items()) if hasattr(value, "items") else value
        table.add_row(field.name, str(text))
    return table


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


def _compared_with(record: HeadRecord, target: str) -> tuple[Model, PreTrainedTokenizerBase | None]:
    """Load the parts of the target that the head's record can be compared with.

    Weights are loaded only if the head records their fingerprint, and the tokenizer likewise.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from specdec_ext.heads.checkpoints.hub import on_disk
    from specdec_ext.heads.checkpoints.language_model import load_language_model, load_tokenizer

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


def _trials(found: Calibration, head: DraftHead) -> Table:
    count = found.trials[0].drafts
    table = Table(
        "hidden states",
        "norm_output",
        "first token",
        "second token",
        "accepted of 2",
        title=f"agreement with the target on {count} drafts",
        title_justify="left",
    )
    chosen = found.head.config
    for trial in sorted(found.trials, key=lambda trial: -trial.score):
        best = trial.norm_output == chosen.norm_output and chosen.feature_layers in (
            trial.feature_layers,
            None,
        )
        table.add_row(
            ", ".join(map(str, trial.feature_layers)),
            str(trial.norm_output),
            f"{trial.first:.1%}",
            f"{trial.second:.1%}",
            f"{trial.score:.2f}",
            style="bold" if best else None,
        )
    if max(trial.first for trial in found.trials) < _LEAST_AGREEMENT:
        table.caption = "no reading agrees with the target: the head was made for another target"
    elif chosen == head.config:
        table.caption = "the checkpoint is read correctly"
    else:
        reading = f"feature_layers={chosen.feature_layers}, norm_output={chosen.norm_output}"
        table.caption = f"pass {reading} to load_draft"
    return table
