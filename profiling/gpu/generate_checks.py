"""Check ``generate`` on a device: every kind of drafter gives the text that the model alone gives.

    python profiling generate-checks                     # on CUDA, as `make gpu-check` does
    python profiling generate-checks --device cpu --dtype float32

Runs the bundled target, greedy and sampled, with one row and with a ragged batch, in float32, bfloat16 and
float16. Plain greedy text is compared with ``model.generate``, and the text of every drafter with that of
``drafter=None``. In float32 all tokens must be equal. In 16 bits two texts may differ after a near-tie: up to
and including the first different token, all logits must be equal except for rounding. A drafter fails if none
of its drafts was accepted, because that tests nothing.

Prints one line per case with PASS or FAIL; the exit code is 1 if any case failed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import chain, product
from typing import Any

import torch
from torch import Tensor

import specdec_ext
from gpu.op_checks import report
from specdec_ext import DraftModelDrafter, HeadDrafter, NgramDrafter, assets
from specdec_ext.tree.config import TreeConfig

# Largest difference of a logit that rounding explains, as a share of the largest logit.
ROUNDING = {torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.01}
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in ROUNDING}
PROMPTS = (
    "def read(path):\n    with open(path) as file:\n        return file.read()\n\n\ndef read_all(paths):\n",
    "import os\n\n\nclass Node:\n    def __init__(self, value):\n",
    "for index in range(10):\n",
)
BATCHES = {"1 row": PROMPTS[:1], "ragged": PROMPTS}
TEXTS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "seed": 1},
}
Run = tuple[Tensor, Tensor]  # tokens [rows, new] and raw logits [rows, new, vocab]


def why_different(ours: Run, baseline: Run, dtype: torch.dtype) -> str | None:
    """How the first run differs from the baseline, or None."""
    texts = zip(ours[0].tolist(), baseline[0].tolist(), strict=True)
    for row, (tokens, expected) in enumerate(texts):
        pairs = zip(tokens, expected, strict=True)
        parts = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if parts is not None and dtype == torch.float32:
            return f"row {row} has token {tokens[parts]} at position {parts}, expected {expected[parts]}"
        end = len(tokens) if parts is None else parts + 1
        mine, theirs = ours[1][row, :end].float(), baseline[1][row, :end].float()
        delta, bound = (
            float((mine - theirs).abs().max()),
            ROUNDING[dtype] * float(theirs.abs().max()),
        )
        if not delta <= bound:
            return f"a logit of row {row} differs by {delta:.2g}; rounding explains {bound:.2g}"
    return None


def new_of(output: Any) -> Run:
    logits = torch.stack(output.logits, dim=1)
    return output.sequences[:, -logits.shape[1] :], logits


def drafters_of(dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    head = assets.load_head()
    draft: Any = assets.load_draft(dtype)
    return {
        "ngram": NgramDrafter(min_ngram=1, num_branches=2),
        "head, a chain": HeadDrafter(head, TreeConfig(depth=4)),
        "head, a tree": HeadDrafter(head, TreeConfig(depth=4, top_k=4, num_nodes=16)),
        "draft model": DraftModelDrafter(draft.to(device)),
    }


def checks(
    dtype: torch.dtype, device: torch.device, new_tokens: int
) -> Iterator[tuple[str, str | None]]:
    """Yield the name of each case and the reason why it fails, or None."""
    model: Any = assets.load_target(dtype).to(device)
    tokenizer, drafters = assets.load_tokenizer(), drafters_of(dtype, device)
    limits = {"max_new_tokens": new_tokens, "eos_token_id": None}
    recorded = {"return_dict_in_generate": True, "output_logits": True}
    for (batch, prompts), (text, kwargs) in product(BATCHES.items(), TEXTS.items()):
        inputs = tokenizer(list(prompts), return_tensors="pt", padding=True).to(device)
        given = {**inputs, **limits, **kwargs}
        plain = new_of(specdec_ext.generate(model, **given, **recorded, drafter=None))
        name = f"{text}, {batch}, {str(dtype).removeprefix('torch.')}"
        if text == "greedy":
            baseline = new_of(model.generate(**given, **recorded))
            yield f"generate no drafter, {name}", why_different(plain, baseline, dtype)
        for drafter_name, drafter in drafters.items():
            how = {"drafter": drafter, "speculation": "fixed"}
            output: Any = specdec_ext.generate(model, **given, **recorded, **how)
            ours = new_of(output)
            why = why_different(ours, plain, dtype)
            if why is None and not output.speculation_stats.accepted_tokens:
                why = "no draft was accepted"
            # A usual call records no logits and takes another path through verification.
            usual = specdec_ext.generate(model, **given, **how)[:, -new_tokens:]
            if why is None and not torch.equal(usual, ours[0]):
                why = "recording logits changes the text"
            yield f"generate {drafter_name}, {name}", why


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--new-tokens", type=int, default=24)
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    cases = (checks(DTYPES[name], device, options.new_tokens) for name in options.dtype)
    return report(chain.from_iterable(cases))
