"""ONNX Runtime's generation library, onnxruntime-genai."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from peers.programs.base import Format, Program
from peers.versions import TORCH

GROUP = 32  # weights of int4 that share a scale in float32
BUILDER = "onnxruntime_genai.models.builder"


class OnnxGenai(Program):
    title = "onnxruntime-genai"
    package = "onnxruntime-genai"
    requirements = ("onnxruntime-genai", "onnx-ir", "onnx", "transformers", TORCH)
    formats: ClassVar = {"f32": Format("fp32", 4), "int4": Format("int4", 0.5 + 4 / GROUP)}

    @staticmethod
    def export(model: Path, out: Path, format: str) -> None:
        command = [sys.executable, "-m", BUILDER, "-i", str(model), "-o", str(out)]
        command += ["-p", format, "-e", "cpu", "-c", str(out.with_suffix(".cache"))]
        if format == "int4":
            # Level 4 multiplies in int8, the fastest.
            options = ["int4_accuracy_level=4", f"int4_block_size={GROUP}"]
            command += ["--extra_options", *options]
        subprocess.run(command, check=True)

    def __init__(self, files: Path, format: str, way: str, threads: int):
        import onnxruntime_genai

        config = onnxruntime_genai.Config(str(files))
        options = {"session_options": {"intra_op_num_threads": threads}}
        config.overlay(json.dumps({"model": {"decoder": options}}))
        self.model = onnxruntime_genai.Model(config)

    def generate(self, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        import numpy as np
        import onnxruntime_genai

        length = len(prompts[0])
        settings = onnxruntime_genai.GeneratorParams(self.model)
        end = length + count
        settings.set_search_options(
            max_length=end, min_length=end, do_sample=False, batch_size=len(prompts)
        )
        generator = onnxruntime_genai.Generator(self.model, settings)
        generator.append_tokens(np.array(prompts, dtype=np.int32))
        for _ in range(count):
            generator.generate_next_token()
        return [[*map(int, generator.get_sequence(row)[length:])] for row in range(len(prompts))]
