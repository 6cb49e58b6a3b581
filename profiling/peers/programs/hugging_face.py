"""Hugging Face ``generate`` in this environment."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from peers.programs.base import PLAIN, Format, Program

LOOKUP = "prompt lookup"


class HuggingFace(Program):
    title = "HF generate"
    package = "transformers"
    formats: ClassVar = {"f32": Format("float32", 4), "bf16": Format("bfloat16", 2)}
    ways: ClassVar = {PLAIN: True, LOOKUP: False}
    # Formats that are no dtypes -> the dtype of the rest.
    computes_in: ClassVar[dict[str, str]] = {}

    def __init__(self, files: Path, format: str, way: str, threads: int):
        import torch
        import transformers

        torch.set_num_threads(threads)
        transformers.logging.set_verbosity_error()
        dtype = getattr(torch, self.computes_in.get(format, format))
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(files, dtype=dtype)
        self.model.generation_config.eos_token_id = None
        self.way = way

    def contestant(self, shared: dict[str, Any]) -> Any:
        """A function of a prompt, from :mod:`specdec_ext.evaluate.benchmark`."""
        from specdec_ext.evaluate.benchmark import LOOKUP_TOKENS, hugging_face

        keywords = {"prompt_lookup_num_tokens": LOOKUP_TOKENS} if self.way == LOOKUP else {}
        return hugging_face(self.model, shared, **keywords)

    def generate(self, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        import torch

        from specdec_ext.evaluate.benchmark import generation_kwargs

        ids = torch.tensor(prompts)
        run = self.contestant(generation_kwargs(count))
        output = run({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
        texts: list[list[int]] = getattr(output, "sequences", output)[:, ids.shape[1] :].tolist()
        return texts
