"""Benchmarks of generation: :func:`compare` runs contestants in turn and reports medians and ratios.

Tokens per second are new tokens of all rows over the wall time of the call, prompt included, by call; the
median of a prompt's calls counts, and ratios are of medians over prompts.
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
    ours,
    synthetic,
)
from specdec_ext.evaluate.benchmark.report import (
    Report,
    plot,
    position_table,
    same_text,
    same_texts,
)
from specdec_ext.evaluate.benchmark.series import (
    Progress,
    Prompt,
    Series,
    interleave,
    unique_ngram_fraction,
)

__all__ = [
    "HF",
    "HF_ASSISTED",
    "HF_LOOKUP",
    "LOOKUP_TOKENS",
    "PLAIN",
    "Contestant",
    "Prompt",
    "Report",
    "Series",
    "batches",
    "compare",
    "endless",
    "hugging_face",
    "interleave",
    "law",
    "machine_line",
    "ours",
    "plot",
    "position_table",
    "race",
    "same_text",
    "synthetic",
    "unique_ngram_fraction",
]

HF, HF_LOOKUP, HF_ASSISTED = "HF generate", "HF prompt lookup", "HF assisted"
PLAIN = "specdec none"


def law(max_new_tokens: int, temperature: float = 0.0, **more: Any) -> dict[str, Any]:
    """Keywords of ``generate`` that all contestants share: greedy, or plain sampling at a temperature."""
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
    on_call: Progress = lambda name, done, total: None,
    speculation: str = "auto",
    **settings: Any,
) -> Report:
    """Hugging Face's ways to generate, plain decoding through our loop, and drafters, in turn.

    Every text has ``max_new_tokens`` tokens: ends of sequence are not heeded.

    Args:
        model: the target.
        prompts: as :func:`batches` makes them, all of one batch size.
        drafters: name -> what ``specdec_ext.generate`` takes as ``drafter``.
        assistant: a draft model for Hugging Face's assisted decoding, which takes single rows as prompt
            lookup does.
        temperature: to sample at; 0 is greedy.
        repeats: calls per prompt; the median counts.
        on_call: told the contestant before each call, which call that is, and of how many.
        speculation: "auto" or "fixed", of the timed calls. Under "auto" one more call per prompt and drafter
            drafts in every step, so that acceptance can be compared.
        settings: more for the report's title.
    """
    shared = law(max_new_tokens, temperature)
    contestants = {HF: hugging_face(model, shared)}
    left_out = {}
    helped = {HF_LOOKUP: {"prompt_lookup_num_tokens": LOOKUP_TOKENS}}
    if assistant is not None:
        helped[HF_ASSISTED] = {"assistant_model": assistant}
    for name, keywords in helped.items():
        if len(prompts[0]["input_ids"]) == 1:
            contestants[name] = hugging_face(model, shared, **keywords)
        else:
            left_out[name] = "transformers takes single rows there"
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
            on_call,
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
    on_call: Progress = lambda name, done, total: None,
    *,
    baseline: str = HF,
    settings: Mapping[str, Any] | None = None,
    streamed: bool = False,
    fixed: Mapping[str, Contestant] | None = None,
) -> Report:
    """Interleave any contestants; ratios are to ``baseline``, and to :data:`PLAIN` where it takes part.

    Args:
        shared: keywords of ``generate`` that all have, as :func:`law` makes them.
        settings: more for the report's title.
        streamed, fixed: as for :func:`interleave`.
    """
    series = interleave(contestants, prompts, repeats, on_call, streamed, fixed)
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
    """Processor, threads, versions, dtype and commit: what a number needs to mean something."""
    dtype = str(model.dtype).removeprefix("torch.")
    return machine.machine_line(model.device, f"transformers {transformers.__version__}", dtype)
