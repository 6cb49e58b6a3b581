"""What the commands share: options, loading of models and drafters, prompts from files, user errors."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specdec_ext.cli._console import PlainConsole, printable

if TYPE_CHECKING:
    import torch
    from torch import LongTensor
    from transformers import PreTrainedTokenizerBase

    from specdec_ext import ComparedRuns


# A PreTrainedModel that can generate; transformers has no type that says both.
Model = Any

BUSY_SHARE = 0.2  # of all cores, by other processes


class Dtype(str, Enum):
    """Floating point types a model can be loaded in, by torch's names and by the short ones."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"
    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


_SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


class SpeculationMode(str, Enum):
    """Whether a step drafts where that pays, or always."""

    auto = "auto"
    fixed = "fixed"


DRAFTER_HELP = (
    "auto, none, ngram, suffix, lookahead, head or draft (which the model's config names; that of the "
    "bundled model does), or folder or hub id of a draft head or a draft model."
)
ModelArgument = Annotated[
    str | None,
    typer.Argument(help="Folder or hub id of a causal language model; the bundled one by default."),
]
DrafterOption = Annotated[
    str,
    typer.Option(
        "--drafter",
        help=DRAFTER_HELP,
    ),
]
SpeculationOption = Annotated[
    SpeculationMode,
    typer.Option("--speculation", help="auto drafts where it pays, fixed in every step."),
]
DtypeOption = Annotated[
    Dtype,
    typer.Option("--dtype", help="Type of weights and activations; auto is the checkpoint's own."),
]
DeviceOption = Annotated[
    str,
    typer.Option("--device", help="cpu, cuda or cuda:N; auto is the GPU where there is one."),
]
PromptsOption = Annotated[
    Path | None,
    typer.Option(
        "--prompts",
        exists=True,
        dir_okay=False,
        help="JSON list or JSONL of prompts, or one prompt as text; the bundled ones by default.",
    ),
]
MaxNewTokensOption = Annotated[
    int, typer.Option("--max-new-tokens", min=1, help="Tokens to generate per prompt.")
]


@contextmanager
def user_errors(argument: str | None = None) -> Iterator[None]:
    """Errors about what the user asked for become one line and exit code 2 instead of a traceback.

    Args:
        argument: which one it is about, for errors that do not say so.
    """
    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        raise typer.BadParameter(printable(str(error)), param_hint=argument) from error


def load_target(
    model: str | None, dtype: Dtype, device: str, argument: str = "MODEL"
) -> tuple[Model, PreTrainedTokenizerBase]:
    """The model named on the command line, in eval mode, and its tokenizer; None names the bundled one.

    Args:
        argument: which one names it.
    """
    from transformers.utils import logging

    from specdec_ext import assets
    from specdec_ext.heads.checkpoints.language_model import load_language_model, load_tokenizer

    logging.disable_progress_bar()  # a bar for each model loaded says nothing about generation
    with user_errors("--device"):
        place = find_device(device)
    with user_errors(argument):
        if model is None:
            bundled: Model = assets.load_target(_torch_dtype(dtype))
            return bundled.to(place), assets.load_tokenizer()
        return load_language_model(model, _torch_dtype(dtype), place), load_tokenizer(model)


def load_drafter(name: str, target: Model, tokenizer: PreTrainedTokenizerBase) -> Any:
    """What ``generate(drafter=...)`` takes, for a name on the command line; it is loaded already."""
    from specdec_ext.drafters import resolve_drafter

    with user_errors("--drafter"):
        found = resolve_drafter(name, target, tokenizer)
    # Where "auto" can't draft there is a warning; a drafter that was asked for is an error.
    return name if name == "auto" else found


