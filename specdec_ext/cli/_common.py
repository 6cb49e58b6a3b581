"""What the commands share: options, loading of models and drafters, prompts from files, user errors."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

if TYPE_CHECKING:
    import torch
    from torch import LongTensor
    from transformers import PreTrainedTokenizerBase

    from specdec_ext import ComparedRuns


# A PreTrainedModel that can generate; transformers has no type that says both.
Model = Any

BUSY_SHARE = 0.2  # of all cores, by other processes


class Dtype(str, Enum):
    """Floating point types a model can be loaded in."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class SpeculationMode(str, Enum):
    """Whether a step drafts where that pays, or always."""

    auto = "auto"
    fixed = "fixed"


ModelArgument = Annotated[
    str | None,
    typer.Argument(help="Folder or hub id of a causal language model; the bundled one by default."),
]
DrafterOption = Annotated[
    str,
    typer.Option(
        "--drafter",
        help="none, auto, ngram, suffix, lookahead, head or draft (the bundled head or draft model), or "
        "folder or hub id of a draft head or a draft model.",
    ),
]
SpeculationOption = Annotated[
    SpeculationMode,
    typer.Option("--speculation", help="auto drafts where it pays, fixed in every step."),
]
DtypeOption = Annotated[Dtype, typer.Option("--dtype", help="Type of weights and activations.")]
DeviceOption = Annotated[str, typer.Option("--device", help="torch device of both models.")]
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
def user_errors() -> Iterator[None]:
    """Errors about what the user asked for become one line and exit code 2 instead of a traceback."""
    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        raise typer.BadParameter(str(error)) from error


def load_target(
    model: str | None, dtype: Dtype, device: str
) -> tuple[Model, PreTrainedTokenizerBase]:
    """The model named on the command line, in eval mode, and its tokenizer; None names the bundled pair."""
    from transformers import AutoTokenizer

    from specdec_ext import assets

    with user_errors():
        if model is None:
            target: Model = assets.load_target(_torch_dtype(dtype))
            return target.to(device), assets.load_tokenizer()
        return _load_model(model, dtype, device), AutoTokenizer.from_pretrained(model)


def load_drafter(name: str, dtype: Dtype, device: str) -> Any:
    """What ``generate(drafter=...)`` takes, for a name on the command line."""
    from specdec_ext import assets
    from specdec_ext.checkpoints import is_draft
    from specdec_ext.drafters import resolve_drafter

    with user_errors():
        if name == "none":
            return None
        if name == "auto":
            return name
        if name == "head":
            return resolve_drafter(assets.load_head())
        if name == "draft":
            draft: Model = assets.load_draft(_torch_dtype(dtype))
            return draft.to(device)
        if ("/" in name or Path(name).exists()) and not is_draft(name):
            return _load_model(name, dtype, device)
        return resolve_drafter(name)


def _load_model(name: str, dtype: Dtype, device: str) -> Model:
    from transformers import AutoModelForCausalLM

    model: Model = AutoModelForCausalLM.from_pretrained(name, dtype=_torch_dtype(dtype))
    return model.to(device).eval()


def _torch_dtype(dtype: Dtype) -> torch.dtype:
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()  # a bar for each model loaded says nothing about generation
    return getattr(torch, dtype.value)


def read_prompts(path: Path) -> list[tuple[str, str]]:
    """(name, text) of each prompt in a file.

    ``.json``: a list of texts or of objects; ``.jsonl``: an object per line; any other file is one prompt.
    An object has ``prompt``, or ``turns`` of which the first counts, and perhaps ``name`` or ``question_id``.

    Raises:
        ValueError: if the file holds something else, or nothing.
    """
    text = path.read_text("utf-8")
    if path.suffix == ".json":
        entries = json.loads(text)
    elif path.suffix == ".jsonl":
        entries = [json.loads(line) for line in text.splitlines() if line.strip()]
    else:
        entries = [text]
    if not isinstance(entries, list) or not entries:
        raise ValueError(
            f"{path}: expected a list of prompts, got {type(entries).__name__} or nothing"
        )
    return [_named_prompt(entry, f"{path}, prompt {i}", str(i)) for i, entry in enumerate(entries)]


def _named_prompt(entry: Any, where: str, default_name: str) -> tuple[str, str]:
    if isinstance(entry, str):
        entry = {"prompt": entry}
    if not isinstance(entry, dict):
        raise ValueError(f"{where}: expected a text or an object, got {type(entry).__name__}")
    turns = entry.get("turns") or [None]
    prompt = entry.get("prompt", turns[0])
    if not isinstance(prompt, str) or not prompt:
        raise ValueError(f"{where}: expected a non-empty text under 'prompt' or 'turns'")
    return str(entry.get("name", entry.get("question_id", default_name))), prompt


def encode(tokenizer: PreTrainedTokenizerBase, prompt: str, device: str) -> LongTensor:
    """``[1, length]`` ids of one prompt."""
    return tokenizer(prompt, return_tensors="pt")["input_ids"].to(device)


def describe(compared: ComparedRuns, prompt_length: int) -> str:
    """One line about a comparison: the verdict and, at a difference, where and how close."""
    if compared.equal or compared.position is None:
        return "equal"
    where = f"at token {compared.position - prompt_length}"
    verdict = "BUG" if compared.verdict == "bug" else compared.verdict
    return f"{verdict} {where}: logit gap {compared.gap:.2g}, bound {compared.bound:.2g}"


def warn_if_busy(console: Console) -> None:
    """Other processes distort ratios: threads of one matrix product wait for each other's cores."""
    before = _processor_seconds()
    time.sleep(0.5)
    after = _processor_seconds()
    if before is None or after is None:
        return
    total, idle = after[0] - before[0], after[1] - before[1]
    busy = 1 - idle / total if total else 0.0
    if busy > BUSY_SHARE:
        console.print(
            f"other processes use {busy:.0%} of this machine: the numbers below are not to be relied on "
            "(with OMP_NUM_THREADS=1 they suffer least)",
            style="yellow",
            soft_wrap=True,
        )


def _processor_seconds() -> tuple[float, float] | None:
    """(total, idle) time of all cores since boot in ticks, or None where Linux does not say."""
    try:
        fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    except OSError:
        return None
    ticks = [float(field) for field in fields]  # user nice system idle iowait irq softirq steal
    return sum(ticks), ticks[3] + ticks[4]
