"""Benchmarks of generation: :func:`compare` runs contestants in turn and reports medians and ratios.

A contestant is one way to generate. Its tokens per second are the new tokens of all rows divided by the wall
time of the call, prefill included. Of several calls with one prompt the median time is used; ratios compare
medians over prompts. :mod:`specdec_ext.evaluate.benchmark.served` measures servers in the same way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import transformers
from transformers import PreTrainedModel

from specdec_ext.display.text import counted
from specdec_ext.evaluate import machine
from specdec_ext.evaluate.benchmark.contestants import (
    LOOKUP_TOKENS,
    Contestant,
    Model,
    endless,
    generation_kwargs,
    hugging_face,
    key_of,
    ours,
    plain_texts,
    synthetic,
)
from specdec_ext.evaluate.benchmark.report import (
    Report,
    figure,
    joint_notes,
    plot,
    position_table,
    repetition_note,
    same_text,
    same_texts,
    told_differences,
    told_error,
)
from specdec_ext.evaluate.benchmark.series import (
    Prompt,
    Race,
    Series,
    interleave,
    run_races,
    unique_ngram_fraction,
)
from specdec_ext.evaluate.benchmark.workload import Workload, batches, workloads

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
    "Workload",
    "batches",
    "compare",
    "compare_all",
    "endless",
    "figure",
    "generation_kwargs",
    "hugging_face",
    "interleave",
    "joint_notes",
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
    "workloads",
]

HF, HF_LOOKUP, HF_ASSISTED = "HF generate", "HF prompt lookup", "HF assisted"
HF_STATIC = "HF static cache"  # on a GPU, transformers compiles the model for it
PLAIN = "specdec none"
COMPARISON = "comparison of texts"  # in place of a contestant, in the errors of a report


def compare(
    model: Model,
    prompts: Sequence[Prompt],
    drafters: Mapping[str, Any],
    *,
    temperature: float = 0.0,
    speculation: str = "auto",
    **options: Any,
) -> Report:
    """Compare Hugging Face's ways to generate, plain decoding through our loop, and drafters.

    Args:
        model, drafters: as for :func:`compare_all`.
        prompts: from :func:`batches`, all of one batch size.
        temperature: of sampling; 0 is greedy.
        speculation: "auto" or "fixed", for the timed calls.
        options: further arguments of :func:`compare_all`.
    """
    workload = Workload(prompts, temperature)
    (report,) = compare_all(model, [workload], drafters, speculation=[speculation], **options)
    return report


def compare_all(
    model: Model,
    workloads: Sequence[Workload],
    drafters: Mapping[str, Any],
    *,
    assistant: Model | None = None,
    max_new_tokens: int = 128,
    repeats: int = 3,
    speculation: Sequence[str] = ("auto",),
    transformers_too: bool = True,
    **settings: Any,
) -> list[Report]:
    """A report for each workload, all of which are measured in turn.

    Plain decoding always takes part. End-of-sequence tokens are ignored, so that every text has
    ``max_new_tokens`` tokens. A contestant that raises an error at one workload is named there in
    ``Report.errors``, and everything else is measured. After an interrupt (Ctrl-C), the reports have the
    prompts before it.

    Args:
        model: the target.
        workloads: batches of prompts, and the temperature at which they are continued. If there are several,
            they have the same rows in the same order.
        drafters: name -> value of the argument ``drafter`` of ``specdec_ext.generate``.
        assistant: a draft model for Hugging Face's assisted decoding. Assisted decoding and prompt lookup are
            left out for batches of more than one row, which transformers does not support there.
        repeats: calls per prompt, of which the median is used.
        speculation: "auto", "fixed" or both, for the timed calls. Under "auto" one more call per prompt and
            drafter drafts in every step, so that acceptance can be compared.
        transformers_too: whether Hugging Face's ways to generate take part.
        settings: further entries of the reports' titles.

    Raises:
        Exception: the first error, if no contestant could be measured.
    """
    races, left_out = [], []
    for workload in workloads:
        shared = generation_kwargs(max_new_tokens, workload.temperature)
        theirs: dict[str, Contestant] = {}
        missing: dict[str, str] = {}
        if transformers_too:
            theirs, missing = _transformers(model, workload, assistant, shared)
        contestants, fixed = _of_drafters(model, drafters, speculation, shared)
        plain = {PLAIN: ours(model, None, shared)}
        everyone = {**theirs, **plain, **contestants}
        races.append(Race(everyone, workload.prompts, fixed, keeps_going=True))
        left_out.append(missing)
    baseline = HF if transformers_too else PLAIN
    with endless(model, *([assistant] if assistant is not None else [])):
        is_interrupted = run_races(races, repeats, streamed=True)
        if not any(race.turns and race.results for race in races):
            raise next(error for race in races for error in race.errors.values())
        reports, measured = [], []
        for done, workload, missing in zip(races, workloads, left_out, strict=True):
            if not done.turns and not done.errors:  # not begun before the interrupt
                continue
            shared = generation_kwargs(max_new_tokens, workload.temperature)
            report = _report(model, done, shared, baseline, settings)
            report.left_out, report.categories = missing, workload.categories[: done.turns]
            report.remarks += workload.remarks
            if is_interrupted:
                report.interrupt(f"after {done.turns} of {counted(len(done.prompts), 'prompt')}")
            with _keeping(report):
                _compare_texts(report, model, shared, workload.names)
            reports.append(report)
            measured.append(workload)
        with _keeping(reports[-1]):
            _compare_sizes(model, reports, measured)
    return reports


@contextmanager
def _keeping(report: Report) -> Iterator[None]:
    """Keep what was measured if texts can't be compared, or if that is interrupted."""
    try:
        yield
    except KeyboardInterrupt:
        report.interrupt("before all texts were compared")
    except Exception as error:
        report.errors[COMPARISON] = told_error(error)