def find_device(name: str) -> torch.device:
    """The torch device of ``--device``.

    Raises:
        ValueError: if there is no such device in this machine, or torch can't use it.
    """
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"{name!r} is no device; expected auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"{name}: the ops of this package run on cpu and cuda; give one of them")
    if device.type == "cuda" and not torch.cuda.is_available():
        lacks = "was built without CUDA" if torch.version.cuda is None else "finds no GPU"
        raise ValueError(
            f"{name}: torch {torch.__version__} {lacks}; give --device cpu, or leave it out"
        )
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"{name}: this machine has {torch.cuda.device_count()} GPUs")
    return device


def _torch_dtype(dtype: Dtype) -> torch.dtype | str:
    import torch

    if dtype is Dtype.auto:
        return "auto"
    found: torch.dtype = getattr(torch, _SHORT.get(dtype.value, dtype.value))
    return found


def read_prompts(path: Path) -> list[tuple[str, str]]:
    """(name, text) of each prompt in a file.

    ``.json``: a list of texts or of objects; ``.jsonl``: one of them per line; any other file is one prompt.
    An object has ``prompt``, or ``turns`` of which the first counts, and perhaps ``name`` or ``question_id``.

    Raises:
        ValueError: if the file holds something else, or nothing, with file and line.
    """
    from specdec_ext.training.records import read_rows, read_text

    listed = path.suffix in (".json", ".jsonl")
    rows = read_rows(path) if listed else [(str(path), read_text(path))]
    if not rows:
        raise ValueError(f"{path} is empty; expected a list of prompts")
    return [_named_prompt(row, where, str(i)) for i, (where, row) in enumerate(rows)]


def _named_prompt(row: Any, where: str, default_name: str) -> tuple[str, str]:
    from specdec_ext.training.records import checked_text

    if isinstance(row, str):
        row = {"prompt": row}
    if not isinstance(row, dict):
        raise ValueError(f"{where}: expected a text or an object, got {type(row).__name__}")
    if "prompt" in row:
        prompt = row["prompt"]
    else:
        turns = row.get("turns")
        prompt = turns[0] if isinstance(turns, list) and turns else None
    if not isinstance(prompt, str) or not prompt:
        raise ValueError(
            f"{where}: expected a text under 'prompt', or a list of texts under 'turns'"
        )
    name = str(row.get("name", row.get("question_id", default_name)))
    return name, checked_text(prompt, f"{where}: the prompt")


def encode(tokenizer: PreTrainedTokenizerBase, prompt: str, device: torch.device) -> LongTensor:
    """``[1, length]`` ids of one prompt.

    Raises:
        ValueError: for what is no text: bytes of a shell that are not UTF-8.
    """
    from specdec_ext.training.records import checked_text

    return tokenizer(checked_text(prompt, "the prompt"), return_tensors="pt")["input_ids"].to(
        device
    )


def describe(compared: ComparedRuns, prompt_length: int) -> str:
    """One line about a comparison: the verdict and, at a difference, where and how close."""
    if compared.equal or compared.position is None:
        return "equal"
    where = f"at token {compared.position - prompt_length}"
    verdict = "BUG" if compared.verdict == "bug" else compared.verdict
    return f"{verdict} {where}: logit gap {compared.gap:.2g}, bound {compared.bound:.2g}"


def warn_if_busy(console: PlainConsole) -> None:
    """Other processes distort ratios: threads of one matrix product wait for each other's cores."""
    before = _processor_seconds()
    time.sleep(0.5)
    after = _processor_seconds()
    if before is None or after is None:
        return
    total, idle = after[0] - before[0], after[1] - before[1]
    busy = 1 - idle / total if total else 0.0
    if busy > BUSY_SHARE:
        console.sentence(
            f"other processes use {busy:.0%} of this machine: the numbers below are not to be relied on "
            "(with OMP_NUM_THREADS=1 they suffer least)",
            style="yellow",
        )


def _processor_seconds() -> tuple[float, float] | None:
    """(total, idle) time of all cores since boot in ticks, or None where Linux does not say."""
    try:
        fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    except OSError:
        return None
    ticks = [float(field) for field in fields]  # user nice system idle iowait irq softirq steal
    return sum(ticks), ticks[3] + ticks[4]
