"""``export_head``: write a head in the layout that another engine reads."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from specdec_ext.heads.checkpoints.config.layouts import Layout
from specdec_ext.heads.checkpoints.load import load_draft
from specdec_ext.heads.checkpoints.save import save_draft
from specdec_ext.heads.config import DraftHead
from specdec_ext.heads.medusa import MedusaHeads
from specdec_ext.preflight.outputs import writable_folder

HeadEngine = Literal["vllm", "sglang", "speculators"]
# The layouts that an engine reads, the most expressive one first.
_LAYOUTS: dict[HeadEngine, tuple[Layout, ...]] = {
    "vllm": ("speculators", "eagle"),
    "sglang": ("eagle",),
    "speculators": ("speculators",),
}
# The name of a kind of head in vLLM, and in capitals in SGLang.
_METHODS = {"eagle1": "eagle", "eagle3": "eagle3"}
_DRAFT_TOKENS = 5  # in the command; a usual number of both engines


@dataclass(frozen=True)
class ExportedHead:
    """A head that was written.

    Attributes:
        folder: its folder.
        layout: the layout of its files.
        command: how the engine is started with it; "" for speculators, which trains.
    """

    folder: Path
    layout: Layout
    command: str


def export_head(
    head: str | Path | DraftHead | MedusaHeads,
    folder: str | Path,
    engine: HeadEngine,
    *,
    overwrite: bool = False,
) -> ExportedHead:
    """Write a head for vLLM (0.33), SGLang (0.5.23) or speculators (0.9.0).

    Args:
        head: the head, or its folder or hub id, in any layout that ``load_draft`` reads. None of the engines
            reads Medusa heads.
        folder: folder for ``config.json`` and the weights; created if it does not exist.
        engine: the program that reads it.
        overwrite: replace files of the folder.

    Raises:
        ValueError: the engine can't compute the head; the message names the options. Nothing is written.
        OSError: the head can't be read, or the folder can't be written or has a head.
    """
    if engine not in get_args(HeadEngine):
        raise ValueError(f"engine={engine!r}; expected one of {get_args(HeadEngine)}")
    folder = Path(folder)
    writable_folder(folder, "folder")
    if isinstance(head, (str, Path)):
        if folder.exists() and Path(head).exists() and folder.samefile(head):
            raise ValueError(f"{folder} is the folder of the head itself; choose another folder")
        head = load_draft(head)
    if (folder / "config.json").exists() and not overwrite:
        raise FileExistsError(
            f"{folder} has a config.json already; choose another folder, or pass overwrite=True "
            "(--overwrite)"
        )
    if isinstance(head, MedusaHeads):
        raise ValueError(
            "none of these engines reads Medusa heads; save_medusa writes them for other programs"
        )
    problems = [*_problems(head, engine)]
    for layout in _LAYOUTS[engine] if not problems else ():
        try:
            save_draft(head, folder, layout=layout)
        except ValueError as error:
            problems.append(str(error).partition("; pass layout=")[0])
        else:
            return ExportedHead(folder, layout, _command(head, engine, folder))
    raise ValueError(f"{engine} can't compute this head: {'; '.join(problems)}")


def _problems(head: DraftHead, engine: HeadEngine) -> Iterator[str]:
    """What a layout of the engine can express, but the engine does not read from it."""
    config = head.config
    if engine == "vllm" and config.kind == "mtp":
        yield "kind='mtp' (only in the target's own checkpoint)"
    if engine == "speculators" and config.kind == "eagle3":
        if config.target_hidden_size != config.hidden_size:
            yield (
                f"target_hidden_size={config.target_hidden_size} (only "
                f"hidden_size={config.hidden_size})"
            )
        if config.feature_layers is None and config.num_features != 3:
            yield f"num_features={config.num_features} without feature_layers (only 3)"


def _command(head: DraftHead, engine: HeadEngine, folder: Path) -> str:
    target = shlex.quote(head.record.target_name or "TARGET")
    if engine == "vllm":
        config: dict[str, Any] = {
            "method": _METHODS[head.config.kind],
            "model": str(folder),
            "num_speculative_tokens": _DRAFT_TOKENS,
        }
        if head.config.mask_token_id is not None:
            config["parallel_drafting"] = True
        return f"vllm serve {target} --speculative-config {shlex.quote(json.dumps(config))}"
    if engine == "sglang":
        return (
            f"python -m sglang.launch_server --model-path {target} --speculative-algorithm "
            f"{_METHODS[head.config.kind].upper()} --speculative-draft-model-path "
            f"{shlex.quote(str(folder))}"
        )
    return ""
