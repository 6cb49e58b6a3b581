"""The cases of the check of ``generate``, by name, and the table of their verdicts. Needs no torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import product

from text_table import format_markdown

DTYPES = ("float32", "bfloat16", "float16")
BATCHES = ("1 row", "ragged")
TEXTS = ("greedy", "sampled")
DRAFTERS = ("ngram", "head, a chain", "head, a tree", "draft model")
# Calls in float32 with something else than a drafter to get right -> the drafter that they use.
CALLS = {
    "end of sequence inside a draft": "head, a tree",
    "stop string": "ngram",
    "max_length": "head, a chain",
    "repetition penalty": "head, a tree",
    "no repeated 3-grams": "ngram",
    "several sequences per prompt": "head, a tree",
    "streamer": "head, a tree",
    "prompt in chunks": "head, a tree",
    "second turn with the cache": "head, a tree",
    "cache of model.generate": "draft model",
    "speculation auto": "head, a tree",
    "rejection rule": "sampled draft model",
    "recorded passes": "head, a tree",
    "no recorded passes": "head, a tree",
    "second device": "head, a tree",
}
PLAIN, ON_CPU = "no drafter", "no drafter, as on the CPU"


def case_names(dtypes: Sequence[str] = DTYPES) -> Iterator[str]:
    """The names of the cases, in the order in which they run; each ends with its dtype."""
    for dtype in dtypes:
        for batch, text in product(BATCHES, TEXTS):
            first = [ON_CPU] if dtype == "float32" else []
            first += [PLAIN] if text == "greedy" else []
            for name in (*first, *DRAFTERS):
                yield grid_name(name, text, batch, dtype)
        if dtype == "float32":
            yield from map(call_name, CALLS)


def grid_name(drafter: str, text: str, batch: str, dtype: str) -> str:
    return f"generate {drafter}, {text}, {batch}, {dtype}"


def call_name(call: str) -> str:
    return f"generate {call}, {CALLS[call]}, float32"


def verdicts(output: str) -> dict[str, str]:
    """``case -> "pass", "none (reason)" or "FAIL (reason)"`` from the lines that the check prints."""
    lines = re.findall(r"^(PASS|(?:NONE|FAIL) \(.*\)) (generate .*)$", output, re.MULTILINE)
    words = {"PASS": "pass", "NONE": "none", "FAIL": "FAIL"}
    return {name: words[verdict[:4]] + verdict[4:] for verdict, name in lines}


def verdict_table(found: dict[str, str]) -> str:
    """A Markdown table with a row per case and a column per dtype, and reasons of other verdicts below.

    Args:
        found: the value of :func:`verdicts`. Planned cases that it lacks did not run.
    """
    rows: dict[str, dict[str, str]] = {}
    reasons = []
    for name in case_names():
        case, dtype = name.removeprefix("generate ").rsplit(", ", 1)
        verdict = found.get(name, "did not run")
        rows.setdefault(case, {})[dtype] = verdict.partition(" (")[0]
        if "(" in verdict:
            reasons.append(f"- {name}: {verdict}")
    cells = [[case, *(row.get(dtype, "") for dtype in DTYPES)] for case, row in rows.items()]
    table = format_markdown(["generate", *DTYPES], cells)
    return "\n".join([table, *(["", *reasons] if reasons else [])])
