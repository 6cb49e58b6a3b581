"""The bundled models and prompts, which are part of the package; nothing is downloaded.

``tiny-python-target`` and ``tiny-python-draft`` are small Llama models of Python source code with the same
tokenizer, trained by ``tools/bundled/bundled_models.py``. ``tiny-python-head`` is an EAGLE 3.1 head for the
target, trained by ``specdec train``. Their model cards give the commands. The prompts are the beginnings of
files on which no model was trained (``PROMPTS.md``, made by ``tools/bundled/make_prompts.py``). The general
prompts (``general_prompts.jsonl``, written for this package) are for models of any kind.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

if TYPE_CHECKING:
    from specdec_ext.heads.config import DraftHead

__all__ = ["held_out_prompts", "load_draft", "load_head", "load_target", "load_tokenizer"]

FOLDER = Path(__file__).parent


def load_target(dtype: torch.dtype | str = torch.float32) -> PreTrainedModel:
    """Load the bundled target on the CPU, in eval mode; "auto" is bfloat16, the dtype of the file."""
    return _load("tiny-python-target", dtype)


def load_draft(dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Load the bundled draft model, which has the target's vocabulary, on the CPU, in eval mode."""
    return _load("tiny-python-draft", dtype)


def load_head() -> DraftHead:
    """Load the bundled EAGLE 3.1 head of the target, in bfloat16; ``drafter="auto"`` finds it by itself."""
    from specdec_ext.heads.checkpoints import load_draft as load_checkpoint
    from specdec_ext.heads.config import DraftHead

    head = load_checkpoint(_existing("tiny-python-head"))
    assert isinstance(head, DraftHead)
    return head


def load_tokenizer() -> PreTrainedTokenizerFast:
    """Load the tokenizer of both models (byte-level BPE, pads on the left)."""
    return PreTrainedTokenizerFast.from_pretrained(_existing("tiny-python-target"))


def target_folder() -> Path:
    """The folder of the bundled target.

    Raises:
        FileNotFoundError: it is missing.
    """
    return _existing("tiny-python-target")


def held_out_prompts() -> list[dict[str, str]]:
    """The bundled prompts in a fixed order, at most 350 tokens each.

    Each prompt is the beginning of a real source file, cut where a block opens. Keys: ``name`` (project and
    path), ``prompt`` (the text) and ``license`` (SPDX identifier).
    """
    return json.loads((FOLDER / "prompts.json").read_text("utf-8"))


def _load(name: str, dtype: torch.dtype | str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(_existing(name), dtype=dtype).eval()


def _existing(name: str) -> Path:
    folder = FOLDER / name
    if not folder.is_dir():
        raise FileNotFoundError(
            f"the bundled model {name} is missing from {FOLDER}; install a wheel or use a complete checkout, "
            "or train it with tools/bundled/bundled_models.py"
        )
    return folder
