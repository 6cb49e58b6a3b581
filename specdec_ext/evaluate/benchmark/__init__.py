"""Benchmarks of generation: :func:`compare` runs contestants in turn and reports medians and ratios.

A contestant is one way to generate. Its tokens per second are the new tokens of all rows divided by the wall
time of the call, prefill included. Of several calls with one prompt the median time is used; ratios compare
medians over prompts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import transformers
from transformers import PreTrainedModel

from specdec_ext.evaluate import machine
from specdec_ext.evaluate.benchmark.contestants import (
    LOOKUP_TOKENS,
    Contestant,
    Model,
    batches,
    endless,
    hugging_face,
    key_of,
    ours,
    plain_texts,
    synthetic,
)
from specdec_ext.evaluate.benchmark.report import (
    Report,
    plot,
    position_table,
    repetition_note,
    same_text,
    same_texts,
)
from specdec_ext.evaluate.benchmark.series import Prompt, Series, interleave, unique_ngram_fraction

__all__ = [
    "HF",
    "HF_ASSISTED",
    "HF_LOOKUP",
    "HF_STATIC",
    "LOOKUP_TOKENS",
    "PLAIN",
    "Contestant",
    "Prompt",
    "Report",
    "Series",
    "batches",
    "compare",
    "endless",
    "generation_kwargs",
    "hugging_face",
    "interleave",
    "key_of",
    "machine_line",
    "ours",
    "plain_texts",
    "plot",
    "position_table",
    "race",
    "repetition_note",
    "same_text",
    "synthetic",
    "unique_ngram_fraction",
]

HF, HF_LOOKUP, HF_ASSISTED = "HF generate", "HF prompt lookup", "HF assisted"
HF_STATIC = "HF static cache"  # on a GPU, transformers compiles the model for it
PLAIN = "specdec none"


def generation_kwargs(max_new_tokens: int, temperature: float = 0.0, **more: Any) -> dict[str, Any]:
    """Keywords of ``generate`` that all contestants share: greedy for temperature 0, else sampling."""
    sampled = {"temperature": temperature, "top_k": 0} if temperature else {}
    return {"max_new_tokens": max_new_tokens, "do_sample": bool(temperature), **sampled, **more}


def compare(
    model: Model,
    prompts: Sequence[Prompt],
    drafters: Mapping[str, Any],
    *,
    assistant: Model | None = None,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    repeats: int = 3,
    speculation: str = "auto",
    **settings: Any,
) -> Report:
    """Compare Hugging Face's ways to generate, plain decoding through our loop, and drafters.

    End-of-sequence tokens are ignored, so that every text has ``max_new_tokens`` tokens.

    Args:
        model: the target.
        prompts: from :func:`batches`, all of one batch size.
        drafters: name -> value of the argument ``drafter`` of ``specdec_ext.generate``.
        assistant: a draft model for Hugging Face's assisted decoding. Assisted decoding and prompt lookup are
            left out for batches of more than one row, which transformers does not support there.
        temperature: of sampling; 0 is greedy.
        repeats: calls per prompt, of which the median is used.
        speculation: "auto" or "fixed", for the timed calls. Under "auto" one more call per prompt and drafter
            drafts in every step, so that acceptance can be compared.
        settings: further entries of the report's title.
    """
    shared = generation_kwargs(max_new_tokens, temperature)
    contestants = {HF: hugging_face(model, shared)}
    left_out = {}
    helped = {HF_LOOKUP: {"prompt_lookup_num_tokens": LOOKUP_TOKENS}}
    if assistant is not None:
        helped[HF_ASSISTED] = {"assistant_model": assistant}
    for name, keywords in helped.items():
        if len(prompts[0]["input_ids"]) == 1:
            contestants[name] = hugging_face(model, shared, **keywords)
        else:
            left_out[name] = "transformers supports it for batch size 1 only"
    contestants[PLAIN] = ours(model, None, shared)
    for name, drafter in drafters.items():
        contestants[f"specdec {name}"] = ours(model, drafter, shared, speculation=speculation)
    fixed = {
        f"specdec {name}": ours(model, drafter, shared, speculation="fixed")
        for name, drafter in drafters.items()
        if drafter is not None and speculation != "fixed"
    }
    with endless(model, *([assistant] if assistant is not None else [])):
        report = race(
            model,
            contestants,
            prompts,
            shared,
            repeats,
            settings=settings,
            streamed=True,
            fixed=fixed,
        )
    report.left_out = left_out
    return report


def race(
    model: Model,
    contestants: Mapping[str, Contestant],
    prompts: Sequence[Prompt],
    shared: Mapping[str, Any],
    repeats: int = 1,
    *,
    baseline: str = HF,
    settings: Mapping[str, Any] | None = None,
    streamed: bool = False,
    fixed: Mapping[str, Contestant] | None = None,
) -> Report:
    """Interleave any contestants; report ratios to ``baseline``, and to :data:`PLAIN` if it takes part.

    Args:
        shared: keywords of ``generate`` that all contestants use, from :func:`generation_kwargs`.
        settings: further entries of the report's title.
        streamed, fixed: as for :func:`interleave`.
    """
    series = interleave(contestants, prompts, repeats, streamed, fixed)
    plain = PLAIN if PLAIN in series else None
    batch = len(prompts[0]["input_ids"])
    return Report(
        machine=machine_line(model),
        settings={"batch": batch, "prompts": len(prompts), **shared, **(settings or {})},
        series=series,
        baseline=baseline,
        plain=plain,
        same_text=same_texts(series, baseline, plain, model, shared["do_sample"]),
    )


def machine_line(model: PreTrainedModel) -> str:
    """Processor, threads, versions, dtype and commit of a measurement, in one line."""
    dtype = str(model.dtype).removeprefix("torch.")
    return machine.machine_line(model.device, f"transformers {transformers.__version__}", dtype)
