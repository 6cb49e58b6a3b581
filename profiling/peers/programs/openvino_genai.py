"""OpenVINO GenAI, with models that optimum-intel exports."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from peers.programs.base import PLAIN, Format, Program
from peers.programs.hugging_face import LOOKUP
from peers.versions import TORCH

CACHE_GB = 1  # of keys and values, in the scheduler of the pipeline
# Format -> weight format of ``optimum-cli export openvino`` and its options, where it has another name.
EXPORT: dict[str, list[str]] = {
    "int4-32": ["int4", "--group-size", "32", "--sym"],
    "int4-64": ["int4", "--group-size", "64", "--sym"],
}
# What is computed in, by format; without it, the processor decides.
HINTS = {"fp32": "f32", "fp16": "bf16"}


class OpenVino(Program):
    """Weights of bfloat16 are files in float16 that are computed in bfloat16, as OpenVINO offers it."""

    title = "OpenVINO GenAI"
    package = "openvino-genai"
    requirements = ("openvino-genai", "optimum-intel", TORCH)
    # optimum-intel asks for it, no text model does, and the index's does not fit every build of torch.
    unwanted = ("torchvision",)
    formats: ClassVar = {
        "f32": Format("fp32", 4),
        "bf16": Format("fp16", 2),
        "int8": Format("int8", 1),
        "int4": Format("int4-32", 0.5 + 2 / 32),
        "int4-64": Format("int4-64", 0.5 + 2 / 64),
    }
    ways: ClassVar = {PLAIN: True, LOOKUP: False}

    @staticmethod
    def export(model: Path, out: Path, format: str) -> None:
        tool = Path(sys.executable).with_name("optimum-cli")
        command = [str(tool), "export", "openvino", "-m", str(model)]
        command += ["--task", "text-generation-with-past", "--weight-format"]
        subprocess.run([*command, *EXPORT.get(format, [format]), str(out)], check=True)

    def __init__(self, files: Path, format: str, way: str, threads: int):
        import openvino_genai

        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = CACHE_GB
        scheduler.enable_prefix_caching = False  # the same prompts come again
        properties: dict[str, Any] = {
            "INFERENCE_NUM_THREADS": threads,
            "scheduler_config": scheduler,
        }
        if format in HINTS:
            properties["INFERENCE_PRECISION_HINT"] = HINTS[format]
        if format == "fp32":
            properties["KV_CACHE_PRECISION"] = "f32"
        if way == LOOKUP:
            properties["prompt_lookup"] = True
        self.pipeline = openvino_genai.LLMPipeline(str(files), "CPU", **properties)
        self.config = self.pipeline.get_generation_config()
        self.config.do_sample = False
        self.config.ignore_eos = True
        self.config.apply_chat_template = False
        if way == LOOKUP:
            self.config.num_assistant_tokens = 10
            self.config.max_ngram_size = 3

    def generate(self, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        import numpy as np
        import openvino
        import openvino_genai

        self.config.max_new_tokens = self.config.min_new_tokens = count
        ids = np.array(prompts, dtype=np.int64)
        inputs = openvino_genai.TokenizedInputs(
            openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids))
        )
        return [list(row) for row in self.pipeline.generate(inputs, self.config).tokens]
