"""Prints the memory that a call adds to this process: a target and a drafter from configs, random weights.

Run by test_memory_measured.py, in a process of its own: ``python measure_peak.py '{"target": {...}, ...}'``.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import specdec_ext
from specdec_ext import DraftModelDrafter, HeadDrafter, TreeConfig, assets
from specdec_ext.drafters import Drafter
from specdec_ext.evaluate.benchmark.memory import peak_bytes, reset_peak
from specdec_ext.planning.sizes.configs import ConfigFile

CPU = torch.device("cpu")


def random_model(folder: str, dtype: torch.dtype) -> Any:
    """A model with random weights, drawn in ``dtype`` without another copy."""
    config = AutoConfig.from_pretrained(folder)
    config.eos_token_id = None
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def write_head(folder: str, dtype: torch.dtype) -> None:
    """Save random weights for the config of a head beside it."""
    from baselines.heads import random_head

    config = ConfigFile.find(folder).head()
    specdec_ext.save_draft(random_head(config, dtype), folder, layout="eagle")


def drafter_of(kind: str, folder: str, dtype: torch.dtype, depth: int) -> Drafter | None:
    if kind == "head":
        head = specdec_ext.load_draft(folder, keep=False)
        return HeadDrafter(head, tree=TreeConfig(depth=depth))
    if kind == "model":
        return DraftModelDrafter(random_model(folder, dtype), depth)
    return None


def main(case: dict[str, Any]) -> None:
    dtype, rows = getattr(torch, case["dtype"]), case["rows"]
    torch.manual_seed(0)
    # Code and libraries are loaded before the measurement: the plan counts tensors.
    tiny, ids = assets.load_target(dtype), torch.ones(1, 8, dtype=torch.long)
    for drafter in ("head", "draft"):
        specdec_ext.generate(tiny, ids, drafter=drafter, max_new_tokens=8, speculation="fixed")
    reset_peak(CPU)
    before = peak_bytes(CPU)
    model = random_model(case["target"], dtype)
    drafter = drafter_of(case["kind"], case["draft"], dtype, case["depth"])

    def call(context: int, new_tokens: int) -> None:
        prompt = torch.randint(1, model.config.vocab_size, (rows, context - new_tokens))
        specdec_ext.generate(
            model,
            prompt,
            drafter=drafter,
            max_new_tokens=new_tokens,
            do_sample=False,
            speculation="fixed",
        )

    call(16, 4)  # the first draft packs the weights of a head
    reset_peak(CPU)  # building and packing take more than is needed afterwards
    call(case["context"], case["new_tokens"])
    print(json.dumps({"bytes": peak_bytes(CPU) - before}))


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    if given.get("write_head"):
        write_head(given["draft"], getattr(torch, given["dtype"]))
    else:
        main(given)