def _compare_sizes(model: Model, reports: Sequence[Report], workloads: Sequence[Workload]) -> None:
    """Compare greedy plain decoding in batches of each size with that of the first size."""
    greedy = [
        (report, workload)
        for report, workload in zip(reports, workloads, strict=True)
        if not workload.temperature and PLAIN in report.series
    ]
    for report, workload in greedy[1:]:
        first, _ = greedy[0]
        sizes = f"batches of {report.settings['batch']} as of {first.settings['batch']}"
        compared = report.series[PLAIN].compared_to(first.series[PLAIN], model)
        report.remarks.append(f"same text of {PLAIN} in {sizes}: {same_text(compared)}")
        report.differences += told_differences(f"{PLAIN} in {sizes}", compared, workload.names)


def _of_drafters(
    model: Model,
    drafters: Mapping[str, Any],
    speculation: Sequence[str],
    shared: dict[str, Any],
) -> tuple[dict[str, Contestant], dict[str, Contestant]]:
    """The drafters under each policy, and variants of those that do not draft in every step that do."""
    contestants, fixed = {}, {}
    for name, drafter in drafters.items():
        for policy in speculation if drafter is not None else ():
            full = f"specdec {name}" + (f", {policy}" if len(speculation) > 1 else "")
            contestants[full] = ours(model, drafter, shared, speculation=policy)
            if policy != "fixed":
                fixed[full] = ours(model, drafter, shared, speculation="fixed")
    return contestants, fixed


def _transformers(
    model: Model, workload: Workload, assistant: Model | None, shared: dict[str, Any]
) -> tuple[dict[str, Contestant], dict[str, str]]:
    """Hugging Face's ways to generate, and those that can't take part with the reason."""
    contestants, left_out = {HF: hugging_face(model, shared)}, {}
    helped: dict[str, dict[str, Any]] = {HF_LOOKUP: {"prompt_lookup_num_tokens": LOOKUP_TOKENS}}
    if assistant is not None:
        helped[HF_ASSISTED] = {"assistant_model": assistant}
    for name, keywords in helped.items():
        if len(workload.prompts[0]["input_ids"]) == 1:
            contestants[name] = hugging_face(model, shared, **keywords)
        else:
            left_out[name] = "transformers supports it for batch size 1 only"
    return contestants, left_out


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
    one = Race(contestants, prompts, fixed or {})
    run_races([one], repeats, streamed)
    report = _report(model, one, shared, baseline, settings or {})
    _compare_texts(report, model, shared)
    return report


def _report(
    model: Model,
    one: Race,
    shared: Mapping[str, Any],
    baseline: str,
    settings: Mapping[str, Any],
) -> Report:
    """The report of a race that was run; ratios are to another contestant if the baseline failed."""
    series = one.results if one.turns else {}
    plain = PLAIN if PLAIN in series else None
    if series and baseline not in series:
        baseline = plain or next(iter(series))
    batch = len(one.prompts[0]["input_ids"])
    return Report(
        machine=machine_line(model),
        settings={"batch": batch, "prompts": one.turns, **shared, **settings},
        series=series,
        baseline=baseline,
        plain=plain,
        expected=plain if shared["do_sample"] and plain else baseline,
        errors={name: told_error(error) for name, error in one.errors.items()},
    )


def _compare_texts(
    report: Report, model: Model, shared: Mapping[str, Any], names: Sequence[str] = ()
) -> None:
    """Compare the texts of all contestants with the expected ones; ``names`` are those of the rows."""
    report.same_text, report.differences = same_texts(
        report.series, report.baseline, report.plain, model, shared["do_sample"], names
    )


def machine_line(model: PreTrainedModel) -> str:
    """Processor, threads, versions, dtype and commit of a measurement, in one line."""
    dtype = str(model.dtype).removeprefix("torch.")
    return machine.machine_line(model.device, f"transformers {transformers.__version__}", dtype)
