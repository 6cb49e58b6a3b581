"""Measure what weights of 8 and 4 bits cost in quality: perplexity of the bundled target.

    python profiling perplexity --out profiling/results/generation/perplexity

The texts are the bundled held-out prompts, source code on which no model was trained. Bits per weight are
those of the linear layers, with their scales; embeddings and norms stay as they are. ``python profiling
generate --weights int4`` measures the speed.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import specdec_ext
from bench.runner import Results, Row, parse, table_parser
from specdec_ext import assets
from specdec_ext.evaluate.machine import machine_line
from specdec_ext.models.passes.linears import row_invariant, row_invariant_linears

# Name -> dtype of the model and the arguments of quantize, None for weights as they are.
FORMATS: dict[str, tuple[torch.dtype, dict[str, Any] | None]] = {
    "float32": (torch.float32, None),
    "bfloat16": (torch.bfloat16, None),
    "int8": (torch.float32, {"weights": "int8"}),
    "int8, groups of 128": (torch.float32, {"weights": "int8", "group_size": 128}),
    "int4": (torch.float32, {"weights": "int4"}),
    "int4, head in int4": (torch.float32, {"weights": "int4", "head": "int4"}),
    "int4, groups of 128": (torch.float32, {"weights": "int4", "group_size": 128}),
    "int4, groups of 128, asymmetric": (
        torch.float32,
        {"weights": "int4", "group_size": 128, "symmetric": False},
    ),
    "int8, bfloat16": (torch.bfloat16, {"weights": "int8"}),
    "int4, bfloat16": (torch.bfloat16, {"weights": "int4"}),
}
COLUMNS = {
    "weights": "{weights}",
    "bits per weight": "{bits:.2f}",
    "perplexity": "{perplexity:.3f}",
    "over float32": "{increase:+.2%}",
    "same likeliest token": "{agreement:.1%}",
}


def main(arguments: list[str] | None = None) -> None:
    options = parse(table_parser(__doc__), arguments)
    tokenizer = assets.load_tokenizer()
    texts = [
        tokenizer(each["prompt"], return_tensors="pt").input_ids
        for each in assets.held_out_prompts()
    ]
    rows: list[Row] = []
    choices: list[Tensor] = []
    for name, (dtype, arguments_of_quantize) in FORMATS.items():
        model, bits = assets.load_target(dtype), 8.0 * dtype.itemsize
        if arguments_of_quantize is not None:
            specdec_ext.quantize(model, **arguments_of_quantize)
            bits = specdec_ext.QuantisationReport.of(model).bits_per_weight
        loss, chosen = scored(model, texts)
        choices.append(chosen)
        row = {"weights": name, "bits": bits, "perplexity": math.exp(loss)}
        row["agreement"] = float((chosen == choices[0]).float().mean())
        rows.append(row)
        row["increase"] = row["perplexity"] / rows[0]["perplexity"] - 1
    tokens = sum(text.shape[1] - 1 for text in texts)
    title, machine = "Perplexity of quantised weights", machine_line(torch.device("cpu"))
    settings = {"texts": len(texts), "tokens": tokens}
    Results(title, machine, COLUMNS, ("weights",), rows, settings).publish(options.out, options.add)


def scored(model: Any, texts: list[Tensor]) -> tuple[float, Tensor]:
    """Mean negative log-likelihood of all tokens but the first of each text, and the likeliest tokens.

    Linear layers multiply as they do when they decode (``ops.linear`` for few rows).
    """
    total, chosen = 0.0, []
    with torch.inference_mode(), row_invariant_linears(row_invariant(model)):
        for text in texts:
            logits = model(text).logits[0, :-1].float()
            total += float(F.cross_entropy(logits, text[0, 1:], reduction="sum"))
            chosen.append(logits.argmax(-1))
    return total / sum(map(len, chosen)), torch.cat(chosen)
