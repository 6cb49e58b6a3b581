"""``EngineOptions``: what a process needs to load a model and start an engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from specdec_ext.defaults import MAX_ROWS, PREFIX_TOKENS
from specdec_ext.drafters import resolve_drafter
from specdec_ext.engine import AnyEngine, make_engine
from specdec_ext.heads.checkpoints.language_model import load_with_tokenizer


@dataclass(frozen=True)
class EngineOptions:
    """How to load a model and start an engine; plain values, which other processes and machines can be sent.

    Attributes:
        model: folder or hub id of a causal language model, or ``"bundled"``. Other machines need the folder
            under the same path.
        drafter: a name, or the folder or hub id of a draft head or a draft model.
        speculation: ``"auto"`` or ``"fixed"``, as in :func:`specdec_ext.generate`.
        dtype: name of a torch dtype; ``"auto"`` for that of the checkpoint.
        device: name of a torch device; None for the GPU that the process sees, else the CPU.
        max_rows, max_length, max_tokens, max_waiting, prefix_tokens: as for :class:`specdec_ext.Engine`.
    """

    model: str
    drafter: str = "auto"
    speculation: Literal["auto", "fixed"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str | None = None
    max_rows: int = MAX_ROWS
    max_length: int | None = None
    max_tokens: int | None = None
    max_waiting: int | None = None
    prefix_tokens: int = PREFIX_TOKENS

    def start(self) -> AnyEngine:
        """Load the model and its tokenizer, and start an engine.

        Raises:
            OSError, ValueError: model or drafter can't be loaded, or do not fit each other.
        """
        device = self.device or ("cuda" if torch.cuda.is_available() else "cpu")
        dtype = self.dtype if self.dtype == "auto" else getattr(torch, self.dtype)
        model, tokenizer = load_with_tokenizer(self.model, dtype, device)
        # "auto" stays a name, for which generate() looks for drafters by itself.
        drafter = resolve_drafter(self.drafter, model, tokenizer)
        return make_engine(
            model,
            drafter="auto" if self.drafter == "auto" else drafter,
            speculation=self.speculation,
            tokenizer=tokenizer,
            max_rows=self.max_rows,
            max_length=self.max_length,
            max_tokens=self.max_tokens,
            max_waiting=self.max_waiting,
            prefix_tokens=self.prefix_tokens,
        )
