"""Shared parts of the commands: options, loading of models and drafters, prompts from files, user errors."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from specdec_ext.defaults import BUNDLED
from specdec_ext.display.console import PlainConsole
from specdec_ext.display.text import printable
from specdec_ext.preflight.extras import require
from specdec_ext.preflight.outputs import writable_file

if TYPE_CHECKING:
    import torch
    from torch import LongTensor
    from transformers import PreTrainedTokenizerBase

    from specdec_ext import ComparedRuns


# A PreTrainedModel that can generate; transformers has no type for that combination.
Model = Any

BUSY_SHARE = 0.2  # warn if other processes use more than this share of all cores


# Types that a model can be loaded in, by torch's names and by their short forms.
Dtype = Literal["auto", "float32", "bfloat16", "float16", "fp32", "bf16", "fp16"]
_SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
DRAFTER_HELP = (
    "auto, none, ngram, suffix, lookahead; head or draft (the one named in the model's config, as the "
    "bundled model has it); mtp (the heads in the model's checkpoint); or the folder or hub id of a draft "
    "head or a draft model."
)
ModelArgument = Annotated[
    str | None,
    typer.Argument(help="Folder or hub id of a causal language model; default: the bundled model."),
]
DrafterOption = Annotated[str, typer.Option("--drafter", help=DRAFTER_HELP)]
SpeculationOption = Annotated[
    Literal["auto", "fixed"],
    typer.Option(
        "--speculation", help="auto: draft only where it saves time; fixed: draft in every step."
    ),
]
DtypeOption = Annotated[
    Dtype,
    typer.Option("--dtype", help="Type of weights and activations; auto: as in the checkpoint."),
]
DeviceOption = Annotated[
    str, typer.Option("--device", help="cpu, cuda or cuda:N; auto: the GPU if there is one.")
]
PromptsOption = Annotated[
    Path | None,
    typer.Option(
        "--prompts",
        exists=True,
        dir_okay=False,
        help="File of prompts (JSON list or JSONL) or of one prompt (text); default: bundled prompts.",
    ),
]
MaxNewTokensOption = Annotated[
    int, typer.Option("--max-new-tokens", min=1, help="Maximum number of new tokens per prompt.")
]


@contextmanager
def user_errors(argument: str | None = None) -> Iterator[None]:
    """Turn errors in the user's input into one line and exit code 2, without a traceback.

    Args:
        argument: the argument that the error is about, for errors whose message does not name it.
    """
    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        raise typer.BadParameter(printable(str(error)), param_hint=argument) from error


def load_target(
    model: str | None,
    dtype: Dtype,
    device: str,
    argument: str = "MODEL",
    is_parallel: bool = False,
) -> tuple[Model, PreTrainedTokenizerBase]:
    """Load the model named on the command line, in eval mode, and its tokenizer.

    Args:
        model: folder or hub id; None or ``"bundled"`` for the bundled model.
        argument: name of the command-line argument, for error messages.
        is_parallel: spread the layers over the processes of ``torchrun``; each has its own device.
    """
    from transformers.utils import logging

    from specdec_ext.heads.checkpoints.language_model import load_with_tokenizer

    name = model or BUNDLED
    # On a terminal transformers shows the loading of a model. The bundled model loads within a second.
    if name == BUNDLED or not sys.stderr.isatty():
        logging.disable_progress_bar()
    with user_errors("--device"):
        place = None if is_parallel else find_device(device)
    with user_errors(argument):
        return load_with_tokenizer(name, torch_dtype(dtype), place)


def load_drafter(name: str, target: Model, tokenizer: PreTrainedTokenizerBase) -> Any:
    """Load the drafter that ``--drafter`` names, as a value for ``generate(drafter=...)``."""
    from specdec_ext.drafters import resolve_drafter

    with user_errors("--drafter"):
        found = resolve_drafter(name, target, tokenizer)
    # generate() warns if "auto" can't draft; a drafter named by the user that can't draft is an error above.
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
        raise ValueError(f"{name!r} is not a device; expected auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"{name}: the ops of this package run on cpu and cuda; pass one of them")
    if device.type == "cuda" and not torch.cuda.is_available():
        lacks = "was built without CUDA" if torch.version.cuda is None else "finds no GPU"
        raise ValueError(
            f"{name}: torch {torch.__version__} {lacks}; pass --device cpu, or leave it out"
        )
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"{name}: this machine has {torch.cuda.device_count()} GPUs")
    return device


def torch_dtype(dtype: Dtype) -> torch.dtype | str:
    """The torch dtype of ``--dtype``; "auto" stays as it is."""
    import torch

    if dtype == "auto":
        return "auto"
    found: torch.dtype = getattr(torch, _SHORT.get(dtype, dtype))
    return found


def read_prompts(path: Path) -> list[tuple[str, str]]:
    """The names and first turns of the prompts in a file.

    Raises:
        ValueError, OSError: as :func:`specdec_ext.evaluate.benchmark.prompts.read_conversations`.
    """
    from specdec_ext.evaluate.benchmark.prompts import read_conversations

    return [(each.name, each.turns[0]) for each in read_conversations(path)]


def encode(tokenizer: PreTrainedTokenizerBase, prompt: str, device: torch.device) -> LongTensor:
    """Return the ``[1, length]`` token ids of one prompt.

    Raises:
        ValueError: if the prompt is not valid Unicode (a shell passed bytes that are not UTF-8).
    """
    from specdec_ext.training.data.records import checked_text

    return tokenizer(checked_text(prompt, "the prompt"), return_tensors="pt")["input_ids"].to(
        device
    )


def describe(compared: ComparedRuns, prompt_length: int) -> str:
    """Describe a comparison in one line: the verdict and, for a difference, its position and logit gap."""
    if compared.equal or compared.position is None:
        return "equal"
    where = f"at token {compared.position - prompt_length}"
    verdict = "BUG" if compared.verdict == "bug" else compared.verdict
    return f"{verdict} {where}: logit gap {compared.gap:.2g}, bound {compared.bound:.2g}"


def warn_if_busy(console: PlainConsole) -> list[str]:
    """Warn if other processes are busy: they distort ratios, as threads of one product wait for a core.

    Returns:
        The warning, if there is one, for the files of the results.
    """
    before = _processor_seconds()
    time.sleep(0.5)
    after = _processor_seconds()
    if before is None or after is None:
        return []
    total, idle = after[0] - before[0], after[1] - before[1]
    busy = 1 - idle / total if total else 0.0
    if busy <= BUSY_SHARE:
        return []
    warning = (
        f"other processes use {busy:.0%} of this machine: the numbers are not reliable "
        "(OMP_NUM_THREADS=1 reduces the effect)"
    )
    console.sentence(warning, style="yellow")
    return [warning]


def _processor_seconds() -> tuple[float, float] | None:
    """(total, idle) time of all cores since boot in ticks; None without /proc/stat."""
    try:
        fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    except OSError:
        return None
    ticks = [float(field) for field in fields]  # user nice system idle iowait irq softirq steal
    return sum(ticks), ticks[3] + ticks[4]


def check_outputs(json_file: Path | None, plot_file: Path | None) -> None:
    """Check before the work that the files of ``--json`` and ``--plot`` can be written after it."""
    if json_file is not None:
        writable_file(json_file, "--json")
    if plot_file is not None:
        writable_file(plot_file, "--plot")
        require("matplotlib", "--plot")
