"""CTranslate2."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from peers.programs.base import Format, Program
from peers.versions import TORCH


class CTranslate2(Program):
    """It computes weights of 8 bits with sums in float32."""

    title = "CTranslate2"
    package = "ctranslate2"
    requirements = ("ctranslate2", "transformers", TORCH)
    formats: ClassVar = {"f32": Format("float32", 4), "int8": Format("int8", 1)}

    @staticmethod
    def export(model: Path, out: Path, format: str) -> None:
        from ctranslate2.converters import TransformersConverter

        TransformersConverter(str(model)).convert(str(out), quantization=format)

    def __init__(self, files: Path, format: str, way: str, threads: int):
        import ctranslate2

        compute = {"int8": "int8_float32"}.get(format, format)
        self.generator = ctranslate2.Generator(
            str(files), device="cpu", compute_type=compute, intra_threads=threads, inter_threads=1
        )
        # It takes tokens, not ids.
        self.vocabulary: list[str] = json.loads((files / "vocabulary.json").read_text("utf-8"))

    def generate(self, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        found = self.generator.generate_batch(
            [[self.vocabulary[number] for number in prompt] for prompt in prompts],
            max_length=count,
            min_length=count,
            sampling_topk=1,
            beam_size=1,
            include_prompt_in_result=False,
        )
        return [each.sequences_ids[0] for each in found]
