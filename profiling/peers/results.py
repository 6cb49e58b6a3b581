"""Records of calls as rows of the table, and as a figure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median

from bench.runner import Columns, Row

from peers.cases import BATCHES, LONG_PROMPT, NEW, PROMPT, Work

KEY = ("model", "contestant")
REFERENCE = "HF generate, float32"  # whose texts the others are compared with
COLOURS = {"specdec_ext": "#1a73e8", "HF generate": "#5f6368"}
OTHER = "#bdc1c6"  # the peers
# Value of a row -> head of its column and format.
QUANTITIES = {
    **{
        f"first_{length}": (f"first token of {length:,}, ms", ".1f")
        for length in (PROMPT, LONG_PROMPT)
    },
    "decode_1": ("decode, tokens/s", ".1f"),
    "floor": ("of the floor", ".0%"),
    **{f"decode_{rows}": (f"{rows} rows", ".0f") for rows in BATCHES},
    "call": (f"call of {NEW}, tokens/s", ".0f"),
}
COLUMNS: Columns = {
    "model": "{model}",
    "contestant": "{contestant}",
    **{head: f"{{{name}:{shape}}}" for name, (head, shape) in QUANTITIES.items()},
    "HF's texts": "{equal}",
    "others": "{others:.0%}",
}
NOTES = [
    "Medians over rounds, then over prompts. Contestants take turns, and only the one that is measured runs.",
    f"First token: a call for one new token. Decode: tokens per second after the first token, {NEW} of them,",
    f"of all rows together; the prompts have {PROMPT} tokens. The floor is the time in which the weights can",
    f"be read once per token. HF's texts: how many texts are those of {REFERENCE}. Others: share of the",
    "processor that other work took during the calls; above some percent, the numbers are not to be used.",
    "",
]


def rows_of(records: Iterable[Row]) -> list[Row]:
    """One row for each contestant and model, in the order of the records.

    A record has the ``model``, the ``contestant`` and the ``work`` (:class:`~peers.cases.Work`); for each
    batch of prompts, ``seconds`` of every round and a digest of each of the ``texts``; ``others``, the CPU
    seconds that other work took during the calls and those that there were; ``weight_bytes`` of a step, which
    is None with drafts; and ``read_gb_per_s``.
    """
    groups: dict[tuple[str, str], dict[Work, Row]] = defaultdict(dict)
    for record in records:
        groups[record["model"], record["contestant"]][Work(**record["work"])] = record
    return [
        {
            "model": model,
            "contestant": contestant,
            **_speeds(by_work),
            **_equality(by_work, groups.get((model, REFERENCE), {})),
            "others": _others(by_work.values()),
        }
        for (model, contestant), by_work in groups.items()
    ]


def draw(rows: Sequence[Row], path: Path) -> None:
    """The table as bars: a panel for each model and quantity that was measured."""
    from matplotlib.figure import Figure

    models = [*dict.fromkeys(row["model"] for row in rows)]
    shown = [name for name in QUANTITIES if name != "floor" and any(name in row for row in rows)]
    sizes = [sum(row["model"] == model for row in rows) for model in models]
    figure = Figure(figsize=(2 + 2.6 * len(shown), 1 + 0.22 * sum(sizes)), layout="constrained")
    panels = figure.subplots(len(models), len(shown), squeeze=False, height_ratios=sizes)
    for line, model in zip(panels, models, strict=True):
        its = [row for row in rows if row["model"] == model][::-1]  # bars are drawn upwards
        for axes, name in zip(line, shown, strict=True):
            head, shape = QUANTITIES[name]
            values = [row.get(name, 0.0) for row in its]
            colours = [COLOURS.get(row["contestant"].split(",")[0], OTHER) for row in its]
            bars = axes.barh([row["contestant"] for row in its], values, color=colours)
            labels = [f"{value:{shape}}" if value else "" for value in values]
            axes.bar_label(bars, labels, padding=2, fontsize=6)
            axes.margins(x=0.2)
            axes.tick_params(labelsize=6, labelleft=axes is line[0])
            axes.spines[["top", "right"]].set_visible(False)
            axes.set_title(f"{model}: {head}", fontsize=7)
    figure.savefig(path, dpi=200)


def _others(records: Iterable[Row]) -> float:
    """Share of the processor that other work took during all calls together."""
    taken, capacity = map(sum, zip(*(record["others"] for record in records), strict=True))
    return taken / capacity


def _speeds(by_work: dict[Work, Row]) -> Row:
    times = {work: [*map(median, record["seconds"])] for work, record in by_work.items()}
    row: Row = {}
    for length in (PROMPT, LONG_PROMPT):
        if first := times.get(Work(1, length, 1)):
            row[f"first_{length}"] = 1e3 * median(first)
    for rows in (1, *BATCHES):
        first, whole = times.get(Work(rows, PROMPT, 1)), times.get(Work(rows, PROMPT, 1 + NEW))
        if first and whole:
            each = (rows * NEW / (b - a) for a, b in zip(first, whole, strict=True))
            row[f"decode_{rows}"] = median(each)
    if whole := times.get(Work(1, PROMPT, NEW)):
        row["call"] = median(NEW / seconds for seconds in whole)
    if "decode_1" in row:
        record = by_work[Work(1, PROMPT, 1 + NEW)]
        if record["weight_bytes"]:
            moved = row["decode_1"] * record["weight_bytes"] / 1e9
            row["floor"] = moved / record["read_gb_per_s"]
    return row


def _equality(by_work: dict[Work, Row], reference: dict[Work, Row]) -> Row:
    pairs = [
        (text, expected)
        for work, record in by_work.items()
        if work.new > 1 and work in reference
        for each, other in zip(record["texts"], reference[work]["texts"], strict=True)
        for text, expected in zip(each, other, strict=True)
    ]
    if not pairs:
        return {}
    return {"equal": f"{sum(text == expected for text, expected in pairs)}/{len(pairs)}"}
